"""The preference evaluator: values equal a plain computation pair by pair, whatever the batch size and the packing."""

import json

import jax
import numpy as np
import pytest

from evaluators import common
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from tests.models.initial import initial
from trainer.config import checks as config_checks
from trainer.config import evaluator, source
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError

BETA = 0.3


def write(folder, strategy, counts=(("a", 17), ("b", 6))):
  """{source: rows}, also as JSON Lines."""
  rng, rows = np.random.default_rng(0), {}

  def text(most=14):
    return " " + "".join(map(chr, rng.integers(97, 123, rng.integers(1, most))))

  for name, count in counts:
    rows[name] = [{"prompt": f"{name}{i}", "chosen": text(), "rejected": text()} for i in range(count)]
    if strategy == "kto":
      rows[name] = [{"prompt": r["prompt"], "completion": r["chosen"], "label": bool(i % 2)}
                    for i, r in enumerate(rows[name])]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
  return rows


def make(folder, strategy="dpo", packing="auto", mesh_sizes=None, batch_size=4, **options):
  """(evaluator, model, its parameters, those of the reference, mesh)."""
  config = tiny.config(folder, seq_len=48)
  config.strategy = dict(name=strategy, beta=BETA, **options)
  config.input.packing = packing
  sources = {name: source(type="jsonl", path=str(folder / f"{name}.jsonl")) for name in ("a", "b")}
  config.evals = {"val": evaluator(type="preference", batch_size=batch_size, sources=sources)}
  config = config_checks.View(config_checks.resolve(config))
  tokenizer = BytesTokenizer()
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
  mesh = mesh_lib.make_mesh(mesh_sizes) if mesh_sizes else jax.make_mesh(
      (1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
  params, reference = (initial(model, seed) for seed in (0, 1))
  setup = common.Setup(config, model, tokenizer, mesh, folder, None)
  return common.make("val", config.evals.val, setup), model, params, reference, mesh


def logps(model, params, rows, key):
  """[(Σ log p of the completion's tokens, how many)] in float64, from full logits of each text in a row of its own."""
  texts = [[256, *row["prompt"].encode(), *row[key].encode(), 257] for row in rows]
  padded = np.array([ids + [0] * (48 - len(ids)) for ids in texts])  # what comes behind is not seen
  logits = np.asarray(jax.jit(model.logits)(params, padded), np.float64)[:, :, :258]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  found = []
  for number, (row, ids) in enumerate(zip(rows, texts, strict=True)):
    at = np.arange(1 + len(row["prompt"]), len(ids))
    found.append((logp[number, at - 1, np.array(ids)[at]].sum(), len(at)))
  return np.array(found)


def ratios(model, params, reference, rows, key):
  return logps(model, params, rows, key)[:, 0] - logps(model, reference, rows, key)[:, 0]


def test_it_equals_a_plain_computation_pair_by_pair(tmp_path):
  rows = write(tmp_path, "dpo")
  ev, model, params, reference, _ = make(tmp_path, loss={"sigmoid": 1.0, "hinge": 0.5, "sft": 0.0})
  values = dict(ev.run(params, 0, reference))
  for suffix, some in (("", rows["a"] + rows["b"]), ("/a", rows["a"]), ("/b", rows["b"])):
    chosen, rejected = (ratios(model, params, reference, some, key) for key in ("chosen", "rejected"))
    margin = BETA * (chosen - rejected)
    wanted = {
        "rewards/chosen": BETA * chosen.mean(), "rewards/rejected": BETA * rejected.mean(),
        "rewards/margins": margin.mean(), "rewards/accuracies": (margin > 0).mean(),
        "losses/sigmoid": np.log1p(np.exp(-margin)).mean(), "losses/hinge": np.maximum(0, 1 - margin).mean(),
        "loss": (np.log1p(np.exp(-margin)) + 0.5 * np.maximum(0, 1 - margin)).mean(),
        "logps/chosen": logps(model, params, some, "chosen")[:, 0].mean(),
        "logps_mean/rejected": np.divide(*logps(model, params, some, "rejected").T).mean(),
    }
    # A reward is a difference of sums of log-probs, which are float32: it is as exact as the last bit of these.
    last_bit = BETA * 2.0**-23 * max(np.abs(logps(model, params, some, key)[:, 0]).max() for key in rows["a"][0]
                                     if key != "prompt")
    for name, value in wanted.items():
      assert values[name + suffix] == pytest.approx(value, rel=2e-5, abs=last_bit), name + suffix
  assert 0 < values["rewards/accuracies"] < 1 and "losses/sft" not in values


@pytest.mark.parametrize("strategy, options", [
    ("dpo", dict(loss={"sigmoid": 1.0, "ipo": 0.1, "sft": 1.0}, ld_alpha=0.5, wpo=True)), ("kto", {}),
    ("dpo", dict(loss={"simpo": 1.0}, reference="none"))])
def test_the_values_do_not_depend_on_the_batch_size_or_the_packing(tmp_path, strategy, options):
  """I6, with padding rows, and I3."""
  if strategy == "dpo":
    options = {"loss": {"sigmoid": 0.0}, **options}
  write(tmp_path, strategy)
  values = []
  for batch_size, packing in ((1, "auto"), (3, "auto"), (64, "auto"), (3, "none")):
    ev, _, params, reference, _ = make(tmp_path, strategy, packing, batch_size=batch_size, **options)
    values.append(dict(ev.run(params, 0, reference)))
  for other, tolerance in zip(values[1:], (1e-6, 1e-6, 1e-5), strict=True):
    assert other.keys() == values[0].keys()
    for name, value in values[0].items():
      assert other[name] == pytest.approx(value, rel=tolerance, abs=1e-5), name  # differences of sums near 100


@pytest.mark.devices(8)
def test_the_values_do_not_depend_on_the_mesh(tmp_path):
  write(tmp_path, "dpo")
  one, _, params, reference, _ = make(tmp_path, batch_size=8)
  eight, _, _, _, mesh = make(tmp_path, mesh_sizes=dict(data=2, fsdp=2, tensor=2), batch_size=8)
  with mesh_lib.activation_rules(mesh):
    sharded = dict(eight.run(params, 0, reference))
  for name, value in one.run(params, 0, reference):
    assert sharded[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_policy_itself_as_reference_ties_every_pair(tmp_path):
  """I7."""
  write(tmp_path, "dpo")
  ev, _, _, reference, _ = make(tmp_path)
  values = dict(ev.run(reference, 0, reference))
  # One program makes both from the same numbers, perhaps compiled in two ways: on some processors the last bit differs.
  assert values["rewards/accuracies"] == 0.5
  assert max(abs(values["rewards/margins"]), abs(values["rewards/chosen"])) < 2e-6
  assert values["losses/sigmoid"] == values["loss"] == pytest.approx(np.log(2), rel=1e-6)


def test_what_is_no_sum_over_examples_is_left_out(tmp_path):
  write(tmp_path, "dpo")
  ev, _, params, reference, _ = make(tmp_path, loss={"sigmoid": 1.0, "aot": 1.0})
  values = dict(ev.run(params, 0, reference))
  assert "losses/sigmoid" in values and not {"loss", "losses/aot"} & values.keys()


def test_single_answers(tmp_path):
  rows = write(tmp_path, "kto")
  ev, model, params, reference, _ = make(tmp_path, "kto")
  values, both = dict(ev.run(params, 0, reference)), rows["a"] + rows["b"]
  every, labels = ratios(model, params, reference, both, "completion"), np.array([row["label"] for row in both])
  wanted = {label: BETA * every[labels == label].mean() for label in (True, False)}
  assert values["rewards/chosen"] == pytest.approx(wanted[True], rel=1e-5)
  assert values["rewards/rejected"] == pytest.approx(wanted[False], rel=1e-5)
  assert values["rewards/margins"] == pytest.approx(wanted[True] - wanted[False], abs=2e-6)
  others = [dict(row, completion=following["completion"]) for some in rows.values()
            for row, following in zip(some, some[1:] + some[:1], strict=True)]
  assert values["kl"] == pytest.approx(ratios(model, params, reference, others, "completion").mean(), rel=1e-4)
  assert "loss" not in values and "rewards/accuracies" not in values
  ev, model, params, reference, _ = make(tmp_path, "kto", loss="apo_zero_unpaired")
  found = dict(ev.run(params, 0, reference))
  x = BETA * every * np.where(labels, 1, -1)
  assert found["loss"] == pytest.approx((1 / (1 + np.exp(x))).mean(), rel=1e-5) and "kl" not in found


def test_log_probs_that_were_computed_before_need_no_reference(tmp_path):
  """Here each token is certain for the reference."""
  rows = write(tmp_path, "dpo")
  ev, model, params, _, _ = make(tmp_path, precompute=True)
  data = ev._examples.data
  kept = data.reference("certain", tmp_path / "cache")
  for batch in kept.batches(4):
    kept.store(batch, np.zeros(batch.tokens_BxT.shape, np.float32))
  kept.finish()
  data.use(kept)
  chosen, rejected = (BETA * logps(model, params, rows["a"] + rows["b"], key)[:, 0].mean()
                      for key in ("chosen", "rejected"))
  values = dict(ev.run(params, 0))
  assert values["rewards/chosen"] == pytest.approx(chosen, rel=1e-5)
  assert values["rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-4)


def test_its_data_are_among_those_that_a_reference_is_asked_about_before_the_first_step(tmp_path, monkeypatch):
  write(tmp_path, "dpo")
  made, setup = [], common.Setup
  monkeypatch.setattr(common, "Setup", lambda *given: made.append(setup(*given)) or made[-1])
  for precompute in (True, False):
    ev = make(tmp_path, precompute=precompute)[0]
    assert made[-1].datasets == ([ev._examples.data] if precompute else [])


def test_what_it_needs(tmp_path):
  write(tmp_path, "dpo")
  ev, _, params, _, _ = make(tmp_path)
  with pytest.raises(ValueError, match="compares the policy with a reference, and none was given"):
    next(ev.run(params, 0))
  config = tiny.config(tmp_path)
  config.evals = {"val": evaluator(type="preference")}
  config = config_checks.View(config_checks.resolve(config))
  with pytest.raises(ConfigError, match="evals.val is of type 'preference', .* dpo or kto or reward; .* is 'seq'"):
    common.make("val", config.evals.val, common.Setup(config, None, BytesTokenizer(), None, tmp_path, None))
