"""From the command to the first step's line where the data lie on a slow server: `python -m trainer` as users call it.

    python -m benchmarks.first_step [--kinds jsonl jsonl.zst parquet] [--files 40] [--megabytes 64] [--rate 20] \
        [--latency 0.05] [--stream_files 1] [--stream_bytes 0] [--no_ranges] [--tokenizer FOLDER]

An HTTP server in this process has so many files of so many megabytes of text each, sends `rate` MB/s to all connections
together and begins an answer after `latency` seconds; with --no_ranges it sends files whole only. The run is of a small
model; the tokenizer is a BPE that is trained on the first part, or that of a Hugging Face folder. What is said is the
time until the line of step 1, that of processors, and how much had been sent by then. Programs that were compiled
before are found again, as a user's are.
"""

import argparse
import http.server
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ml_collections import ConfigDict

from trainer.config import defaults, source

# Sent at a time.
PIECE = 1 << 18


def get_config(arg: str | None = None) -> ConfigDict:
  """A small model; the argument is the source's type, its other keys come from the command."""
  c = defaults()
  c.input.sources.main = source(type=arg or "jsonl", path="set/*")
  c.model.update(num_layers=4, hidden_size=128, intermediate_size=384, num_heads=4)
  c.update(seq_len=256, batch_size=8, total_steps=3, log_steps=1, report=False)
  c.tokenizer.update(type="bpe", vocab_size=1024)
  return c


def texts(megabytes: float) -> list[str]:
  """Documents of some 4 kB from the standard library's sources, again and again, each with its number."""
  sources = [file.read_text("utf-8", "ignore") for file in sorted(Path(json.__file__).parent.parent.glob("*.py"))]
  whole, found, size = "".join(sources), [], 0
  while size < megabytes * 1e6:
    at = len(found) * 4096 % (len(whole) - 4096)
    found.append(f"# {len(found)}\n{whole[at:at + 4096]}")
    size += len(found[-1])
  return found


def content(kind: str, megabytes: float) -> bytes:
  """A file of so many megabytes of text."""
  documents = texts(megabytes)
  if kind == "parquet":
    import pyarrow
    import pyarrow.parquet
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file, row_group_size=1000)
    return file.getvalue()
  lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
  if kind == "jsonl":
    return lines
  import zstandard
  return zstandard.compress(lines)


class Server:
  """Serves the same content under many names. Attributes: `url`, `sent`: bytes of content so far."""

  def __init__(self, names: list[str], data: bytes, rate: float, latency: float, ranges: bool = True):
    self.sent, lock, free = 0, threading.Lock(), [time.monotonic()]

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_HEAD(self):
        self.answer(False)

      def do_GET(self):
        self.answer(True)

      def answer(self, with_content):
        time.sleep(latency)
        name, asked = self.path.rpartition("/")[2], self.headers.get("Range") if ranges else None
        listed = "".join(f'<a href="{one}">x</a>' for one in names).encode()
        of = data if name in names else listed
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups() if asked else (0, len(of) - 1)
        part = memoryview(of)[int(first):int(last) + 1]
        self.send_response(206 if asked else 200)
        for key, value in (("Content-Length", len(part)), ("ETag", f'"{name}{len(of)}"'), ("Content-Type",
                           "text/html" if of is listed else "application/octet-stream")):
          self.send_header(key, str(value))
        self.end_headers()
        for at in range(0, len(part) if with_content else 0, PIECE):
          piece = part[at:at + PIECE]
          with lock:  # one wire for all
            free[0] = max(free[0], time.monotonic()) + len(piece) / rate / 1e6
            wait = free[0] - time.monotonic()
          time.sleep(max(0.0, wait))
          try:
            self.wfile.write(piece)
          except ConnectionError:  # who asked wants no more
            return
          server.sent += len(piece)

      def log_message(self, *args):
        pass

    server, self._http = self, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._http.daemon_threads = True
    threading.Thread(target=self._http.serve_forever, daemon=True).start()
    self.url = f"http://127.0.0.1:{self._http.server_port}/set/"

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()


def processors(pid: int) -> float:
  """Seconds of processors that a process has used, as Linux says."""
  fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, given: argparse.Namespace) -> None:
  names = [f"part-{n:04}.{kind}" for n in range(given.files)]
  data = content(kind, given.megabytes)
  server = Server(names, data, given.rate, given.latency, not given.no_ranges)
  with tempfile.TemporaryDirectory() as folder:
    main = "--config.input.sources.main"
    command = [sys.executable, "-m", "trainer", f"--config={__file__}:{kind.partition('.')[0]}",
               f"--workdir={folder}/run", f"--config.input.cache_dir={folder}/cache",
               f"{main}.path={server.url}*.{kind}", f"{main}.copies={folder}/copies",
               f"{main}.stream_files={given.stream_files}", f"{main}.stream_bytes={given.stream_bytes}"]
    if given.tokenizer:
      command += ["--config.tokenizer.type=hf", f"--config.tokenizer.path={given.tokenizer}"]
    began, at = time.monotonic(), None
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = []
    for line in run.stdout:
      lines.append(line)
      if at is None and line.lstrip("\r").startswith("step 1/"):
        at, sent, cpu = time.monotonic() - began, server.sent, processors(run.pid)
        run.terminate()
    run.wait()
  server.close()
  if at is None:
    raise SystemExit("".join(lines[-30:]))
  size = len(data) / 1e6
  print(f"{kind}: {given.files} files of {size:.0f} MB, stream_files={given.stream_files}, "
        f"stream_bytes={given.stream_bytes}{', no ranges' * given.no_ranges}: step 1 after {at:.1f} s "
        f"({cpu:.1f} of processors), {sent / 1e6:.0f} of {given.files * size:,.0f} MB sent", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--kinds", nargs="*", default=["jsonl", "jsonl.zst", "parquet"])
  for name, kind, value in (("files", int, 40), ("megabytes", float, 64), ("rate", float, 20), ("latency", float, 0.05),
                            ("stream_files", int, 1), ("stream_bytes", int, 0), ("tokenizer", str, "")):
    parser.add_argument(f"--{name}", type=kind, default=value)
  parser.add_argument("--no_ranges", action="store_true")
  given = parser.parse_args()
  for kind in given.kinds:
    measure(kind, given)


if __name__ == "__main__":
  main()
