"""Explanations: there is one for all that a config can choose, what they name exists, and what they claim holds."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import tiny
from tests.trainer.strategies import test_grpo
from trainer import advantages, config_checks, config_source, explain, explain_reads, optim, schedules, strategies
from trainer.config import STRATEGIES, defaults, evaluator, reward, source
from trainer.errors import ConfigError
from trainer.explanations import groups, topics
from trainer.explanations.topic import At, parse
from trainer.strategies import grpo, kto, preference, presets

ALL = [topic for group in groups().values() for topic in group]
KEYS = list(config_source.keys().values())


# ----------------------------------------------------------------------------------------------
# There is one for everything.


def chosen_by_configs():
  yield from (f"loss.{name}" for name in strategies.STRATEGIES)
  yield from (f"loss.dpo.{name}" for name in preference.LOSSES)
  yield from (f"loss.kto.{name}" for name in kto.LOSSES)
  yield from (f"loss.{name}" for name in presets.PRESETS)
  yield from (f"loss.grpo.{name}" for name in presets.PRESETS)
  yield from (f"divergence.{name}" for name in preference.DIVERGENCES)
  yield from (f"ratio.{name}" for name in grpo.RATIOS)
  yield from (f"clip.{name}" for name in grpo.CLIPS)
  yield from (f"aggregate.{name}" for name in grpo.AGGREGATES)
  yield from (f"kl.{name}" for name in grpo.ESTIMATORS)
  yield from (f"baseline.{name}" for name in advantages.BASELINES)
  yield from (f"scale.{name}" for name in advantages.SCALES)
  yield from (f"optimizer.{name}" for name in optim.NAMES)
  yield from (f"schedule.{name}" for name in schedules.NAMES)


@pytest.mark.parametrize("name", chosen_by_configs())
def test_what_a_config_can_choose_has_a_topic(name):
  topic = topics()[name]
  assert topic.equation and topic.source and topic.test, name


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.name)
def test_what_a_topic_names_exists(topic):
  assert topic.title and topic.what and topic.equation and topic.source
  for at in topic.source:
    first, last = explain.locate(at)
    lines = (tiny.ROOT / at.file).read_text(encoding="utf-8").splitlines()[first - 1:last]
    assert lines and (not at.text or any(at.text in line for line in lines))
  for test in topic.test:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (tiny.ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test
  assert [key for key in topic.keys if key not in config_source.keys()] == []
  assert [other for other in topic.see if other not in topics()] == []
  for paper in topic.paper:
    assert re.search(r"\b(19|20)\d\d\b.*(arXiv \d{4}\.\d{4,5}|https?://)", paper), paper
  if topic.config:
    changed = defaults()
    exec(topic.config, {"config": changed, "strategy": strategies_in_configs, "evaluator": evaluator})


def strategies_in_configs(name, **options):
  """As in a config file; what is given are keys of that strategy."""
  assert set(options) <= set(STRATEGIES[name])
  return config_checks.strategy(name, **options)


def test_no_topic_has_the_name_of_a_key():
  assert set(topics()).isdisjoint({key.typed for key in KEYS} | {key.path for key in KEYS})


# ----------------------------------------------------------------------------------------------
# What they say is what is computed.


@pytest.mark.parametrize("name", preference.LOSSES)
def test_papers_are_those_that_the_code_names(name):
  """And the notation that a loss needs stands below its equation."""
  topic = topics()[f"loss.dpo.{name}"]
  named = set(re.findall(r"arXiv\s+(\d{4}\.\d{4,5})", preference.LOSSES[name].__doc__))
  assert named <= set(re.findall(r"arXiv (\d{4}\.\d{4,5})", " ".join(topic.paper)))
  assert topic.source[0] == At("trainer/strategies/preference.py", name)
  assert ("π_ref" in topic.equation) == (name not in preference.REFERENCE_FREE)
  assert ("label_smoothing" in " ".join(topic.keys)) == (name in preference.SMOOTHED)


CLOSED_FORMS = {
    "ln 2": math.log(2), "2 ln 2": 2 * math.log(2), "1": 1.0, "1/(4β²)": 1 / (4 * 0.3**2), "1/(2β²)": 1 / (2 * 0.3**2),
    "½ ln 2 + ½": 0.5 * math.log(2) + 0.5, "−ln 2 − ½ ln(ε(1−ε))": -math.log(2) - 0.5 * math.log(0.1 * 0.9)}


@pytest.mark.parametrize("name", [name for name in preference.LOSSES if name not in preference.REFERENCE_FREE])
def test_values_at_the_first_step_are_those_that_are_claimed(name):
  from tests.trainer.strategies import test_preference
  claimed = re.search(r"^at the first step, policy = reference: (.*)$", topics()[f"loss.{name}"].equation, re.MULTILINE)
  assert CLOSED_FORMS[claimed.group(1)] == pytest.approx(test_preference.AT_START[name])


# The equations of the presets, once more: of a batch's tokens by sequence, in float64.


def clip(x, low, high):
  return np.minimum(np.maximum(x, low), high)


def ppo(s, low, high):
  return -np.minimum(s["ratio"] * s["A"], clip(s["ratio"], 1 - low, 1 + high) * s["A"])


def k2(s):
  return (s["logp"] - s["ref"]) ** 2 / 2


def token_mean(sequences, loss):
  return sum(loss(s).sum() for s in sequences) / sum(len(s["logp"]) for s in sequences)


EQUATIONS = {
    "grpo": lambda q, length: np.mean([ppo(s, 0.2, 0.2).mean() for s in q]),
    "dapo": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.28)),
    "dr_grpo": lambda q, length: sum(ppo(s, 0.2, 0.2).sum() for s in q) / (len(q) * length),
    "gspo": lambda q, length: np.mean(
        [ppo(s | dict(ratio=np.exp(np.mean(s["logp"] - s["old"]))), 0.0003, 0.0004) for s in q]),
    "cispo": lambda q, length: token_mean(q, lambda s: -np.minimum(s["ratio"], 5.0) * s["A"] * s["logp"]),
    "rloo": lambda q, length: sum((-s["ratio"] * s["A"] + 0.05 * k2(s)).sum() for s in q) / (len(q) * 1),
    "reinforce++": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.2) + 0.01 * k2(s)),
    "astrai": lambda q, length: token_mean(q, lambda s: ppo(s, 0.2, 0.2) + 0.02 * k2(s)),
}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_what_their_equations_say(name):
  config = config_checks.resolve({"strategy": dict(name="grpo", preset=name, temperature=0.7),
                                  "rollout": dict(max_new_tokens=11)})
  presets.fill_in(config)
  _, logits, batch = test_grpo.table()
  batch = batch | dict(advantages=batch["advantages"] + 0.4 * (batch["sequences"] > 0))  # sums that do not cancel
  logp = test_grpo.logps(logits, batch)
  sequences = []
  for row, segment, at in test_grpo.sequences_of(batch):
    s = dict(logp=logp[row, at], old=batch["old_logprobs"][row, at].astype(np.float64),
             ref=batch["ref_logprobs"][row, at].astype(np.float64), A=float(batch["advantages"][row, segment]))
    sequences.append(s | dict(ratio=np.exp(s["logp"] - s["old"])))
  expected = EQUATIONS[name](sequences, 11)
  found = test_grpo.of_table(config.strategy, advantages=batch["advantages"].astype(np.float32))[0]
  assert found == pytest.approx(expected, rel=2e-5) and abs(expected) > 1e-2
  # The numbers of the equation that is printed are the preset's.
  text, values = topics()[f"loss.{name}"].equation, presets.PRESETS[name]
  for key in ("clip_low", "clip_high", "kl_coef"):
    if values["strategy"].get(key):
      assert f"{values['strategy'][key]:.10f}".rstrip("0") in text.replace("5.0,", "5.,").replace("5.0)", "5.)"), key
  if "resample" in values["rollout"]:
    assert f"up to {values['rollout']['resample']} times" in text


def test_without_baseline_and_scale_rewards_are_advantages():
  rewards = np.array([[1.0, -2.5, np.nan], [0.0, 0.0, 0.0]])
  np.testing.assert_array_equal(advantages.advantages(rewards, "none", "none"), rewards.astype(np.float32))


# ----------------------------------------------------------------------------------------------
# Config keys.


def flat(values, prefix=""):
  for key, value in values.items():
    if hasattr(value, "items") and f"{prefix}{key}" != "strategy" and len(value):
      yield from flat(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value.to_dict() if hasattr(value, "to_dict") else value


def test_every_key_is_found_with_its_default_and_a_comment():
  expected = dict(flat(defaults()))
  for make, prefix in ((source, "input.sources.<name>."), (evaluator, "evals.<name>."),
                       (reward, "rollout.rewards.<name>.")):
    expected |= dict(flat(make(), prefix))
  for name, options in STRATEGIES.items():
    expected |= {f"strategy({name}).{key}": None if isinstance(value, type) else value
                 for key, value in options.items()}
  expected["strategy"] = "seq"
  found = {key.path: key for key in KEYS}
  assert found.keys() == expected.keys()
  for path, value in expected.items():
    key = found[path]
    assert key.default == value, path
    line = (tiny.ROOT / key.file).read_text(encoding="utf-8").splitlines()[key.line - 1]
    leaf = path.rpartition(".")[2]
    assert leaf in line or leaf.rpartition("_")[0] in line, path
    assert len(key.comment) > 3, path


def test_lines_that_read_a_key_name_it():
  """Each key is read somewhere, or its section is taken as a whole; what is said to read it has its name."""
  found = explain_reads.reads()
  whole = ("spikes.",)
  for key in KEYS:
    leaf = key.typed.rpartition(".")[2]
    places = found.get(key.typed, ())
    assert places or any(found.get(key.typed[:i + 1]) for i, c in enumerate(key.typed) if c == "."), key.typed
    for file, number in places:
      line = (tiny.ROOT / file).read_text(encoding="utf-8").splitlines()[number - 1]
      assert leaf in line or leaf.rpartition("_")[0] in line or key.typed.startswith(whole) and "**" in line, (
          key.typed, file, number, line)


@pytest.mark.parametrize("key, file, text", [
    ("optimizer.b2", "trainer/optim.py", "adam(cfg.b1, cfg.b2, cfg.eps)"),
    ("rollout.group_size", "trainer/rollout.py", "c.group_size"),
    ("schedule.floor", "trainer/schedules.py", "floor = cfg.floor"),
    ("model.moe.balance_loss", "models/spec.py", "balance_loss"),
    ("chat.on_rewritten_history", "input_pipeline/examples_chat.py", "self._chat.on_rewritten_history"),
    ("evals.<name>.top_k", "evaluators/generate.py", "top_k"),
    ("total_steps", "trainer/main.py", '"total"'), ("seed", "trainer/program.py", "seed=config.seed")])
def test_some_keys_are_read_where_they_are(key, file, text):
  lines = (tiny.ROOT / file).read_text(encoding="utf-8").splitlines()
  assert any(place == file and text in lines[number - 1] for place, number in explain_reads.reads()[key])


def test_no_key_is_said_to_be_read_by_the_wrong_section():
  """`weight_decay` is the optimizer's: a section of another name that is read the same way is not taken for it."""
  found = explain_reads.reads()
  assert {file for file, _ in found["optimizer.weight_decay"]} == {"trainer/optim.py"}
  assert {file for file, _ in found["schedule.timescale"]} == {"trainer/schedules.py"}
  assert not any(file.startswith("trainer/") for file, _ in found["input.sources.<name>.text_key"])


# ----------------------------------------------------------------------------------------------
# What is printed.


def printed(capsys, *argv):
  code = explain.main(list(argv))
  out, error = capsys.readouterr()
  assert "\033" not in out + error
  return code, out, error


def test_a_topic_is_printed_with_all_that_belongs_to_it(capsys):
  code, out, _ = printed(capsys, "loss.dapo")
  assert code == 0
  for part in ("clip(ρ, 1 − 0.2, 1 + 0.28)", "strategy.clip_high: 0.28 in this preset", "rollout.resample: 10 in this",
               "arXiv 2503.14476", "Elsewhere", "trainer/strategies/presets.py:", '"dapo": dict(strategy=_strategy(',
               "::test_presets_are_what_their_equations_say", "loss.grpo"):
    assert part in out, part
  number = int(re.search(r"trainer/strategies/grpo\.py:(\d+)  policy_term", out).group(1))
  lines = (tiny.ROOT / "trainer/strategies/grpo.py").read_text(encoding="utf-8").splitlines()
  assert lines[number - 1].startswith("def policy_term(")


@pytest.mark.parametrize("typed, named", [
    ("ipo", "loss.ipo"), ("loss.dpo.ipo", "loss.ipo"), ("muon", "optimizer.muon"), ("dapo", "loss.dapo"),
    ("clip_fraction", "metric.clip_ratio/region_mean"), ("clip_ratio/low_mean", "metric.clip_ratio/region_mean"),
    ("approx_kl", "metric.policy/approx_kl"), ("eval/val/bits_per_byte", "metric.bits_per_byte"), ("mfu", "metric.mfu"),
    ("sampling/importance_sampling_ratio/max", "metric.sampling/sampling_logp_difference"),
    ("logps_mean/rejected", "metric.logps/chosen"), ("cosine", "schedule.cosine"), ("k3", "kl.k3"),
    ("leave_one_out", "baseline.leave_one_out")])
def test_other_names_lead_to_the_topic(typed, named, capsys):
  assert printed(capsys, typed)[1].startswith(f"{named}: ")


def test_keys_are_printed_whatever_names_stand_in_them(capsys):
  _, out, _ = printed(capsys, "config.optimizer.b2")
  assert out.startswith(f"config.optimizer.b2 = {defaults().optimizer.b2}\n") and "adam(cfg.b1, cfg.b2, cfg.eps)" in out
  assert "optimizer.adamw" in out
  _, out, _ = printed(capsys, "input.sources.mine.text_key")
  assert out.startswith("config.input.sources.<name>.text_key = 'text'") and "input_pipeline/readers.py:" in out
  _, out, _ = printed(capsys, "strategy.beta")
  dpo, of_kto = out.split("config.strategy.beta")[1:]
  assert "strategy dpo" in dpo and "preference.py" in dpo and "kto.py" not in dpo
  assert "As for dpo. How dear it is to leave the reference" in of_kto
  assert "strategy kto" in of_kto and "kto.py" in of_kto and "preference.py" not in of_kto
  _, out, _ = printed(capsys, "mesh.fsdp")
  assert "Read as part of mesh" in out and "mesh_lib.make_mesh(config.mesh)" in out


@pytest.mark.parametrize("typed, near", [("loss.dapp", "loss.dapo"), ("optimizer.b3", "optimizer.b2"),
                                         ("loss.gprpo", "loss.grpo"), ("muonn", "muon"),
                                         ("token", "ratio.token"), ("token", "aggregate.token")])
def test_an_unknown_name_is_told_with_the_nearest(typed, near, capsys):
  code, out, error = printed(capsys, typed)
  assert code == 1 and not out and f"'{typed}' is no topic" in error and near in error
  with pytest.raises(ConfigError, match="no topic and no config key"):
    explain.explain(typed)


def test_without_a_topic_all_are_listed(capsys):
  code, out, _ = printed(capsys)
  assert code == 0
  for topic in ALL:
    assert re.search(rf"^  {re.escape(topic.name)}  ", out, re.MULTILINE), topic.name
  assert printed(capsys, "--help")[0] == 0 and printed(capsys, "a", "b")[0] == 2


def test_the_documentation_shows_what_is_printed(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "100")
  page = (tiny.ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
  (example,) = re.findall(r"^```\n(loss\.dapo: .*?)^```", page, re.DOTALL | re.MULTILINE)
  out = printed(capsys, "loss.dapo")[1].splitlines()
  assert [line for line in example.splitlines() if line not in out] == []
  assert [f"{name.partition('.')[0]}." for name in topics() if "." in name and f"`{name.partition('.')[0]}." not in page
          and name != "rollout.dynamic_sampling"] == []


def test_places_that_are_gone_are_errors():
  for at in (At("trainer/optim.py", "nothing"), At("trainer/optim.py", "_parts", "no such line"),
             At("trainer/optim.py", "Optimizer.nothing")):
    with pytest.raises(LookupError):
      explain.locate(at)
  with pytest.raises(LookupError):
    explain.find_test("tests/trainer/test_optim.py::test_nothing")


def test_a_place_is_what_begins_in_its_line():
  (first, last) = explain.locate(At("trainer/strategies/grpo.py", "policy_term", 'if cfg.clip == "cispo":'))
  lines = (tiny.ROOT / "trainer/strategies/grpo.py").read_text(encoding="utf-8").splitlines()
  assert 'cfg.clip == "cispo"' in lines[first - 1] and "return Policy(-weight_BxT" in lines[last - 1]
  text = explain.code(At("trainer/strategies/preference.py", "ipo"))
  assert "jnp.square(chosen - rejected - 0.5 / cfg.beta)" in text


def test_the_form_of_the_texts_is_checked():
  with pytest.raises(ValueError, match="is no field"):
    parse("= a: b\nWhat.\nequation:\n  x\nsourse: file name\n")


def test_topics_and_keys_start_no_jax():
  """It is to answer at once."""
  code = ("import sys; from trainer import explain; explain.explain('loss.ipo'); explain.explain('optimizer.b2');"
          "sys.exit('jax' in sys.modules)")
  assert subprocess.run([sys.executable, "-c", code], cwd=tiny.ROOT, check=False).returncode == 0
