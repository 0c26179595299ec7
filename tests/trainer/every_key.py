"""What becomes of a config, made by the functions that `train` calls and no further than a test of one key needs.

A `Made` holds one config; what it is asked for is made once. Nothing is trained: programs are traced and not compiled,
data are the rows of the first steps, and a run (`begun`) is `train` itself up to its loop.
"""

import contextlib
import functools
import hashlib
import re
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np
import pytest
from jax.interpreters import partial_eval
from ml_collections import ConfigDict

from evaluators import common as evaluators_lib
from input_pipeline import loader, prompt_data
from input_pipeline.sources import python as readers_python
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, make_tokenizer
from tests import tiny
from tests.trainer.every_key_bases import Begun, Files, begin
from trainer import program as program_lib
from trainer import tree as tree_lib
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import sampler
from trainer.strategies import learns
from trainer.strategies.reference import overlay
from trainer.telemetry import throughput
from trainer.telemetry.writers import MultiWriter

VOCABULARY = BytesTokenizer.vocab_size
# Steps whose rows are looked at.
STEPS = 4


class Made:
  """Args:
    config: as a user gives it.
    files: what it names.
  """

  def __init__(self, config: ConfigDict, files: Files):
    self.given, self.files = config, files
    self._seen: dict[Callable, Any] = {}

  def seen(self, see: Callable[["Made"], Any]) -> Any:
    """`see(self)`, made once."""
    if see not in self._seen:
      self._seen[see] = see(self)
    return self._seen[see]

  @functools.cached_property
  def resolved(self) -> ConfigDict:
    resolved, _ = program_lib.resolve(self.given)
    program_lib.settle(resolved, "cpu")
    return resolved

  @functools.cached_property
  def config(self) -> config_checks.View:
    return config_checks.View(self.resolved)

  @functools.cached_property
  def workdir(self) -> Path:
    workdir = self.files.workdir()
    workdir.mkdir()
    return workdir

  @functools.cached_property
  def model(self) -> Any:
    return program_lib.make_model(self.config, VOCABULARY)

  @functools.cached_property
  def optimizer(self) -> Any:
    return program_lib.planned_optimizer(self.config, self.model)

  @functools.cached_property
  def program(self) -> program_lib.Program:
    return program_lib.make_program(self.config, self.model, self.optimizer, mesh_lib.make_mesh(self.config.mesh),
                                    ["main"])

  @functools.cached_property
  def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    return program_lib.abstract_batch(self.config, self.model, self.config.batch_size,
                                      precompute=self.program.precompute)

  def traced(self, function: Callable, *args: Any) -> str:
    """The program of a function for abstract arguments. What is computed and not used does not count."""
    with mesh_lib.activation_rules(self.program.mesh, self.config.activation_rules):
      closed = jax.make_jaxpr(function)(*args)
    used, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    # The text has names in the place of constants.
    within = [part.consts for equation in tiny.equations(used) for part in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda part: isinstance(part, jax.extend.core.ClosedJaxpr))
        if isinstance(part, jax.extend.core.ClosedJaxpr)]
    return re.sub(r"0x[0-9a-f]+", "0x", str(used)) + str(digest([closed.consts, *within]))

  @functools.cached_property
  def tokenizer(self) -> Any:
    texts = (prompt_data.prompt_texts(self.config) if self.config.rollout.num_prompts else
             loader.train_texts(self.config, learns(self.config)))
    return make_tokenizer(self.config.tokenizer, texts, self.workdir / "tokenizer.json")

  @functools.cached_property
  def data(self) -> Any:
    if self.config.rollout.num_prompts:
      return prompt_data.make_prompt_data(self.config, self.tokenizer, False)
    return loader.make_train_data(self.config, self.tokenizer, learns=learns(self.config), workdir=self.workdir)

  @functools.cached_property
  def params(self) -> Any:
    """Parameters of the model that take no program to make: of each path its own."""
    def draw(path: str, leaf: Any) -> np.ndarray:
      seed = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "big")
      return np.random.default_rng(seed).normal(0, 0.5, leaf.shape).astype(leaf.dtype)

    return tree_lib.unflatten({path: draw(path, leaf)
                               for path, leaf in tree_lib.flatten(self.model.abstract_params()).items()})

  @functools.cached_property
  def evaluator(self) -> Any:
    """Of `evals.val`, on one device."""
    mesh = mesh_lib.make_mesh({}, jax.devices()[:1])
    setup = evaluators_lib.Setup(self.config, self.model, self.tokenizer, mesh, self.workdir, MultiWriter())
    return evaluators_lib.make("val", self.config.evals.val, setup)

  @functools.cached_property
  def begun(self) -> Begun:
    return begin(self.given, self.workdir, then=lambda run: run.save() if run.config.export.path else None)


# What stands for Python's standard library: all of it takes half a minute to parse.
LIBRARY = ("bisect.py", "calendar.py", "json/decoder.py", "json/encoder.py", "textwrap.py", "uuid.py")


@contextlib.contextmanager
def made_once(folder: Path):
  """In here samplers of equal models on equal devices share their programs, how fast devices are is measured once, and
  Python has a small library, in `folder`.
  """
  whole = sysconfig.get_paths()
  for name in LIBRARY:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(whole["stdlib"]) / name, folder / name)
  compiled, make = {}, sampler.Sampler._jitted

  def jitted(self: sampler.Sampler, *sizes: Any) -> Callable:
    key = (repr(self.model.spec), self.chunk, self.mesh, sizes)
    if key not in compiled:
      compiled[key] = make(self, *sizes)
    return compiled[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampler.Sampler, "_jitted", jitted)
    patch.setattr(readers_python.sysconfig, "get_paths", lambda *_: whole | {"stdlib": str(folder)})
    patch.setattr(throughput, "peak_flops", functools.cache(throughput.peak_flops))
    yield


# ----------------------------------------------------------------------------------------------
# What may differ between two configs.


def digest(tree: Any) -> Any:
  """The same tree, with arrays as short names of their contents."""
  if isinstance(tree, dict):
    return {key: digest(tree[key]) for key in sorted(tree)}
  if isinstance(tree, (list, tuple)):
    return [digest(part) for part in tree]
  if isinstance(tree, (np.ndarray, jax.Array)):
    array = np.asarray(tree)
    return f"{array.dtype}{array.shape}{hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"
  return re.sub(r"0x[0-9a-f]+", "0x", repr(tree))


def loss(m: Made) -> str:
  """The strategy's loss of a batch in training: model and strategy."""
  program = m.program
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = program.abstract_state["params"]
  held = program.abstract_state.get("reference")
  reference = () if held is None else (overlay(params, held),)
  return m.traced(program.loss_fn, params, m.batch, key, *reference)


def step(m: Made) -> str:
  """A whole update with gradients, optimizer and what moves beside, and where each part of the state lives."""
  program = m.program
  return "\n".join([m.traced(program.update_fn, program.abstract_state, m.batch),
                    *(f"{path}: {leaf}" for path, leaf in tree_lib.flatten(program.state_sharding).items())])


def descent(m: Made) -> str:
  """What the optimizer makes of gradients, and the shapes of what it remembers."""
  optimizer, state = m.optimizer, m.program.abstract_state

  def update(gradients: Any, opt: Any, trained: Any, number: jax.Array) -> tuple[Any, Any]:
    updates, opt = optimizer.update(gradients, opt, trained, number)
    return optimizer.apply(updates, trained, number), opt

  trained, _ = optimizer.split(state["params"])
  return m.traced(update, trained, state["opt"], trained, state["step"])


def layout(m: Made) -> str:
  """Where each part of the state lives, and each activation of the loss."""
  return "\n".join([m.seen(loss), *(f"{path}: {leaf}"
                                    for path, leaf in tree_lib.flatten(m.program.state_sharding).items())])


def fresh(m: Made) -> str:
  """How parameters are drawn."""
  return m.traced(m.model.init, jax.eval_shape(lambda: jax.random.key(0)))


def rows(m: Made) -> list:
  """The rows of the first steps, or the first prompts, with all that says how the stream goes on."""
  data = m.data
  if m.config.rollout.num_prompts:
    items = [data.item(i) for i in range(min(12, data.num_items or 12))]
    return digest([[(item.prompt.ids, item.content, item.columns) for item in items], data.num_items, data.stats()])
  return digest([[data.batch_range(step) for step in range(STEPS)], [data.batch(step) for step in range(STEPS)],
                 data.num_steps, data.rows_per_epoch, data.stats(), data.counters(200)])


def refusal(m: Made) -> str:
  """What is said against the data; "" if they are accepted."""
  try:
    m.seen(rows)
  except ValueError as error:
    return re.sub(r"workdir-\d+", "", f"{type(error).__name__}: {error}")
  return ""


def learning_rates(m: Made) -> list:
  """Of the steps of the whole run."""
  return [sorted(m.optimizer.learning_rates(step).items()) for step in range(0, m.config.total_steps, 5)]


def cycles(m: Made) -> list:
  """The same; none without the length of a cycle."""
  try:
    return m.seen(learning_rates)
  except ConfigError as error:
    assert "needs the length of its first cycle" in str(error)
    return []


def scored(m: Made) -> list:
  """What the evaluator `val` gives and writes."""
  reference = jax.tree.map(lambda leaf: 0.9 * leaf, m.params)
  found = list(m.evaluator.run(m.params, 0, *[reference] * getattr(m.evaluator, "wants_reference", False)))
  written = sorted((m.workdir / "samples").glob("*"))
  return digest([found, [path.read_text(encoding="utf-8") for path in written]])
