"""Runs of strategy contrastive on rows with images: tests/native.py has the folder of a tiny model."""

import json

import jax
import numpy as np
import pytest

from input_pipeline.evaluation import make_eval_data
from input_pipeline.sources.made import png
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from models import hf
from tests import native
from tests.evaluators.test_retrieval import by_loop
from tests.trainer.strategies.test_contrastive_runs import losses
from trainer import train
from trainer import tree as tree_lib
from trainer.config import defaults, evaluator, source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.embed import command as embed
from trainer.generate.command import load_folder, load_run
from trainer.modes import invariances, verify
from trainer.program import resolve
from trainer.strategies import learns, similarity
from trainer.telemetry.writers import read_rows

SHADES = 6


def picture(folder, number):
  """A file with an image of one shade, in one of three shapes; of each number another."""
  shape = ((24, 32), (16, 40), (30, 30))[number % 3]
  name = f"{number}.png"
  (folder / name).write_bytes(png(np.full((*shape, 3), (40 * number, 255 - 40 * number, 90), np.uint8)))
  return name


def write_rows(folder):
  """Each image once looked for by its name, once the query; a hard negative is another image, or a name."""
  names, rows = [picture(folder, n) for n in range(SHADES)], []
  for n, name in enumerate(names):
    other = (n + 1) % SHADES
    rows.append(dict(query={"text": "<image> shade?", "image": name}, positive=f"shade {n}", negative=f"shade {other}"))
    rows.append(dict(query=[dict(role="user", content=f"find {n}")], positive={"image": name},
                     negative={"image": names[other]} if n % 2 else None))
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder / "rows.jsonl"


def config_of(folder, make=native.squares, **changed):
  hf_folder = folder / "hf"
  if not hf_folder.exists():
    make(hf_folder)
  c = defaults()
  c.update(batch_size=4, grad_accum_steps=2, seq_len=144, total_steps=4, report=False, log_steps=1)
  c.strategy = changed.pop("strategy", strategy("contrastive", negatives=1, pooling="last", query_prompt="Q: "))
  c.model.update(hf=str(hf_folder), head="embedding")
  c.optimizer.learning_rate = 3e-3
  c.input.sources.main = source(type="jsonl", path=str(write_rows(folder)))
  c.input.cache_dir = str(folder / "cache")
  c.update(changed)
  return c


def embedded(loaded_of, at, file, rows=2, prompt="query"):
  mesh = mesh_lib.make_mesh({})
  loaded = loaded_of(at, mesh)
  if loaded_of is load_folder:
    embed.of_folder(loaded, None, None)
  made = embed.Embedder(loaded, mesh, rows)
  return made(embed.read_texts(str(file), "query", made.images), prompt)[0]


@pytest.mark.parametrize("make, body", [
    (native.squares, "SmolVLMModel"), pytest.param(native.folder, "Qwen2_5_VLModel", marks=pytest.mark.slow)])
def test_a_run_with_a_frozen_tower_learns_and_its_export_embeds_the_same(make, body, tmp_path):
  c = config_of(tmp_path, make)
  c.export.path, c.optimizer.freeze = "export", ("^vision/",)
  c.evals.held_out = evaluator(type="retrieval", split="all", at_start=False, recall_at=(1, 2), batch_size=3)
  train(c, tmp_path / "w")
  assert losses(tmp_path / "w")[-1] < losses(tmp_path / "w")[0]
  out = tmp_path / "w" / "export"
  assert json.loads((out / "config.json").read_text())["architectures"] == [body]
  assert (out / "preprocessor_config.json").is_file() and (out / "modules.json").is_file()
  before, after = (tree_lib.flatten(hf.load(path)[1]) for path in (tmp_path / "hf", out))
  assert before.keys() - {"unembed/kernel"} == after.keys()
  for path in after:
    assert np.array_equal(before[path], after[path]) == path.startswith("vision/"), path
  file = tmp_path / "rows.jsonl"
  ours, theirs = embedded(load_run, tmp_path / "w", file), embedded(load_folder, out, file)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
  np.testing.assert_allclose(ours, embedded(load_run, tmp_path / "w", file, rows=5), rtol=0, atol=1e-6)
  check_retrieval(tmp_path)


def check_retrieval(folder):
  """The evaluator's numbers are those of the vectors that the command gives; equal images are one text."""
  rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
  texts = list(dict.fromkeys(json.dumps(text) for row in rows for text in (row["positive"], row["negative"]) if text))
  (folder / "texts.jsonl").write_text("".join(f'{{"query": {text}}}\n' for text in texts))
  queries, found = (embedded(load_run, folder / "w", folder / name, prompt=prompt) for name, prompt in (
      ("rows.jsonl", "query"), ("texts.jsonl", "document")))
  answers = [np.array([texts.index(json.dumps(row["positive"]))]) for row in rows]
  assert len(texts) == 2 * SHADES
  expected = by_loop(queries, found, answers, (1, 2))
  told = [row for row in read_rows(folder / "w" / "metrics.jsonl") if "eval/held_out/mrr@10" in row][-1]
  for name, value in expected.items():
    assert told[f"eval/held_out/{name}"] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("make", [native.squares, pytest.param(native.folder, marks=pytest.mark.slow)])
def test_micro_batches_change_nothing(make, tmp_path):
  """GradCache: the embeddings of all, then a micro-batch at a time."""
  for count in (1, 4):
    train(config_of(tmp_path, make, grad_accum_steps=count, total_steps=1), tmp_path / f"{count}")
  one, four = (next(row for row in read_rows(tmp_path / f"{count}" / "metrics.jsonl") if "loss" in row)
               for count in (1, 4))
  for name in ("loss", "grad_norm", "accuracy", "pairs", "positive_similarity", "negative_similarity"):
    assert four[name] == pytest.approx(one[name], rel=1e-5), name


def test_adapters_go_on_where_they_were(tmp_path):
  def config(**changed):
    c = config_of(tmp_path, **changed)
    c.model.lora.rank, c.model.lora.targets = 2, (r"blocks/attn/[qv]/kernel",)
    return c

  whole = train(config(), tmp_path / "whole")
  stopped = config()
  stopped.callbacks.stop = dict(type="tests.trainer.strategies.test_distill.Keep", stop=2)
  train(stopped, tmp_path / "parts")
  parts = train(config(), tmp_path / "parts")
  assert losses(tmp_path / "parts")[-2:] == losses(tmp_path / "whole")[-2:]
  one, other = (tree_lib.flatten(run.state["params"]) for run in (whole, parts))
  assert all(np.array_equal(one[path], other[path]) for path in one)
  assert any(path.startswith("vision/") and "/lora_b" in path and np.any(leaf) for path, leaf in one.items())


@pytest.mark.slow  # tests/trainer/strategies/test_contrastive_runs.py has a mesh for texts
@pytest.mark.devices(8)
@pytest.mark.host_patches
def test_eight_devices_compute_what_one_does_and_packed_is_as_alone(tmp_path, monkeypatch):
  c = config_of(tmp_path, native.folder, seq_len=288)
  c.mesh.update(data=2, fsdp=2, tensor=2)
  monkeypatch.setattr(invariances, "CHECKS", [check for check in invariances.CHECKS if check.row in ("I2", "I3")])
  results = verify.verify(c, tmp_path / "w")
  assert [result.status for result in results] == ["PASS", "PASS", "PASS", "SKIP", "PASS", "PASS"], results


def batch_of(folder, rows):
  """These rows as a batch, each a row of its own, in their order; with the config."""
  c = config_of(folder, grad_accum_steps=1, strategy=strategy("contrastive"))
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  c.input.packing, c.input.sources.main.split = "none", "all"
  c, _ = resolve(c)
  data = make_eval_data(c, load_tokenizer(folder / "hf"), learns=learns(c), workdir=folder / "work")
  return data.batch(0, len(rows))


def test_equal_images_are_duplicates_and_others_are_not(tmp_path):
  """The same file under another name, beside another image of the same shape: all three have the same tokens."""
  first, second = picture(tmp_path, 0), picture(tmp_path, 3)
  (tmp_path / "copy.png").write_bytes((tmp_path / first).read_bytes())
  names = (first, "copy.png", second)
  batch = batch_of(tmp_path, [dict(query={"text": "what", "image": name}, positive=f"{n}")
                              for n, name in enumerate(names)])
  queries = [tokens[segments == 1].tolist() for tokens, segments in zip(batch["tokens"], batch["segment_ids"],
                                                                        strict=True)]
  assert queries[0] == queries[1] == queries[2]
  asked = np.asarray(jax.jit(similarity.labels, static_argnums=1)(batch, 0).duplicates)
  np.testing.assert_array_equal(asked, [[0, 1, 0], [1, 0, 0], [0, 0, 0]])
  batch = batch_of(tmp_path, [dict(query=f"{n}", positive={"image": name}) for n, name in enumerate(names)])
  shown = np.asarray(jax.jit(similarity.labels, static_argnums=1)(batch, 0).duplicates)
  np.testing.assert_array_equal(shown, asked)
