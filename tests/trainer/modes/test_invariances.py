"""What each equality of `--mode=verify` measures, of gradients that a test makes up; and when it is skipped."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.hf.errors import HFError
from trainer.config import defaults, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.modes import fixture, invariances
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


# A model in which each token's logits are a row of a table, in which `shift` is added to those of token 3.
TABLE = np.log(np.arange(1.0, 51.0).reshape(5, 10) % 7 + 1)


class Table:
  vocab_chunk, vocab_size, num_real_vocab, final_logit_cap = 4, 10, 10, None

  def __init__(self, shift=0.0):
    self._shift = shift

  def apply(self, params, batch):
    return SimpleNamespace(hidden=jax.nn.one_hot(batch["tokens"], 5))

  def unembedding(self, params):
    return params["w"]

  def unembed(self, params, hidden_BxTxD):
    return hidden_BxTxD @ params["w"] + self._shift * (jnp.arange(10) == 3)

  def logits(self, params, batch):
    return self.unembed(params, self.apply(params, batch).hidden)


def log_probs(shift=0.0, temperature=1.0):
  logits = (TABLE + shift * (np.arange(10) == 3)) / temperature
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_table(shift=0.0, name="seq", **batch):
  s = given(name, batch=batch)
  s.model, s.params = Table(shift), {"w": jnp.asarray(TABLE, jnp.float32)}
  s.place, s.placed = lambda tree, mesh: tree, lambda batch, mesh: batch
  return s


def test_log_probs_in_chunks_are_compared_where_something_is_trained():
  """Of the first row of a device alone; relative where they are above 1 in size."""
  tokens = np.array([[0, 3, 1, 2], [2, 3, 3, 3]])
  weights = np.array([[0, 1, 1, 0], [1, 1, 1, 1]], np.float32)
  s = of_table(0.5, tokens=tokens, loss_weights=jnp.asarray(weights), segment_ids=np.ones((2, 4), int))
  theirs, ours = log_probs(0.5), log_probs()
  pairs = [(0, 3), (3, 1)]  # (token, the next one that is trained)
  expected = max(abs(ours[p] - theirs[p]) / max(1, abs(theirs[p])) for p in pairs)
  assert expected > 0.05 and invariances.full_logits(s) == pytest.approx(expected, rel=1e-4)
  assert invariances.full_logits(of_table(**s.batch)) < 1e-6
  s.batch["loss_weights"] = jnp.asarray(weights * [[0], [1]])
  assert reason(invariances.full_logits, s) == "the first row trains nothing"


def test_evaluations_of_1_3_and_all_rows_are_compared(monkeypatch):
  """Whose losses say how many rows they were given: 1, 3 and 5. All tokens of texts count, though none is trained."""
  given_rows = []

  def row_sums(model):
    def sums(params, batch):
      given_rows.append(len(batch["tokens"]))
      weight = batch["loss_weights"].sum(1)
      return jnp.stack([weight * len(batch["tokens"]), weight, weight], axis=1)
    return sums

  monkeypatch.setattr(invariances.loss_evaluator, "_make_row_sums", row_sums)
  segment_ids = np.array([[1, 1, 2], [1, 1, 0], [1, 0, 0], [1, 2, 3], [1, 1, 1]])
  weights = np.zeros((5, 3), np.float32)
  s = of_table(tokens=np.zeros((5, 3), int), segment_ids=segment_ids, loss_weights=weights)
  assert invariances.batch_sizes(s) == (5.0 - 1.0) / 1.0
  assert given_rows == [1, 3, 5]  # each traced once; the last three are filled up with an empty one
  assert s.batch["loss_weights"] is weights  # what other checks are given stays


def test_ratios_are_taken_to_the_policy_as_it_is_where_there_is_no_older_one(monkeypatch):
  asked = []

  def token_logprobs(model, params, batch, temperature):
    asked.append(temperature)
    return jnp.full((1, 3), -2.0)

  monkeypatch.setattr(invariances.sequences, "token_logprobs", token_logprobs)
  batch = dict(tokens=np.zeros((1, 3), int), advantages=np.ones((1, 1)))
  s = of_table(name="grpo", **batch)
  s.config.strategy.temperature = 0.5
  found = invariances._with_old_policy(s)
  np.testing.assert_array_equal(found["old_logprobs"], [[-2, -2, -2]])
  assert asked == [0.5] and found.keys() == {*batch, "old_logprobs"} and "old_logprobs" not in s.batch
  s.batch["old_logprobs"] = np.array([[-1.0, np.nan, 0.0]])
  np.testing.assert_array_equal(invariances._with_old_policy(s)["old_logprobs"], [[-1, -2, 0]])
  other = of_table(name="grpo", tokens=batch["tokens"])
  assert invariances._with_old_policy(other) is other.batch  # no rewards
  other = of_table(name="reward", **batch)
  assert invariances._with_old_policy(other) is other.batch and len(asked) == 2  # margins


def test_what_is_generated_is_read_again_in_one_pass(monkeypatch):
  """The sampler says the log-probs of its tokens, one of them with a mistake of 0.25."""
  asked, wrong = [], [(0, 2), (1, 3), (1, 0)]

  class Sampler:
    def __init__(self, model, mesh, rows):
      pass

    def generate(self, params, prompts, **options):
      asked.append((prompts, options))
      found = []
      for prompt, ids in ((1, [3, 4, 2]), (0, [4, 3, 1, 0])):
        text = [*prompts[prompt], *ids]
        said = [log_probs(temperature=0.7)[pair] for pair in itertools.pairwise(text[-len(ids) - 1:])]
        found.append(SimpleNamespace(prompt=prompt, ids=np.array(ids), logprobs=np.array(said)))
      number, at = wrong[len(asked) - 1]
      found[number].logprobs[at] += 0.25
      return found

  monkeypatch.setattr(invariances, "Sampler", Sampler)
  monkeypatch.setattr(invariances.api, "generates", lambda model: True)
  segments = np.array([[1] * 10, [1, 1, 1] + [2] * 7, [0] * 10, [1] + [2] * 9, [1] * 10, [1] * 9 + [0]])
  tokens = (np.arange(60).reshape(6, 10) * 3) % 5
  s = of_table(tokens=tokens, segment_ids=segments)
  monkeypatch.setattr(invariances.strategies, "temperature", lambda cfg: 0.7)
  for _ in wrong:
    assert invariances.generation(s) == pytest.approx(0.25, abs=1e-5)
  (prompts, options), *_ = asked
  rows = [(0, 8), (1, 3), (4, 6), (5, 8)]  # 8, 7, 6 and 8 tokens at most of rows that begin with two of a document
  assert [p.tolist() for p in prompts] == [tokens[row, :count].tolist() for row, count in rows]
  assert options == dict(max_new_tokens=8, temperature=0.7, seed=s.config.seed)


def test_what_a_model_says_is_of_what_is_there(monkeypatch):
  params = {"w": jnp.asarray(TABLE, jnp.float32)}
  batch = {"tokens": np.array([[4, 0, 2]]), "segment_ids": np.array([[1, 2, 0]]), "segment_roles": np.array([[1, 0]])}
  model = Table()
  model.num_real_vocab = 7
  np.testing.assert_allclose(invariances._outputs(model, params, batch), TABLE[[4, 0], :7], rtol=1e-6)
  said = jnp.arange(4.0).reshape(1, 2, 2)
  monkeypatch.setattr(invariances.similarity, "embeddings",
                      lambda hidden, batch, pooling: said + {"mean": 10, "last": 20}[pooling] + hidden[0, 0, 4])
  np.testing.assert_array_equal(invariances._outputs(model, params, batch, "last"), [[21, 22]])
  monkeypatch.setattr(invariances.sequences, "scores", lambda model, params, hidden, batch: said + hidden[0, 0, 4])
  model.num_labels = 1
  np.testing.assert_array_equal(invariances._outputs(model, params, batch), [[1, 2]])


@pytest.mark.parametrize("skipped, changed, expected", [(1, 0, 0.0), (1, 2, 2.0), (0, 0, None), (2, 0, None)])
def test_a_step_with_nan_is_skipped_and_changes_nothing(monkeypatch, skipped, changed, expected):
  state = {"params": {"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}, "opt": [jnp.zeros(3)], "nonfinite": 4,
           "step": jnp.zeros(())}
  s = of_table(tokens=np.zeros((6, 2), int))
  s.run = SimpleNamespace(state=state, data=SimpleNamespace(source_names=("main",)))
  made = []

  def loss_fn(*given):
    return {"loss": Mean(jnp.array(3.0), jnp.array(2.0)), "z": Mean(jnp.array(0.0), jnp.array(1.0))}, {"shown": given}

  def make_program(config, model, optimizer, mesh, names):
    made.append((config, model, optimizer, mesh, names))
    sharding = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)
    return SimpleNamespace(loss_fn=loss_fn, options=Options(), state_sharding=sharding)

  def make_update_fn(loss_fn, optimizer, options):
    assert options.micro_batch_size == 6
    terms, shown = loss_fn("p", "b")
    assert shown == {"shown": ("p", "b")} and terms.keys() == {"loss", "z"}
    assert all(np.isnan(term.sum) for term in terms.values()) and terms["loss"].weight == 2

    def update(state, batch):
      after = state | {"nonfinite": state["nonfinite"] + skipped, "step": state["step"] + 1}
      if changed:
        after |= {"params": {"a": state["params"]["a"], "b": 2 * state["params"]["b"]}, "opt": [state["opt"][0] + 1]}
      return after, {}
    return update

  monkeypatch.setattr(invariances.program_lib, "planned_optimizer", lambda config, model: "optimizer")
  monkeypatch.setattr(invariances.program_lib, "make_program", make_program)
  monkeypatch.setattr(invariances.update, "make_update_fn", make_update_fn)
  if expected is None:
    with pytest.raises(AssertionError, match=f"a step was to be skipped; {skipped} were counted"):
      invariances.nan_batch(s)
  else:
    assert invariances.nan_batch(s) == expected
  assert made == [(s.config, s.model, "optimizer", s.mesh, ("main",))]


@dataclasses.dataclass
class Options:
  micro_batch_size: int = 1


def test_micro_batches_that_a_strategy_refuses_say_why(monkeypatch):
  def refuse(config):
    raise ConfigError(f"no {config.grad_accum_steps} of {config.batch_size}")

  monkeypatch.setattr(invariances.strategies, "check", refuse)
  s = given(batch={"tokens": np.zeros((8, 2))})
  assert reason(invariances.micro_batches, s) == "no 2 of 8"


def test_matches_are_taken_apart_without_prompts():
  """Two texts of a pair in a row against the same in one of twice the length: the same loss and gradient here."""
  batch = dict(tokens=np.array([[1, 2, 3, 4]]), segment_ids=np.array([[1, 1, 2, 2]]), segment_roles=np.array([[1, 1]]))
  s = given("contrastive", batch=batch, gradient=lambda batch, _: (1.0, float(np.sum(batch["tokens"]))))
  assert invariances.packing(s) == 0.0 and s.asked[1]["batch"]["tokens"].sum() == 10


# ----------------------------------------------------------------------------------------------
# The fixture.


@pytest.fixture
def made(monkeypatch):
  """A fixture without a run; `programs`: which were made, as (values that differ, rows of a micro-batch)."""
  def make_model(config, vocab_size):
    return SimpleNamespace(config=config, num_real_vocab=vocab_size, vocab_size=vocab_size)

  monkeypatch.setattr(fixture.program_lib, "make_model", make_model)
  config = defaults()
  config.model.vision.image_token = 6
  mesh = mesh_lib.make_mesh({}, jax.devices()[:1])
  run = SimpleNamespace(mesh=mesh, tokenizer=SimpleNamespace(vocab_size=9))
  s = fixture.Fixture(config.lock(), Path("w"), run, {"w": np.ones(2, np.float32)}, None,
                      {"tokens": np.arange(8).reshape(4, 2)})
  s.programs = []

  def program(config, micro_batch_size):
    s.programs.append((config.seed, config.model.vocab_chunk, micro_batch_size))

    def of(params, batch, step, reference):
      assert step == 0 and reference is None
      value = params["w"].sum() * batch["tokens"].sum() * micro_batch_size
      return {"w": value}, None, {"loss": value + config.seed}
    return of

  monkeypatch.setattr(s, "_program", program)
  return s


def test_a_fixture_has_a_program_for_each_variant_and_keeps_what_it_found(made):
  seed, chunk = made.config.seed, made.config.model.vocab_chunk
  grads, metrics = made.gradient()
  assert grads == {"w": 2 * 28 * 4} and metrics == {"loss": 224 + seed}
  made.gradient(model__vocab_chunk=chunk)  # what the config says is no other program
  made.gradient(micro_batch_size=4)
  assert made.gradient(micro_batch_size=2)[0] == {"w": 112}
  assert made.gradient(seed=seed + 1)[1] == {"loss": 224 + seed + 1}
  assert made.programs == [(seed, chunk, 4), (seed, chunk, 2), (seed + 1, chunk, 4)]
  # Another batch, or other parameters, by the same program; and what was found before stays.
  assert made.gradient({"tokens": np.ones((4, 2), int)})[0] == {"w": 2 * 8 * 4}
  assert made.gradient(params={"w": np.zeros(2, np.float32)})[0] == {"w": 0}
  assert made.gradient()[0] is grads and len(made.programs) == 3
  assert made.gradient({"tokens": np.ones((3, 2), int)})[0] == {"w": 2 * 6 * 3}
  assert made.programs[3:] == [(seed, chunk, 3)]


def test_a_fixture_with_other_values_leaves_its_config_alone(made):
  found = made.changed(seed=7, model__vision__image_token=2)
  assert (found.seed, found.model.vision.image_token, found.is_locked) == (7, 2, True)
  assert made.config.model.vision.image_token == 6 and made.config.seed != 7
  assert made.variant(seed=8).config.seed == 8 and made.model.vocab_size == 9 and made.built_in


def test_another_token_is_never_one_of_an_image_or_a_video(made):
  held = {6}
  for video in (None, 7):
    made.config = made.changed(model__vision__video__token=video)
    held |= {video} - {None}
    found = made.other_token(np.arange(9, dtype=np.int32))
    assert found.dtype == np.int32 and not held & set(found.tolist())
    assert all(new != old and 0 <= new < 9 for old, new in enumerate(found.tolist()))
  assert fixture.image_token(made.config) == 6
  assert fixture.image_token(made.changed(model__vision__image_token=None)) == -1


def test_hidden_states_come_from_the_fixture_s_parameters(made):
  made.model = SimpleNamespace(apply=lambda params, batch: SimpleNamespace(
      hidden=(batch["tokens"][..., None] * params["w"]).astype(jnp.bfloat16)))
  for tokens in ([[1, 2]], [[3, 4]]):
    found = made.hidden({"tokens": np.array(tokens)})
    assert found.dtype == np.float32 and found.tolist() == [[[t, t] for t in tokens[0]]]


def test_completions_of_rows_that_have_fewer():
  batch = dict(tokens=np.array([[7, 1, 0], [1, 2, 3]]), segment_ids=np.array([[1, 1, 0], [1, 2, 2]]),
               prompt_ids=np.zeros((2, 3), int), segment_roles=np.array([[1, 0], [1, 1]]), source_ids=np.array([4, 5]),
               images=np.arange(6).reshape(2, 3))
  apart = completions_apart(batch)
  np.testing.assert_array_equal(apart["tokens"], [[7, 1, 0], [1, 0, 0], [2, 3, 0]])
  np.testing.assert_array_equal(apart["images"], [[0, 1, 2], [3, 4, 5], [3, 4, 5]])  # of the row, not of tokens
  np.testing.assert_array_equal(apart["segment_roles"], [[1, 0], [1, 0], [1, 0]])
  assert apart["source_ids"].tolist() == [4, 5, 5] and "prompt_ids" not in apart


def test_a_derivative_is_taken_within_a_small_step():
  """The objective is 2 x + x³ at 1, of slope 5: by steps of a thousandth of it, at most of a hundredth of x."""
  for scale, largest in ((1.0, 1e-3 * 3 / 5), (100.0, 1e-2)):
    moved = []

    def gradient(batch, params=None, scale=scale, moved=moved):
      x = 1.0 if params is None else float(params["w"][0])
      moved.append(abs(x - 1))
      return {"w": np.array([5.0], np.float32)}, {"loss": 2 * x + x**3 + 3 * (scale - 1)}

    s = SimpleNamespace(built_in=False, batch={}, params={"w": np.array([1.0], np.float32)}, gradient=gradient,
                        config=SimpleNamespace(strategy=None))
    assert invariances.derivative(s) < 1e-3
    assert max(moved) == pytest.approx(largest, rel=1e-3) and len(moved) == 5
