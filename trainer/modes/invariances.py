"""The equalities of docs/exactness.md, on a model, parameters and a batch of a user's own: what `--mode=verify` runs.

Each function here returns what was measured, to be at most what `CHECKS` allows, or raises `Skip` and says why it does
not apply. Rows I8 (fixtures) and I13 (golden files) of the table are facts about Weft, not about a config; of I8 the
derivative is taken here.

B rows, T tokens, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from evaluators import loss as loss_evaluator
from input_pipeline.examples.roles import ABSENT
from models import api, hf
from models.hf.errors import HFError
from trainer import program as program_lib
from trainer import strategies, tree, update
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.export.command import export
from trainer.generate.sampler import Sampler
from trainer.metrics import Mean
from trainer.modes.fixture import Fixture, Skip, completions_apart, distance, padded, split_documents
from trainer.strategies import logprobs, seq, sequences, similarity
from trainer.telemetry import writers

# Of texts that are generated: prompts, tokens of each, and new ones.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 8
# Slopes agree that differ by less than this share of them; how many are taken at most.
AGREE, SLOPES = 1e-2, 8


def micro_batches(s: Fixture) -> float:
  """I1."""
  rows, shards = len(s.batch["tokens"]), mesh_lib.batch_shards(s.mesh)
  counts = [count for count in (2, 4, 8) if rows % count == 0 and rows // count % shards == 0]
  counts = sorted({*counts[:1], *counts[-1:]})  # each is a program of its own
  for count in counts:
    try:
      strategies.check(s.changed(grad_accum_steps=count, batch_size=rows))
    except ConfigError as e:
      raise Skip(str(e)) from e
  if not counts:
    raise Skip(f"{rows} rows on {shards} shards are one micro-batch")
  whole, _ = s.gradient()
  return max(distance(whole, s.gradient(micro_batch_size=rows // count)[0]) for count in counts)


def one_device(s: Fixture) -> float:
  """I2."""
  if s.mesh.size == 1:
    raise Skip("one device")
  return distance(s.gradient()[0], s.gradient(mesh=mesh_lib.make_mesh({}, jax.devices()[:1]))[0])


def packing(s: Fixture) -> float:
  """I3, the first half."""
  if strategies.of(s.config).data == "matches":
    return _apart(s, {**s.batch, "prompt_ids": np.zeros_like(s.batch["segment_ids"])})
  if "segment_roles" in s.batch:
    raise Skip("completions of a prompt are taken apart below" if strategies.of(s.config).data == "rollouts" else
               f"{s.config.strategy.name} compares documents of one row with one another")
  together, apart = split_documents(s.batch, most=16)
  if len(together["tokens"]) == len(apart["tokens"]):
    raise Skip("no row has two documents")
  shards = mesh_lib.batch_shards(s.mesh)
  one, metrics = s.gradient(padded(together, shards))
  other, metrics_apart = s.gradient(padded(apart, shards))
  return max(distance(one, other), abs(metrics["loss"] / metrics_apart["loss"] - 1))


def other_documents(s: Fixture) -> float:
  """I3, the second half: how many hidden states change with another document of their row."""
  # A prompt that completions share is a part of each of them.
  documents = np.where(np.isin(s.batch["segment_ids"], s.batch.get("prompt_ids", 0)), 0, s.batch["segment_ids"])
  rows = [row for row, ids in enumerate(documents) if len(np.unique(ids[ids > 0])) > 1]
  if not rows:
    raise Skip("no row has two documents")
  segments = documents[rows[0]]
  mine = np.zeros(s.batch["tokens"].shape, bool)
  mine[rows[0]] = segments == segments[segments > 0][0]
  return _changed(s, mine & _text(s), others=~mine)


def shared_prompts(s: Fixture) -> float:
  """I3 of completions that share their prompt: against each, or the two of a preference, in a row of its own, prompts
  and all."""
  if not s.batch.get("prompt_ids", np.zeros(1)).any():
    raise Skip("no completions share a prompt in a row")
  return _apart(s, s.batch)


def _apart(s: Fixture, batch: dict[str, np.ndarray]) -> float:
  """The batch against that which has what belongs together in rows of its own."""
  shards, together = mesh_lib.batch_shards(s.mesh), strategies.of(s.config).sequences_each(s.config.strategy)
  one, metrics = s.gradient()
  other, metrics_apart = s.gradient(padded(completions_apart(batch, together), shards))
  return max(distance(one, other), abs(metrics["loss"] - metrics_apart["loss"]))  # a loss that may be 0


def causality(s: Fixture) -> float:
  """How many hidden states change with a later token."""
  places = np.flatnonzero(_text(s)[0] & (s.batch.get("block_ids", s.batch["segment_ids"] * 0)[0] == 0))
  if not len(places):
    raise Skip("the first row has no token that only later ones see")
  later = np.zeros(s.batch["tokens"].shape, bool)
  cut = places[len(places) // 2]
  later[0, places[places >= cut]] = True
  earlier = np.ones_like(later)
  earlier[0, cut:] = False
  return _changed(s, later, others=earlier)


def _text(s: Fixture) -> np.ndarray:
  """Which tokens [B, T] are real, and no image's."""
  return (s.batch["segment_ids"] > 0) & (s.batch.get("image_index", 0 * s.batch["tokens"]) == 0)


def _changed(s: Fixture, where: np.ndarray, others: np.ndarray) -> float:
  before = s.hidden(s.batch)
  tokens = np.where(where, s.other_token(s.batch["tokens"]), s.batch["tokens"])
  after = s.hidden({**s.batch, "tokens": tokens})
  if not (before[where] != after[where]).any():
    raise AssertionError("other tokens change nothing at all, not even at their own places")
  return float(np.sum(np.any(before != after, axis=-1) & others & (s.batch["segment_ids"] > 0)))


def full_logits(s: Fixture) -> float:
  """I4, values: log-probs in chunks against those of logits, relative to their size where that is above 1."""
  _need_tokens(s)
  first = {key: part[:mesh_lib.batch_shards(s.mesh)] for key, part in s.batch.items()}
  targets_BxT, weights_BxT = seq.next_tokens(first)

  @jax.jit
  def both(params):
    hidden = s.model.apply(params, first).hidden
    stats = logprobs.token_stats(hidden, s.model.unembedding(params), targets_BxT, chunk=_chunk(s), want=("logprob",),
                                 logit_cap=s.model.final_logit_cap, num_real_vocab=s.model.num_real_vocab)
    full = jax.nn.log_softmax(s.model.unembed(params, hidden), axis=-1)
    return stats.logprob, jnp.take_along_axis(full, targets_BxT[..., None], -1)[..., 0]

  with mesh_lib.activation_rules(s.mesh, s.config.activation_rules):
    chunked, full = map(np.asarray, both(s.place(s.params, s.mesh)))
  trained = np.asarray(weights_BxT) > 0
  if not trained.any():
    raise Skip("the first row trains nothing")
  return float((np.abs(chunked - full) / np.maximum(1.0, np.abs(full)))[trained].max())


def one_chunk(s: Fixture) -> float:
  """I4, the gradient."""
  if not s.built_in:
    raise Skip("model.vocab_chunk is a key of the built-in model")
  _need_tokens(s)
  return distance(s.gradient(model__vocab_chunk=s.model.vocab_size)[0], s.gradient(model__vocab_chunk=_chunk(s))[0])


def _need_tokens(s: Fixture) -> None:
  if s.config.model.head != "lm":
    what = {"score": "scores sequences", "embedding": "embeds texts"}[s.config.model.head]
    raise Skip(f"the model {what} and predicts no tokens")


def _chunk(s: Fixture) -> int:
  """The config's, or less where the vocabulary fits into that."""
  return min(s.model.vocab_chunk, -(-s.model.vocab_size // 4))


def batch_sizes(s: Fixture) -> float:
  """I6: the loss of an evaluation of the rows, 1, 3 and all at a time, the last batch filled up. Of all of their
  tokens, trained or not: the roundings of a few tokens' log-probs do not average out."""
  if mesh_lib.batch_shards(s.mesh) > 1:
    raise Skip("batches of one row would not fill the mesh")
  _need_tokens(s)
  row_sums = jax.jit(loss_evaluator._make_row_sums(s.model))
  params, rows = s.place(s.params, s.mesh), len(s.batch["tokens"])
  losses, whole = [], s.batch | {"loss_weights": (np.asarray(s.batch["segment_ids"]) > 0).astype(np.float32)}
  with mesh_lib.activation_rules(s.mesh, s.config.activation_rules):
    for size in sorted({1, min(3, rows), rows}):
      batch = padded(whole, size)
      sums = sum(np.asarray(row_sums(params, {key: part[i:i + size] for key, part in batch.items()}), np.float64).sum(0)
                 for i in range(0, len(batch["tokens"]), size))
      losses.append(sums[0] / sums[2])
  return float(max(losses) - min(losses)) / abs(losses[0])


def at_the_reference(s: Fixture) -> float:
  """I7: where policy and reference are the same, no margin; and the loss of DPO is ln 2."""
  cfg, at_reference = s.config.strategy, strategies.of(s.config).at_reference
  if at_reference is None or s.reference is None:
    raise Skip("no preferences against a reference in the state")
  if cfg.reference not in ("start", "base"):
    raise Skip(f"the reference is {cfg.reference!r}, not what the policy begins as")
  _, metrics = s.gradient()
  return max(abs(metrics[name] / value - 1) if value else abs(metrics[name])
             for name, value in at_reference(cfg).items())


def derivative(s: Fixture) -> float:
  """I8: the derivative of the objective along its gradient is the gradient's norm, by differences extrapolated."""
  if s.built_in and s.config.model.moe.num_experts:
    raise Skip("which experts are chosen changes in jumps, which no derivative has")
  batch = _with_old_policy(s)
  grads, metrics = s.gradient(batch)
  norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values())))
  if norm == 0:
    raise Skip("the gradient is 0")
  flat = tree.flatten(s.params)
  size = float(np.sqrt(sum(np.sum(np.square(np.asarray(flat[p], np.float64))) for p in grads)))

  def objective(step: float) -> float:
    moved = flat | {p: np.asarray(flat[p] + np.float32(step / norm) * grads[p], flat[p].dtype) for p in grads}
    found = s.gradient(batch, params=tree.unflatten(moved))[1]
    return found.get("objective", found["loss"])

  def slope(step: float) -> float:
    return (objective(step) - objective(-step)) / (2 * step)

  # Large enough that float32 can tell the objective's values apart, small enough that they are nearly straight.
  step = min(1e-3 * max(abs(metrics.get("objective", metrics["loss"])), 0.1) / norm, 1e-2 * size)
  slopes = [slope(step), slope(step / 2)]
  # An objective that is small itself, a divergence of two models that nearly agree say, bends sooner.
  while abs(slopes[-1] - slopes[-2]) > AGREE * abs(slopes[-1]) and len(slopes) < SLOPES:
    slopes.append(slope(step / 2**len(slopes)))
  one, half = min(itertools.pairwise(slopes), key=lambda pair: abs(pair[1] - pair[0]))
  return abs((4 * half - one) / 3 / norm - 1)


def _with_old_policy(s: Fixture) -> dict[str, np.ndarray]:
  """The batch, with log p_old of the policy as it is where it has none, or NaN, and the loss takes that of whatever
  policy it is given: its ratios are then 1 everywhere, so that it has a gradient but no slope."""
  rewarded = {"advantages", "token_advantages"} & s.batch.keys()
  if not rewarded or "old_logprobs" not in strategies.of(s.config).rollout_keys:
    return s.batch
  temperature = strategies.temperature(s.config.strategy)
  score = jax.jit(lambda params, batch: sequences.token_logprobs(s.model, params, batch, temperature))
  with mesh_lib.activation_rules(s.mesh, s.config.activation_rules):
    now_BxT = np.asarray(score(s.place(s.params, s.mesh), s.placed(s.batch, s.mesh)))
  old_BxT = s.batch.get("old_logprobs", np.full_like(now_BxT, np.nan))
  return {**s.batch, "old_logprobs": np.where(np.isnan(old_BxT), now_BxT, old_BxT)}


def generation(s: Fixture) -> float:
  """I9: log-probs of generated tokens, step by step with a cache, against one pass over the whole text."""
  if not api.generates(s.model):
    raise Skip("the model does not generate")
  _need_tokens(s)
  if "images" in s.batch or s.config.model.vision.tower != "none":
    raise Skip("rows have images; tests/trainer/generate/test_sampler_images.py has the same for them")
  prompts: list = []
  for tokens, segments in zip(s.batch["tokens"], s.batch["segment_ids"], strict=True):
    mine = tokens[segments == segments[0]] if segments[0] else tokens[:0]
    prompts += [mine[:PROMPT_TOKENS - len(prompts) % 3]] * (len(mine) > 1)  # ragged
  prompts = prompts[:PROMPTS]
  if not prompts:
    raise Skip("no row begins with a document of two tokens")
  params = s.place(s.params, s.mesh)
  temperature = strategies.temperature(s.config.strategy)
  done = Sampler(s.model, s.mesh, rows=2).generate(params, prompts, max_new_tokens=NEW_TOKENS, temperature=temperature,
                                                   seed=s.config.seed)
  texts = [np.concatenate([prompts[c.prompt], c.ids]) for c in done]
  width = -(-(PROMPT_TOKENS + NEW_TOKENS) // 16) * 16
  batch = padded({"tokens": np.stack([np.pad(t, (0, width - len(t))) for t in texts]).astype(np.int32),
                  "segment_ids": np.stack([np.arange(width) < len(t) for t in texts]).astype(np.int32),
                  "positions": np.stack([np.arange(width)] * len(texts)).astype(np.int32)},
                 mesh_lib.batch_shards(s.mesh))

  @jax.jit
  def forced(params):
    stats = logprobs.token_stats(
        s.model.apply(params, batch).hidden[:, :-1], s.model.unembedding(params), batch["tokens"][:, 1:],
        chunk=s.model.vocab_chunk, logit_cap=s.model.final_logit_cap, num_real_vocab=s.model.num_real_vocab,
        temperature=temperature, want=("logprob",))
    return stats.logprob

  with mesh_lib.activation_rules(s.mesh, s.config.activation_rules):
    expected = np.asarray(forced(params))
  return float(max(np.abs(expected[row, len(prompts[c.prompt]) - 1:][:len(c.ids)] - c.logprobs).max()
                   for row, c in enumerate(done)))


def first_ratio(s: Fixture) -> float:
  """I9: how far the ratios of the first step after a rollout are from 1: their mean, and the k3 estimate of the
  divergence from the policy that the rollout began with, above 0 as soon as one is another. Of the slice, and of its
  first step in the run's own precision."""
  row = next(row for row in writers.read_rows(s.workdir / "metrics.jsonl") if row["step"] == 1)
  if not row.keys() >= {"policy/ratio_mean", "policy/approx_kl"}:
    raise Skip("no ratios to an older policy")
  rows = [row] if s.compute == "float32" else [row, s.gradient(precision__compute=s.compute)[1]]
  return max(max(abs(each["policy/ratio_mean"] - 1), abs(each["policy/approx_kl"])) for each in rows)


def equal_rewards(s: Fixture) -> float:
  """I10: the largest entry of the gradient where all advantages are 0, as they are where all rewards are equal."""
  if "advantages" not in s.batch:
    raise Skip("no advantages")
  if strategies.of(s.config).graded:
    raise Skip("the batch's advantages are margins of pairs, not made of rewards")
  if s.config.strategy.get("beta", 0.0):
    raise Skip("strategy.beta is not 0: the penalty has a gradient of its own")
  if not np.any(s.batch["advantages"]):
    raise AssertionError("all advantages of the batch are 0 to begin with")
  grads, _ = s.gradient({**s.batch, "advantages": 0 * s.batch["advantages"]})
  return float(max(np.abs(g).max() for g in grads.values()))


def recomputation(s: Fixture) -> float:
  """I11: nothing kept for the backward pass, or everything."""
  return distance(s.gradient(remat="none")[0], s.gradient(remat="full")[0])


def unrolled(s: Fixture) -> float:
  """I11: the layers as one loop, or one after another."""
  if not s.built_in:
    raise Skip("model.scan_layers is a key of the built-in model")
  return distance(s.gradient(model__scan_layers=True)[0], s.gradient(model__scan_layers=False)[0])


def exported(s: Fixture) -> float:
  """I12: logits, scores or embeddings, after an export and a load, relative to the largest."""
  out = s.workdir / "verify_export"
  try:
    export(s.workdir, out, dtype="float32")
  except HFError as e:
    raise Skip(f"no Hugging Face family has this model: {str(e).splitlines()[0]}") from e
  first = {key: part[:1] for key, part in s.batch.items()}
  loaded, params = hf.load(out)
  state = jax.device_put(jax.device_get(s.run.state["params"]), jax.devices()[0])
  pooling = s.config.strategy.pooling if s.config.model.head == "embedding" else None
  ours, theirs = _outputs(s.model, state, first, pooling), _outputs(loaded, params, first, pooling)
  return float(np.abs(ours - theirs).max() / np.abs(ours).max())


def _outputs(model: Any, params: Any, batch: dict[str, np.ndarray], pooling: str | None = None) -> np.ndarray:
  """What the model says of a batch: logits of the real tokens [N, V] or, of the segments that are there, scores
  [N, num_labels], or with `pooling` embeddings [N, D]."""
  if pooling is not None:
    vectors = jax.jit(lambda p, b: similarity.embeddings(model.apply(p, b).hidden, b, pooling))(params, batch)
    return np.asarray(vectors)[batch["segment_roles"] != ABSENT]
  if getattr(model, "num_labels", 0):
    scores = jax.jit(lambda p, b: sequences.scores(model, p, model.apply(p, b).hidden, b))(params, batch)
    return np.asarray(scores)[batch["segment_roles"] != ABSENT]
  return np.asarray(jax.jit(model.logits)(params, batch))[batch["segment_ids"] > 0][:, :model.num_real_vocab]


def nan_batch(s: Fixture) -> float:
  """I14: how many arrays of parameters and optimizer a step with a loss that is NaN leaves with other bits."""
  config, optimizer = s.config, program_lib.planned_optimizer(s.config, s.model)
  program = program_lib.make_program(config, s.model, optimizer, s.mesh, s.run.data.source_names)

  def loss_fn(*args):
    terms, shown = program.loss_fn(*args)
    return {name: Mean(term.sum * jnp.nan, term.weight) for name, term in terms.items()}, shown

  options = dataclasses.replace(program.options, micro_batch_size=len(s.batch["tokens"]))
  fn = update.make_update_fn(loss_fn, optimizer, options)
  with mesh_lib.activation_rules(s.mesh, config.activation_rules):
    after, _ = jax.jit(fn, out_shardings=(program.state_sharding, None))(s.run.state, s.placed(s.batch, s.mesh))
  skipped = int(after["nonfinite"]) - int(s.run.state["nonfinite"])
  if skipped != 1:
    raise AssertionError(f"a step was to be skipped; {skipped} were counted")
  return float(sum(not np.array_equal(a, b, equal_nan=True) for key in ("params", "opt") for a, b in zip(
      *(jax.tree.leaves(jax.device_get(state[key])) for state in (s.run.state, after)), strict=True)))


class Check(NamedTuple):
  row: str
  what: str
  allowed: float
  measure: Callable[[Fixture], float]


CHECKS = (
    Check("I1", "gradient: micro-batches, whole batch", 1e-6, micro_batches),
    Check("I2", "gradient: this mesh, one device", 1e-5, one_device),
    Check("I3", "loss and gradient: packed, one document a row", 1e-5, packing),
    Check("I3", "hidden states that another document changes", 0, other_documents),
    Check("I3", "loss and gradient: prompts shared, apart", 1e-5, shared_prompts),
    Check("I3", "hidden states that a later token changes", 0, causality),
    Check("I4", "log-probs: in chunks, of full logits", 3e-6, full_logits),
    Check("I4", "gradient: in chunks, of full logits", 1e-5, one_chunk),
    Check("I6", "evaluated loss: batches of 1, 3, all", 1e-7, batch_sizes),
    Check("I7", "policy = reference: margin 0, loss ln 2", 1e-4, at_the_reference),
    Check("I8", "derivative along the gradient: its norm", 1e-2, derivative),
    Check("I9", "log-probs: generated, in one pass", 1e-5, generation),
    Check("I9", "ratio of the first step after a rollout: 1", 0, first_ratio),
    Check("I10", "gradient where all rewards are equal", 0, equal_rewards),
    Check("I11", "gradient: remat none, full", 1e-6, recomputation),
    Check("I11", "gradient: layers scanned, unrolled", 1e-6, unrolled),
    Check("I12", "logits, scores, vectors: exported and loaded", 1e-5, exported),
    Check("I14", "arrays that a step with NaN changes", 0, nan_batch),
)
