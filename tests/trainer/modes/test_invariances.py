"""What each equality of `--mode=verify` measures, of gradients that a test makes up; and when it is skipped."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from models.hf.errors import HFError
from trainer.config import defaults, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.modes import invariances
from trainer.modes.fixture import Skip, completions_apart, distance, padded, split_documents

SEGMENTS = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])


def given(name="seq", batch=None, gradient=None, reference=None, devices=1, model=None, **options):
  """What equalities are measured on. `gradient(batch, asked)`: (a number in the place of the gradient, the loss)."""
  config = defaults()
  config.strategy = strategy(name, **options)
  config.model.update(model or {})
  batch = {"tokens": np.arange(8).reshape(2, 4), "segment_ids": SEGMENTS} if batch is None else batch
  s = SimpleNamespace(config=config, batch=batch, reference=reference, built_in=True, asked=[], mesh=mesh_lib.make_mesh(
      dict(data=devices), jax.devices()[:devices]), model=SimpleNamespace(vocab_chunk=4, vocab_size=10), params={})
  s.changed = lambda **changed: SimpleNamespace(strategy=config.strategy, **changed)

  def of(batch=None, **asked):
    s.asked.append(asked | ({} if batch is None else {"batch": batch}))
    value, loss = (gradient or (lambda *_: (1.0, 1.0)))(s.batch if batch is None else batch, asked)
    return {"w": np.array([value, 0.0])}, loss if isinstance(loss, dict) else {"loss": loss}

  s.gradient = of
  return s


def reason(measure, s):
  with pytest.raises(Skip) as skipped:
    measure(s)
  return str(skipped.value)


def test_the_worst_of_the_micro_batches_counts(monkeypatch):
  monkeypatch.setattr(invariances.strategies, "check", lambda config: None)
  eight = {"tokens": np.zeros((8, 2)), "segment_ids": np.ones((8, 2), int)}
  s = given(batch=eight, gradient=lambda _, asked: ({None: 2.0, 4: 2.5, 1: 1.0}[asked.get("micro_batch_size")], 1.0))
  assert invariances.micro_batches(s) == 0.5  # |1 - 2| / 2
  assert [asked.get("micro_batch_size") for asked in s.asked] == [None, 4, 1]
  three = given(batch={"tokens": np.zeros((3, 2))})
  assert reason(invariances.micro_batches, three) == "3 rows on 1 shards are one micro-batch"


@pytest.mark.devices(2)
def test_one_device_is_compared_with_all():
  s = given(devices=2, gradient=lambda _, asked: (4.0 if "mesh" in asked else 5.0, 1.0))
  assert invariances.one_device(s) == pytest.approx(0.2) and s.asked[1]["mesh"].size == 1
  assert reason(invariances.batch_sizes, s) == "batches of one row would not fill the mesh"
  assert reason(invariances.one_device, given()) == "one device"


def test_packing_compares_gradients_and_losses_of_documents_apart():
  def of(gradient, loss):
    return given(gradient=lambda batch, _: (1.0, 2.0) if len(batch["tokens"]) == 2 else (gradient, loss))

  assert invariances.packing(of(1.0, 2.0)) == 0
  assert invariances.packing(of(1.25, 2.0)) == 0.25 and invariances.packing(of(1.0, 1.0)) == 1.0
  s = of(1.0, 2.0)
  invariances.packing(s)
  np.testing.assert_array_equal(s.asked[1]["batch"]["segment_ids"], [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0]])
  one = {"tokens": np.zeros((1, 4)), "segment_ids": SEGMENTS[1:]}
  assert reason(invariances.packing, given(batch=one)) == "no row has two documents"
  assert reason(invariances.other_documents, given(batch=one)) == "no row has two documents"
  roles = {"segment_roles": np.ones((2, 2))}
  assert "taken apart below" in reason(invariances.packing, given("grpo", batch=roles))
  assert reason(invariances.packing, given("dpo", batch=roles)) == "dpo compares documents of one row with one another"


def test_hidden_states_that_change_where_they_must_not_are_counted():
  """A model in which each place sees its own token and the one `back` before it."""
  def of(measure, back, **more):
    s = given(batch={"tokens": np.arange(8).reshape(2, 4) % 5, "segment_ids": SEGMENTS, **more})
    s.other_token = lambda tokens: tokens + 1
    s.hidden = lambda batch: (batch["tokens"] + 10 * np.roll(batch["tokens"], back, axis=1))[..., None]
    return measure(s)

  assert of(invariances.other_documents, 0) == 0 and of(invariances.other_documents, 1) == 1
  assert of(invariances.other_documents, 2) == 2
  assert of(invariances.causality, 1) == 1  # the first sees the last, round the corner
  assert of(invariances.causality, 0) == 0 and of(invariances.causality, -1) == 1
  assert reason(lambda _: of(invariances.causality, 1, block_ids=SEGMENTS), None) == (
      "the first row has no token that only later ones see")
  with pytest.raises(AssertionError, match="change nothing at all"):
    s = given()
    s.other_token, s.hidden = lambda tokens: tokens + 1, lambda batch: np.zeros((2, 4, 1))
    invariances.causality(s)


def test_shared_prompts_are_compared_with_completions_that_have_their_own():
  batch = dict(tokens=np.array([[7, 1, 2]]), segment_ids=np.array([[3, 1, 2]]), prompt_ids=np.array([[3, 3, 3]]),
               segment_roles=np.array([[1, 1]]), advantages=np.array([[0.5, -0.5]]), source_ids=np.array([0]))
  s = given("grpo", batch=batch, gradient=lambda batch, _: (2.0 / len(batch["tokens"]), 3.0 + len(batch["tokens"])))
  assert invariances.shared_prompts(s) == 1.0  # |4 - 5|, and |2 - 1| / 2 of the gradient
  apart = s.asked[1]["batch"]
  np.testing.assert_array_equal(apart["tokens"], [[7, 1, 0], [7, 2, 0]])
  np.testing.assert_array_equal(apart["segment_ids"], [[1, 1, 0]] * 2)
  np.testing.assert_array_equal(apart["advantages"], [[0.5, 0.0], [-0.5, 0.0]])
  assert reason(invariances.shared_prompts, given("grpo")) == "no completions share a prompt in a row"


def test_policy_and_reference_that_are_the_same():
  def measured(loss, margin, **options):
    metrics = {"losses/sigmoid": loss, "rewards/margins": margin}
    return invariances.at_the_reference(given("dpo", reference={}, gradient=lambda *_: (1.0, metrics), **options))

  assert measured(np.log(2), 0.0) == 0 and measured(np.log(2), -0.25) == 0.25
  assert measured(1.5 * np.log(2), 0.0) == pytest.approx(0.5)
  assert measured(1.5 * np.log(2), 0.0, label_smoothing=0.1) == 0  # is no ln 2
  s = given("kto", reference={}, gradient=lambda *_: (1.0, {"rewards/margins": -0.125}))
  assert invariances.at_the_reference(s) == 0.125
  s = given("dpo", reference={})
  assert reason(invariances.at_the_reference, given()) == "no preferences against a reference in the state"
  assert "no preferences" in reason(invariances.at_the_reference, given("dpo"))
  s.config.strategy.reference = "/a"
  assert reason(invariances.at_the_reference, s) == "the reference is '/a', not what the policy begins as"


def test_equal_rewards_have_no_gradient():
  batch = {"tokens": np.zeros((1, 2)), "advantages": np.array([[1.0, -1.0]])}
  s = given("grpo", batch=batch, gradient=lambda batch, _: (-0.5 if np.any(batch["advantages"]) else -0.125, 1.0))
  assert invariances.equal_rewards(s) == 0.125
  assert reason(invariances.equal_rewards, given("grpo")) == "no advantages"
  assert "has a gradient of its own" in reason(invariances.equal_rewards, given("grpo", batch=batch, beta=0.1))
  assert "margins of pairs" in reason(invariances.equal_rewards, given("reward", batch=batch))
  with pytest.raises(AssertionError, match="are 0 to begin with"):
    invariances.equal_rewards(given("grpo", batch=batch | {"advantages": np.zeros((1, 2))}))


def test_recomputation_loops_and_chunks_are_what_differs():
  for measure, key, values in (
      (invariances.recomputation, "remat", ["none", "full"]),
      (invariances.unrolled, "model__scan_layers", [True, False]),
      (invariances.one_chunk, "model__vocab_chunk", [10, 3])):
    s = given(gradient=lambda _, asked, key=key, first=values[0]: (4.0 if asked[key] == first else 3.0, 1.0))
    assert measure(s) == 0.25 and [asked[key] for asked in s.asked] == values


def test_what_does_not_apply_says_why(monkeypatch):
  own = given()
  own.built_in = False
  assert reason(invariances.unrolled, own) == "model.scan_layers is a key of the built-in model"
  assert reason(invariances.one_chunk, own) == "model.vocab_chunk is a key of the built-in model"
  scores, embeds = given(model=dict(head="score")), given(model=dict(head="embedding"))
  for measure in (invariances.one_chunk, invariances.full_logits, invariances.batch_sizes):
    assert reason(measure, scores) == "the model scores sequences and predicts no tokens"
    assert reason(measure, embeds) == "the model embeds texts and predicts no tokens"
  experts = given(model=dict(moe=dict(num_experts=4)))
  assert "experts are chosen changes in jumps" in reason(invariances.derivative, experts)
  assert reason(invariances.derivative, given(gradient=lambda *_: (0.0, 1.0))) == "the gradient is 0"
  assert reason(invariances.generation, given()) == "the model does not generate"
  monkeypatch.setattr(invariances.api, "generates", lambda model: True)
  assert "rows have images" in reason(invariances.generation, given(batch={"images": 0}))
  assert "of two tokens" in reason(invariances.generation, given(batch={
      "tokens": np.zeros((2, 3)), "segment_ids": np.array([[1, 2, 2], [0, 0, 0]])}))

  def refused(*_, **__):
    raise HFError("no such model\nand more")

  monkeypatch.setattr(invariances, "export", refused)
  own.workdir = Path("w")
  assert reason(invariances.exported, own) == "no Hugging Face family has this model: no such model"


def test_distance_is_the_largest_difference_in_units_of_the_norm():
  one = {"a": np.array([3.0]), "b": np.array([[0.0, 4.0]])}
  assert distance(one, {"a": np.array([2.0]), "b": np.array([[0.5, 4.0]])}) == 0.2
  assert distance(one, one) == 0
  for value in (0.0, np.inf, np.nan):
    with pytest.raises(Skip, match="nothing to compare"):
      distance({"a": np.array([value])}, one)


def test_documents_are_split_up_to_so_many():
  batch = {"tokens": np.arange(12).reshape(3, 4), "segment_ids": np.array([[1, 1, 2, 0], [1, 2, 3, 3], [1, 1, 1, 1]]),
           "source_ids": np.array([5, 6, 7])}
  together, apart = split_documents(batch, most=5)
  np.testing.assert_array_equal(together["tokens"], batch["tokens"][:2])
  np.testing.assert_array_equal(apart["tokens"], [[0, 1, 0, 0], [0, 0, 2, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 6, 7]])
  np.testing.assert_array_equal(apart["source_ids"], [5, 5, 6, 6, 6])
  assert len(split_documents(batch, most=4)[0]["tokens"]) == 1 and len(split_documents(batch, most=1)[0]["tokens"]) == 1
  assert padded(batch, 4)["tokens"].shape == (4, 4) and not padded(batch, 4)["segment_ids"][3].any()
  assert padded(batch, 3)["source_ids"].tolist() == [5, 6, 7]


def test_preferences_stay_together():
  batch = dict(tokens=np.array([[7, 1, 2, 8, 3, 4]]), segment_ids=np.array([[5, 1, 2, 6, 3, 4]]),
               prompt_ids=np.array([[0, 5, 5, 0, 6, 6]]), segment_roles=np.array([[1, 2, 1, 2]]))
  apart = completions_apart(batch, 2)
  np.testing.assert_array_equal(apart["tokens"][:, :4], [[7, 1, 7, 2], [8, 3, 8, 4]])
  np.testing.assert_array_equal(apart["segment_ids"][:, :4], [[1, 1, 2, 2]] * 2)
  np.testing.assert_array_equal(apart["segment_roles"], [[1, 2, 0, 0]] * 2)
  assert apart["tokens"].shape == (2, 12)


def test_an_export_is_compared_with_the_largest_number(monkeypatch):
  monkeypatch.setattr(invariances, "export", lambda *_, **__: None)
  monkeypatch.setattr(invariances.hf, "load", lambda path: ("loaded", None))
  of_model = {"loaded": [[1.0, -4.5]], "own": [[1.25, -5.0]]}
  monkeypatch.setattr(invariances, "_outputs", lambda model, *_: np.array(of_model[model]))
  s = given()
  s.model, s.workdir, s.run = "own", Path("w"), SimpleNamespace(state={"params": {}})
  assert invariances.exported(s) == 0.1  # |4.5 - 5| / 5
