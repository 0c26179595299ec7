"""From a config to the compiled step: what trains, and what it trains on, as shapes and placements; nothing allocated.

`trainer/main.py` runs what this makes; `--mode=plan` asks of the same thing how large and how fast it would be, on
devices that are not here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from input_pipeline import batches
from input_pipeline.examples.kinds import WITH_ADVANTAGES, WITH_PARTS
from input_pipeline.reference import ROUTE
from models import api, remat, spec
from models.quantization import matmul
from trainer import startup, strategies
from trainer import state as state_lib
from trainer import update as update_lib
from trainer.config import checks as config_checks
from trainer.config import durations
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.export import hugging_face
from trainer.generate import image_tokens
from trainer.optim import mup, offload
from trainer.optim import optimizer as optim
from trainer.rollouts import old_policy
from trainer.rollouts import options as rollout_options
from trainer.strategies import critic, teachers
from trainer.strategies import reference as reference_lib
from trainer.telemetry import diagnostics, spikes

# Of a batch whose data nobody has read: segments of a row, where documents have parts.
SEGMENTS = 8
# What chooses the keys of attention, of a critic, too.
INDEXERS = "(^|/)blocks/indexer/"


@dataclass(frozen=True)
class Program:
  """One optimizer step: `update_fn(state, batch) -> (state, metrics)`, jitted with the state donated.

  Attributes:
    model, optimizer, mesh: what it was made for.
    abstract_state: the training state as ShapeDtypeStructs, whose shardings say where each leaf lives.
    params_sharding: that of the parameters.
    batch_sharding: rows over the mesh.
    reference: the leaves of a reference policy, None: there is none. With `precompute` it is not in the state, and
      batches have the arrays `kept`.
    share_prompts: batches have `prompt_ids`.
    options: of the update: seed, rows of a micro-batch, and so on.
    loss_fn: `(params, batch, rng, *reference) -> (terms, metrics)`, the strategy bound to its model and options.
    update_fn: trace it within `mesh.activation_rules(mesh, config.activation_rules)`; so `score_fn`.
    score_fn: `(params, batch, step, reference, whole) -> {name: of each token}` on all devices
      (trainer/rollouts/old_policy.py), jitted; None: rollouts need no such thing.
    notes: what the user should know.
  """

  model: Any
  optimizer: optim.Optimizer
  mesh: Any
  abstract_state: Any
  params_sharding: Any
  batch_sharding: Any
  reference: Any
  precompute: bool
  kept: tuple[batches.Kept, ...]
  share_prompts: bool
  options: update_lib.Options
  loss_fn: Callable
  update_fn: Any
  score_fn: Any
  notes: tuple[str, ...]

  @property
  def state_sharding(self) -> Any:
    """Where each leaf of the state lives."""
    return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

  def place_rows(self, rows_fn: Callable, size: int) -> dict[str, jax.Array]:
    """The batch of so many rows on its devices; `rows_fn(numbers)` gives those that this process needs."""
    return mesh_lib.place_batch(rows_fn, size, self.batch_sharding)

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The batch, which every process has whole, on its devices."""
    return self.place_rows(lambda rows: {key: part[rows] for key, part in batch.items()}, len(batch["tokens"]))

  def seen(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The example of a batch with what an update is given beside: what other models say, requests to stop."""
    batch = dict(batch)
    for kept in self.kept:
      batch[kept.name] = jax.ShapeDtypeStruct((*batch["loss_weights"].shape, *kept.tail), kept.dtype,
                                              sharding=self.batch_sharding)
    if jax.process_count() > 1:
      batch["stop_requests"] = processes.stop_requests(self.mesh, False)
    return batch

  def flops_per_token(self, seq_len: int, images_per_row: int = 0) -> float:
    """Model FLOPs of a token, forward and backward, as MFU is counted (trainer/telemetry/throughput.py)."""
    images = {}
    if images_per_row:
      images = dict(images_per_row=images_per_row, tower_frozen=not any(
          path.startswith(("vision/", "projector/")) for path in self.optimizer.trainable))
    return self.model.flops_per_token(seq_len, **images)


def resolve(config: Mapping) -> tuple[ConfigDict, list[str]]:
  """The complete config with what follows from other files and presets, checked; and sentences on what was filled in.

  Raises:
    ConfigError: what was found, what is allowed, what to type.
  """
  resolved = config_checks.resolve(config)
  notes = [*hugging_face.fill_in(resolved), *strategies.fill_in(resolved), *mup.fill_in(resolved),
           *_freeze_indexers(resolved)]
  config_checks.validate(resolved)
  api.validate(resolved.model, resolved.seq_len)
  rollout_options.check(resolved)
  spikes.check(resolved)
  diagnostics.check(resolved)
  mesh_lib.check_activation_rules(resolved.activation_rules)
  return resolved, notes


def _freeze_indexers(resolved: ConfigDict) -> list[str]:
  """Freezes what has no gradient (models/attention/selected.py), so that no weight decay moves it."""
  o, latent = resolved.optimizer, resolved.model.latent
  if not latent.kv_rank or not latent.index_topk or INDEXERS in o.freeze:
    return []
  o.freeze = (*o.freeze, INDEXERS)
  return [f"optimizer.freeze has {INDEXERS!r}: the choice of keys (model.latent.index_topk) has no gradient"]


def settle(resolved: ConfigDict, platform: str) -> list[str]:
  """Gives what depends on the platform (cpu, gpu, tpu) its value: `precision`'s `auto`s, `model.vocab_chunk`; returns
  sentences on it."""
  p, notes = resolved.precision, []
  if p.compute == "auto":
    p.compute = "float32" if platform == "cpu" else "bfloat16"
    faster = platform == "cpu" and startup.has_matrix_unit()
    notes.append(f"precision.compute = {p.compute}: auto, on {platform}" + faster * (
        "; this processor multiplies matrices of bfloat16 several times as fast: --config.precision.compute=bfloat16"))
  elif p.compute == "bfloat16" and platform == "cpu" and not startup.has_matrix_unit():
    notes.append("precision.compute = bfloat16: this processor has no instructions for it (AMX); float32 is faster")
  if p.frozen == "auto":
    p.frozen = "bfloat16" if platform != "cpu" and resolved.model.lora.rank > 0 else p.params
  if resolved.model.vocab_chunk is None:
    resolved.model.vocab_chunk = spec.VOCAB_CHUNK if platform == "cpu" else spec.VOCAB_CHUNK_ELSEWHERE
  return notes


def make_model(config: Any, vocab_size: int) -> Any:
  """The model of the config, with its critic if it has one, for a tokenizer of so many entries; no parameter is made
  yet."""
  options = dict(vocab_size=vocab_size, params_dtype=config.precision.params, compute_dtype=config.precision.compute,
                 remat=config.remat, frozen=config.precision.frozen, freeze=config.optimizer.freeze,
                 matmul_rules=_matmul_rules(config.precision))
  model = api.make_model(config.model, **options)
  return critic.beside(model, config, **options) if strategies.of(config).critic else model


def _matmul_rules(precision: Any) -> matmul.MatmulRules | None:
  """Which kernels are multiplied in 8 bits; keys of what is not used are not read."""
  if precision.matmul == "none":
    return None
  return matmul.make_matmul_rules(precision.matmul, precision.matmul_gradients, precision.matmul_skip)


def make_optimizer(config: Any, model: Any, total_steps: int, to_steps: Any) -> optim.Optimizer:
  """The optimizer of the config; `to_steps` resolves durations, see `optim.make_optimizer`."""
  return optim.make_optimizer(config.optimizer, config.schedule, model.abstract_params(), total_steps=total_steps,
                              to_steps=to_steps, only=model.trained_only, precision=config.precision, seed=config.seed,
                              width=mup.width(config.model))


def shares_prompts(config: Any, model: Any, mesh: Any) -> bool:
  """Whether sequences of a row share their prompt, by `input.share_prompts`; False if none have one in common.

  Args:
    mesh: of devices; or an AbstractMesh, which stands for some of the kind that is here.

  Raises:
    ConfigError: prompts are to be shared, and the model cannot.
  """
  sampled = config.rollout.num_prompts > 0
  if not sampled and not strategies.of(config).shares_prompts(config.strategy):
    return False
  wanted = config.input.share_prompts
  reason = getattr(model, "no_prefix_sharing", "it has no attribute no_prefix_sharing (models/api.py)")
  if reason is None and strategies.of(config).teacher:  # which goes through the same rows
    reason = teachers.no_prefix_sharing(config.strategy)
  if wanted == "always" and reason is not None:
    raise ConfigError(f"input.share_prompts is 'always', which {type(model).__name__} cannot do: {reason}. Use "
                      "--config.input.share_prompts=auto.")
  if wanted != "auto":
    return wanted == "always"
  platform = jax.default_backend() if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
  # Sampled rows on a split length do not share; rows of files do on every mesh, so that they are the same on each.
  return reason is None and platform != "tpu" and not (sampled and mesh.shape.get("context", 1) > 1)


def make_program(config: Any, model: Any, optimizer: optim.Optimizer, mesh: Any,
                 source_names: Sequence[str]) -> Program:
  """The step of that config on that mesh.

  Args:
    config: the whole config; its keys count as read (`config_checks.View`).
    mesh: of devices that are here, of a topology that is not, or an AbstractMesh, with which nothing can be compiled.
    source_names: see `update.make_update_fn`.

  Raises:
    ConfigError: options of the strategy, or rules of sharding, that cannot be.
  """
  strategy_cfg = config.strategy
  strategies.check(config)
  if mesh.shape.get("context", 1) > 1 and (reason := getattr(model, "no_split_length", None)):
    raise ConfigError(f"mesh.context is {mesh.shape['context']}, which splits the length of rows, but the model cannot "
                      f"have that: {reason}. Use --config.mesh.context=1.")
  reference, precompute = None, False
  if strategies.needs_reference(strategy_cfg) or strategies.of(config).teacher:
    reference = reference_lib.shapes(config, optimizer, model.abstract_params())
    precompute = strategies.precomputes(strategy_cfg)

  fresh = state_lib.make_fresh(optimizer, ema=config.optimizer.ema_decay > 0,
                               reference=None if precompute else reference)
  abstract_state = jax.eval_shape(fresh, model.abstract_params())
  params_sharding, notes = mesh_lib.param_shardings(abstract_state["params"], mesh, config.sharding_rules)
  offloaded = config.precision.offload_optimizer
  if offloaded:
    offload.check(mesh, "precision.offload_optimizer = True")
  if config.remat in remat.HOST_MEMORY:
    offload.check(mesh, f"remat = {config.remat}")
  state_sharding = place_state(abstract_state, params_sharding, mesh, offloaded)
  if strategies.of(config).teacher and not precompute:
    state_sharding["reference"] = {"teacher": teachers.shardings(config, abstract_state["reference"]["teacher"], mesh)}
  # With shardings they are of the types that the arrays will have, so that what is traced for them is not traced again.
  abstract_state = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
                                abstract_state, state_sharding)

  loss_fn = make_loss_fn(model, strategy_cfg, source_names)
  options = make_update_options(config, source_names)
  score_fn = None

  def score(*args):
    # Made when it is called: the config's rollouts may serve one step, and those that are gone on with several.
    return old_policy.make_score_fn(model, strategy_cfg, seed=options.seed, micro_batch_size=options.micro_batch_size)(
        *args)

  if config.rollout.num_prompts and "old_logprobs" in strategies.of(config).rollout_keys:
    score_fn = jax.jit(score, static_argnums=4, out_shardings=NamedSharding(mesh, PartitionSpec()))
  update_fn = jax.jit(
      update_lib.make_update_fn(loss_fn, optimizer, options), donate_argnums=0, out_shardings=(state_sharding, None))
  return Program(model, optimizer, mesh, abstract_state, params_sharding, mesh_lib.batch_sharding(mesh), reference,
                 precompute, reference_lib.kept(config) if precompute else (), shares_prompts(config, model, mesh),
                 options, loss_fn, update_fn, score_fn, tuple(notes))


def make_loss_fn(model: Any, strategy_cfg: Any, source_names: Sequence[str] = ()) -> Callable:
  """The strategy of section `strategy`, bound to its model and options: `(params, batch, rng, *reference) -> (terms,
  metrics)`. `source_names`: those that a batch's `source_ids` count, which one with teachers wants."""
  strategy = strategies.find(strategy_cfg.name)
  loss, whole = strategy.loss, strategy.whole

  def loss_fn(params, batch, rng, *reference):
    return loss(model, params, batch, rng, strategy_cfg, *reference)

  def whole_fn(params, batch, in_micro_batches):
    return whole(model, params, batch, strategy_cfg, in_micro_batches)

  if whole is not None:
    return strategies.Objective(loss_fn, whole_fn)
  return teachers.heard(loss_fn, strategy_cfg, source_names) if strategy.teacher else loss_fn


def make_update_options(config: Any, source_names: Sequence[str]) -> update_lib.Options:
  """What the config says of an update."""
  return update_lib.Options(
      seed=config.seed, micro_batch_size=config.batch_size // config.grad_accum_steps, source_names=source_names,
      clip_norm=config.optimizer.clip_norm, ema_decay=config.optimizer.ema_decay,
      reference_mix=strategies.reference_mix(config.strategy), offloaded=config.precision.offload_optimizer,
      choice_bias_rate=config.model.moe.choice_bias_rate)


def place_state(abstract_state: Any, params_sharding: Any, mesh: Any, offloaded: bool = False) -> Any:
  """Where each leaf of the state lives, given where the parameters do; `offloaded`: the optimizer's in host memory."""
  shardings = mesh_lib.state_shardings(abstract_state, abstract_state["params"], params_sharding, mesh)
  if offloaded:
    shardings["opt"] = offload.to_host(shardings["opt"])
  return shardings


# ----------------------------------------------------------------------------------------------
# Without data: what a plan needs of the rest of a run.


def planned_optimizer(config: Any, model: Any) -> optim.Optimizer:
  """The optimizer where the data, hence the length of an epoch, are not known; its shapes are those of the run's."""
  run = durations.RunLengths(None, config.batch_size, config.seq_len, rows_per_epoch=10**6)
  total_steps = durations.steps(config, "total", run) or 10**6
  run = run._replace(total_steps=total_steps)
  return make_optimizer(config, model, total_steps, functools.partial(durations.steps, run=run))


def planned_images(config: Any, model: Any) -> int:
  """Places for images in a row where the data are not known: `plan.images_per_row`, or those of the largest image."""
  vision = getattr(model, "vision", None)
  return 0 if vision is None else config.plan.images_per_row or vision.most_squares(config.seq_len)


def abstract_batch(config: Any, model: Any, rows: int, *, precompute: bool = False, share_prompts: bool = False,
                   sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
  """The arrays of a training batch, made without data: names, dtypes and shapes.

  Args:
    precompute: with what other models say (`Program.precompute`).
    share_prompts: with the segments of prompts that are shared (`Program.share_prompts`).
    sharding: of all arrays.
  """
  learns, layout = strategies.learns(config), image_tokens.layout_of(model)
  parts = learns in WITH_PARTS or config.rollout.num_prompts > 0
  row = batches.empty_batch(1, config.seq_len, 0, batches.Arrays(
      SEGMENTS if parts else 0, prompts=share_prompts,
      kept=(*(reference_lib.kept(config) if precompute else ()), *((ROUTE,) if learns == "routed" else ())),
      advantages=learns in WITH_ADVANTAGES))
  if config.rollout.num_prompts:
    held = strategies.of(config).keys(config.rollout.updates * config.rollout.epochs)
    row |= {key: row["loss_weights"] for key in held if key != "advantages"}
    if (routing := rollout_options.routing(config, model)) is not None:
      row["replayed_experts" if config.rollout.replay_experts else "sampled_experts"] = np.zeros(
          (1, config.seq_len, *routing), np.int16)
  row |= image_tokens.empty(layout, 1, config.seq_len, planned_images(config, model), layout.frames if layout else 1)
  return {key: jax.ShapeDtypeStruct((rows, *np.shape(values)[1:]), values.dtype, sharding=sharding)
          for key, values in row.items()}
