"""Explanations: what docs, the source and the tests have of a name is found, and every metric is in the docs."""

import ast
import os
import re
import subprocess
import sys

import pytest

from input_pipeline.examples import advantages
from tests import tiny
from trainer import strategies
from trainer.config import defaults, evaluator, reward, source
from trainer.errors import ConfigError
from trainer.explain import command as explain
from trainer.explain import config_source
from trainer.explain import docs as explain_docs
from trainer.optim import optimizer as optim
from trainer.optim import schedules
from trainer.strategies import kto, preference, presets

KEYS = list(config_source.keys().values())


def documented(name):
  """The passages that are about a name."""
  context, _, last = name.rpartition(".")
  return [passage for score, passage in explain_docs.find([last], context) if score >= 2]


# ----------------------------------------------------------------------------------------------
# Docs have everything.


def chosen_by_configs():
  yield from strategies.STRATEGIES
  yield from preference.LOSSES
  yield from kto.LOSSES
  yield from presets.PRESETS
  yield from (f"f_divergence.{name}" for name in preference.DIVERGENCES)
  yield from (f"ratio.{name}" for name in presets.RATIOS)
  yield from (f"clip.{name}" for name in presets.CLIPS)
  yield from (f"aggregate.{name}" for name in presets.AGGREGATES)
  yield from (f"kl.{name}" for name in presets.ESTIMATORS)
  yield from (f"combine.{name}" for name in advantages.COMBINATIONS)
  yield from (f"baseline.{name}" for name in advantages.BASELINES)
  yield from (f"scale.{name}" for name in advantages.SCALES)
  yield from (f"optimizer.{name}" for name in optim.NAMES)
  yield from (f"schedule.{name}" for name in schedules.NAMES)


@pytest.mark.parametrize("name", chosen_by_configs())
def test_what_a_config_can_choose_is_in_the_docs(name):
  assert documented(name), name


def test_papers_that_the_code_names_are_in_the_docs():
  text = (tiny.ROOT / "docs" / "dpo.md").read_text(encoding="utf-8")
  for name, loss in preference.LOSSES.items():
    assert [paper for paper in re.findall(r"arXiv\s+(\d{4}\.\d{4,5})", loss.__doc__) if paper not in text] == [], name


# Of a step's metrics, those that are no rows of metrics.jsonl; and what is no metric, but written in the same form.
INTERNAL = {"nonfinite", "nonfinite_in_a_row", "nonfinite_leaf", "stop_requests", "moe"}


def name_of(node):
  """A name, with <name> for what an f-string puts there; "": it is none."""
  if isinstance(node, ast.JoinedStr):
    return "".join(part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values)
  return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def keys_of(node):
  for part in ast.walk(node):
    if isinstance(part, ast.Dict):
      yield from (name_of(key) for key in part.keys if key is not None)
    elif isinstance(part, ast.DictComp):
      yield name_of(part.key)
    elif isinstance(part, ast.Call) and getattr(part.func, "id", "") == "dict":
      yield from (word.arg for word in part.keywords if word.arg)


def metrics_of(function, evaluates):
  """The metrics that a function makes: metrics["…"] = …, metrics |= {…}, what a function named for them returns, what
  an evaluator yields."""
  returns = re.search(r"metrics|^(report|statistics|window|to_floats)$", function.name)
  for node in ast.walk(function):
    if isinstance(node, ast.Assign | ast.AugAssign):
      for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        held = target.value if isinstance(target, ast.Subscript) else target
        if (getattr(held, "id", "") or getattr(held, "attr", "")) in ("metrics", "row", "shown"):
          yield from [name_of(target.slice)] if held is not target else keys_of(node.value)
    elif isinstance(node, ast.Return) and returns and node.value is not None:
      yield from keys_of(node.value)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "write_scalars" and len(node.args) > 1:
      yield from keys_of(node.args[1])
    elif evaluates and isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
      yield name_of(node.value.elts[0])


WRITERS = sorted(
    path.relative_to(tiny.ROOT).as_posix() for folder in ("trainer", "trainer/strategies", "evaluators", "models")
    for path in (tiny.ROOT / folder).glob("*.py")
    if not re.match(r"explain|config|notes|metrics|startup|trackers|plan|inspect|sweep|replay", path.name))


def test_every_metric_that_is_written_is_in_the_docs():
  words = {word for passage in explain_docs.passages() for word in explain_docs.code_of(passage.text).split()}
  free = [re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(word))) for word in words if "<" in word]
  found, missing = set(), set()
  for file in WRITERS:
    for node in ast.walk(ast.parse((tiny.ROOT / file).read_text(encoding="utf-8"))):
      if isinstance(node, ast.FunctionDef):
        found |= {(file, name) for name in metrics_of(node, file.startswith("evaluators")) if name not in INTERNAL}
  for file, name in found:
    pattern = re.compile(re.escape(name).replace("<name>", r"[^/]*"))
    if name.strip("<name>/") and name not in words and not any(pattern.fullmatch(word) for word in words) and not any(
        one.fullmatch(name) for one in free):
      missing.add((file, name))
  assert len(found) > 70 and missing == set(), "add them to a table of metrics in docs/"


def test_a_new_metric_is_found():
  (function,) = ast.parse('def loss():\n  metrics["a/b"] = 1\n  metrics |= {f"c/{x}": 2}\n  return dict(d=1)').body
  assert set(metrics_of(function, False)) == {"a/b", "c/<name>"}
  function.name = "_pair_metrics"
  assert "d" in set(metrics_of(function, False))


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
  for name, record in strategies.STRATEGIES.items():
    expected |= {f"strategy({name}).{key}": None if isinstance(value, type) else value
                 for key, value in record.options.items()}
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


@pytest.mark.parametrize("name, line", [
    ("optimizer.b2", "trainer/optim/optimizer.py:{}  return {{\"adam\": (everything, adam(cfg.b1, cfg.b2, cfg.eps))}}"),
    ("schedule.floor", "trainer/optim/schedules.py:{}  floor = cfg.floor"),
    ("model.moe.balance_loss", "balance_loss"), ("evals.loss.top_k", "evaluators/generate.py")])
def test_lines_of_code_that_read_a_key_are_shown(name, line, capsys):
  code = printed(capsys, name)[1].partition("\nCode\n")[2]
  for file, number, text in re.findall(r"^  ([\w/]+\.py):(\d+)  (.*)$", code.partition("\n\n")[0], re.MULTILINE):
    if line.format(number) in f"{file}:{number}  {text}":
      assert " ".join((tiny.ROOT / file).read_text(encoding="utf-8").splitlines()[int(number) - 1].split())[:90] == text
      break
  else:
    pytest.fail(code)


# ----------------------------------------------------------------------------------------------
# Passages of docs.


PAGE = """# Title

The first `alpha` of all.

## A table of metrics

| metric | `one` | `two` |
|---|---|---|
| `a/{min,max}` | 1 | 2 |
| `rewards/<name>/mean` | | `x` |

- `beta`, `gamma`: an item
  of two lines.
- another with `preset="delta"`.

An equation of `eps`:

$$
x = 1
$$

```bash
python -m alpha `beta`
```
"""


def test_passages_and_what_they_are_about(tmp_path, monkeypatch):
  (tmp_path / "page.md").write_text(PAGE)
  monkeypatch.setattr(explain_docs, "DOCS", tmp_path)
  explain_docs.passages.cache_clear()
  try:
    of = lambda *names: [(p.anchor, p.text) for _, p in explain_docs.find(list(names))]  # noqa: E731
    assert of("alpha") == [("title", "The first `alpha` of all.")]
    assert of("two") == [("a-table-of-metrics", "`two`\n  `a/{min,max}`: 2\n  `rewards/<name>/mean`: `x`")]
    assert [text[:6] for _, text in of("a/max")] == ["`a/{mi"] and of("a/mid") == []
    assert [text[:10] for _, text in of("rewards/length/mean", "rewards/<name>/mean")] == ["`rewards/<"]
    assert of("gamma") == [("a-table-of-metrics", "- `beta`, `gamma`: an item of two lines.")]
    assert of("delta") == [("a-table-of-metrics", '- another with `preset="delta"`.')]
    assert of("eps") == [("a-table-of-metrics", "An equation of `eps`:\n  x = 1")]
    assert explain_docs.names() == {"page.md": ["a/min", "a/max", "rewards/<name>/mean", "one", "two", "beta", "gamma"]}
  finally:
    explain_docs.passages.cache_clear()


def test_without_docs_keys_are_explained_and_it_says_where_docs_are(tmp_path, monkeypatch, capsys):
  """As where the packages are installed without their checkout."""
  monkeypatch.setattr(explain_docs, "DOCS", tmp_path / "none")
  explain_docs.passages.cache_clear()
  try:
    assert "config.optimizer.b2" in (out := printed(capsys, "optimizer.b2")[1]) and "not installed" in out
    code, _, error = printed(capsys, "loss.dapo")
    assert code == 1 and "'loss.dapo' is no config key. The documentation is not installed" in error
    assert "not installed" in printed(capsys)[1]
  finally:
    explain_docs.passages.cache_clear()


# ----------------------------------------------------------------------------------------------
# What is printed.


def printed(capsys, *argv):
  code = explain.main(list(argv))
  out, error = capsys.readouterr()
  assert "\033" not in out + error
  return code, out, error


def test_a_preset_is_printed_with_its_values_its_paper_its_code_and_its_tests(capsys):
  code, out, _ = printed(capsys, "loss.dapo")
  assert code == 0
  for part in ("clip_low, clip_high: 0.2, 0.28", "rollout.resample: 10", "2503.14476", '"dapo": dict(',
               "::test_rollouts_of_the_recipes"):
    assert part in out, part
  page, anchor = re.search(r"^docs/(\w+\.md)#(presets)$", out, re.MULTILINE).groups()
  assert f"\n## {anchor.capitalize()}\n" in (tiny.ROOT / "docs" / page).read_text(encoding="utf-8")
  number = int(re.search(r"trainer/strategies/presets\.py:(\d+)  ", out).group(1))
  assert '"dapo"' in (tiny.ROOT / "trainer/strategies/presets.py").read_text(encoding="utf-8").splitlines()[number - 1]


@pytest.mark.parametrize("typed, said", [
    ("ipo", "2310.12036"), ("loss.dpo.ipo", "2310.12036"), ("muon", "orthogonalised momentum"),
    ("clip_ratio/low_mean", "clip_low"), ("approx_kl", "policy/approx_kl"), ("k3", "e^(-d) - 1 + d"),
    ("eval/val/bits_per_byte", "perplexity"), ("mfu", "flops_per_token"),
    ("rewards/length/mean", "one reward function"), ("sampling/kl", "KL(q ‖ p_old)"),
    ("sampling/importance_sampling_ratio/max", "p_old / q"), ("cosine", "cos πt"), ("scale.none", "none  1"),
    ("baseline.none", "none  0"), ("leave_one_out", "the group's other completions"), ("packing", "input.packing")])
def test_names_lead_to_what_docs_say(typed, said, capsys):
  code, out, _ = printed(capsys, typed)
  assert code == 0 and out.startswith(f"{typed}\n") and said in out


def test_keys_are_printed_whatever_names_stand_in_them(capsys):
  _, out, _ = printed(capsys, "config.optimizer.b2")
  assert out.startswith(f"config.optimizer.b2 = {defaults().optimizer.b2}  (float)\n")
  assert "adam(cfg.b1, cfg.b2, cfg.eps)" in out and re.search(r"^docs/\w+\.md#optimizers$", out, re.MULTILINE)
  _, out, _ = printed(capsys, "input.sources.mine.text_key")
  assert out.startswith("config.input.sources.<name>.text_key = 'text'") and "input_pipeline/sources/readers.py:" in out
  _, out, _ = printed(capsys, "strategy.beta")
  dpo, of_kto, of_distill = out.split("config.strategy.beta")[1:]
  assert "strategy dpo" in dpo and "trainer/strategies/dpo.py:" in dpo
  assert "As for dpo. How dear it is to leave the reference" in of_kto
  assert "strategy kto" in of_kto and "trainer/strategies/kto.py:" in of_kto
  assert "strategy distill" in of_distill and "trainer/strategies/distill.py:" in of_distill


@pytest.mark.parametrize("typed, near", [("loss.dapp", "dapo"), ("optimizer.b3", "optimizer.b2"),
                                         ("loss.gprpo", "grpo"), ("muonn", "muon")])
def test_an_unknown_name_is_told_with_the_nearest(typed, near, capsys):
  code, out, error = printed(capsys, typed)
  assert code == 1 and not out and f"'{typed}' is no config key, and nothing in docs/" in error and near in error
  with pytest.raises(ConfigError, match="no config key, and nothing in docs"):
    explain.explain(typed)


def test_without_a_name_all_are_listed(capsys):
  code, out, _ = printed(capsys)
  assert code == 0
  words = set(out.split())
  assert {key.path.rpartition(".")[2] for key in KEYS} <= words and {"dapo", "policy/approx_kl", "cosine"} <= words
  assert printed(capsys, "--help")[0] == 0 and printed(capsys, "a", "b")[0] == 2


def test_explanations_need_no_device():
  done = subprocess.run([sys.executable, "-m", "trainer.explain", "optimizer.b2"], cwd=tiny.ROOT, check=False,
                        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "absent"})
  assert done.returncode == 0 and "optimizer.b2" in done.stdout, done.stderr
