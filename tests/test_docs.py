"""The documentation does what it says: examples run as they stand, links lead somewhere, the map is complete."""

import ast
import functools
import io
import json
import re
import sys
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.sources.sources import open_source
from models import api
from tests import tiny
from trainer import strategies, train, tree
from trainer.config import checks as config_checks
from trainer.config import defaults, durations, evaluator, reward, source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.optim import optimizer as optim
from trainer.telemetry.writers import read_rows

DOCS = sorted((tiny.ROOT / "docs").glob("*.md"))
PAGES = [tiny.ROOT / "README.md", *DOCS]


def examples():
  """({file name: code}, {heading: config lines}) of docs/extending.md."""
  files, configs = {}, {}
  for section in (tiny.ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split("\n## ")[1:]:
    for first, code in re.findall(r"^```python\n# (.+?)\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
      if first.partition(":")[0] == "config":
        configs[section.splitlines()[0] + first[len("config"):]] = code
      else:
        files[first] = code
  return files, configs


@pytest.fixture
def project(tmp_path, monkeypatch):
  """The documentation's files as an importable package, and the working folder beside it."""
  for name, code in examples()[0].items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  for name in [name for name in sys.modules if name.split(".")[0] == "my_project"]:
    del sys.modules[name]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def configured(corpus, heading, **changed):
  """The tiny config of three steps without evaluations, changed by the lines in that section."""
  config = tiny.config(corpus, total_steps=3)
  config.evals = {}
  for key, value in changed.items():
    config[key] = value
  exec(examples()[1][heading], {"config": config, "source": source, "evaluator": evaluator,
                                 "strategy": strategy, "reward": reward})
  return config


def rows_of(workdir, key):
  return {row["step"]: row[key] for row in read_rows(workdir / "metrics.jsonl") if key in row}


def test_every_section_has_one_file_and_its_config():
  files, configs = examples()
  assert list(configs) == ["A source", "A model", "A strategy", "A strategy: pairs", "A strategy: rollouts",
                           "An evaluator", "A callback"]
  assert len(files) == 7 and all(name.startswith("my_project/") for name in files)


def write_tar(path, texts):
  """As WebDataset has it, a picture beside each text."""
  with tarfile.open(path, "w") as tar:
    for i, text in enumerate(texts):
      for ending, content in (("caption", text), ("png", b"picture")):
        member = tarfile.TarInfo(f"{i:04}.{ending}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def test_the_source_is_mixed_in_and_names_a_bad_row(project, corpus):
  (project / "data").mkdir()
  write_tar(project / "data" / "a.tar", [f"letter {i}\nof many".encode() for i in range(30)])
  config = configured(corpus, "A source")
  run = train(config, project / "w")
  assert run.data.source_names == ("letters", "main")
  assert rows_of(project / "w", "data/letters/rows")[3] == 12  # half of three steps of eight rows
  assert rows_of(project / "w", "loss/letters").keys() == {1, 2, 3}

  letters = open_source(source(**config.input.sources.letters), "letters", split="all")
  assert [r.fields for r in letters.records()] == [
      dict(caption=f"letter {i}\nof many", png=b"picture") for i in range(30)]
  write_tar(project / "data" / "b.tar", [b"fine", b"\xff"])
  with pytest.raises(DataError, match=r"b\.tar: 0001: a text that is not UTF-8"):
    train(config, project / "other")


def test_the_model_trains_and_keeps_documents_apart(project, corpus):
  config = configured(corpus, "A model", model=defaults().model)
  run = train(config, project / "w")
  shapes = {path: leaf.shape for path, leaf in tree.flatten(run.state["params"]).items()}
  assert shapes == {"embed/embedding": (258, 32), "mix/kernel": (4, 32, 32)}
  losses = rows_of(project / "w", "loss")
  assert losses[1] == pytest.approx(np.log(258), abs=0.1) and losses[3] < losses[1]

  batch = {"tokens": jnp.arange(8)[None], "segment_ids": jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]])}
  hidden = jax.jit(run.model.apply)(run.state["params"], batch).hidden
  changed = jax.jit(run.model.apply)(run.state["params"], batch | {"tokens": batch["tokens"].at[0, 2].set(99)}).hidden
  np.testing.assert_array_equal(hidden[:, :2], changed[:, :2])  # what comes before
  np.testing.assert_array_equal(hidden[:, 3:], changed[:, 3:])  # the other document
  assert not np.array_equal(hidden[:, 2], changed[:, 2])

  config.model.window = 33
  with pytest.raises(ConfigError, match="model.window is 33; ShortContext needs 1 to seq_len=32"):
    train(config, project / "other")


def test_the_strategy_adds_its_term_and_its_metric(project, corpus):
  train(configured(corpus, "A strategy"), project / "w")
  loss, nll, entropy = (rows_of(project / "w", key) for key in ("loss", "nll", "entropy"))
  assert entropy[1] == pytest.approx(np.log(258), abs=0.1)  # nearly uniform at first
  for step in (1, 2, 3):
    assert loss[step] == pytest.approx(nll[step] - 0.05 * entropy[step], rel=1e-5)


def test_the_preference_loss_is_that_of_dpo(project, corpus):
  (project / "pairs.jsonl").write_text("".join(json.dumps(
      dict(prompt=f"{i} and {i + 1}", chosen=f" then {i + 2}", rejected=f" or {i * 7}")) + "\n" for i in range(24)))
  pairs = source(type="jsonl", path=str(project / "pairs.jsonl"))
  own = configured(corpus, "A strategy: pairs")
  own.input.sources.main = pairs
  theirs = own.copy_and_resolve_references()
  theirs.strategy = strategy("dpo", beta=0.2)
  for name, config in (("own", own), ("theirs", theirs)):
    train(config, project / name)
  losses = [rows_of(project / name, "loss") for name in ("own", "theirs")]
  assert losses[0][1] == pytest.approx(np.log(2), rel=1e-6) and losses[0][3] < losses[0][1]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)
  assert rows_of(project / "own", "margin") == pytest.approx(rows_of(project / "theirs", "rewards/margins"), abs=1e-6)


def test_the_loss_on_rollouts_is_what_it_says_and_raises_rewards(project, corpus):
  (project / "prompts.jsonl").write_text("".join(json.dumps(dict(prompt=f"{i}: ")) + "\n" for i in range(40)))
  config = configured(corpus, "A strategy: rollouts", total_steps=16)
  config.input.sources.main = source(type="jsonl", path=str(project / "prompts.jsonl"))
  config.schedule.update(name="constant", warmup_steps=0)
  config.rollout.reward_workers = 0
  run = train(config, project / "w")
  rewards = [value for _, value in sorted(rows_of(project / "w", "reward").items())]
  assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.08

  # By whole logits in float64: two completions in a row, of 2 and 3 tokens behind prompts of 2.
  segments, weights = np.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 0]), np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
  batch = {"tokens": np.arange(40, 50), "positions": np.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 0]), "segment_ids": segments,
           "loss_weights": weights.astype(np.float32), "segment_roles": np.ones(2, np.int32),
           "advantages": np.array([0.5, -1.0])}
  batch = {key: jnp.asarray(values)[None] for key, values in batch.items()}
  params = run.state["params"]
  hidden, kernel = run.model.apply(params, batch).hidden[0], run.model.unembedding(params)
  logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)[:, :run.model.num_real_vocab]
  logps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  told = [logps[t - 1, 40 + t] for t in np.flatnonzero(weights)]
  expected = -(np.exp(0.5 / 0.5) * sum(told[:2]) + np.exp(-1.0 / 0.5) * sum(told[2:])) / 5
  terms, _ = strategies.of(config).loss(run.model, params, batch, None, config.strategy)
  assert float(terms["loss"].sum[0] / terms["loss"].weight[0]) == pytest.approx(expected, rel=1e-5)


def test_the_evaluator_agrees_with_the_built_in_loss(project, corpus):
  evals = {"val": evaluator(type="loss", eval_steps=3)}
  run = train(configured(corpus, "An evaluator", evals=evals), project / "w")
  early, late, gain = (rows_of(project / "w", f"eval/context/{key}") for key in ("early", "late", "gain"))
  assert early.keys() == {0, 2, 3} and gain[3] == early[3] - late[3]  # 50% of three steps is every second step
  whole = run.last_eval[1]["eval/val/loss"]
  assert min(early[3], late[3]) < whole < max(early[3], late[3])


def test_the_callback_measures_the_updates(project, corpus):
  config = configured(corpus, "A callback", total_steps=4)
  config.optimizer.update(name="sgd", learning_rate=1e-2, weight_decay=0.0, clip_norm=0.0)
  config.schedule.update(name="constant", warmup_steps=0)
  train(config, project / "w")
  ratios = rows_of(project / "w", "update_ratio")
  assert ratios.keys() == {2, 4}
  # |all updates| <= (the largest ratio) * |all parameters|; the logged norm is the one after the update.
  for step, ratio in ratios.items():
    assert ratio >= rows_of(project / "w", "update_norm")[step] / rows_of(project / "w", "param_norm")[step] * 0.99
    assert ratio < 1.0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
  text = page.read_text(encoding="utf-8")
  broken = []
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if re.match(r"[a-z]+:", target):
      continue
    path, _, anchor = target.partition("#")
    other = (page.parent / path).resolve() if path else page
    if not other.exists() or anchor and anchor not in anchors(other):
      broken.append(target)
  assert not broken


def anchors(page):
  """GitHub's anchors of a page's headings."""
  outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
  headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_begins_with_the_two_commands():
  text = (tiny.ROOT / "README.md").read_text(encoding="utf-8")
  assert len(text.splitlines()) <= 120
  first, second = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:2]
  assert "-m trainer --config=configs/quickstart.py" in first and "-m pytest" in second


def test_named_tests_exist():
  """docs/exactness.md names the tests that show each row of its table."""
  text = (tiny.ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
  named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", text)
  assert len(named) > 10
  for name, path in named:
    assert f"def {name}(" in (tiny.ROOT / path).read_text(encoding="utf-8"), (name, path)


def config_examples():
  """(page, config) of every other Python block in the documents that makes a `config` or defines get_config."""
  for page in DOCS:
    if page.name == "extending.md":
      continue
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
      if "defaults()" not in code:
        continue
      namespace = {}
      exec(code, namespace)
      yield page.name, namespace["config"] if "config" in namespace else namespace["get_config"]()


# Rows of the table of exactness that cost half a minute and have parts of theirs in other rows: every night alone.
AT_NIGHT = {"test_two_processes_go_back_before_a_spike_as_one_does", "test_a_stopped_run_continues_bitwise"}


def test_a_case_of_each_row_of_the_table_of_exactness_is_run_by_default(request):
  """Seen where the tests of all these files were collected, and not where some were chosen."""
  text = (tiny.ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
  rows = [{(file, name) for name, file in re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", line)}
          for line in text.splitlines() if line.startswith("|")]
  by_default = {(item.path.relative_to(tiny.ROOT).as_posix(), item.name.partition("[")[0])
                for item in request.session.items if item.get_closest_marker("slow") is None}
  if {file for row in rows for file, _ in row} <= {file for file, _ in by_default}:
    assert not [row for row in rows if row and not row & by_default and AT_NIGHT.isdisjoint(name for _, name in row)]


@pytest.mark.devices(8)
def test_config_examples_have_an_effect():
  """Keys and types are right, and each rule of the examples matches parameters of the default model."""
  mesh = mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2))
  checked = 0
  for _, given in config_examples():
    config = config_checks.resolve(given)
    model = api.make_model(config.model, vocab_size=258, params_dtype="float32", compute_dtype="float32")
    shapes = model.abstract_params()
    optim.make_optimizer(config.optimizer, config.schedule, shapes, total_steps=1000,
                         to_steps=functools.partial(durations.steps, run=durations.RunLengths(1000, 8, 256, None)))
    mesh_lib.param_shardings(shapes, mesh, config.sharding_rules)
    checked += 1
  assert checked >= 6


def test_named_keys_exist():
  """Dotted keys in the documents, `optimizer.b2` say, are keys of the config."""
  known = set(config_keys(defaults())) | {f"input.sources.<name>.{k}" for k in source()}
  known |= {f"strategy.{option}" for record in strategies.STRATEGIES.values() for option in record.options}
  sections = {key.split(".")[0] for key in known if "." in key} - {"input"}
  unknown = set()
  for page in DOCS:
    for key in re.findall(r"`(?:config\.)?([a-z_]+\.[a-z_0-9.]+)`", page.read_text(encoding="utf-8")):
      files = (".py", ".md", ".json", ".jsonl", ".safetensors", ".html", ".svg")
      if key.split(".")[0] in sections and key not in known and not key.endswith(files):
        unknown.add((page.name, key))
  assert not unknown


def config_keys(config, prefix=""):
  for key, value in config.items():
    yield prefix + key
    if hasattr(value, "items"):
      yield from config_keys(value, f"{prefix}{key}.")


def test_the_seam_is_documented_as_it_is():
  """The example model has every member that models/api.py asks for."""
  members = {name for name in vars(api.Model) if not name.startswith("_")} | set(api.Model.__annotations__)
  code = examples()[0]["my_project/models.py"]
  assert [name for name in sorted(members) if not re.search(rf"\b{name}\b", code)] == []


def strings_of_the_code():
  """All strings in the code, those of f-strings with … for what is filled in."""
  for folder in ("trainer", "models", "input_pipeline", "evaluators"):
    for path in (tiny.ROOT / folder).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
          yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
          yield re.sub(r"%[sdrg]", "…", node.value)


def test_messages_that_are_explained_are_messages_of_the_code():
  """docs/troubleshooting.md: each fixed part of a message stands in the code, those of one message in one string."""
  rows = [line for line in (tiny.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
          if line.startswith("| `")]
  assert len(rows) > 20
  code = list(strings_of_the_code())
  for row in rows:
    for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
      parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
      assert parts and any(all(part in string for part in parts) for string in code), message
