"""resolve, validate, audit, differences: what is accepted, and what each refusal says."""

import json

import pytest

from trainer.config import checks, defaults, evaluator, reward, source, strategy
from trainer.errors import ConfigError
from trainer.strategies import STRATEGIES, Strategy


def minimal(**changed):
  config = defaults()
  config.input.sources.main = source(type="python_stdlib")
  config.update(changed)
  return config


def test_resolve_fills_partial_dicts_with_defaults():
  resolved = checks.resolve({"optimizer": {"b2": 0.9}, "input": {"sources": {"a": {"type": "text", "path": "x"}}}})
  assert resolved.optimizer.b2 == 0.9
  assert resolved.optimizer.b1 == defaults().optimizer.b1
  assert resolved.input.sources.a.path == "x"
  assert resolved.input.sources.a.weight == 1.0


@pytest.mark.parametrize("given, expected", [
    ({"optimzer": {}}, "unknown key config.optimzer; did you mean config.optimizer?"),
    ({"optimizer": {"learning_rat": 1.0}}, "did you mean config.optimizer.learning_rate?"),
    ({"input": {"seq_len": 64}}, "unknown key config.input.seq_len; did you mean config.seq_len?"),
    ({"model": {"learning_rate": 0.1}}, "did you mean config.optimizer.learning_rate?"),
    ({"input": {"sources": {"a": {"pth": "x"}}}}, "did you mean config.input.sources.a.path?"),
    ({"evals": {"v": {"typ": "loss"}}}, "did you mean config.evals.v.type?"),
    ({"batch_size": "8"}, "config.batch_size is '8' (str); it must be a whole number"),
    ({"batch_size": 1.5}, "config.batch_size is 1.5"),
    ({"batch_size": True}, "config.batch_size is True"),
    ({"optimizer": {"learning_rate": True}}, "config.optimizer.learning_rate is True (bool); it must be a number"),
    ({"model": {"window": "x"}}, "a whole number or None"),
    ({"model": 3}, "must be a dict"),
    ({"strategy": "dpo"}, "config.strategy is 'dpo'; it must be a dict, e.g. strategy('dpo', beta=0.2)"),
    ({"strategy": {"name": "sqe"}}, "known strategies: seq"),
    ({"callbacks": {"mine": {"argument": 1}}}, "config.callbacks.mine has no `type`"),
])
def test_resolve_refuses(given, expected):
  with pytest.raises(ConfigError) as error:
    checks.resolve(given)
  assert expected in str(error.value)


def test_resolve_lists_every_problem_at_once():
  with pytest.raises(ConfigError) as error:
    checks.resolve({"optimzer": {}, "batch_size": "x"})
  assert "2 problems" in str(error.value)


def test_whole_floats_are_numbers_of_either_kind():
  resolved = checks.resolve({"batch_size": 16.0, "optimizer": {"learning_rate": 1}})
  assert (resolved.batch_size, resolved.optimizer.learning_rate) == (16, 1.0)


def test_unset_keys_are_independent():
  config = minimal()
  config.model.window = 7
  assert config.model.num_kv_heads is None


def test_a_duration_replaces_the_default_in_another_unit():
  resolved = checks.resolve({"total_tokens": 1000, "schedule": {"warmup_steps": 5}})
  assert resolved.total_steps == -1 and resolved.schedule.warmup_percent == -1


@pytest.mark.parametrize("given, warmup", [
    ({"warmup_steps": -1}, {"percent": 2.0, "steps": -1}), ({"warmup_steps": None}, {"percent": 2.0, "steps": None}),
    ({"warmup_steps": 0}, {"percent": -1.0, "steps": 0}), ({"warmup_tokens": 7}, {"percent": -1.0, "tokens": 7}),
    ({"warmup_steps": 5, "warmup_percent": 3.0}, {"percent": 3.0, "steps": 5})])  # which durations.py refuses
def test_a_duration_that_is_given_as_unset_replaces_nothing(given, warmup):
  schedule = checks.resolve({"schedule": given}).schedule
  assert {unit: schedule[f"warmup_{unit}"] for unit in warmup} == warmup


def test_sources_of_evaluators_are_complete_too_and_so_are_evaluators_of_ones_own():
  given = {"v": {"sources": {"mine": {"type": "text", "path": "x", "weight": 2}}, "max_documents": 3},
           "own": {"type": "my.Evaluator", "argument": 1, "eval_steps": 5}}
  resolved = checks.resolve({"evals": given, "callbacks": {"c": {"type": "my.Callback", "x": 1}}})
  wanted = {**evaluator().to_dict(), "max_documents": 3,
            "sources": {"mine": {**source().to_dict(), "type": "text", "path": "x", "weight": 2.0}}}
  assert resolved.evals.v.to_dict() == wanted
  assert resolved.evals.own.to_dict() == {**evaluator().to_dict(), **given["own"]}
  assert resolved.callbacks.c.to_dict() == {"type": "my.Callback", "x": 1}
  given["v"]["sources"]["mine"]["wieght"] = 1
  with pytest.raises(ConfigError, match="unknown key config.evals.v.sources.mine.wieght; did you mean .*mine.weight"):
    checks.resolve({"evals": given})


def test_losses_and_teachers_are_replaced_as_a_whole():
  assert checks.resolve({"strategy": {"name": "dpo", "loss": {"hinge": 0.5}}}).strategy.loss.to_dict() == {"hinge": 0.5}
  teachers = {"a": {"path": "x", "weight": 2.0}}
  assert checks.resolve({"strategy": {"name": "distill", "teachers": teachers}}).strategy.teachers.to_dict() == teachers


@pytest.mark.parametrize("changed, expected", [
    (dict(batch_size=6, grad_accum_steps=4), "Try --config.batch_size=8"),
    (dict(batch_size=0), "batch_size is 0"),
    (dict(seq_len=1), "seq_len is 1"),
    (dict(keep_best_mode="low"), "allowed: min, max"),
    (dict(optimizer=dict(name="adam")), "allowed: adamw, adafactor, muon, lion, sgd"),
    (dict(schedule=dict(floor=1.5)), "schedule.floor is 1.5"),
    (dict(evals=dict(val=dict(type="loss", on_error="go"))), "evals.val.on_error is 'go'; allowed: stop, warn"),
    (dict(schedule=dict(name="cosin")), "allowed: constant, linear, cosine, wsd, sgdr, rsqrt"),
    (dict(optimizer=dict(learning_rate=-1.0)), "optimizer.learning_rate is -1.0"),
    (dict(optimizer=dict(weight_decay=float("nan"))), "config.optimizer.weight_decay is nan"),
    (dict(tokenizer=dict(type="word")), "tokenizer.type is 'word'; allowed: auto, bytes, bpe, hf"),
    (dict(precision=dict(params="bfloat16"), optimizer=dict(learning_rate=1e-5)), "lost to rounding"),
    (dict(precision=dict(params="bfloat16"), optimizer=dict(learning_rate=1e-5)), "stochastic_rounding=True"),
    (dict(precision=dict(stochastic_rounding=True)), "precision.params is float32: there is nothing to round"),
    (dict(precision=dict(moments="int4")), "precision.moments is 'int4'; allowed: float32, bfloat16, int8"),
    (dict(precision=dict(moments="int8"), optimizer=dict(name="adafactor")), "adafactor keeps means of rows"),
    (dict(precision=dict(second_moments="int8"), optimizer=dict(name="lion")), "lion has no second moments"),
    (dict(precision=dict(matmul="int4")), "allowed: none, int8, fp8"),
    (dict(precision=dict(matmul="int8", matmul_gradients="some")), "allowed: none, inputs, all"),
    (dict(precision=dict(matmul_gradients="all")), "precision.matmul is none, so that nothing uses it"),
    (dict(precision=dict(matmul_skip=("attn",))), "precision.matmul is none, so that nothing uses it"),
    (dict(precision=dict(matmul="fp8", frozen="nf4")), "would be rounded twice"),
])
def test_validate_refuses(changed, expected):
  with pytest.raises(ConfigError) as error:
    checks.validate(checks.resolve({"input": {"sources": {"a": {"type": "python_stdlib"}}}, **changed}))
  assert expected in str(error.value)


@pytest.mark.parametrize("key, allowed", [
    ("packing", "auto, concat, best_fit, none"), ("mixture_by", "examples, tokens"), ("stop", "first, all, never"),
    ("over_long", "auto, split, truncate_end, truncate_start, drop, error"),
])
def test_choices_of_the_input(key, allowed):
  with pytest.raises(ConfigError, match=f"input.{key} is 'tight'; allowed: {allowed}"):
    checks.validate(checks.resolve({"input": {"sources": {"a": {"type": "python_stdlib"}}, key: "tight"}}))


def test_small_learning_rates_are_for_float32_or_rounding_at_random():
  """T33."""
  source_of = {"input": {"sources": {"a": {"type": "python_stdlib"}}}, "optimizer": {"learning_rate": 1e-6}}
  checks.validate(checks.resolve(source_of | {"precision": {"params": "bfloat16", "stochastic_rounding": True}}))


def test_no_source_says_what_to_write():
  with pytest.raises(ConfigError, match="input.sources is empty"):
    checks.validate(checks.resolve({}))


def test_audit_refuses_changed_keys_that_nothing_read():
  view = checks.View(checks.resolve(minimal(optimizer=dict(b2=0.5, momentum=0.9))))
  assert view.optimizer.b2 == 0.5
  _ = view.input.sources.main.type
  with pytest.raises(ConfigError) as error:
    checks.audit(view)
  assert "config.optimizer.momentum = 0.9" in str(error.value)
  assert "b2" not in str(error.value)
  _ = view.optimizer.momentum
  checks.audit(view)


def test_audit_accepts_unread_defaults():
  view = checks.View(checks.resolve(minimal()))
  _ = view.input.sources.main.type
  checks.audit(view)


def test_audit_knows_the_defaults_of_what_has_a_name_and_leaves_out_what_a_plan_is_asked():
  def viewed(weight, **changed):
    text, length = source(type="text", path="x", weight=weight), reward(type="length", weight=weight)
    view = checks.View(checks.resolve(minimal(evals=dict(v=evaluator(sources=dict(s=text))), **changed,
                                              rollout=dict(rewards=dict(r=length)), plan=dict(compile="never"))))
    of_eval = view.evals.v.sources.s
    _ = view.input.sources.main.type, of_eval.type, of_eval.path, view.rollout.rewards.r.type
    return view

  checks.audit(viewed(1.0))
  with pytest.raises(ConfigError) as error:
    checks.audit(viewed(2.0, model=dict(window=-1)))  # which is "unset" of durations alone
  assert sorted(line for line in str(error.value).splitlines() if line.startswith("  - ")) == [
      "  - config.evals.v.sources.s.weight = 2.0", "  - config.model.window = -1",
      "  - config.rollout.rewards.r.weight = 2.0"]
  saved = json.loads(checks.to_json(checks.resolve(minimal())))
  assert checks.differences(saved, checks.resolve(minimal(model=dict(window=-1)))) == ["model.window: None -> -1"]


def test_view_is_read_only_and_names_missing_keys():
  view = checks.View(checks.resolve(minimal()))
  with pytest.raises(AttributeError, match="read-only"):
    view.optimizer.b2 = 1
  with pytest.raises(AttributeError, match="config.optimizer.nothing"):
    _ = view.optimizer.nothing


def test_differences_survive_json_and_ignore_what_does_not_train():
  first = checks.resolve(minimal())
  saved = json.loads(checks.to_json(first))
  assert checks.differences(saved, first) == []
  free = checks.resolve(minimal(log_steps=3, mesh=dict(data=2)))
  assert checks.differences(saved, free) == []
  other = checks.resolve(minimal(seq_len=64, evals=dict(v=evaluator())))
  assert checks.differences(saved, other) == ["seq_len: 256 -> 64"]


def test_a_run_of_an_older_version_goes_on_where_new_keys_have_their_defaults():
  first = checks.resolve(minimal(tokenizer=dict(type="bytes")))
  saved = json.loads(checks.to_json(first))
  del saved["model"]["qk_norm"], saved["optimizer"]["momentum"], saved["model"]["layer_pattern"]
  saved["tokenizer"]["add_bos"], saved["gone"] = True, 1
  for no_decay in ("scale|bias|embedding", "scale|bias|embedding|A_log", "scale|bias|embedding|A_log|sinks",
                   r"scale|bias|embedding|A_log|sinks|xielu/\w+"):  # by default, one version after another
    saved["optimizer"]["wd_mults"] = [[f".*({no_decay})$", 0.0]]
    assert checks.differences(saved, first) == ["gone: 1 -> (absent)"]  # and a default may be a tuple
  first.optimizer.wd_mults = ((".*bias$", 0.0),)
  assert len(checks.differences(saved, first)) == 2
  saved["optimizer"]["wd_mults"], first.optimizer.wd_mults = [], defaults().optimizer.wd_mults
  assert len(checks.differences(saved, first)) == 2
  del saved["optimizer"]["wd_mults"]
  first.model.qk_norm = not first.model.qk_norm
  assert checks.differences(saved, first)[1:] == [f"model.qk_norm: (absent) -> {first.model.qk_norm}"]
  folder = checks.resolve(minimal(tokenizer=dict(type="hf", path="x")))
  assert "tokenizer.add_bos: True -> None" in checks.differences(saved, folder)


def test_a_run_that_goes_on_may_change_what_trains_nothing_and_no_other_key():
  named = dict(evals=dict(v=evaluator()), callbacks=dict(c=dict(type="a.B", x=1)), loggers=dict(w=dict(type="wandb")),
               mesh=dict(data=2))
  free = [key for key in checks.flatten(checks.resolve(minimal(**named))) if not checks.trains(key)]
  sections = {key.partition(".")[0] for key in free if "." in key} - {"precision", "input", "model", "rollout"}
  assert sections == {"mesh", "processes", "evals", "callbacks", "loggers", "profile", "init_from", "export", "plan"}
  whole = [key for key in checks.flatten(checks.resolve(minimal(**named))) if key.partition(".")[0] in sections]
  lengths = [f"{prefix}_{unit}" for prefix in ("log", "ckpt", "keep")
             for unit in ("steps", "examples", "tokens", "epochs", "percent")]
  assert sorted(free) == sorted([
      *whole, *lengths, "keep_last", "keep_best", "keep_best_mode", "sharding_rules", "activation_rules", "remat",
      "deterministic", "precision.offload_optimizer", "report", "resume", "allow_config_changes", "health_silent",
      "input.cache_dir", "input.prefetch", "input.workers", "input.max_over_long", "input.on_bad_row",
      "input.max_bad_rows", "model.scan_layers", "model.attention", "model.attention_block", "model.vocab_chunk",
      "rollout.batch_size", "rollout.reward_workers", "rollout.reward_timeout_seconds", "rollout.environment_workers",
      "rollout.max_without_lesson"])


@pytest.mark.parametrize("key, value", [("attention_logit_cap", 1.0), ("attention_out_bias", True),
                                        ("attention_scale", 0.5)])
def test_keys_that_begin_like_a_free_one_are_not_free(key, value):
  first = checks.resolve(minimal())
  other = checks.resolve(minimal(model={key: value}))
  assert len(checks.differences(json.loads(checks.to_json(first)), other)) == 1
  free = checks.resolve(minimal(model=dict(attention_block=32, scan_layers=False)))
  assert checks.differences(json.loads(checks.to_json(first)), free) == []


def test_a_duration_that_is_unset_is_not_a_changed_key():
  view = checks.View(checks.resolve(minimal(schedule=dict(name="cosine", decay_percent=-1.0))))
  _ = view.input.sources.main.type, view.schedule.name
  checks.audit(view)
  assert checks.differences(json.loads(checks.to_json(checks.resolve(minimal()))), view._node) == []


def test_changing_only_the_strategy_leaves_no_keys_of_the_one_before(monkeypatch):
  monkeypatch.setitem(STRATEGIES, "other", Strategy(None, options=dict(beta=0.1)))
  config = minimal()
  config.strategy.name = "other"
  assert checks.resolve(config).strategy.to_dict() == {"name": "other", "beta": 0.1}
  config.strategy.z_loss = 0.5
  with pytest.raises(ConfigError, match="config.strategy.z_loss"):
    checks.resolve(config)


def test_a_model_of_ones_own_may_have_keys_of_its_own():
  assert checks.resolve(minimal(model=dict(name="my.Model", my_key=3))).model.my_key == 3
  with pytest.raises(ConfigError, match="config.model.my_key"):
    checks.resolve(minimal(model=dict(my_key=3)))



@pytest.mark.parametrize("before", list(STRATEGIES))
@pytest.mark.parametrize("after", list(STRATEGIES))
def test_changing_the_strategys_name_alone_takes_its_own_options(before, after):
  given = defaults()
  given.strategy = strategy(before)
  given.strategy.name = after
  resolved = checks.resolve(given).strategy.to_dict()
  assert resolved.keys() == {"name", *STRATEGIES[after].options}
  assert isinstance(resolved.get("loss"), type(STRATEGIES[after].options.get("loss")))


def test_lists_within_lists_become_tuples_however_deep():
  found = checks.resolve(minimal(optimizer=dict(wd_mults=[["bias$", 0.5], ["scale$", 1.0]])))
  assert found.optimizer.wd_mults == (("bias$", 0.5), ("scale$", 1.0))
  assert checks._as_tuple([[1, [2, (3, [4])]]]) == ((1, (2, (3, (4,)))),)
