"""A long run that evaluates and saves all the time: does its process grow?

    python -m benchmarks.soak [--minutes 60] [--config configs/quickstart.py] [--out FILE.svg] [--config.KEY=VALUE …]

The quickstart, with an evaluation every 25 steps, samples every 50 and a checkpoint every 10, until the time is over
and SIGTERM stops it. Its memory (resident, without pages of files), open files, threads, child processes and files in
the workdir are looked at every 5 seconds. Growth is that from the second to the last quarter of the time, by medians:
what the first quarter takes are programs that are compiled and caches that are filled. Exits with 1 if memory grew by
more than 5 %, or any of the others by more than 2.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from trainer.telemetry.writers import read_rows

HERE = Path(__file__).resolve().parent
OVERRIDES = ("--config.total_steps=100000000", "--config.schedule.name=constant", "--config.schedule.decay_percent=-1",
             "--config.schedule.floor=0.1",
             "--config.ckpt_steps=10", "--config.ckpt_percent=-1", "--config.keep_last=2", "--config.log_steps=10",
             "--config.evals.val.eval_steps=25", "--config.evals.val.eval_percent=-1",
             "--config.evals.samples.eval_steps=50", "--config.evals.samples.eval_percent=-1")
KINDS = {"memory": "memory, MB", "files": "open files", "threads": "threads", "children": "child processes",
         "kept": "files in the workdir, without samples"}
SECONDS, MEMORY_GROWTH, OTHER_GROWTH = 5.0, 0.05, 2


def look(pid: int, workdir: Path) -> dict[str, float]:
  """What the process holds now."""
  status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
  tasks = list(Path(f"/proc/{pid}/task").iterdir())
  children = sum(len((task / "children").read_text().split()) for task in tasks)
  kept = sum(1 for p in workdir.rglob("*") if p.is_file() and "samples" not in p.parts)
  return {"memory": int(status["RssAnon"].split()[0]) / 1024, "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
          "threads": len(tasks), "children": children, "kept": kept}


def watch(process: subprocess.Popen, workdir: Path, minutes: float) -> list[tuple[float, dict[str, float]]]:
  """(minutes, what it holds) until the time is over."""
  began, seen = time.monotonic(), []
  with tqdm(total=round(minutes), unit="min") as bar:
    while (now := (time.monotonic() - began) / 60) < minutes:
      if process.poll() is not None:
        sys.exit(f"the run ended by itself, with {process.returncode}, after {now:.1f} minutes")
      try:
        seen.append((now, look(process.pid, workdir)))
      except (FileNotFoundError, ProcessLookupError):
        pass  # a file or a thread that went while it was looked at; the next look is soon
      bar.update(int(now) - bar.n)
      time.sleep(SECONDS)
  return seen


def growth(seen: list[tuple[float, dict[str, float]]], kind: str) -> tuple[float, float]:
  """Medians of the second and of the last quarter."""
  values = [held[kind] for _, held in seen]
  quarter = len(values) // 4
  return statistics.median(values[quarter:2 * quarter]), statistics.median(values[-quarter:])


def draw(seen: list[tuple[float, dict[str, float]]], out: str) -> None:
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"svg.hashsalt": "weft", "font.size": 9}):
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    minutes = [now for now, _ in seen]
    top.plot(minutes, [held["memory"] for _, held in seen], lw=1)
    top.set(ylabel=KINDS["memory"], ylim=(0, None))
    for kind in list(KINDS)[1:]:
      bottom.plot(minutes, [held[kind] for _, held in seen], lw=1, label=KINDS[kind])
    bottom.set(xlabel="minutes", ylabel="count", ylim=(0, None))
    bottom.legend()
    for axes in (top, bottom):
      axes.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--minutes", type=float, default=60)
  parser.add_argument("--config", default="configs/quickstart.py")
  parser.add_argument("--out", default=str(HERE / "soak.svg"))
  args, overrides = parser.parse_known_args()
  with tempfile.TemporaryDirectory() as folder:
    workdir, log = Path(folder) / "run", Path(folder) / "log"
    with open(log, "w", encoding="utf-8") as file:
      process = subprocess.Popen([sys.executable, "-m", "trainer", f"--config={args.config}", f"--workdir={workdir}",
                                  *OVERRIDES, *overrides], cwd=HERE.parent, stdout=file, stderr=subprocess.STDOUT)
      try:
        seen = watch(process, workdir, args.minutes)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)
      except BaseException:
        process.kill()
        print(log.read_text(encoding="utf-8")[-3000:])
        raise
    if process.returncode:
      sys.exit(f"it was asked to stop and ended with {process.returncode}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    rows = read_rows(workdir / "metrics.jsonl")
  draw(seen, args.out)
  count = {kind: sum(key in row for row in rows) for kind, key in (
      ("evaluations", "time/eval"), ("checkpoints", "time/checkpoint"))}
  print(f"{args.minutes:g} minutes, {rows[-1]['step']:,} steps, {count['evaluations']:,} rounds of evaluation, "
        f"{count['checkpoints']:,} checkpoints; {len(seen):,} looks\n")
  print("| | second quarter | last quarter | at most |\n|---|---|---|---|")
  wrong = False
  for kind, name in KINDS.items():
    before, after = growth(seen, kind)
    wrong |= after > before * (1 + MEMORY_GROWTH) if kind == "memory" else after > before + OTHER_GROWTH
    print(f"| {name} | {before:,.0f} | {after:,.0f} | {max(held[kind] for _, held in seen):,.0f} |")
  sys.exit(int(wrong))


if __name__ == "__main__":
  main()
