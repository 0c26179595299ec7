"""SFT end to end: what a step computes does not depend on packing, padding, micro-batches, devices or restarts."""

import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import programs, tiny
from tests.models.initial import initial
from tests.trainer.export.test_hugging_face import StopAt  # noqa: F401 (named in a config below)
from trainer import train, tree
from trainer.config import checks as config_checks
from trainer.config import evaluator
from trainer.config.checks import View
from trainer.errors import DataError
from trainer.strategies import learns, sft
from trainer.telemetry.writers import read_rows


def write_conversations(file, count=40, seed=0):
  rng = random.Random(seed)
  rows = []
  for number in range(count):
    messages = [{"role": "system", "content": "Be short."}] if number % 3 == 0 else []
    for turn in range(1 + number % 2):
      words = " ".join(rng.choice(tiny.WORDS) for _ in range(rng.randint(1, 5)))
      messages += [{"role": "user", "content": words},
                   {"role": "assistant", "content": words.upper(), "weight": 1 - turn / 2}]
    rows.append({"messages": messages})
  file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
  return file


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
  return write_conversations(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def config(file, **changed):
  strategy = changed.pop("strategy", {})
  c = tiny.config(file, seq_len=256, **changed)
  c.strategy = dict(name="sft", **strategy)
  c.input.sources.main.update(type="jsonl", path=str(file))
  c.chat.template = "plain"
  return c


def all_batches(file, workdir, packing, seq_len, normalize):
  """Every row of one epoch, as one batch."""
  c = config_checks.resolve(config(file, strategy=dict(normalize=normalize), input=dict(packing=packing)))
  with c.unlocked():
    c.seq_len, c.input.sources.main.split, c.input.stop, c.tokenizer.type = seq_len, "all", "first", "bytes"
  data = loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=workdir)
  return {key: np.concatenate([data.batch(step)[key] for step in range(data.num_steps)]) for key in data.batch(0)}


@pytest.mark.parametrize("options", [{}, {"dft": True}, {"label_smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_packing_and_padding_change_neither_loss_nor_gradient(conversations, tmp_path, normalize, options):
  """I3: several conversations a row, one a row, and rows half as long again."""
  model = tiny.model(vocab_size=264)
  params = initial(model)
  strategy = View(config_checks.resolve(config(conversations, strategy=options)).strategy)

  @jax.jit
  def objective(params, batch):
    terms, _ = sft.loss(model, params, batch, None, strategy)
    return jnp.sum(terms["loss"].sum) / jnp.sum(terms["loss"].weight), jnp.sum(terms["loss"].weight)

  results = {}
  for packing, seq_len in (("best_fit", 256), ("none", 256), ("best_fit", 384)):
    batch = all_batches(conversations, tmp_path, packing, seq_len, normalize)
    (value, weight), gradient = jax.value_and_grad(objective, has_aux=True)(params, batch)
    results[packing, seq_len] = float(value), float(weight), gradient, len(batch["tokens"])
  value, weight, gradient, rows = results.pop(("best_fit", 256))
  assert weight == (40 if normalize == "sequence" else pytest.approx(weight)) and rows < results["none", 256][3] == 40
  for other_value, other_weight, other_gradient, _ in results.values():
    assert other_value == pytest.approx(value, rel=1e-6) and other_weight == pytest.approx(weight, rel=1e-6)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-6 * norm)


def trained(file, workdir, **changed):
  c = config(file, total_steps=4, evals={}, **changed)
  c.optimizer.update(name="sgd", learning_rate=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
  return train(c, workdir)


@pytest.mark.parametrize("mesh", [
    pytest.param(dict(data=1, fsdp=2), id="two", marks=pytest.mark.devices(2)),
    pytest.param(dict(data=1, fsdp=2, context=2, tensor=2), id="eight",
                 marks=[pytest.mark.slow, pytest.mark.devices(8)])])
def test_micro_batches_and_devices_do_not_change_the_parameters(conversations, tmp_path, mesh):
  """I1, I2: four steps of plain SGD at once on one device, and on several in four micro-batches."""
  with programs.devices(1):
    reference = tree.flatten(trained(conversations, tmp_path / "a").state["params"])
  programs.show(math.prod(mesh.values()))
  params = tree.flatten(trained(conversations, tmp_path / "b", grad_accum_steps=4, mesh=mesh).state["params"])
  for path, leaf in reference.items():
    np.testing.assert_allclose(leaf, params[path], atol=2e-6, err_msg=path)


def test_a_stopped_run_goes_on_as_if_it_had_not(conversations, tmp_path):
  """I5, with dropout and NEFTune: parameters, optimizer and metrics bitwise."""
  def make(**changed):
    c = config(conversations, total_steps=6, **changed)
    c.model.update(dropout=0.1, neftune_alpha=5.0)
    return c

  straight = train(make(), tmp_path / "straight")
  stopping = make()
  stopping.callbacks.stop = dict(type="tests.trainer.strategies.test_sft_runs.StopAt", step=3)
  train(stopping, tmp_path / "halves")
  continued = train(make(), tmp_path / "halves")
  assert continued.step == 6
  for path, leaf in tree.flatten(continued.state).items():
    np.testing.assert_array_equal(leaf, tree.flatten(straight.state)[path], err_msg=path)
  losses = [{row["step"]: row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl") if "loss" in row}
            for name in ("straight", "halves")]
  assert losses[0] == losses[1] and len(losses[0]) == 6


def test_the_held_out_loss_does_not_depend_on_the_batch_size(conversations, tmp_path):
  """I6: at 8, 24 and 64 rows, with rows of padding, on conversations packed and weighted as in training."""
  c = config(conversations, total_steps=1)
  c.evals = {f"at{rows}": evaluator(type="loss", batch_size=rows, at_start=True) for rows in (8, 24, 64)}
  values = train(c, tmp_path / "w").last_eval[1]
  losses = [values[f"eval/at{rows}/loss"] for rows in (8, 24, 64)]
  assert losses == pytest.approx([losses[0]] * 3, rel=1e-7)


@pytest.mark.parametrize("row, message", [
    ({"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]}, r"messages\[1\].role"),
    ({"messages": [{"role": "user", "content": "a"}] + 2 * [{"role": "assistant", "content": "b"}]}, r"messages\[2\]"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, r"messages\[1\].content"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}, r"messages\[0\]"),
    ({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "b"}]}, r"messages\[0\].content"),
    ({"question": "a", "reply": "b"}, r"question"),
])
def test_a_malformed_conversation_is_named_with_file_line_and_key(conversations, tmp_path, row, message):
  file = tmp_path / "bad.jsonl"
  file.write_text(conversations.read_text(encoding="utf-8") + json.dumps(row) + "\n", encoding="utf-8")
  with pytest.raises(DataError, match=message) as error:
    train(config(file, total_steps=1), tmp_path / "w")
  assert f"{file}:41" in str(error.value)


def test_learning_to_shout(conversations, tmp_path):
  """The answer repeats the question in capitals; the loss on answers falls."""
  c = config(conversations, total_steps=60, log_steps=10, evals={})
  c.optimizer.learning_rate = 3e-2
  run = train(c, tmp_path / "w")
  losses = [row["loss"] for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "loss" in row]
  assert losses[-1] < 0.6 * losses[0] and run.last_row["trained_tokens"] > 0
