"""Writes schedule_references.json: factors on the learning rate by Transformers' and PyTorch's schedules.

    python tests/trainer/make_schedule_references.py   (needs torch and transformers)

Transformers' warm-up of W - 1 steps has its peak where ours of W has, at update W - 1.
"""

import json
from pathlib import Path

import torch
import transformers

STEPS, FILE = 13, Path(__file__).with_name("schedule_references.json")


def factors(make) -> list[float]:
  """Of each update of a run."""
  optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=1.0)
  schedule, found = make(optimizer), []
  for _ in range(STEPS):
    found.append(schedule.get_last_lr()[0])
    optimizer.step()
    schedule.step()
  return found


def main() -> None:
  t = transformers
  restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
  rows = []
  for warm in (0, 4):
    more = dict(num_warmup_steps=max(warm - 1, 0), num_training_steps=STEPS)
    rows += [
        (dict(name="linear", floor=0.0, warmup_steps=warm),
         lambda o, m=more: t.get_linear_schedule_with_warmup(o, **m)),
        (dict(name="cosine", floor=0.0, warmup_steps=warm),
         lambda o, m=more: t.get_cosine_schedule_with_warmup(o, **m)),
        (dict(name="cosine", floor=0.2, warmup_steps=warm),
         lambda o, m=more: t.get_cosine_with_min_lr_schedule_with_warmup(o, **m, min_lr_rate=0.2)),
        *((dict(name="wsd", floor=floor, warmup_steps=warm, decay_steps=5, decay_shape=shape),
           lambda o, m=more, f=floor, s=shape: t.get_wsd_schedule(
               o, num_decay_steps=5, min_lr_ratio=f, decay_type=s, **m))
          for floor in (0.0, 0.2) for shape in ("linear", "cosine")),
    ]
  rows += [(dict(name="sgdr", floor=floor, cycle_steps=3, t_mult=2.0),
            lambda o, f=floor: restarts(o, T_0=3, T_mult=2, eta_min=f)) for floor in (0.0, 0.2)]
  found = [dict(options=options, factors=factors(make)) for options, make in rows]
  text = ",\n".join(json.dumps(row) for row in found)
  FILE.write_text(f'{{"made_with": "transformers {t.__version__}, torch {torch.__version__}", "rows": [\n{text}\n]}}\n')


if __name__ == "__main__":
  main()
