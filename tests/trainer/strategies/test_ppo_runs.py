"""PPO end to end: what its batches hold is of policy and critic before the rollout's updates; restarts do not move it;
and what others take from such a run is the policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, lora
from tests import tiny
from tests.trainer.rollout_runs import STOP, assert_same_state, config, rows_of, table, write_prompts
from tests.trainer.strategies import pairs
from tests.trainer.strategies.test_grpo import probabilities
from trainer import program, train, tree
from trainer.callbacks import Callback
from trainer.checkpoints import init_from
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.export.command import export
from trainer.generate.command import load_run
from trainer.strategies import critic

COEF, ROOM = 0.3, 64


@pytest.fixture(scope="module")
def given(tmp_path_factory):
  """(prompts, the folder of a reward model of another size than the policy's)."""
  folder = tmp_path_factory.mktemp("given")
  tiny.hf_folder(folder / "critic", num_layers=1, hidden_size=32, vocab_size=258, head="score", num_labels=1)
  return write_prompts(folder), str(folder / "critic")


def ppo(given, **changed):
  """Two completions of each prompt; an advantage is what was given less what was expected."""
  prompts, folder = given
  options = dict(critic=folder, gae_lambda=1.0, kl_coef=COEF, value_coef=1.0) | changed.pop("strategy", {})
  rollout = changed.pop("rollout", {})
  c = config(prompts, **dict(total_steps=4) | changed, rollout=dict(group_size=2) | rollout)
  with c.unlocked():
    c.strategy = strategy("ppo", **options)
  return c


class Keep(Callback):
  """The parameters before the updates, and their batches."""

  before, batches = {}, {}

  def on_step_begin(self, run):
    Keep.before[run.step] = jax.device_get(run.state["params"])

  def on_step_end(self, run, step, metrics):
    Keep.batches[step - 1] = {key: np.asarray(part) for key, part in run.batch.items()}


@pytest.fixture(scope="module")
def straight(given, tmp_path_factory):
  """(run, workdir) of two rollouts in two updates each."""
  c, workdir = ppo(given), tmp_path_factory.mktemp("straight")
  c.callbacks = dict(keep=dict(type=f"{__name__}.Keep"))
  return train(c, workdir), workdir


@functools.cache
def values_fn(model):
  def values(params, ids):
    batch = {"tokens": ids, "segment_ids": jnp.ones_like(ids), "positions": jnp.arange(ROOM)[None]}
    return model.score(params, model.apply(params, batch).hidden)[..., 0]

  return jax.jit(values)


def alone(batch):
  """(places in the row, all tokens with the prompt, places of the sampled ones in these) of a batch's sequences."""
  for row, segment in np.argwhere(batch["segment_roles"] > 0):
    at = np.flatnonzero(batch["segment_ids"][row] == segment + 1)
    ids = batch["tokens"][row, at]
    if "prompt_ids" in batch and (number := batch["prompt_ids"][row, at[0]]):
      ids = np.concatenate([batch["tokens"][row, batch["segment_ids"][row] == number], ids])
    mine = batch["loss_weights"][row, at] > 0
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, :len(ids)] = ids
    yield (row, at[mine]), padded, np.flatnonzero(mine) + len(ids) - len(at)


def test_batches_hold_what_critic_and_policy_said_before_the_rollouts_updates(straight):
  """Of the second rollout, each sequence by itself: values of the critic after two updates; and with λ = γ = 1 the
  return of a token is the reward less the penalties from there on, log p - log p_ref each. Advantages are white over
  both of its updates."""
  run, workdir = straight
  before, real, given, advantages, errors = Keep.before[2], run.model.num_real_vocab, [], [], []
  policy = run.model.policy
  for step in (2, 3):
    batch = Keep.batches[step]
    for here, ids, sampled in alone(batch):
      values = np.asarray(values_fn(run.model.critic)(before["critic"], ids), np.float64)[0, sampled - 1]
      np.testing.assert_allclose(batch["old_values"][here], values, atol=2e-5)
      lp, ref = (np.log(probabilities(pairs.jitted_logits(policy)(
          {k: v for k, v in params.items() if k != "critic"}, ids)[..., :real]))[0, sampled - 1, ids[0, sampled]]
                 for params in (before, Keep.before[0]))
      left = np.cumsum((COEF * (lp - ref))[::-1])[::-1]
      given.append(batch["returns"][here] + left)
      assert np.ptp(given[-1]) < 2e-5 and np.abs(left).max() > 1e-4
      advantages.append(batch["token_advantages"][here])
      errors.append(batch["returns"][here] - values)
  rewards = sorted(line["reward"] for line in table(workdir, 3))
  np.testing.assert_allclose(sorted(part[0] for part in given), rewards, atol=2e-5)
  advantages, errors = np.concatenate(advantages), np.concatenate(errors)
  assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(1, abs=1e-5)
  np.testing.assert_allclose(advantages, (errors - errors.mean()) / errors.std(ddof=1), atol=2e-4)


def test_metrics_say_how_the_critic_does(straight):
  """The first step after a rollout has ratios of 1, to the bit, and values inside their bound."""
  rows = rows_of(straight[1])
  for step, row in rows.items():
    assert row["value_loss"] == pytest.approx(row["critic_loss"])  # value_coef is 1
    assert row["objective"] == pytest.approx(row["loss"] + row["critic_loss"])
    assert (row["policy/ratio_mean"], row["policy/approx_kl"]) == (1, 0) or step in (2, 4)
    assert row["value/clip_ratio"] == 0 or step in (2, 4)
    assert row["value/explained_variance"] < 1 and row["returns/std"] > 0 and row["rewards/low/mean"] == row["reward"]
    assert row["objective/rlhf_reward"] == pytest.approx(row["reward"] + row["objective/non_score_reward"])
  assert rows[2]["policy/approx_kl"] > 0 and rows[1]["kl"] == 0 < rows[3]["kl"]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopped_anywhere_it_becomes_the_same_run(given, straight, tmp_path, stop):
  """Within a rollout the checkpoint holds values, returns and advantages."""
  for callbacks in (dict(stop=dict(type=STOP, step=stop)), {}):
    c = ppo(given)
    c.callbacks = callbacks
    run = train(c, tmp_path / "w")
  assert_same_state(straight[0].state, run.state)
  assert rows_of(straight[1]) == rows_of(tmp_path / "w")


def test_what_others_take_from_it_is_the_policy(straight, tmp_path):
  """An export, a sampler, a run that begins from it; FLOPs are those of both."""
  run, workdir = straight
  params = {k: v for k, v in run.state["params"].items() if k != "critic"}
  ids = np.arange(12)[None]
  wanted = np.asarray(run.model.policy.logits(params, ids))
  loaded, exported = hf.load(export(workdir, tmp_path / "hf"))
  np.testing.assert_allclose(loaded.logits(exported, ids)[..., :258], wanted[..., :258], atol=1e-5)
  read = load_run(workdir, run.mesh)
  np.testing.assert_array_equal(jax.jit(read.model.logits)(read.params, ids), wanted)
  target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
  origin = dataclasses.replace(init_from.origin_of(run.config), path=str(workdir))
  found, where = init_from.first_params(origin, run.model.policy, target)
  assert_same_state(found, params)
  assert "fresh" not in where
  flops = [model.flops_per_token(32) for model in (run.model.policy, run.model.critic)]
  assert run.program.flops_per_token(32) == pytest.approx(sum(flops)) and min(flops) > 0


def test_what_a_critic_begins_as(given, straight):
  """As the run's own parameters with a new head; as a reward model; as a run's policy with a new head."""
  run, workdir = straight

  def begun(path):
    config, _ = program.resolve(ppo(given, strategy=dict(critic=path)))
    program.settle(config, "cpu")
    model = program.make_model(config, run.tokenizer.vocab_size)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
                          model.abstract_params())
    found, where = critic.first_params(config, init_from.origin_of(config), model, target)
    return tree.flatten(found["critic"]), tree.flatten(found), where

  own, policy, where = begun("start")
  assert where == "fresh parameters; critic: fresh parameters"
  for path in own.keys() - {"score/kernel"}:
    np.testing.assert_array_equal(own[path], policy[path], err_msg=path)
  assert np.abs(own["score/kernel"]).max() > 0
  folder = hf.load(given[1])[1]
  assert_same_state(tree.unflatten(begun(given[1])[0]), folder)
  assert_same_state(Keep.before[0]["critic"], folder)
  again, _, where = begun(str(workdir))
  assert where.endswith(", 1 fresh arrays")
  trained = tree.flatten(run.state["params"])
  for path in again.keys() - {"score/kernel"}:
    np.testing.assert_array_equal(again[path], trained[path], err_msg=path)


def test_what_cannot_be_a_critic_is_refused(given, tmp_path):
  two = str(tiny.hf_folder(tmp_path / "two", vocab_size=258, head="score", num_labels=2))
  for path, message in ((two, "strategy.critic is .*, a model with 2 labels"),
                        (str(tmp_path / "no"), "strategy.critic is .* which is no folder")):
    with pytest.raises(ConfigError, match=message):
      train(ppo(given, strategy=dict(critic=path)), tmp_path / "w")
  c = ppo(given)
  c.tokenizer.update(type="hf", path=str(tiny.ROOT / "tests" / "input_pipeline" / "references" / "tiny"))
  with pytest.raises(ConfigError, match="strategy.critic is .* whose tokenizer is another one than this run's"):
    train(c, tmp_path / "other")
  for rollout, message in ((dict(resample=1), "there is nothing to replace"), (dict(num_prompts=0), "num_prompts")):
    with pytest.raises(ConfigError, match=message):
      train(ppo(given, rollout=rollout), tmp_path / "w")


@pytest.mark.parametrize("of_run", [True, False])
def test_under_adapters_the_bases_are_made_again(of_run, given, tmp_path):
  """A critic that begins as the run has adapters of its own, over a base that is left out of checkpoints; another one
  is trained whole. What is read is the policy's, with its base."""
  base = str(tiny.hf_folder(tmp_path / "base", vocab_size=258))
  c = ppo(given, total_steps=2, strategy=dict(critic="start") if of_run else {})
  c.callbacks = dict(stop=dict(type=STOP, step=1))
  for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_multiple"):
    c.model[key] = defaults().model[key]
  c.model.hf, c.model.lora.rank = base, 2
  c.tokenizer.update(type="hf", path=base)
  run = train(c, tmp_path / "w")
  of_critic = [path for path in run.program.optimizer.trainable if path.startswith("critic/")]
  assert "critic/score/kernel" in of_critic
  assert all(lora.is_new(path.removeprefix("critic/")) for path in of_critic) == of_run
  assert set(run.pinned) == {"base", "reference", *(["base of the critic"] if of_run else [])}
  ids = np.arange(12)[None]
  read = load_run(tmp_path / "w", run.mesh)
  np.testing.assert_array_equal(jax.jit(read.model.logits)(read.params, ids),
                                jax.jit(run.model.logits)(run.state["params"], ids))
  c.callbacks = {}
  assert run.step == 1 and train(c, tmp_path / "w").step == 2
