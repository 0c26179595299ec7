"""A run's loss as a small picture, from its metrics.jsonl alone: docs/quickstart.svg of the README.

    python docs/site/curve.py runs/quickstart docs/quickstart.svg
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 32, 150, 14, 38


def picture(rows: list[dict]) -> str:
  """SVG: the training loss over steps as a line, held-out losses as dots, compressors of the held-out text as levels.

  Args:
    rows: those of metrics.jsonl. Losses are in nats a token. Compressors have bits per byte of the held-out text, which
      become nats a token by the ratio of the model's own two numbers.
  """
  train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
  held = [row for row in rows if "eval/val/bits_per_byte" in row]
  nats = held[-1]["eval/val/loss"] / held[-1]["eval/val/bits_per_byte"]
  steps, losses = train[-1][0], [loss for _, loss in train]
  low, top = int(min(losses)), max(losses)

  def at(step: float, loss: float) -> tuple[float, float]:
    return (LEFT + step / steps * (WIDTH - LEFT - RIGHT), TOP + (top - loss) / (top - low) * (HEIGHT - TOP - BOTTOM))

  def line(points: Iterable[tuple[float, float]], style: str) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    return f'<polyline points="{places}" fill="none" {style}/>'

  def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

  parts = []
  for loss in range(low, int(top) + 1):
    parts += [line([(0, loss), (steps, loss)], 'stroke="#e4e4e4"'),
              text(LEFT - 8, at(0, loss)[1] + 4, str(loss), "end")]
  for step in range(0, steps + 1, 100):
    parts.append(text(at(step, low)[0], HEIGHT - BOTTOM + 18, str(step), "middle"))
  for name in ("gzip", "xz"):
    bits = held[-1][f"eval/val/bits_per_byte_{name}"]
    parts += [line([(0, bits * nats), (steps, bits * nats)], 'stroke="#999" stroke-dasharray="5 4"'),
              text(WIDTH - RIGHT + 8, at(0, bits * nats)[1] + 4, f"{name}: {bits:.3f} bits/byte")]
  parts.append(line(train, 'stroke="#3f51b5" stroke-width="1.6"'))
  for row in held:
    x, y = at(row["step"], row["eval/val/loss"])
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d84315"/>')
  parts += [text(WIDTH - RIGHT + 8, y + 10, f"model: {held[-1]['eval/val/bits_per_byte']:.3f} bits/byte"),
            text(at(steps / 2, low)[0], HEIGHT - 2, "step; line: training loss, dots: held-out loss, nats a token",
                 "middle")]
  body = "\n".join(parts)
  return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
          f'font-size="11" fill="#333">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n')


def main() -> None:
  workdir, out = map(Path, sys.argv[1:])
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
  out.write_text(picture(rows), encoding="utf-8")
  print(f"Wrote {out}.")


if __name__ == "__main__":
  main()
