"""Configs that keys are changed in, and the files that they name; for tests/trainer/every_key.py."""

import contextlib
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests import split, tiny
from tests.evaluators import digits
from trainer import main
from trainer.config import defaults, source, strategy
from trainer.export.command import export


class Begun(NamedTuple):
  """A run that has not taken a step: the run, its batches and the first of these, and what was said."""

  run: Any
  batches: Any
  first: dict[str, np.ndarray]
  said: str


class Files:
  """Data sets, checkpoints and folders that configs name; each is written when it is asked for first."""

  def __init__(self, folder: Path):
    self.folder, self._workdirs = folder, 0

  def workdir(self) -> Path:
    """A folder that is not there yet."""
    self._workdirs += 1
    return self.folder / f"workdir-{self._workdirs}"

  def jsonl(self, name: str, rows: list[dict]) -> str:
    path = self.folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)

  def text(self, name: str, content: str) -> str:
    path = self.folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)

  @functools.cached_property
  def corpus(self) -> Path:
    return tiny.write_corpus(self.folder / "corpus")

  @functools.cached_property
  def hf(self) -> str:
    """A Hugging Face folder."""
    return str(tiny.hf_folder(self.folder / "hf", rope_theta=500.0))

  @functools.cached_property
  def odd_hf(self) -> str:
    """A folder whose config.json has a number that is not known here."""
    folder = tiny.hf_folder(self.folder / "odd_hf")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "odd": 2}))
    return str(folder)

  @functools.cached_property
  def scorers(self) -> tuple[str, str]:
    """Folders of two reward models."""
    return tuple(str(tiny.hf_folder(self.folder / f"scorer_{seed}", seed=seed, head="score")) for seed in (1, 2))

  @functools.cached_property
  def other_hf(self) -> str:
    """One of the same architecture with other parameters."""
    return str(tiny.hf_folder(self.folder / "other_hf", seed=2, rope_theta=500.0))

  @functools.cached_property
  def run(self) -> str:
    """The workdir of a run with another seed, whose checkpoint has parameters that no run begins with."""
    def save(run: Any) -> None:
      run.state = run.state | {"params": jax.tree.map(lambda leaf: leaf + 1, run.state["params"])}
      run.save()

    config, workdir = text(self), self.workdir()
    config.seed = 7
    begin(config, workdir, then=save)
    return str(workdir)

  @functools.cached_property
  def peft(self) -> str:
    """Adapters of rank 2 in PEFT's format."""
    config, workdir = text(self), self.workdir()
    config.seed, config.model.lora.rank = 7, 2
    begin(config, workdir, then=lambda run: run.save())
    return str(export(workdir, self.folder / "peft", adapter="peft"))

  @functools.cached_property
  def template(self) -> str:
    """A chat template that tells the day, and shows thoughts in the last message alone."""
    return self.text("template.jinja", (
      "{{ bos_token }}{{ strftime_now('%Y') }}{%- for m in messages %}{{ '[' + m.role + ']' }}"
      "{%- if loop.last and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
      "{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
      "{%- if add_generation_prompt %}[assistant]{% endif %}"))

  @property
  def two_halves(self) -> ConfigDict:
    """A source whose halves have no word in common, larger than what a tokenizer is trained on at a time."""
    return source(type="text", path=self.text("halves.txt", "ab " * 40000 + "cd " * 80000), documents="line")

  @property
  def bad_row(self) -> ConfigDict:
    """A source in which one row of two is none."""
    return source(type="jsonl", path=self.text("bad.jsonl", '{"text": "it is there"}\n{"text":\n'))

  @property
  def bad_image(self) -> ConfigDict:
    """A source in which one image of two is none."""
    good = digits.encoded(digits.picture(0))
    return source(type="jsonl", path=self.jsonl("bad", [
      dict(image=image, prefix="what?", suffix="it is") for image in (good, "AAAA")]))


def begin(config: ConfigDict, workdir: Path, then: Callable[[Any], Any] = lambda run: None) -> Begun:
  """`train(config, workdir)` with `then(run)` in place of its loop."""
  found, said = [], io.StringIO()

  def instead(run: Any, update_fn: Any, batches: Any) -> None:
    with batches:
      ahead = dict(prepared=len(getattr(batches, "_ahead", ())), pool=getattr(batches, "_pool", None))
      first = {key: np.asarray(part) for key, part in next(batches).items()}
      then(run)
      run.checkpoints.wait()
    found.append(Begun(run, ahead, first, ""))

  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
    patch.setattr(main, "_loop", instead)
    patch.setattr(main.Step, "begin", lambda *args: None)  # a step that is not taken is not compiled
    main.train(config, workdir)
  return found[0]._replace(said=said.getvalue())


def text(files: Files) -> ConfigDict:
  """Pretraining on files of text; what tiny configs change of durations and schedules is as in `defaults()` again."""
  config, usual = tiny.config(files.corpus), defaults()
  config.update({key: usual[key] for key in ("total_steps", "log_steps")})
  config.schedule.update(tiny.COSINE)
  config.ckpt_steps, config.evals = None, {}
  config.input.cache_dir = str(files.folder / "cache")
  return config


def _rows(name: str, make: Callable[[int], dict], strategy_name: str) -> Callable[[Files], ConfigDict]:
  def base(files: Files) -> ConfigDict:
    config = text(files)
    config.input.sources = dict(main=source(type="jsonl", path=files.jsonl(name, [make(n) for n in range(24)])))
    config.strategy = strategy(strategy_name)
    config.seq_len = 96
    return config

  base.__name__ = name
  return base


def _turns(number: int, **more: str) -> dict:
  answer = dict(role="assistant", content=f"a {number}", **more)
  return dict(messages=[dict(role="user", content=f"q {number}"), answer, dict(role="user", content="more"), answer])


# Conversations of two turns; in which the assistant thinks.
turns = _rows("turns", _turns, "sft")
thoughts = _rows("thoughts", lambda n: _turns(n, reasoning_content="hm"), "sft")
# Prompts with completions, for fine-tuning.
answers = _rows("answers", lambda n: dict(prompt=f"q {n}", completion="b" * (1 + n % 5), reply="c"), "sft")
pairs = _rows("pairs", lambda n: dict(prompt=f"q {n}", chosen="b" * (1 + n % 5), rejected="cc"), "dpo")
_matches = _rows("matches", lambda n: dict(query=f"q {n % 7}", positive="b" * (1 + n % 5), **(
  {"negative": f"n {n}"} if n % 2 else {})), "contrastive")

_talks = _rows("talks", lambda n: dict(query=[dict(role="user", content=f"q {n % 7}")], positive="b" * (1 + n % 5)),
               "contrastive")


def matches(files: Files) -> ConfigDict:
  """Queries with answers and up to one negative each, for a model that embeds."""
  config = _matches(files)
  config.model.head, config.strategy.negatives = "embedding", 1
  return config


def talks(files: Files) -> ConfigDict:
  """The same, whose queries are conversations."""
  config = _talks(files)
  config.model.head = "embedding"
  return config


judged = _rows("judged", lambda n: dict(prompt=f"q {n}", completion="b" * (1 + n % 5), label=n % 2 == 0), "kto")
# Responses that were sampled and rewarded elsewhere.
responses = _rows("responses", lambda n: dict(prompt=f"q {n}", responses=["a", "bb", "ccc"], rewards=[0, n, 1]), "grpo")


def images(files: Files) -> ConfigDict:
  """Fine-tuning on questions about pictures, of which not all are square."""
  config = text(files)
  pictures = [digits.encoded(np.concatenate([digits.picture(n), digits.picture(n + 50)])) for n in range(8)]
  rows = [dict(image=picture, prefix=f"what? {n}", suffix="it is") for n, picture in enumerate(pictures)]
  config.input.sources = dict(main=source(type="jsonl", path=files.jsonl("images", rows)))
  config.strategy = strategy("sft")
  config.tokenizer.type, config.seq_len = "bytes", 64
  config.model.vision = digits.VISION
  return config


def squares(files: Files) -> ConfigDict:
  """Images that are cut into squares, for a folder that says so."""
  config = split.config(files.folder / "squares")
  config.input.cache_dir = str(files.folder / "cache")
  return config


def native(files: Files) -> ConfigDict:
  """The same, in tiles of 4 pixels: each picture is 2 of them."""
  config = images(files)
  config.model.rope_sections = (2, 1, 1)
  config.model.vision = dict(
      tower="qwen2_5_vl", image_size=4, patch_size=2, num_layers=2, hidden_size=8, intermediate_size=8, num_heads=2,
      activation="swiglu", projector="merge", window=1, full_layers=(1,), image_token=258, min_pixels=32, max_pixels=64)
  return config


def films(files: Files) -> ConfigDict:
  """The same, about films of 8 frames, of two seconds, each of the size of two tiles, or of 4."""
  config = native(files)
  pictures = [digits.encoded(np.concatenate([digits.picture(n), digits.picture(n + 50)])) for n in range(16)]
  shown = [{"frames": pictures[n:n + 8], "fps": 4} for n in range(8)]
  rows = [dict(video=film, prefix=f"what? {n} <video> or ? ", suffix="it is") for n, film in enumerate(shown)]
  config.input.sources = dict(main=source(type="jsonl", path=files.jsonl("films", rows)))
  config.model.vision.update(video=dict(token=259, tokens_per_second=2.0, min_pixels=64, max_pixels=128))
  return config


def learned(files: Files) -> ConfigDict:
  """The same, with a tower that has learned positions and gives features to the first layer, too."""
  config = native(files)
  config.model.vision.update(tower="qwen3_vl", activation="gelu", window=None, full_layers=(), position_grid=3,
                             deepstack_layers=(0,))
  return config


def pooled(files: Files) -> ConfigDict:
  """The same, with a tower that takes the mean of a tile, and whose pictures are as large as 70 tiles allow."""
  config = images(files)
  config.seq_len = 128
  config.model.vision = dict(
      tower="gemma4", image_size=4, patch_size=2, num_layers=1, hidden_size=8, intermediate_size=8, num_heads=2,
      activation="geglu", projector="mean", position_grid=140, image_token=258, max_pixels=70 * 16)
  return config


def prompts(files: Files) -> ConfigDict:
  """Two rollouts' worth of prompts; rewards differ between nearly all completions."""
  from tests.trainer import rollout_runs
  config = text(files)
  rows = [dict(prompt=f"q {number}", other=f"what about {number}?", answer="a") for number in range(12)]
  given = rollout_runs.config([files.jsonl("prompts", rows)], None)
  config.update(strategy=given.strategy, optimizer=given.optimizer, schedule=given.schedule, seq_len=64)
  config.input.sources, config.rollout, config.input.cache_dir = given.input.sources, given.rollout, None
  config.rollout.rewards = dict(score=dict(type="tests.trainer.rollout_toys.low"))
  return config
