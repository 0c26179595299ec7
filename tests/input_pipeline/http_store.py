"""A store of files that tests read over HTTP: ETags, ranges, lists of folders, and the faults that it is told."""

import contextlib
import hashlib
import http.server
import threading


class Store:
  """Attributes:
    files: {path: content}.
    asked: (path, first byte) of each request for content, in their order.
    fault: `(path, first byte) -> None | int | "drop"`: a status to answer with, or to break off in the middle.
    ranges, sizes: whether it knows them, and says them.
    sent: bytes of files so far.
    tag: a part of all ETags.
    encoding: what it says of how content is encoded.
    gate: `(path, bytes of this answer so far)`, called before each thousand of them.
  """

  def __init__(self, files: dict[str, bytes]):
    self.files, self.asked, self.fault, self.ranges = files, [], lambda path, at: None, True
    self.sizes = True
    self.sent, self.gate, self.tag = 0, lambda path, sent: None, ""
    self.url, self.encoding = "", ""


def _handler(store: Store):
  class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
      self._answer(False)

    def do_GET(self):
      self._answer(True)

    def _answer(self, with_content):
      path, asked = self.path.partition("?")[0], self.headers.get("Range")
      at, stop = 0, None
      if asked and store.ranges:
        at, _, last = asked.removeprefix("bytes=").partition("-")
        at, stop = int(at), int(last) + 1
      if path not in store.files and any(name.startswith(f"{path}/") for name in store.files):
        path += "/"
      fault = store.fault(path, at if with_content else None)
      if with_content and not path.endswith("/"):
        store.asked.append((path, at))
      content = store.files.get(path)
      if path.endswith("/"):
        names = sorted({name[len(path):].partition("/") for name in store.files if name.startswith(path)})
        content = "".join(f'<a href="{a}{slash}">x</a>' for a, slash, _ in names).encode()
      if isinstance(fault, int) or content is None:
        self.send_error(fault or 404)
        return
      part = content[at:stop]
      self.send_response(206 if asked and store.ranges else 200)
      if store.sizes:
        self.send_header("Content-Length", str(len(part)))
      self.send_header("Accept-Ranges", "bytes" if store.ranges else "none")
      self.send_header("ETag", hashlib.md5(store.tag.encode() + content).hexdigest())
      if path.endswith("/"):
        self.send_header("Content-Type", "text/html")
      elif store.encoding:
        self.send_header("Content-Encoding", store.encoding)
      self.end_headers()
      if with_content:
        part = part[:len(part) // 2] if fault == "drop" else part
        with contextlib.suppress(ConnectionError):  # who asked wants no more
          for begin in range(0, len(part), 1000):
            store.gate(path, begin)
            self.wfile.write(part[begin:begin + 1000])
            store.sent += 0 if path.endswith("/") else len(part[begin:begin + 1000])
        self.close_connection = True

    def log_message(self, *args):
      pass

  return Handler


@contextlib.contextmanager
def serving(files: dict[str, bytes]):
  """A store with these files at `store.url`."""
  store = Store(files)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(store))
  server.daemon_threads = True
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  store.url = f"http://127.0.0.1:{server.server_port}"
  try:
    yield store
  finally:
    server.shutdown()
    server.server_close()
