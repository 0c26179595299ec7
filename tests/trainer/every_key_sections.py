"""Every key of what a config may have several or one of several kinds of: sources, evaluators, rewards, strategies.

As in every_key_table.py. A key that several types read has a list of rows, one for each at least.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.sources.sources import open_source
from tests.trainer.every_key import Made, digest, loss, scored
from tests.trainer.every_key_bases import (
  Files,
  answers,
  images,
  judged,
  matches,
  pairs,
  prompts,
  responses,
  talks,
  text,
)
from tests.trainer.every_key_runs import evaluating_steps, first_reference, sampled
from tests.trainer.every_key_table import Row, data, durations, program, run, schedule, update
from trainer.config import evaluator, source, strategy
from trainer.errors import ConfigError
from trainer.rollouts.experience import Trajectory, collect
from trainer.rollouts.returns import Returns
from trainer.rollouts.reward_pool import Group, Scorer
from trainer.strategies import learns, preference, presets


def path_of(key: str) -> str:
  """Where a key of a section stands in the configs here."""
  section, _, rest = key.partition(".")
  section = "strategy" if section.startswith("strategy(") else section
  places = dict(source="input.sources.main", evaluator="evals.val", reward="rollout.rewards.score", strategy="strategy")
  return f"{places[section]}.{rest.partition('=')[0]}"


# ----------------------------------------------------------------------------------------------
# Sources: which texts come out.


def texts(m: Made) -> list[str]:
  """The texts of the training sources, in order."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "tensorflow_datasets", _datasets())
    return list(loader.train_texts(m.config, learns(m.config))())


def copies(m: Made) -> list[str]:
  """Where the texts of the training source are read from."""
  return [record.where for record in open_source(m.config.input.sources.main, "main").records()]


def _datasets() -> ModuleType:
  """In place of the library of that name: what a data set says is its name, its folder and its split."""
  def builder(name: str, data_dir: str) -> Any:
    splits = {split: SimpleNamespace(filepaths=[]) for split in ("train", "test")}

    def read(split: str) -> list[dict[str, str]]:
      return [dict(text=f"{name} {data_dir} {split}", body="another text")]

    return SimpleNamespace(info=SimpleNamespace(splits=splits, features=dict(text=None, body=None)), data_dir=data_dir,
                           as_data_source=read)

  module = ModuleType("tensorflow_datasets")
  module.builder = builder
  return module


def _parquet(files: Files, name: str) -> str:
  path = files.folder / f"{name}.parquet"
  pq.write_table(pa.table(dict(text=[f"{name} one", "two"], body=["three", "four"])), path)
  return str(path)


def _groups(files: Files, name: str) -> str:
  """A file of two row groups."""
  path = files.folder / f"{name}.parquet"
  pq.write_table(pa.table(dict(text=["one", "two"])), path, row_group_size=1)
  return str(path)


def _records(files: Files, name: str) -> str:
  path = files.folder / f"{name}.arrayrecord"
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for text_of in (f"{name} one", "two"):
    writer.write(b'{"text": "%s", "body": "another text"}' % text_of.encode())
  writer.close()
  return str(path)


def _arrow(files: Files, name: str) -> str:
  """A folder as `datasets` saves a DatasetDict."""
  folder = files.folder / name
  for split in ("train", "test"):
    (folder / split).mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(text=[f"{name} {split}", "two"], body=["three", "four"]))
    with pa.OSFile(str(folder / split / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table)
    (folder / split / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
  (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  return str(folder)


def _object(files: Files) -> str:
  """A file that is one object, of which two keys hold rows."""
  return files.text("object.json", '{"a": [{"text": "one"}], "b": [{"text": "two"}]}')


def _lines(files: Files, name: str) -> str:
  return files.jsonl(name, [dict(text=f"{name} one", body="two"), dict(text="three", body="four")])


def _table(files: Files, name: str) -> str:
  return files.text(f"{name}.csv", f"text,body\n{name} one,two\nthree,four\n")


def of(kind: str, **options: Any) -> dict[str, Any]:
  """The training source is of that type; options that are functions are of `Files`."""
  return {"input.sources.main": source(type=kind)} | {f"input.sources.main.{k}": v for k, v in options.items()}


WRITTEN = dict(jsonl=_lines, csv=_table, parquet=_parquet, arrow=_arrow, arrayrecord=_records)
TFDS = of("tfds", dataset="a", path="folder")
OTHER = {"input.sources.other": lambda f: source(type="text", path=f.text("other.txt", "zz " * 400))}

SOURCE = {
  "source.type": data("arithmetic", base=answers, see=texts),
  "source.path": [data(lambda f: f.text("one.txt", "one"), of("text", path=lambda f: str(f.corpus)), see=texts),
                  *(data(lambda f, write=write: write(f, "b"), of(kind, path=lambda f, write=write: write(f, "a")),
                         see=texts) for kind, write in WRITTEN.items()),
                  data("elsewhere", TFDS, see=texts)],
  "source.copies": [data(lambda f: str(f.folder / "there"), of(
      kind, path=lambda f, write=write, more=more: f"file://{write(f, 'a')}{more}",
      copies=lambda f: str(f.folder / "here")), see=copies)
      for kind, write, more in (("text", lambda f, name: f.corpus, ""), *(
          (kind, write, "/train/*.arrow" * (kind == "arrow")) for kind, write in WRITTEN.items()))],
  "source.text_key": [*(data("body", of(kind, path=lambda f, write=write: write(f, "a")), see=texts)
                        for kind, write in WRITTEN.items()), data("body", TFDS, see=texts)],
  "source.rows_key": data("b", of("jsonl", path=_object, rows_key="a"), see=texts),
  "source.documents": data("line", of("text", path=lambda f: f.text("lines.txt", "one\ntwo\n")), see=texts),
  "source.dataset": [data("b", TFDS, see=texts), data("name", of("digits", max_documents=4), images, texts),
                     *(data("chat", of(kind, max_documents=4), answers, texts)
                       for kind in ("python_docstrings", "arithmetic", "arithmetic_mistakes")),
                     *(data("chat", of(kind, max_documents=4), pairs, texts)
                       for kind in ("python_docstring_pairs", "arithmetic_pairs"))],
  "source.dataset_split": [data("test", TFDS, see=texts),
                           data("test", of("arrow", path=lambda f: _arrow(f, "a")), see=texts)],
  "source.split": data("validation", see=texts),
  "source.validation_fraction": data(0.6, see=texts),
  "source.max_documents": data(3, see=texts),
  "source.weight": data(5.0, OTHER),
  "source.stream_files": data(1, see=texts),  # a BPE is trained on the first part
  "source.stream_bytes": [
      data(1, of(kind, path=lambda f, write=write: write(f, "a"), stream_files=1, **more), see=texts)
      for kind, write, more in (
          ("jsonl", _lines, {}), ("csv", _table, {}), ("parquet", _groups, {}),
          ("text", lambda f, name: f.text(f"{name}.txt", "one\ntwo\n"), dict(documents="line")))],
}

# ----------------------------------------------------------------------------------------------
# Evaluators: what they give and write.


def rows_at_a_time(m: Made) -> int:
  """Rows of a batch, on which no value depends."""
  ev = m.evaluator
  return ev._sampler.rows if hasattr(ev, "_sampler") else getattr(ev, "_examples", ev)._batch_size


def questions(files: Files) -> ConfigDict:
  """Fine-tuning on questions with more than one column for each part."""
  config = text(files)
  answers = ("yes", "two b")
  rows = [dict(prompt=f"q {n}", completion=answers[n % 2], other=f"and {n}?", reply=answers[(n + 1) % 2],
               choices=["yes", "two b", "no"], more=["two b", "none", "yes"]) for n in range(12)]
  config.input.sources = dict(main=source(type="jsonl", path=files.jsonl("questions", rows), split="train",
                                          validation_fraction=0.5))
  config.strategy = strategy("sft")
  return config


def domains(files: Files) -> ConfigDict:
  """Such questions that name their teacher, "yes" or "no"."""
  config = questions(files)
  rows = [dict(prompt=f"q {n}", completion="yes", domain=("yes", "no")[n % 2]) for n in range(12)]
  config.input.sources.main.path = files.jsonl("domains", rows)
  return config


def preferred(files: Files) -> ConfigDict:
  config = pairs(files)
  config.input.sources.main.update(split="train", validation_fraction=0.5)
  return config


def searched(files: Files) -> ConfigDict:
  config = matches(files)
  config.input.sources.main.update(split="train", validation_fraction=0.5)
  return config


COLUMNS = dict(prompt_key="prompt", answer_key="completion")
KINDS: dict[str, tuple[Callable, ConfigDict]] = {
  "loss": (text, evaluator(type="loss")),
  "samples": (text, evaluator(type="samples", prompts=("one", "two"), max_new_tokens=8)),
  "generate": (questions, evaluator(type="generate", max_new_tokens=8, temperature=1.0, num_samples=2, **COLUMNS)),
  "classify": (questions, evaluator(type="classify", options=("yes", "two b"), **COLUMNS)),
  "preference": (preferred, evaluator(type="preference")),
  "retrieval": (searched, evaluator(type="retrieval")),
}


def ev(kind: str, value: Any, see: Callable = scored, **options: Any) -> Row:
  """A row of a key of that type of evaluator."""
  base, made = KINDS[kind]
  given = {"evals.val": made} | {f"evals.val.{key}": other for key, other in options.items()}
  return run(see, value, given, base)


# Strings of which some text of an untrained model has one.
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def _other_source(files: Files) -> ConfigDict:
  rows = [dict(prompt="o", completion="yes", chosen="yes", rejected="no", query="o", positive="yes",
               text="hello")]
  return ConfigDict(dict(o=source(type="jsonl", path=files.jsonl("others", rows))))


WITH_SOURCES = ("loss", "generate", "classify", "preference", "retrieval")
EVALUATOR = {
  "evaluator.type": run(scored, "samples", {"evals.val": evaluator(type="loss", prompts=("a",), max_new_tokens=8)}),
  **{f"evaluator.{key}": row for key, row in durations(
    "eval", evaluating_steps, {"evals.val": evaluator(type="loss")}).items()},
  **{f"evaluator.{key}": schedule(value, {"evals.val": evaluator(type="loss")}, evaluating_steps)
     for key, value in dict(at_start=False, at_end=False, on_error="warn").items()},
  "evaluator.sources": [ev(kind, _other_source) for kind in WITH_SOURCES],
  "evaluator.split": [ev(kind, "all") for kind in WITH_SOURCES],
  "evaluator.max_documents": [ev(kind, 1) for kind in WITH_SOURCES],
  "evaluator.batch_size": [ev(kind, 16, rows_at_a_time) for kind in KINDS],
  "evaluator.baselines": ev("loss", ("gzip",)),
  "evaluator.prompts": ev("samples", ("one", "three")),
  **{f"evaluator.{key}": [ev(kind, value) for kind in ("samples", "generate")]
     for key, value in dict(max_new_tokens=4, temperature=0.3).items()},
  "evaluator.stop": [ev(kind, LETTERS) for kind in ("samples", "generate")],
  "evaluator.keep_stop": [ev(kind, True, stop=LETTERS) for kind in ("samples", "generate")],
  **{f"evaluator.{key}": ev("generate", value) for key, value in dict(
    top_k=2, top_p=0.2, min_p=0.9, num_samples=3, pass_at=(1, 2), extract="b+", match="vqa").items()},
  **{f"evaluator.{key}": [ev(kind, value) for kind in ("generate", "classify")]
     for key, value in dict(prompt_key="other", answer_key="reply").items()},
  "evaluator.options": ev("classify", ("yes", "two b", "no")),
  "evaluator.options_key": ev("classify", "more", options=(), options_key="choices"),
  "evaluator.score": ev("classify", "mean"),
  "evaluator.with_end": ev("classify", False),
  "evaluator.recall_at": ev("retrieval", (1, 2)),
}

# ----------------------------------------------------------------------------------------------
# Rewards: the scores of some completions.


def scores(m: Made) -> list:
  """Those of completions of a prompt whose right answer is 5, and of another column 6; and the weights."""
  said = ["5", "6 6 6 6 6", "#### 7 and 5", "<a>5</a>"]
  with Scorer(m.config.rollout.rewards, 0, 60.0) as scorer:
    found = scorer.score([Group("2+3=", said, [list(map(ord, one)) for one in said], {"answer": "5", "other": "6"})])
  return digest([found.values, found.failed, scorer.weights])


def rewarded(value: Any, kind: str, **options: Any) -> Row:
  return run(scores, value, {"rollout.rewards.score": ConfigDict(dict(type=kind, **options))}, prompts)


REWARD = {
  "reward.type": rewarded("numeric", "exact_match"),
  "reward.weight": rewarded(2.0, "exact_match"),
  "reward.answer_key": [rewarded("other", "exact_match"), rewarded("other", "numeric")],
  "reward.pattern": [rewarded(r"\d", "exact_match"), rewarded(r"<a>.*", "numeric"), rewarded("7", "regex", pattern="a"),
                     rewarded(r"\d", "format", pattern="a")],
  "reward.min_length": rewarded(9, "length", min_length=2),
  "reward.max_length": rewarded(5, "length", max_length=20),
  "reward.cache_length": rewarded(15, "length", max_length=20),
  "reward.ngram": rewarded(1, "repetition"),
  "reward.max_penalty": rewarded(0.5, "repetition"),
  "reward.path": run(sampled, lambda f: f.scorers[1], {
    "rollout.rewards.score": lambda f: ConfigDict(dict(type="model", path=f.scorers[0]))}, prompts),
}

# ----------------------------------------------------------------------------------------------
# Strategies.


def noise(m: Made) -> str:
  """The loss, with dropout that the strategy's check would refuse."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("trainer.strategies.check", lambda config: None)
    return loss(m)


def strategies(name: str, rows: dict[str, Row]) -> dict[str, Row]:
  """The rows with that strategy in their configs."""
  return {f"strategy({name}).{key}": row._replace(given={"strategy": strategy(name)} | row.given)
          for key, row in rows.items()}


def returned(m: Made) -> list:
  """What is made of rewards and values: advantages and returns of tokens."""
  rng, sampled = np.random.default_rng(0), np.array([0, 1, 1, 1])
  units = [[(Trajectory(np.arange(4), sampled, sampled, 1, "stop"), reward, 0)] for reward in (1.0, -2.0)]
  made = Returns(m.config.strategy).make(collect(units), rng.normal(size=8), rng.normal(size=8))
  return digest(list(made))


def first_critic(m: Made) -> dict:
  """The critic that the run begins with."""
  return digest(m.begun.run.state["params"]["critic"])


def said_against(m: Made) -> str:
  """Why the config is refused; "": it is not."""
  try:
    _ = m.resolved
  except ConfigError as error:
    return str(error)
  return ""


def _reference(base: Callable, given: dict[str, Any]) -> dict[str, Row]:
  """Rows of the keys on a reference policy; `given`: what makes the strategy compare with one."""
  return {
    "reference": run(first_reference, lambda f: f.run, given, base),
    "precompute": program(True, given),
    "reference_ema": update(0.5, given),
    "reference_ema_steps": update(7, given | {"strategy.reference_ema": 0.5}),
    "disable_dropout": program(False, {"model.dropout": 0.5}, see=noise),
  }


SMOOTHING = {"strategy.label_smoothing": 0.1}
KL = {"strategy.kl_coef": 0.1}
STRATEGY = {
  **strategies("seq", dict(label_smoothing=program(0.1), z_loss=program(0.1),
                            mtp_weight=program(0.5, {"model.mtp_layers": 1}))),
  **strategies("sft", dict(label_smoothing=program(0.1), z_loss=program(0.1), dft=program(True),
                            mtp_weight=program(0.5, {"model.mtp_layers": 1}))),
  "strategy(sft).normalize": data("sequence", base=questions),
  **strategies("dpo", {
    **{f"loss.{name}": program(0.7, SMOOTHING) for name in preference.LOSSES},
    "beta": program(0.5), "label_smoothing": program(0.1), "f_divergence": program("js"),
    "alpha": program(0.3, {"strategy.f_divergence": "alpha"}), "ld_alpha": program(0.5), "wpo": program(True),
    "simpo_gamma": program(0.9, {"strategy.loss.simpo": 1.0}), "cpo_alpha": program(0.9, {"strategy.loss.cpo": 1.0}),
    "discopop_tau": program(0.2, {"strategy.loss.discopop": 1.0}), **_reference(pairs, {})}),
  **strategies("kto", {
    "loss": program("apo_zero_unpaired"), "beta": program(0.5), "desirable_weight": program(0.5),
    "undesirable_weight": program(0.5), **_reference(judged, {})}),
  **{key: row._replace(given=row.given | {"strategy.teacher": lambda f: f.hf}) for key, row in strategies("distill", {
    "beta": program(0.9), "temperature": program(0.7), "cached_top_k": program(3)}).items()},
  **strategies("distill", {"teachers": program(lambda f: {"a": {"path": f.hf}, "b": {"path": f.other_hf}},
                                               {"strategy.teachers": lambda f: {"a": {"path": f.hf}}}, questions),
                           "teacher_key": data("domain", {"strategy.teachers": lambda f: {
                               "yes": {"path": f.hf}, "no": {"path": f.hf}}}, domains),
                           "teacher": run(first_reference, lambda f: f.other_hf, {"strategy.teacher": lambda f: f.hf},
                                          questions),
                           "normalize": data("sequence", {"strategy.teacher": lambda f: f.hf}, questions)}),
  **{key: row._replace(given={"model.head": "score"} | row.given) for key, row in strategies("reward", {
    "center_rewards_coefficient": program(0.1),
    "disable_dropout": program(False, {"model.dropout": 0.5}, see=noise)}).items()},
  **{f"strategy(contrastive).{key}": row for key, row in {
    **{key: program(value, base=matches) for key, value in dict(
      loss="siglip", symmetric=True, pooling="mean", temperature=0.3, mask_duplicates=False).items()},
    "bias": program(-3.0, {"strategy.loss": "siglip"}, matches),
    "negatives": data(2, base=matches), "max_length": data(4, base=matches),
    "query_prompt": data("Q", base=matches), "document_prompt": data("D", base=matches),
    "text_ends": data("tokenizer", base=matches),
    "as_messages": data(True, {"chat.template": "plain"}, matches),
    "generation_prompt": data(True, {"chat.template": "plain"}, talks)}.items()},
  **strategies("grpo", {
    **{f"preset={name}": program(name) for name in presets.PRESETS if name not in ("grpo", "gdpo")},
    "preset=gdpo": run(sampled, "gdpo", base=prompts), "combine": run(sampled, "normalize_then_sum", base=prompts),
    "sapo_temperature_pos": program(2.0, {"strategy.clip": "sapo"}),
    "sapo_temperature_neg": program(2.0, {"strategy.clip": "sapo"}), "off_policy_mask_threshold": program(0.5),
    "ratio": program("sequence"), "clip": program("cispo"), "clip_low": program(0.1), "clip_high": program(0.3),
    "clip_dual": program(3.0), "aggregate": program("token"),
    "aggregate_length": program(7, {"strategy.aggregate": "constant"}),
    "kl_coef": program(0.2, KL), "kl": program("k2", KL), "kl_corrected": program(False, KL),
    "correction": program("token_mask", base=prompts),
    "correction_min": program(0.5, {"strategy.correction": "token_mask"}, prompts),
    "correction_max": program(2.0, {"strategy.correction": "sequence_truncate"}, prompts),
    "entropy_coef": program(0.1), "temperature": program(0.5), **_reference(responses, KL)}),
  **{key: row._replace(base=prompts) for key, row in strategies("ppo", {
    "critic": run(first_critic, lambda f: f.hf),
    "gamma": program(0.9, see=returned), "gae_lambda": program(0.5, see=returned),
    "whiten": program(False, see=returned), "whiten_rewards": program(True, see=returned),
    "kl_coef": program(0.2, see=returned), "kl": program("k2", see=returned), "kl_in": program("loss"),
    "kl_corrected": program(False, {"strategy.kl_in": "loss"}),
    "value_coef": program(0.5), "value_clip": program(0.1), "clip_low": program(0.1), "clip_high": program(0.3),
    "clip_dual": program(3.0), "aggregate": program("sequence"), "entropy_coef": program(0.1),
    "correction": program("token_mask"), "correction_min": program(0.5, {"strategy.correction": "token_mask"}),
    "correction_max": program(2.0, {"strategy.correction": "sequence_truncate"}),
    "temperature": run(said_against, 0.5),  # it is that of the rollouts
    **{key: row for key, row in _reference(prompts, {}).items() if key != "precompute"}}).items()},
  "strategy(grpo).baseline": [data("leave_one_out", {"strategy.scale": "none"}, responses),
                              run(sampled, "leave_one_out", {"strategy.scale": "none"}, prompts)],
  "strategy(grpo).scale": [data("none", base=responses), run(sampled, "none", base=prompts)],
}

SECTIONS = SOURCE | EVALUATOR | REWARD | STRATEGY
