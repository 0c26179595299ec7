"""Strategies by dotted path: a user's own loss in place of a built-in one."""

import json
import sys

import pytest

from tests import tiny
from tests.trainer import rollout_runs
from trainer import strategies, train
from trainer.config import checks as config_checks
from trainer.config import defaults, evaluator, source, strategy
from trainer.errors import ConfigError
from trainer.modes import inspect
from trainer.telemetry.writers import read_rows

CODE = '''
import jax
import jax.numpy as jnp

from input_pipeline.examples import roles
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import Strategy, sequences


def nll(model, params, batch, rng, cfg):
  """Cross-entropy by whole logits, which the built-in losses never make."""
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  logits = model.unembed(params, out.hidden)[:, :-1, :model.num_real_vocab]
  targets, weights = batch["tokens"][:, 1:], batch["loss_weights"][:, 1:]
  logps = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
  return {"loss": Mean(jnp.sum(-logps * weights, axis=1), jnp.sum(weights, axis=1))}, {}


def scaled(model, params, batch, rng, cfg):
  terms, metrics = nll(model, params, batch, rng, cfg)
  return {"loss": Mean(cfg.scale * terms["loss"].sum, terms["loss"].weight)}, metrics


def apo(model, params, batch, rng, cfg, reference=None):
  stats, out = sequences.token_stats(model, params, batch, None, ("logprob",))
  x = cfg.beta * sequences.segment_sums(
      stats.logprob - sequences.reference_logprobs(model, batch, reference), batch)
  wanted, unwanted = (batch["segment_roles"] == role for role in (roles.DESIRABLE, roles.UNDESIRABLE))
  losses = jnp.where(wanted, jax.nn.sigmoid(-x), jnp.where(unwanted, jax.nn.sigmoid(x), 0.0))
  return {"loss": Mean(jnp.sum(losses, axis=1), jnp.sum(wanted | unwanted, axis=1).astype(jnp.float32))}, {}


def dpo(model, params, batch, rng, cfg, reference=None):
  stats, out = sequences.token_stats(model, params, batch, None, ("logprob",))
  logps = stats.logprob
  if reference is not None or "ref_logprobs" in batch:
    logps = logps - sequences.reference_logprobs(model, batch, reference)
  x = sequences.segment_sums(logps, batch)
  present = (batch["segment_roles"][:, 0::2] > 0).astype(jnp.float32)
  losses = -jax.nn.log_sigmoid(cfg.beta * (x[:, 0::2] - x[:, 1::2]))
  return {"loss": Mean(jnp.sum(losses * present, axis=1), jnp.sum(present, axis=1))}, {}


def ratio(model, params, batch, rng, cfg):
  stats, out = sequences.token_stats(model, params, batch, None, ("logprob",), cfg.temperature)
  mask, old = sequences.completion_mask(batch), jax.lax.stop_gradient(stats.logprob)
  if "old_logprobs" in batch:
    old = jnp.where((mask > 0) & ~jnp.isnan(batch["old_logprobs"]), batch["old_logprobs"], old)
  sums = sequences.segment_sums(jnp.exp(stats.logprob - old) * mask, batch)
  return {"loss": Mean(-jnp.sum(sums * batch["advantages"], axis=1), jnp.sum(mask, axis=1))}, {}


def check(cfg, grad_accum_steps, cfg_model):
  if cfg.scale <= 0:
    raise ConfigError(f"strategy.scale is {cfg.scale}; it must be above 0.")


SCALED = Strategy(scaled, options=dict(scale=2.0), check=check)
CHAT = Strategy(nll, data="conversations")
DPO = Strategy(dpo, options=dict(beta=0.1), data="pairs", needs_reference=True)
MAYBE = Strategy(dpo, options=dict(beta=0.1, free=False), data="pairs", needs_reference=lambda cfg: not cfg.free)
APO = Strategy(apo, options=dict(beta=0.1), data="labelled", needs_reference=True)
RATIO = Strategy(ratio, data="rollouts", rollout_keys=("advantages", "old_logprobs"),
                 options=dict(temperature=float, baseline="leave_one_out", scale="none", disable_dropout=True))
BY_GROUP = Strategy(ratio, data="rollouts", options=dict(temperature=float))
SOME_KEYS = Strategy(ratio, data="rollouts", rollout_keys=("rewards",))
SHOWN_BADLY = Strategy(nll, headline={"loss": "loss {value:.3f}"})
STRANGERS = Strategy(dpo, data="pairs", mismatched=True)
MARGINS = Strategy(nll, graded=True)
OPEN = Strategy(scaled, options=dict(scale=float))
PEARS = Strategy(nll, data="pears")
UNREFERENCED = Strategy(nll, data="pairs", needs_reference=True)
NONE = Strategy(scaled, options=dict(scale=None))
NAMED = Strategy(scaled, options=dict(name="x"))
LISTED = Strategy(scaled, options=["scale"])
NO_LOSS = Strategy("nll")
NUMBER = 3


def few(model, params):
  pass


class Loss:
  pass
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("own")
  (folder / "own_losses.py").write_text(CODE)
  sys.path.insert(0, str(folder))
  tiny.write_corpus(folder / "texts")
  rows = {
      "chats": [dict(prompt=f"{i} and {i + 1}", completion=f" then {i + 2}") for i in range(24)],
      "pairs": [dict(prompt=f"{i} and", chosen=f" then {i + 2}", rejected=f" or {i * 7}") for i in range(24)],
      "labelled": [dict(prompt=f"{i} and", completion=f" then {i + i % 2}", label=i % 2 == 0) for i in range(24)]}
  for name, made in rows.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
  yield folder
  sys.path.remove(str(folder))
  sys.modules.pop("own_losses", None)


def config_of(folder, data, section):
  config = tiny.config(folder / "texts", total_steps=3)
  config.evals = {}
  if data != "texts":
    config.input.sources.main = source(type="jsonl", path=str(folder / f"{data}.jsonl"))
  config.strategy = section
  return config


def losses(config, workdir, key="loss"):
  train(config, workdir)
  return [row[key] for row in read_rows(workdir / "metrics.jsonl") if key in row]


@pytest.mark.parametrize("data, own, theirs", [
    ("texts", ("nll", {}), ("seq", {})),
    ("chats", ("CHAT", {}), ("sft", {})),
    ("pairs", ("DPO", dict(beta=0.3)), ("dpo", dict(beta=0.3))),
    ("pairs", ("DPO", dict(precompute=True)), ("dpo", {})),
    ("pairs", ("MAYBE", dict(reference_ema=0.5, reference_ema_steps=1)),
     ("dpo", dict(reference_ema=0.5, reference_ema_steps=1))),
    ("labelled", ("APO", {}), ("kto", dict(loss="apo_zero_unpaired"))),
])
def test_it_trains_as_the_built_in_one_of_the_same_loss(folder, tmp_path, data, own, theirs):
  (name, options), (theirs, same) = own, theirs
  mine = losses(config_of(folder, data, strategy(f"own_losses.{name}", **options)), tmp_path / "own")
  assert len(mine) == 3 and mine[0] != mine[2]
  assert mine == pytest.approx(losses(config_of(folder, data, strategy(theirs, **same)), tmp_path / "theirs"), rel=2e-5)


@pytest.mark.parametrize("own, options", [
    ("RATIO", dict(baseline="leave_one_out", scale="none")), ("BY_GROUP", dict(baseline="group", scale="none"))])
def test_on_rollouts_it_trains_as_grpo_of_the_same_loss(folder, tmp_path, own, options):
  """Two steps of each rollout at a temperature; by default an advantage is the reward less the mean of its group."""
  updates = 1 + (own == "RATIO")  # the other has no old log-probs
  prompts, found = rollout_runs.write_prompts(tmp_path), []
  for section in (strategy(f"own_losses.{own}"), strategy("grpo", clip="none", aggregate="token", **options)):
    config = rollout_runs.config(prompts, total_steps=4, rollout=dict(updates=updates))
    config.strategy = section
    found.append({key: losses(config, tmp_path / section.name, key) for key in ("loss", "grad_norm", "reward")})
  assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4, abs=1e-6)
  assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
  assert found[0]["reward"] == found[1]["reward"] and len(set(found[0]["reward"])) > 1


def test_truncated_sampling_is_refused_on_rollouts(folder, tmp_path):
  config = rollout_runs.config(rollout_runs.write_prompts(tmp_path), rollout=dict(top_k=4))
  config.strategy = strategy("own_losses.RATIO")
  with pytest.raises(ConfigError, match="that its gradient would be that of another policy"):
    train(config, tmp_path / "w")
  config.rollout.top_k, config.strategy.baseline = 0, "best"
  with pytest.raises(ConfigError, match="baseline"):
    train(config, tmp_path / "w")


def test_its_options_reach_the_loss_and_the_saved_config_and_a_run_goes_on(folder, tmp_path):
  once = losses(config_of(folder, "texts", strategy("own_losses.SCALED", scale=1.0)), tmp_path / "once")
  config = config_of(folder, "texts", strategy("own_losses.SCALED", scale=4.0))
  assert losses(config, tmp_path / "w")[0] == pytest.approx(4 * once[0], rel=1e-6)
  assert json.loads((tmp_path / "w" / "config.json").read_text())["strategy"] == dict(
      name="own_losses.SCALED", scale=4.0)
  config.strategy.scale = 2.0
  with pytest.raises(ConfigError, match="strategy.scale: 4.0 -> 2.0"):
    train(config, tmp_path / "w")
  assert config_checks.resolve(config_of(folder, "texts", dict(name="own_losses.SCALED"))).strategy.scale == 2.0


def test_preferences_are_evaluated_and_shown(folder, tmp_path, capsys):
  config = config_of(folder, "pairs", strategy("own_losses.MAYBE", free=True))
  config.evals.held_out = evaluator(type="preference", eval_steps=3, split="all")
  mine = losses(config, tmp_path / "own", "eval/held_out/loss")
  config.strategy = strategy("own_losses.DPO")
  assert len(mine) == 2 and mine[0] != losses(config, tmp_path / "other", "eval/held_out/loss")[0]
  inspect.inspect(config, tmp_path / "seen")
  shown = capsys.readouterr().out
  assert "24 pairs of strings" in shown and "⟦ then " in shown


def test_without_its_reference_the_options_of_one_have_no_effect(folder, tmp_path):
  config = config_of(folder, "pairs", strategy("own_losses.MAYBE", free=True, reference_ema=0.5))
  with pytest.raises(ConfigError, match=r"nothing in this configuration uses them:\n  - config.strategy.reference_ema"):
    train(config, tmp_path / "w")


@pytest.mark.parametrize("name, told", [
    ("mine", "strategy.name is 'mine'; known strategies: seq, sft, dpo, kto, grpo, ppo, distill, reward, "
     "contrastive, or the"),
    ("no_such_package.loss", r"strategy.name: found 'no_such_package.loss', which could not be imported \(No module"),
    ("own_losses.missing", "could not be imported .module 'own_losses' has no attribute 'missing'.. Allowed: seq, sft"),
    ("own_losses.NUMBER", "which is of type int. A strategy is a trainer.strategies.Strategy"),
    ("own_losses.Loss", "which is a class. A strategy is"),
    ("own_losses.NO_LOSS", "which is a Strategy whose loss is no function"),
    ("own_losses.PEARS", "data='pears'; allowed: 'texts', 'conversations', 'pairs', 'labelled', 'rollouts'"),
    ("own_losses.SHOWN_BADLY", "headline shows 'loss' as 'loss {value:.3f}', which is no format of a number"),
    ("own_losses.SOME_KEYS", "rollout_keys have 'rewards'; allowed: advantages, behavior_logprobs, old_logprobs"),
    ("own_losses.MARGINS", "graded=True, data='texts' and head='lm'; margins come with data='pairs' alone"),
    ("own_losses.STRANGERS", "mismatched=True and data='pairs'"),
    ("own_losses.few", r"called as loss\(model, params, batch, rng, cfg\), which it does not take: too many"),
    ("own_losses.UNREFERENCED", r"Define it as loss\(model, params, batch, rng, cfg, reference=None\)"),
    ("own_losses.NONE", r"option scale is None by default; .* options=dict\(scale=float\)"),
    ("own_losses.NAMED", "has an option 'name'"),
    ("own_losses.LISTED", "whose options are .'scale'.; they are a dict"),
])
def test_what_is_no_strategy_is_refused(folder, name, told):
  with pytest.raises(ConfigError, match=told):
    strategy(name)


@pytest.mark.parametrize("changed, told", [
    (dict(scal=1.0), r"unknown key config.strategy.scal; did you mean config.strategy.scale\?"),
    (dict(scale="much"), "config.strategy.scale is 'much' .str.; it must be a number"),
])
def test_options_that_it_does_not_have_are_refused(folder, changed, told):
  given = defaults()
  given.strategy = dict(name="own_losses.SCALED", **changed)
  with pytest.raises(ConfigError, match=told):
    config_checks.resolve(given)


def test_options_have_values_and_checks_of_their_own(folder, tmp_path):
  assert strategy("own_losses.OPEN").scale is None and strategy("own_losses.OPEN", scale=2).scale == 2.0
  assert strategy("own_losses.DPO") == strategy("own_losses.DPO", reference="start", precompute=False)
  with pytest.raises(ConfigError, match="strategy.scale is -1.0; it must be above 0."):
    train(config_of(folder, "texts", strategy("own_losses.SCALED", scale=-1.0)), tmp_path / "w")


def test_built_in_ones_have_records_too():
  assert {name: strategies.find(name).data for name in strategies.STRATEGIES} == dict(
      seq="texts", sft="conversations", dpo="pairs", kto="labelled", grpo="rollouts", ppo="rollouts",
      distill="conversations", reward="pairs", contrastive="matches")
  for name, record in strategies.STRATEGIES.items():
    assert strategies.find(name) is record and {"name", *record.options} == set(strategy(name))
