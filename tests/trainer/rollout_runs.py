"""Small runs with rollouts, and what they leave behind."""

import contextlib
import json
import random

import jax
import numpy as np
import pytest

from input_pipeline import prompt_data
from tests import tiny
from trainer import tree
from trainer.config import reward, source, strategy
from trainer.telemetry.writers import read_rows

TOYS = "tests.trainer.rollout_toys"
STOP = "tests.trainer.export.test_hugging_face.StopAt"


def write_prompts(folder):
  """Two files, of 40 and 7 prompts of different lengths."""
  return _write(folder / "a.jsonl", 40, 0), _write(folder / "b.jsonl", 7, 1)


def _write(file, count, seed):
  rng = random.Random(seed)
  rows = [{"prompt": " ".join(rng.choice(tiny.WORDS) for _ in range(rng.randint(1, 5))) + f" {number}: ",
           "number": number, "answer": "a"} for number in range(count)]
  file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
  return file


def config(prompts, score="low", **changed):
  """4 prompts of two sources × 4 completions of up to 8 tokens at temperature 0.7, in two updates; SGD with momentum.

  Most runs here are of this kind, so that one program serves them."""
  options, rollout = changed.pop("strategy", {}), changed.pop("rollout", {})
  c = tiny.config(prompts[0], **{"seq_len": 64, "total_steps": 2, "ckpt_steps": 1000} | changed)
  c.evals = {}
  c.strategy = strategy("grpo", **options)
  c.input.sources = {name: source(type="jsonl", path=str(file))
                     for name, file in zip(("main", "other"), prompts, strict=False)}
  c.optimizer.update(name="sgd", learning_rate=0.1, momentum=0.9, nesterov=False, weight_decay=0.0)
  c.schedule = dict(name="constant", warmup_percent=0.0)
  c.rollout.update(dict(num_prompts=4, group_size=4, max_new_tokens=8, temperature=0.7, updates=2, batch_size=8,
                        reward_workers=0) | rollout)
  if score:
    c.rollout.rewards[score] = reward(type=f"{TOYS}.{score}")
  return c


def rows_of(workdir):
  """{step: metrics} without what depends on the clock."""
  clocks = ("time/", "mfu", "goodput", "tokens_per_second", "sampling/tokens_per_second")
  rows = {}
  for row in read_rows(workdir / "metrics.jsonl"):
    kept = {key: value for key, value in row.items() if not key.startswith(clocks)}
    if set(kept) > {"step"}:
      rows[row["step"]] = rows.get(row["step"], {}) | kept
  return rows


def table(workdir, step):
  text = (workdir / "samples" / f"rollout-{step:08d}.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def assert_same_state(a, b):
  b = tree.flatten(b)
  for path, leaf in tree.flatten(a).items():
    np.testing.assert_array_equal(leaf, b[path], err_msg=path)


def start_of(run):
  """The parameters that it began with."""
  return jax.jit(run.model.init)(jax.random.key(0))


@contextlib.contextmanager
def stops_often():
  """Every fifth token ends a completion in here; an untrained model says them all alike."""
  class Stops(prompt_data.Prompter):
    def __init__(self, *args):
      super().__init__(*args)
      self.stop_ids = range(0, 258, 5)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(prompt_data, "Prompter", Stops)
    yield
