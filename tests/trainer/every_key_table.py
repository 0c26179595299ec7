"""Every key of `defaults()`: where it matters, another value, and what differs then (tests/trainer/test_every_key.py).

A row is  "key": kind(another value, {other keys that must be set}, base=config, see=what must differ).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.tiny import ROOT
from tests.trainer.every_key import (
  Made,
  cycles,
  descent,
  fresh,
  layout,
  learning_rates,
  loss,
  refusal,
  rows,
  step,
)
from tests.trainer.every_key_bases import (
  answers,
  images,
  learned,
  matches,
  native,
  pooled,
  prompts,
  squares,
  text,
  thoughts,
  turns,
  videos,
)
from tests.trainer.every_key_runs import (
  beginnings_shared,
  callbacks,
  calls_at_a_time,
  calls_found,
  chosen,
  continued,
  decoded_rows,
  decoding_processes,
  engine,
  evaluating_steps,
  exported,
  exported_if_can_be,
  first_parameters,
  goes_on,
  health_told,
  in_steps,
  joining_seconds,
  kept,
  length,
  limits,
  logging_steps,
  no_length,
  own_cache,
  plan_text,
  planned,
  prepared,
  preparing_threads,
  profiled_steps,
  promised,
  prompts_in_chunks,
  rollouts_without_signal,
  runs_of_the_sampler,
  sampled,
  sampled_ahead,
  sampling_devices,
  saving_steps,
  scoring_processes,
  scoring_seconds,
  shared_out,
  spikes_watched,
  texts_kept,
  tolerated_steps,
  trained_again,
  trained_first,
  turns_taken,
  unknown_entry,
  writers,
)
from trainer.config import evaluator, source, strategy

TOYS = "tests.trainer.rollout_toys"
TOKENIZER = str(ROOT / "tests" / "input_pipeline" / "references" / "tiny")


class Row(NamedTuple):
  """A key's effect.

  Attributes:
    kind: program, data, schedule or run.
    value: what the key is changed to; of `Files`, if it is a function.
    given: other keys, by path, that are set before; values as `value`.
    base: the config that all this is changed in.
    see: what must differ.
  """

  kind: str
  value: Any
  given: dict[str, Any]
  base: Callable
  see: Callable[[Made], Any]


def program(value: Any, given: dict | None = None, base: Callable = text, see: Callable = loss) -> Row:
  return Row("program", value, given or {}, base, see)


def update(value: Any, given: dict | None = None, base: Callable = text, see: Callable = step) -> Row:
  return Row("program", value, given or {}, base, see)


def optimizing(value: Any, given: dict | None = None) -> Row:
  return update(value, given, see=descent)


def placing(value: Any, given: dict | None = None) -> Row:
  return update(value, given, see=layout)


def heads(m: Made) -> str:
  """How parameters are drawn, whichever head the strategy is for."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("trainer.strategies.check", lambda config: None)
    return fresh(m)


def data(value: Any, given: dict | None = None, base: Callable = text, see: Callable = rows) -> Row:
  return Row("data", value, given or {}, base, see)


def schedule(value: Any, given: dict | None = None, see: Callable = learning_rates) -> Row:
  return Row("schedule", value, given or {}, text, see)


def run(see: Callable, value: Any, given: dict | None = None, base: Callable = text) -> Row:
  return Row("run", value, given or {}, base, see)


def _durations(prefix: str, see: Callable, given: dict | None = None, **changed: float) -> dict[str, Row]:
  """Rows of a duration in each unit: about a seventh of the run, as no default is."""
  values = dict(steps=140, examples=8 * 140, tokens=8 * 32 * 140, epochs=20.0, percent=14.0) | changed
  return {f"{prefix}_{unit}": schedule(value, given, see) for unit, value in values.items()}


def durations(prefix: str, see: Callable, given: dict | None = None) -> dict[str, Row]:
  """The same of durations that the run itself asks for, which is seen of steps."""
  found = _durations(prefix, in_steps(prefix), given)
  return found | {f"{prefix}_steps": found[f"{prefix}_steps"]._replace(see=see)}


# Where an epoch is taken to have a million rows.
EPOCHS = 8 * 140 / 10**6
LOCAL = {"model.layer_pattern": ("local", "global"), "model.window": 8}
CHUNKS = {"model.layer_pattern": ("chunked", "nope"), "model.attention_chunk": 8}
LEARNED = {"model.positions": "learned", "model.max_positions": 64}
MOE = {"model.moe.num_experts": 4}
DELTA = {"model.layer_pattern": ("delta", "global")}
MAMBA = {"model.layer_pattern": ("mamba", "global")}
LATENT = {"model.latent.kv_rank": 8}
INDEXED = LATENT | {"model.latent.q_rank": 8, "model.latent.index_topk": 8}
GLOBAL = {"model.global_attention.head_dim": 8, "model.attention_scale": 0.5}
GROUPS = MOE | {"model.moe.groups": 2, "model.moe.groups_used": 2}
BIAS = MOE | {"model.moe.choice_bias": True}
LORA = {"model.lora.rank": 2}
POOL = {"model.vision.projector": "pool", "model.vision.tokens_per_image": 4}
TWO = {"input.sources.other": lambda f: source(type="jsonl", path=f.jsonl("other", [
  dict(prompt=f"other {n}", completion="c" * 40) for n in range(12)]))}
JUDGED = {"evals.val": evaluator(type="loss"), "keep_best": "eval/val/loss"}
NAMELESS = {"chat.template": "plain"}


def _scaling(kind: str, **more: Any) -> dict[str, Any]:
  given = dict(type=kind, factor=4.0) | ({} if kind == "linear" else dict(original_positions=16)) | more
  return {f"model.rope_scaling.{key}": value for key, value in given.items()}


YARN = _scaling("yarn", original_positions=1024, beta_fast=2.0, beta_slow=0.3)
LONGROPE = _scaling("longrope", short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
# A folder says how large the vocabulary is.
FOLDER = {"model.vocab_multiple": 128}

MODEL = {
  "model.name": program("tests.trainer.every_key_model.Louder"),
  "model.hf": run(first_parameters, lambda f: f.hf, FOLDER),
  "model.hf_ignore": run(unknown_entry, ("odd",), FOLDER | {"model.hf": lambda f: f.odd_hf}),
  "model.vocab_size": program(512),
  "model.vocab_multiple": program(128),
  "model.num_layers": program(3),
  "model.hidden_size": program(32),
  "model.intermediate_size": program(64),
  "model.num_heads": program(4),
  "model.num_kv_heads": program(1),
  "model.head_dim": program(16),
  "model.norm": program("layernorm"),
  "model.norm_eps": program(1e-3),
  "model.norm_scale_plus_one": program(True),
  "model.norm_bias": program(True, {"model.norm": "layernorm"}),
  "model.norm_position": program("sandwich"),
  "model.parallel_blocks": program(True),
  "model.activation": program("geglu"),
  "model.positions": program("learned", {"model.max_positions": 64}),
  "model.max_positions": program(48, LEARNED),
  "model.rope_theta": program(500.0),
  "model.rope_local_theta": program(100.0, LOCAL),
  "model.rope_fraction": program(0.5),
  "model.rope_interleaved": program(True),
  "model.rope_sections": program((4, 0, 0), base=native),
  "model.rope_sections_interleaved": program(True, base=native),
  "model.rope_scaling.type": program("linear", {"model.rope_scaling.factor": 2.0}),
  "model.rope_scaling.factor": program(2.0, _scaling("linear")),
  "model.rope_scaling.original_positions": program(8, _scaling("dynamic")),
  "model.rope_scaling.low_frequency_factor": program(2.0, _scaling("llama3")),
  "model.rope_scaling.high_frequency_factor": program(8.0, _scaling("llama3")),
  "model.rope_scaling.beta_fast": program(40.0, YARN),
  "model.rope_scaling.beta_slow": program(0.1, YARN),
  "model.rope_scaling.truncate": program(False, YARN),
  "model.rope_scaling.attention_factor": [program(2.0, YARN), program(2.0, LONGROPE)],
  "model.rope_scaling.short_factors": program((1.5,) * 4, LONGROPE),
  "model.rope_scaling.long_factors": program((3.0,) * 4, LONGROPE),
  "model.tie_embeddings": program(False),
  "model.head": program("score", see=heads),
  "model.similarity": program("scale", base=matches),
  "model.num_labels": program(3, {"model.head": "score"}, see=heads),
  "model.scale_embeddings": program(True),
  "model.embedding_scale": program(2.0),
  "model.residual_scale": program(0.5),
  "model.logit_scale": program(0.5),
  "model.qkv_bias": program(True),
  "model.attention_out_bias": program(True),
  "model.mlp_bias": program(True),
  "model.qk_norm": program(True),
  "model.qk_norm_over": [program(over, {"model.qk_norm": True}) for over in ("all", "each_head", "rotated")],
  "model.layer_scale": program(True),
  "model.kv_shared_layers": program(1),
  "model.double_wide_mlp": program(True, {"model.kv_shared_layers": 1}),
  "model.per_layer_size": program(4),
  "model.per_layer_vocab": program(8, {"model.per_layer_size": 4}),
  "model.altup.num_inputs": program(2),
  "model.altup.coef_clip": program(0.1, {"model.altup.num_inputs": 2}),
  "model.laurel_rank": program(4),
  "model.mtp_layers": program(1),
  "model.query_temperature.scale": program(0.5),
  "model.query_temperature.floor": program(16, {"model.query_temperature.scale": 0.5}),
  "model.activation_sparsity": program((0.5, 0.0)),
  "model.value_norm": program(True),
  "model.global_attention.head_dim": program(16, {"model.attention_scale": 0.5}),
  "model.global_attention.num_kv_heads": program(1, GLOBAL),
  "model.global_attention.values_are_keys": program(True, GLOBAL),
  "model.global_attention.rope_fraction": program(0.5, GLOBAL),
  "model.attention_scale": program(0.5),
  "model.attention_logit_cap": program(20.0),
  "model.final_logit_cap": program(20.0),
  "model.window": program(4, LOCAL),
  "model.attention_chunk": program(4, CHUNKS),
  "model.nope_temperature.scale": program(0.5, CHUNKS),
  "model.nope_temperature.floor": program(4, CHUNKS | {"model.nope_temperature.scale": 0.5}),
  "model.layer_pattern": [program(("local", "global"), {"model.window": 8}), program(("global", "nope")),
                          program(("delta", "global"))],
  "model.attention_gate": program(True),
  "model.attention_sinks": program(True),
  "model.delta.num_key_heads": program(1, DELTA),
  "model.delta.num_value_heads": program(6, DELTA),
  "model.delta.key_head_dim": program(8, DELTA),
  "model.delta.value_head_dim": program(8, DELTA),
  "model.delta.conv_width": program(3, DELTA),
  "model.delta.chunk": program(8, DELTA),
  "model.mamba.num_heads": program(8, MAMBA),
  "model.mamba.head_dim": program(8, MAMBA),
  "model.mamba.num_groups": program(2, MAMBA),
  "model.mamba.state_dim": program(8, MAMBA),
  "model.mamba.conv_width": program(3, MAMBA),
  "model.mamba.conv_bias": program(False, MAMBA),
  "model.mamba.min_step": program(0.5, MAMBA),
  "model.mamba.chunk": program(8, MAMBA),
  "model.latent.kv_rank": program(8),
  "model.latent.q_rank": program(4, LATENT),
  "model.latent.nope_dim": program(8, LATENT),
  "model.latent.rope_dim": program(8, LATENT),
  "model.latent.value_dim": program(8, LATENT),
  "model.latent.index_topk": program(4, INDEXED),
  "model.latent.index_heads": program(2, INDEXED),
  "model.latent.index_head_dim": program(16, INDEXED),
  "model.latent.index_rope_interleaved": program(True, INDEXED),
  "model.latent.index_shared_layers": program((1,), INDEXED),
  "model.moe.num_experts": program(4),
  "model.moe.experts_per_token": program(1, MOE),
  "model.moe.expert_size": program(8, MOE),
  "model.moe.shared_size": program(8, MOE),
  "model.moe.shared_gate": program(True, MOE | {"model.moe.shared_size": 8}),
  "model.moe.beside_mlp": program(True, MOE | {"model.norm_position": "sandwich"}),
  "model.moe.router_norm": program(True, MOE),
  "model.moe.expert_scale": program(True, MOE),
  "model.moe.router_bias": program(True, MOE),
  "model.moe.softmax": program("after_topk", MOE | {"model.moe.normalize_weights": False}),
  "model.moe.normalize_weights": program(False, MOE),
  "model.moe.scores": program("sigmoid", MOE | {"model.moe.normalize_weights": False}),
  "model.moe.weight_scale": program(2.0, MOE),
  "model.moe.weights_on_input": program(True, MOE),
  "model.moe.choice_bias": program(True, MOE),
  "model.moe.choice_bias_rate": update(0.1, BIAS),
  "model.moe.groups": program(2, MOE | {"model.moe.experts_per_token": 1}),
  "model.moe.groups_used": program(1, GROUPS),
  "model.moe.dense_layers": program(1, MOE),
  "model.moe.layer_step": program(2, MOE),
  "model.moe.balance_loss": program(0.1, MOE),
  "model.moe.z_loss": program(0.1, MOE),
  "model.vision.tower": program("clip", base=images),
  "model.vision.image_size": program(6, base=images),
  "model.vision.patch_size": program(1, base=images),
  "model.vision.num_layers": program(2, base=images),
  "model.vision.hidden_size": program(16, base=images),
  "model.vision.intermediate_size": program(16, base=images),
  "model.vision.num_heads": program(1, base=images),
  "model.vision.activation": program("relu", base=images),
  "model.vision.norm_eps": program(1e-3, base=images),
  "model.vision.mean": program((0.1, 0.2, 0.3), base=images),
  "model.vision.std": program((0.1, 0.2, 0.3), base=images),
  "model.vision.feature_layer": program(-2, {"model.vision.num_layers": 2}, images),
  "model.vision.final_norm": program(False, base=images),
  "model.vision.projector": program("mlp", base=images),
  "model.vision.projector_activation": program("relu", {"model.vision.projector": "mlp"}, images),
  "model.vision.projector_bias": program(False, base=images),
  "model.vision.tokens_per_image": program(1, POOL, images),
  "model.vision.feature_scale": program(2.0, base=images),
  "model.vision.attention": program("causal", base=images),
  "model.vision.image_token": data(259, base=images),
  "model.vision.window": program(2, base=native),
  "model.vision.full_layers": program((), base=native),
  "model.vision.min_pixels": data(64, base=native),
  "model.vision.max_pixels": data(16, {"model.vision.min_pixels": 16}, native),
  "model.vision.longest_side": data(12, POOL | {"model.vision.projector": "shuffle"}, images),
  "model.vision.split": data(False, base=squares),
  "model.vision.position_grid": program(2, base=learned),
  "model.vision.deepstack_layers": program((), base=learned),
  "model.vision.clipped": program(True, base=pooled),
  "model.vision.standardized": program(True, base=pooled),
  "model.vision.video.token": data(260, base=videos),
  "model.vision.video.tokens_per_second": data(7.0, base=videos),
  "model.vision.video.fps": data(1.0, base=videos),
  "model.vision.video.num_frames": data(4, base=videos),
  "model.vision.video.min_frames": data(6, {"model.vision.video.fps": 0.5}, videos),
  "model.vision.video.max_frames": data(2, {"model.vision.video.fps": 4.0, "model.vision.video.min_frames": 2}, videos),
  "model.vision.video.min_pixels": data(32, base=videos),
  "model.vision.video.max_pixels": data(16, {"model.vision.video.min_pixels": 16}, videos),
  "model.lora.rank": program(4, LORA),
  "model.lora.alpha": program(4.0, LORA),
  "model.lora.targets": program(("attn/q/kernel",), LORA),
  "model.lora.rslora": program(True, LORA),
  "model.lora.dora": program(True, LORA),
  "model.lora.modules_to_save": optimizing(("^embed/",), LORA),
  "model.lora.trainable_token_indices": optimizing((5,), LORA),
  "model.lora.dropout": program(0.5, LORA),
  "model.lora.peft": run(first_parameters, lambda f: f.peft, LORA),
  "model.neftune_alpha": program(5.0),
  "model.dropout": program(0.5),
  "model.init_std": program(0.1, see=fresh),
  "model.mup_base_size": schedule(8),
  "model.scan_layers": program(False),
  "model.attention": program("splash", {"seq_len": 128}),
  "model.attention_block": program(16),
  "model.vocab_chunk": program(64),
}

OPTIMIZER = {
  "optimizer.name": optimizing("lion"),
  "optimizer.learning_rate": optimizing(1e-3),
  "optimizer.b1": optimizing(0.5),
  "optimizer.b2": optimizing(0.5),
  "optimizer.eps": optimizing(1e-3),
  "optimizer.weight_decay": optimizing(0.5),
  "optimizer.wd_mults": optimizing(()),
  "optimizer.lr_mults": optimizing((("^embed/", 0.5),)),
  "optimizer.freeze": optimizing(("^embed/",)),
  "optimizer.group_warmup": optimizing((("norm", 5),)),
  "optimizer.clip_norm": update(0.5),
  "optimizer.momentum": optimizing(0.5, {"optimizer.name": "sgd"}),
  "optimizer.nesterov": optimizing(False, {"optimizer.name": "sgd"}),
  "optimizer.muon_steps": optimizing(3, {"optimizer.name": "muon"}),
  "optimizer.muon_exclude": optimizing(("attn/q",), {"optimizer.name": "muon"}),
  "optimizer.decay_exponent": optimizing(0.5, {"optimizer.name": "adafactor"}),
  "optimizer.min_dim_size_to_factor": optimizing(8, {"optimizer.name": "adafactor"}),
  "optimizer.ema_decay": update(0.9),
  "optimizer.max_nonfinite_steps": run(tolerated_steps, 3),
  "schedule.name": schedule("linear"),
  **_durations("schedule.warmup", learning_rates, epochs=EPOCHS),
  "schedule.floor": schedule(0.5),
  **_durations("schedule.decay", learning_rates, {"schedule.name": "wsd"}, epochs=EPOCHS),
  "schedule.decay_shape": schedule("sqrt", {"schedule.name": "wsd"}),
  **_durations("schedule.cycle", cycles, {"schedule.name": "sgdr"}, epochs=EPOCHS),
  "schedule.t_mult": schedule(1.0, {"schedule.name": "sgdr", "schedule.cycle_steps": 100}),
  "schedule.timescale": schedule(100, {"schedule.name": "rsqrt"}),
  "mesh.slice": placing(2),
  "mesh.data": placing(2, {"mesh.data": 1, "mesh.fsdp": -1}),
  "mesh.fsdp": placing(2),
  "mesh.expert": placing(2),
  "mesh.context": placing(2),
  "mesh.tensor": placing(2),
  "sharding_rules": placing((("^embed/embedding$", (None, None)),), {"mesh.tensor": 2}),
  "activation_rules": placing((("stream", None),), {"mesh.tensor": 2}),
  "precision.params": program("bfloat16"),
  "precision.stochastic_rounding": optimizing(True, {"precision.params": "bfloat16"}),
  "precision.frozen": program("bfloat16", LORA),
  "precision.compute": program("bfloat16"),
  "precision.moments": optimizing("bfloat16"),
  "precision.second_moments": optimizing("bfloat16"),
  "precision.offload_optimizer": update(True),
  "precision.matmul": program("int8"),
  "precision.matmul_gradients": update("all", {"precision.matmul": "int8"}),
  "precision.matmul_skip": program(("attn/q",), {"precision.matmul": "int8"}),
  "remat": update("full"),
}

DATA = {
  "tokenizer.type": data("bpe"),
  "tokenizer.path": data(TOKENIZER, {"tokenizer.type": "hf", "tokenizer.path": lambda f: f.hf}),
  "tokenizer.new_tokens": data(("th",), {"tokenizer.type": "hf", "tokenizer.path": lambda f: f.hf}),
  "tokenizer.new_special_tokens": data(("[user]",), {
    "tokenizer.type": "hf", "tokenizer.path": lambda f: f.hf, "chat.template": lambda f: f.template}, turns),
  "tokenizer.vocab_size": data(270, {"tokenizer.type": "bpe", "tokenizer.vocab_size": 280}),
  "tokenizer.train_megabytes": data(0.001, {
    "tokenizer.type": "bpe", "tokenizer.vocab_size": 261, "input.sources.main": lambda f: f.two_halves}),
  "tokenizer.split_digits": data(True, {
    "tokenizer.type": "bpe", "tokenizer.vocab_size": 400,
    "input.sources.main": source(type="python_stdlib", max_documents=3)}),
  "tokenizer.add_bos": data(False),
  "tokenizer.add_eos": data(False),
  "chat.template": data(lambda f: f.template, NAMELESS, turns),
  "chat.date": data("2024-01-01", {"chat.template": lambda f: f.template}, turns),
  "chat.train_on": data("last_assistant", NAMELESS, turns),
  "chat.roles": data(("user",), NAMELESS, turns),
  "chat.on_rewritten_history": data("last", {"chat.template": lambda f: f.template}, thoughts),
  "chat.fields": data((("completion", "reply"),), base=answers),
  "chat.image_marker": data("?", {"chat.images_at": "text"}, images),
  "chat.video_marker": data("or", base=videos),
  "chat.image_before": data("A", {"chat.images_at": "text"}, images),
  "chat.image_after": data("B", {"chat.images_at": "text"}, images),
  "chat.images_at": data("text", base=images),
  "chat.prefix_end": data("|", base=images),
  "input.packing": data("none"),
  "input.over_long": data("drop", {"input.max_over_long": 1.0}),
  "input.max_over_long": data(1.0, {"input.over_long": "drop", "seq_len": 64}, see=refusal),
  "input.on_bad_row": data("drop", {"input.sources.bad": lambda f: f.bad_row, "input.max_bad_rows": 0.5}, see=refusal),
  "input.max_bad_rows": data(0.5, {"input.sources.bad": lambda f: f.bad_row, "input.on_bad_row": "drop"}, see=refusal),
  "input.mixture_by": data("tokens", TWO, answers),
  "input.stop": data("first"),
  "input.weight_stages": data(((1, {"main": 1.0, "other": 9.0}),), TWO, answers),
  "input.batch_size_stages": data(((2, 16),)),
  "input.cache_dir": run(own_cache, lambda f: str(f.folder / "elsewhere"), {"input.cache_dir": None}),
  "input.prefetch": run(prepared, 5),
  "input.workers": run(preparing_threads, 3),
  "input.images.resize": data("pad", base=images),
  "input.images.interpolation": data("nearest", base=images),
  "input.images.augment.crop": data(0.5, base=images),
  "input.images.augment.flip": data(1.0, base=images),
  "input.images.augment.color": data(0.5, base=images),
  "input.images.max_pixels": data(10, base=images, see=refusal),
  "input.images.on_error": data("drop", {"input.sources.bad": lambda f: f.bad_image}, images, refusal),
  "input.images.workers": run(decoding_processes, 2, base=images),
  "batch_size": program(16),
  "grad_accum_steps": update(2, {"batch_size": 16}),
  "seq_len": data(48),
}

# Strings of which some completions of an untrained model have one.
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
# What the user says, with a template that shows tools.
ASKED = {"tokenizer.type": "hf", "tokenizer.path": TOKENIZER, "chat.template": "qwen3",
         "rollout.prompt_key": "other", "seq_len": 1024}
AHEAD = {"strategy.correction": "token_truncate", "rollout.max_staleness": 1}
ROLLOUT = {
  "rollout.num_prompts": run(sampled, 3, base=prompts),
  "rollout.prompt_key": data("other", base=prompts),
  "rollout.group_size": run(sampled, 3, base=prompts),
  "rollout.updates": run(shared_out, 1, base=prompts),
  "rollout.epochs": run(shared_out, 2, base=prompts),
  "rollout.max_new_tokens": run(sampled, 4, base=prompts),
  "rollout.stop": run(sampled, LETTERS, base=prompts),
  "rollout.keep_stop": run(sampled, True, {
    "rollout.stop": LETTERS, "rollout.rewards.score": dict(type="regex", pattern="[a-z]")}, prompts),
  "rollout.temperature": run(sampled, 0.3, base=prompts),
  **{f"rollout.{key}": run(sampled, value, {"strategy": strategy("dpo")}, prompts)
     for key, value in dict(top_k=3, top_p=0.5, min_p=0.99).items()},
  "rollout.batch_size": run(decoded_rows, 16, base=prompts),
  "input.share_prompts": run(sampled, "never", base=prompts),
  "rollout.replay_experts": run(sampled, True, MOE, prompts),
  "rollout.engine": data("http://127.0.0.1:9", base=prompts, see=engine),
  "rollout.engine_handover": data("sglang", {"rollout.engine": "http://127.0.0.1:9"}, prompts, engine),
  "rollout.engine_timeout_seconds": data(5.0, {"rollout.engine": "http://127.0.0.1:9"}, prompts, engine),
  "rollout.max_staleness": run(sampled_ahead, 2, {"strategy.correction": "token_truncate"}, prompts),
  "rollout.concurrent": run(sampled_ahead, True, AHEAD, prompts),
  "rollout.schedule": run(sampled_ahead, lambda f: str(f.jsonl("schedule", [
    dict(rollout=0, policy=0, update=1), dict(rollout=1, policy=1, update=3)])), AHEAD, prompts),
  "rollout.in_flight": run(sampled_ahead, True, AHEAD | {"rollout.concurrent": True}, prompts),
  "rollout.devices": run(sampling_devices, 4, base=prompts),
  "rollout.tensor": run(sampling_devices, 2, {"rollout.devices": 4}, prompts),
  "rollout.carry_over": run(goes_on, True, AHEAD | {"rollout.max_staleness": 2}, prompts),
  "rollout.replay_groups": run(trained_again, 2, {"strategy.correction": "token_truncate"}, prompts),
  "rollout.replay_window": run(trained_again, 3, {"strategy.correction": "token_truncate", "rollout.replay_groups": 1},
                               prompts),
  "rollout.resample": run(sampled, 2, {"rollout.rewards.score.type": f"{TOYS}.same"}, prompts),
  "rollout.curriculum_target": data(0.5, base=prompts, see=chosen),
  "rollout.curriculum_floor": data(0.9, {"rollout.curriculum_target": 0.5}, prompts, chosen),
  "rollout.curriculum_passing": data(0.5, {"rollout.curriculum_target": 0.5}, prompts, chosen),
  "rollout.mask_truncated": [run(sampled, True, base=prompts),
                             run(sampled, True, {"strategy": strategy("dpo"), "seq_len": 96}, prompts)],
  "rollout.max_without_lesson": run(rollouts_without_signal, 3, base=prompts),
  "rollout.rewards": run(sampled, dict(score=dict(type="length", max_length=4)), base=prompts),
  "rollout.reward_workers": run(scoring_processes, 2, base=prompts),
  "rollout.reward_timeout_seconds": run(scoring_seconds, 5.0, base=prompts),
  "rollout.environment": run(sampled, f"{TOYS}.Echo", base=prompts),
  "rollout.environment_timeout_seconds": run(turns_taken, 0.01, {"rollout.environment": f"{TOYS}.Slow"}, prompts),
  "rollout.environment_timeout_reward": run(turns_taken, -2.0, {
    "rollout.environment": f"{TOYS}.SlowToAnswer", "rollout.environment_timeout_seconds": 1.0}, prompts),
  "rollout.environment_workers": run(calls_at_a_time, 2, {"rollout.environment": f"{TOYS}.Echo"}, prompts),
  "rollout.turn_share": run(runs_of_the_sampler, 0.5, {"rollout.environment": f"{TOYS}.Echo"}, prompts),
  "rollout.kept_texts": run(texts_kept, 5, {"rollout.environment": f"{TOYS}.Echo"}, prompts),
  "rollout.share_beginnings": run(beginnings_shared, True, base=prompts),
  "rollout.prefill_chunk": run(prompts_in_chunks, 8, base=prompts),
  "rollout.tools": data((f"{TOYS}.shout",), ASKED, prompts),
  "rollout.tool_format": run(calls_found, "bare", ASKED | {"rollout.tools": (f"{TOYS}.shout",)}, prompts),
  "rollout.max_turns": run(turns_taken, 1, {"rollout.environment": f"{TOYS}.Echo"}, prompts),
}

RUN = {
  "deterministic": program(False, see=promised),
  "seed": [data(1), run(first_parameters, 1), update(1, {"model.dropout": 0.5})],
  "strategy.name": program("sft"),
  "input.sources": data(dict(main=source(type="python_stdlib", max_documents=3))),
  **durations("total", length),
  # A percentage of the run says nothing about its length.
  "total_percent": run(no_length, 14.0, {"total_steps": 1000}),
  "evals": schedule(dict(val=evaluator(type="loss", eval_steps=7)), see=evaluating_steps),
  "callbacks": run(callbacks, dict(mine=dict(type="trainer.callbacks.Callback"))),
  "report": run(callbacks, False),
  "loggers": run(writers, dict(mine=dict(type="tests.trainer.telemetry.test_loggers.Memory"))),
  "health_silent": run(health_told, ("ratio_one",)),
  **durations("log", logging_steps),
  **durations("ckpt", saving_steps),
  **durations("keep", saving_steps),
  "keep_last": run(kept, 1, {"evals.val": evaluator(type="loss")}),
  "keep_best": run(kept, "eval/val/loss", {"evals.val": evaluator(type="loss")}),
  "keep_best_mode": run(kept, "max", JUDGED | {"keep_last": 1}),
  "spikes.action": run(spikes_watched, "warn"),
  **{f"spikes.{key}": run(spikes_watched, value, {"spikes.action": "rollback"}) for key, value in dict(
    metric="grad_norm", window=50, deviations=7.0, in_a_row=2, margin=10, skip=10, max_rollbacks=3).items()},
  "profile.start_step": run(profiled_steps, 3, {"profile.num_steps": 2}),
  "profile.num_steps": run(profiled_steps, 3),
  "processes.join_seconds": run(joining_seconds, 17.0),
  "processes.heartbeat_seconds": run(limits, 17.0),
  "processes.hang_seconds": run(limits, 17.0),
  "processes.phase_seconds": run(limits, 17.0),
  "init_from.path": run(first_parameters, lambda f: f.run),
  "init_from.remap": run(first_parameters, ((".*attn/k/.*", ""), ("attn/q/", "attn/k/")), {
    "init_from.path": lambda f: f.run, "init_from.ignore": ("attn/q/",)}),
  "init_from.ignore": run(first_parameters, ("^embed/",), {"init_from.path": lambda f: f.run}),
  "init_from.hf": [run(first_parameters, lambda f: f.hf, FOLDER),
                   run(first_parameters, lambda f: f.other_hf, FOLDER | {"model.hf": lambda f: f.hf})],
  "init_from.fresh": run(first_parameters, True, FOLDER | {"model.hf": lambda f: f.hf}),
  "init_from.made_by": run(trained_first, "configs.quickstart", {"init_from.path": lambda f: str(f.workdir())}),
  "resume": run(first_parameters, lambda f: f.run, {"seed": 7}),
  "export.path": run(exported, "out"),
  "export.dtype": run(exported, "float16", {"export.path": "out"}),
  "export.mtp": run(exported_if_can_be, False, {"export.path": "out", "model.mtp_layers": 1}),
  "allow_config_changes": run(continued, True),
  "plan.topology": run(planned, "v5e:2x2"),
  "plan.slices": run(planned, 2, {"plan.topology": "v5e:2x2", "mesh.slice": 2}),
  "plan.compile": run(plan_text, "never", {"plan.topology": "h100:2x1"}),
  **{f"plan.{key}": run(planned, value, {"plan.topology": "v5e:2x2", "mesh.fsdp": 2}) for key, value in dict(
    memory_gb=3.0, tflops=5.0, memory_bandwidth=7.0, link_bandwidth=0.9).items()},
  "plan.network_bandwidth": run(planned, 0.1, {"plan.topology": "h100:2x2"}),
  "plan.images_per_row": run(planned, 3, {"plan.topology": "v5e:2x2"}, images),
}

ROWS = MODEL | OPTIMIZER | DATA | ROLLOUT | RUN
