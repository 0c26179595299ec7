"""The step as shapes: the same for a run with data and devices as for a plan without either."""

import json
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from input_pipeline import loader
from input_pipeline.batches import Kept
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.models.common import make
from trainer import program as program_lib
from trainer import startup, tree, update
from trainer import state as state_lib
from trainer.checkpoints import init_from
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import checks as config_checks
from trainer.config import reward, source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.rollouts import experience
from trainer.strategies import chunked_loss, learns, logprobs
from trainer.strategies.grpo import GRPO

pytestmark = pytest.mark.devices(8)


def resolved(corpus, **changed):
  config, _ = program_lib.resolve(tiny.config(corpus, **changed))
  program_lib.settle(config, "cpu")
  return config


def made(config, mesh):
  model = program_lib.make_model(config, BytesTokenizer.vocab_size)
  return program_lib.make_program(config, model, program_lib.planned_optimizer(config, model), mesh, ["main"])


def abstract_mesh(**sizes):
  sizes = {axis: sizes.get(axis, 1) for axis in mesh_lib.AXES}
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def kinds(batch):
  """{name: (dtype, rank, places in a row)}; how many segments a row has, the data decide."""
  return {name: (np.dtype(values.dtype), len(values.shape), None if name in ("segment_roles", "advantages")
                 else tuple(values.shape[1:])) for name, values in batch.items()}


@pytest.mark.parametrize(("name", "row"), [
    ("seq", dict(text="one two three")),
    ("sft", dict(prompt="one", completion=" two")),
    ("dpo", dict(prompt="one", chosen=" two", rejected=" three")),
    ("kto", dict(prompt="one", completion=" two", label=True))])
def test_the_batch_made_without_data_is_that_of_the_data(name, row, tmp_path):
  (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
  config = resolved(tmp_path, strategy=strategy(name))
  config.input.sources.main = source(type="jsonl", path=str(tmp_path / "rows.jsonl"))
  data = loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=tmp_path)
  model = program_lib.make_model(config, BytesTokenizer.vocab_size)
  real, planned = data.batch(0), program_lib.abstract_batch(config, model, config.batch_size)
  assert kinds(planned) == kinds(real)
  assert {leaf.shape[0] for leaf in planned.values()} == {config.batch_size}


def test_the_batch_of_rollouts_has_what_rollouts_give(tmp_path):
  config = resolved(tmp_path, strategy=strategy("grpo"),
                    rollout=dict(num_prompts=2, rewards=dict(right=reward(type="numeric"))))
  model = program_lib.make_model(config, BytesTokenizer.vocab_size)
  real = experience.make_batch(experience.collect([]), np.zeros(0, np.int64),
                               experience.RowFormat(config.seq_len, 0, 8), keys=GRPO.rollout_keys[:2])
  assert kinds(program_lib.abstract_batch(config, model, 8)) == kinds(real)


@pytest.mark.parametrize("changed", [
    dict(), dict(strategy=strategy("dpo")), dict(strategy=strategy("dpo", precompute=True)),
    dict(strategy=strategy("kto")), dict(strategy=strategy("grpo")), dict(grad_accum_steps=2)],
    ids=["seq", "dpo", "precomputed", "kto", "grpo", "accumulated"])
def test_the_step_traces_without_data(changed, tmp_path):
  config = resolved(tmp_path, **changed)
  program = made(config, mesh_lib.make_mesh(dict(fsdp=2, data=2, tensor=2)))
  batch = program_lib.abstract_batch(config, program.model, config.batch_size, precompute=program.precompute)
  with mesh_lib.activation_rules(program.mesh):
    state, metrics = jax.eval_shape(program.update_fn, program.abstract_state, batch)
  assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
      lambda a: (a.shape, a.dtype), program.abstract_state)
  assert "loss" in metrics
  assert ("reference" in program.abstract_state) == (program.reference is not None and not program.precompute)


def largest_array(config, rows):
  """Elements of the largest array in the compiled step, on one device."""
  program = made(config, mesh_lib.make_mesh({}, jax.devices()[:1]))
  batch = program_lib.abstract_batch(config, program.model, rows, precompute=program.precompute)
  text = program.update_fn.lower(program.abstract_state, batch).compile().as_text()
  return max(math.prod(int(n) for n in dims.split(",")) for dims in re.findall(r"[a-z]\w*\[([0-9,]+)\]", text))


def of_a_large_vocabulary(name, least, chunk, tmp_path, monkeypatch):
  """(elements of the largest array in a strategy's step, of all its logits); `least`: MIN_TOKENS, which decides whether
  logits are made of some tokens at a time or of some entries."""
  monkeypatch.setattr(chunked_loss, "MIN_TOKENS", least)
  monkeypatch.setattr(logprobs, "MIN_TOKENS", least)
  config = resolved(tmp_path, strategy=strategy(name), batch_size=4, seq_len=64)
  config.model.update(vocab_size=2048, vocab_chunk=chunk)
  return largest_array(config, 4), 4 * 64 * 2048


# The losses of texts are made in one module, those of answers in the other: each of them in both ways.
@pytest.mark.parametrize("name, least", [
    ("seq", 1), ("sft", 10**9), ("dpo", 1), ("grpo", 10**9), *(
        pytest.param(name, least, marks=pytest.mark.slow) for name, least in (
            ("seq", 10**9), ("sft", 1), ("dpo", 10**9), ("grpo", 1), ("kto", 1), ("kto", 10**9)))])
def test_no_strategy_ever_has_the_logits_of_the_whole_vocabulary(name, least, tmp_path, monkeypatch):
  largest, logits = of_a_large_vocabulary(name, least, 128, tmp_path, monkeypatch)
  assert largest <= logits / 8


@pytest.mark.parametrize("name", ["seq", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_same_search_finds_them_where_they_exist(name, tmp_path, monkeypatch):
  largest, logits = of_a_large_vocabulary(name, 1, 2048, tmp_path, monkeypatch)
  assert largest >= logits


def test_a_mesh_that_is_not_here_places_as_one_that_is(tmp_path):
  config = resolved(tmp_path, optimizer=dict(ema_decay=0.9))
  here = made(config, mesh_lib.make_mesh(dict(fsdp=4, tensor=2)))
  there = made(config, abstract_mesh(fsdp=4, tensor=2))
  assert jax.tree.map(lambda s: s.spec, here.state_sharding) == jax.tree.map(lambda s: s.spec, there.state_sharding)
  assert jax.tree.map(lambda a: a.shape, here.abstract_state) == jax.tree.map(lambda a: a.shape, there.abstract_state)


def test_who_trains_on_cpu_learns_which_dtype_is_fast_there(tmp_path, monkeypatch):
  for unit, compute, expected in (
      (False, "auto", ["precision.compute = float32: auto, on cpu"]),
      (True, "auto", ["precision.compute = float32: auto, on cpu; this processor multiplies matrices of "
                      "bfloat16 several times as fast: --config.precision.compute=bfloat16"]),
      (False, "bfloat16", ["precision.compute = bfloat16: this processor has no instructions for it (AMX); float32 is "
                           "faster"]),
      (True, "bfloat16", []), (False, "float32", [])):
    monkeypatch.setattr(startup, "has_matrix_unit", lambda unit=unit: unit)
    config, _ = program_lib.resolve(tiny.config(tmp_path, precision=dict(compute=compute)))
    assert program_lib.settle(config, "cpu") == expected


def test_what_is_left_open_follows_the_platform(tmp_path):
  config, _ = program_lib.resolve(tiny.config(tmp_path))
  assert program_lib.settle(config, "tpu") == ["precision.compute = bfloat16: auto, on tpu"]
  assert (config.precision.compute, config.precision.frozen) == ("bfloat16", "float32")
  assert config.model.vocab_chunk == 8192
  config, _ = program_lib.resolve(tiny.config(tmp_path))
  config.model.lora.rank = 4
  program_lib.settle(config, "cpu")
  assert (config.precision.compute, config.precision.frozen) == ("float32", "float32")
  assert config.model.vocab_chunk == 2048
  config.model.vocab_chunk = 100
  program_lib.settle(config, "tpu")
  assert config.model.vocab_chunk == 100


def test_options_that_cannot_be_are_refused_before_any_device(tmp_path):
  config = resolved(tmp_path, strategy=strategy("dpo", beta=0.0))
  with pytest.raises(ConfigError, match="strategy.beta"):
    made(config, abstract_mesh())
  for changed, says in (
      (dict(activation_rules=(("heights", None),)), "activation_rules: unknown name"),
      (dict(batch_size=3, grad_accum_steps=2), "batch_size 3 is not divisible"),
      (dict(rollout=dict(num_prompts=2)), "strategy 'seq' does not learn from completions"),
      (dict(spikes=dict(action="warn", window=9)), "spikes.window is 9"),
      (dict(health_silent=("nothing",)), "health_silent names 'nothing'")):
    with pytest.raises(ConfigError, match=says):
      program_lib.resolve(tiny.config(tmp_path, **changed))
  learned = dict(positions="learned", max_positions=31)
  with pytest.raises(ConfigError, match="seq_len is 32, but model.max_positions is 31"):
    program_lib.resolve(tiny.config(tmp_path, seq_len=32, model=learned))
  program_lib.resolve(tiny.config(tmp_path, seq_len=31, model=learned))


def test_keys_that_the_step_reads_count_as_read(tmp_path):
  config = resolved(tmp_path)
  view = config_checks.View(config)
  model = program_lib.make_model(view, BytesTokenizer.vocab_size)
  program_lib.make_program(view, model, program_lib.planned_optimizer(config, model), abstract_mesh(), ["main"])
  assert {"remat", "precision.compute", "optimizer.clip_norm", "sharding_rules", "seed"} <= view._read


def test_prompts_are_shared_where_that_can_be():
  one, split = mesh_lib.make_mesh({}, jax.devices()[:1]), mesh_lib.make_mesh(dict(data=4, context=2))
  tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape={})
  plain = make(num_layers=1)

  def found(wanted, model, *meshes, name="grpo", sampled=True, **strategy):
    config = SimpleNamespace(rollout=SimpleNamespace(num_prompts=int(sampled)), strategy=SimpleNamespace(
        name=name, **strategy), input=SimpleNamespace(share_prompts=wanted))
    return [program_lib.shares_prompts(config, model, mesh) for mesh in meshes]

  assert found("auto", plain, one, split, tpu, abstract_mesh(data=8)) == [True, False, False, True]
  assert found("always", plain, one, split, tpu) == [True] * 3
  assert found("never", plain, one) == [False]
  # Of data from files: the same on every mesh; only where there is something to share.
  assert found("auto", plain, one, split, tpu, name="dpo", sampled=False) == [True, True, False]
  assert found("auto", plain, one, name="kto", sampled=False, loss="kto") == [True]
  for name in ("seq", "sft", "grpo"):
    assert found("always", plain, one, name=name, sampled=False) == [False]
  assert found("always", plain, one, name="kto", sampled=False, loss="apo_zero_unpaired") == [False]
  apart = [make(num_layers=1, moe=dict(num_experts=2, experts_per_token=1, expert_size=8)),
           make(num_layers=1, rope_scaling=dict(type="dynamic", factor=2.0, original_positions=8)), object()]
  assert [found("auto", model, one) for model in apart] == [[False]] * 3
  with pytest.raises(ConfigError, match="object cannot do: it has no attribute no_prefix_sharing"):
    found("always", apart[2], one)


def test_the_whole_state_lives_where_its_parameters_do(tmp_path):
  """Moments and averages of a parameter are split as it is; counters are on every device."""
  program = made(resolved(tmp_path, optimizer=dict(ema_decay=0.9)), mesh_lib.make_mesh(dict(fsdp=4, tensor=2)))
  specs = {path: tuple(sharding.spec) for path, sharding in tree.flatten(program.state_sharding).items()}
  found = {path: spec for path, spec in specs.items() if path.endswith("attn/o/kernel")}
  assert found == {f"{part}/blocks/attn/o/kernel": (None, "tensor", "fsdp")
                   for part in ("params", "ema", "opt/adam/mu", "opt/adam/nu")}
  assert {specs[name] for name in ("step", "nonfinite", "opt/adam/count")} == {()}
  assert {path: leaf.sharding for path, leaf in tree.flatten(program.abstract_state).items()} == tree.flatten(
      program.state_sharding)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_averages_are_kept_where_they_have_a_decay(tmp_path, decay):
  program = made(resolved(tmp_path, optimizer=dict(ema_decay=decay)), mesh_lib.make_mesh({}, jax.devices()[:1]))
  assert ("ema" in program.abstract_state) == (decay > 0)


def test_what_an_update_is_told(tmp_path):
  config = resolved(tmp_path, seed=5, batch_size=16, grad_accum_steps=2, optimizer=dict(clip_norm=0.25, ema_decay=0.75),
                    precision=dict(params="bfloat16", stochastic_rounding=True, offload_optimizer=True),
                    strategy=strategy("dpo", reference_ema=0.5, reference_ema_steps=7))
  config.model.moe.choice_bias_rate = 0.125
  program = made(config, mesh_lib.make_mesh({}, jax.devices()[:1]))
  assert program.options == update.Options(5, 8, ["main"], 0.25, 0.75, (0.5, 7), True, 0.125)
  assert program.optimizer.moments.seed == 5 and program.optimizer.stochastic_rounding


def test_what_other_models_say_is_split_as_the_rows_are():
  mesh = mesh_lib.make_mesh(dict(data=4, tensor=2))
  rows = mesh_lib.batch_sharding(mesh)
  program = SimpleNamespace(kept=(Kept("said"), Kept("ids", (3,), "int32")), mesh=mesh, batch_sharding=rows)
  given = {"loss_weights": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=rows)}
  seen = program_lib.Program.seen(program, given)
  assert {name: (part.shape, part.dtype, part.sharding) for name, part in seen.items()} == {
      "loss_weights": ((8, 16), np.float32, rows), "said": ((8, 16), np.float32, rows),
      "ids": ((8, 16, 3), np.int32, rows)}
  assert list(given) == ["loss_weights"]


def test_what_a_model_is_told(tmp_path, monkeypatch):
  config = resolved(tmp_path, remat="full", optimizer=dict(freeze=("embed/",)), precision=dict(
      params="bfloat16", compute="float32", matmul="int8", matmul_gradients="all", matmul_skip=("attn/k/",)))
  config.precision.frozen = "int8"  # of a run both would be refused; here each is to be told apart
  monkeypatch.setattr(program_lib.api, "make_model", lambda section, **options: (section, options))
  rules = program_lib.matmul.make_matmul_rules("int8", "all", ("attn/k/",))
  assert program_lib.make_model(config, 300) == (config.model, dict(
      vocab_size=300, params_dtype="bfloat16", compute_dtype="float32", remat="full", frozen="int8", freeze=("embed/",),
      matmul_rules=rules))
  config.precision.matmul = "none"
  assert program_lib.make_model(config, 300)[1]["matmul_rules"] is None


@pytest.mark.parametrize("changed, looked", [
    (dict(), []), (dict(remat="offload"), ["remat = offload"]),
    (dict(precision=dict(offload_optimizer=True)), ["precision.offload_optimizer = True"])])
def test_whether_there_is_memory_of_the_host_is_looked_at_where_it_is_used(tmp_path, monkeypatch, changed, looked):
  said, mesh = [], mesh_lib.make_mesh({}, jax.devices()[:1])
  monkeypatch.setattr(program_lib.offload, "check", lambda mesh, what: said.append((mesh, what)))
  made(resolved(tmp_path, **changed), mesh)
  assert said == [(mesh, what) for what in looked]


def test_a_run_begins_with_everything_where_the_step_has_it(tmp_path):
  """Parameters, moments, averages and counters, none of which is whole where it is to be split."""
  config = resolved(tmp_path, optimizer=dict(ema_decay=0.9))
  program = made(config, mesh_lib.make_mesh(dict(fsdp=4, tensor=2)))
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  start = state_lib.initialise(config, init_from.origin_of(config), program, checkpoints)
  checkpoints.close()
  found, wanted = tree.flatten(start.state), tree.flatten(program.abstract_state)
  assert found.keys() == wanted.keys() and "ema/embed/embedding" in found
  for path, leaf in found.items():
    assert leaf.sharding.is_equivalent_to(wanted[path].sharding, leaf.ndim), path


@pytest.mark.parametrize("platform, rank, frozen", [
    ("tpu", 4, "bfloat16"), ("gpu", 4, "bfloat16"), ("cpu", 4, "float32"), ("gpu", 0, "float32")])
def test_the_base_under_adapters_is_kept_in_bfloat16_on_accelerators(tmp_path, platform, rank, frozen):
  config, _ = program_lib.resolve(tiny.config(tmp_path))
  config.model.lora.rank = rank
  program_lib.settle(config, platform)
  assert config.precision.frozen == frozen


def test_indexers_stay_as_they_are(tmp_path):
  """Without a gradient weight decay alone would move them; freezing them a second time says no more."""
  latent = dict(kv_rank=8, q_rank=8, index_topk=4)
  config, notes = program_lib.resolve(tiny.config(tmp_path, model=dict(latent=latent)))
  assert [note for note in notes if "optimizer.freeze has" in note and "index_topk" in note]
  again, notes = program_lib.resolve(config)
  assert again.optimizer.freeze == config.optimizer.freeze and not any("index_topk" in note for note in notes)
  program_lib.settle(config, "cpu")
  trainable = made(config, abstract_mesh()).optimizer.trainable
  paths = set(tree.flatten(program_lib.make_model(config, 64).abstract_params()))
  assert {path for path in paths if "indexer" in path} == paths - trainable != set()
  with pytest.raises(ConfigError, match=r"mesh\.context is 2, .*indexers choose among all keys of a row"):
    made(config, abstract_mesh(context=2))


def test_rows_of_a_model_with_states_are_not_split(tmp_path):
  config = resolved(tmp_path)
  config.model.layer_pattern = ("delta", "global")
  with pytest.raises(ConfigError, match=r"mesh\.context is 2, .*delta layers.*--config\.mesh\.context=1"):
    made(config, abstract_mesh(context=2))


@pytest.mark.parametrize("updates, epochs, held", [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_batches_hold_older_log_probs_where_the_policy_will_have_moved(tmp_path, updates, epochs, held):
  config = resolved(tmp_path, strategy=strategy("grpo"))
  config.rollout.update(num_prompts=2, group_size=2, max_new_tokens=4, updates=updates, epochs=epochs)
  model = make()
  shapes = program_lib.abstract_batch(config, model, 4, precompute=False, share_prompts=False, sharding=None)
  assert ("old_logprobs" in shapes) == held and shapes["tokens"].shape == (4, config.seq_len)


def test_chunks_of_the_vocabulary_are_those_of_the_platform(tmp_path):
  for platform, chunk in (("cpu", program_lib.spec.VOCAB_CHUNK), ("tpu", program_lib.spec.VOCAB_CHUNK_ELSEWHERE)):
    config, _ = program_lib.resolve(tiny.config(tmp_path))
    config.model.vocab_chunk = None
    program_lib.settle(config, platform)
    assert config.model.vocab_chunk == chunk
  assert program_lib.spec.VOCAB_CHUNK != program_lib.spec.VOCAB_CHUNK_ELSEWHERE


@pytest.mark.parametrize("images, trained, asked", [
    (2, {"blocks/q"}, dict(images_per_row=2, tower_frozen=True)), (0, {"vision/q"}, {}),
    (2, {"blocks/q", "projector/up"}, dict(images_per_row=2, tower_frozen=False)),
    (2, {"vision/q"}, dict(images_per_row=2, tower_frozen=False))])
def test_operations_of_a_tower_count_backward_where_something_of_it_is_trained(images, trained, asked):
  of = SimpleNamespace(model=SimpleNamespace(flops_per_token=lambda seq_len, **more: (seq_len, more)),
                       optimizer=SimpleNamespace(trainable=trained))
  assert program_lib.Program.flops_per_token(of, 8, images) == (8, asked)
