"""Folders of sentence-transformers: make_sentence_references.py made sentence_references/ with that library."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from models import hf
from models.hf import sentence_transformers
from models.hf.sentence_transformers import Found
from trainer.distributed import mesh as mesh_lib
from trainer.embed import command as embed
from trainer.errors import ConfigError, DataError
from trainer.generate.command import load_folder

REFERENCES = Path(__file__).parent / "sentence_references"
SAID = {"last": Found("last", "query: ", "", 24), "mean": Found("mean", "", "", 24)}


def embedder(folder, pooling=None, max_length=None, rows=2):
  mesh = mesh_lib.make_mesh({})
  loaded = load_folder(folder, mesh)
  embed.of_folder(loaded, pooling, max_length)
  return embed.Embedder(loaded, mesh, rows)


@pytest.mark.parametrize("case", SAID)
def test_embeddings_are_those_of_sentence_transformers(case):
  folder = REFERENCES / case
  assert sentence_transformers.read(folder) == SAID[case]
  with np.load(folder / "reference.npz") as reference:
    texts, made = reference["texts"].tolist(), embedder(folder)
    for prompt, key in (("none", "plain"), ("query", "query")):
      found, cut = made(texts, prompt)
      np.testing.assert_allclose(found, reference[key], rtol=0, atol=2e-6)
      assert cut == (2 if prompt == "query" and SAID[case].query_prompt else 1)
    assert np.abs(reference["plain"] - reference["query"]).max() > 0.01 or case == "mean"


def test_vectors_of_images_are_those_of_sentence_transformers(tmp_path):
  """Which makes a message of each, and of the prompt, and lets it be answered; also of images in a column beside."""
  folder = REFERENCES / "images"
  assert sentence_transformers.read(folder) == Found("last", "Find it.", "", None, True, True)
  made = embedder(folder, max_length=96)
  texts = embed.read_texts(str(folder / "rows.jsonl"), "text", made.images)
  with np.load(folder / "reference.npz") as reference:
    for prompt, key in (("none", "plain"), ("query", "query")):
      np.testing.assert_allclose(made(texts, prompt)[0], reference[key], rtol=0, atol=2e-6)
    assert np.abs(reference["plain"] - reference["query"]).max() > 0.01
    rows = [dict(text="what is it", image=str(folder / "wide.png")), dict(image=str(folder / "small.png"))]
    (tmp_path / "beside.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both, alone = made(embed.read_texts(str(tmp_path / "beside.jsonl"), "text", made.images), "none")[0]
    np.testing.assert_allclose([alone, both], reference["plain"][1:3], rtol=0, atol=2e-6)


def test_what_texts_become_is_written_and_read(tmp_path):
  for messages, answered in ((True, False), (True, True)):
    found = Found("last", "Find it.", "", 96, messages, answered)
    sentence_transformers.write(tmp_path, 16, found, images=True)
    assert sentence_transformers.read(tmp_path) == found
  said = json.loads((tmp_path / "sentence_bert_config.json").read_text())
  theirs = json.loads((REFERENCES / "images" / "sentence_bert_config.json").read_text())
  del theirs["modality_config"]["video"]  # which is not read
  assert {key: said[key] for key in theirs} == theirs


def test_what_is_written_is_read_and_says_what_old_files_said(tmp_path):
  sentence_transformers.write(tmp_path, 16, Found("mean", "query: ", "text: ", 96))
  assert sentence_transformers.read(tmp_path) == Found("mean", "query: ", "text: ", 96)
  for said, own, length in (({}, {"model_max_length": 64}, 64), ({"max_seq_length": 32}, {"model_max_length": 64}, 32),
                            ({}, {"model_max_length": 10**30}, None), ({}, {}, None)):
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(said))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert sentence_transformers.read(tmp_path).max_length == length
  pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
  assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens", "include_prompt"]
  assert pooling["word_embedding_dimension"] == 16
  kinds = [module["type"] for module in json.loads((tmp_path / "modules.json").read_text())]
  assert kinds == [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize")]


@pytest.mark.parametrize("file, content, told", [
    ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "b.Dense"}], "modules Transformer, Dense; re"),
    ("modules.json", [{"type": "a.Transformer", "path": "0_T"}, {"type": "b.Pooling"}], "the Transformer is in '0_T'"),
    ("modules.json", {}, "is no list of modules with their types"),
    ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pools by cls; read are lasttoken, mean"),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "by mean, max_t"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "leaves prompts out of the mean"),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs has 'text'; read is chat_t"),
    ("sentence_bert_config.json", {"processing_kwargs": {"chat_template": {"tools": []}}}, "has 'tools'; read is chat"),
])
def test_what_is_not_computed_is_refused(tmp_path, file, content, told):
  sentence_transformers.write(tmp_path, 16, Found("mean", "", "", 96))
  (tmp_path / file).write_text(json.dumps(content))
  with pytest.raises(hf.HFError, match=told):
    sentence_transformers.read(tmp_path)
  (tmp_path / "modules.json").write_text("[")
  with pytest.raises(hf.HFError, match="modules.json is not valid JSON"):
    sentence_transformers.read(tmp_path)


def test_a_folder_that_does_not_say_how_it_pools_is_asked(tmp_path):
  folder = shutil.copytree(REFERENCES / "last", tmp_path / "folder")
  (folder / "modules.json").unlink()
  with pytest.raises(ConfigError, match="has no modules.json, .* Give --pooling=last or mean"):
    embedder(folder)
  with np.load(folder / "reference.npz") as reference:
    found, _ = embedder(folder, "last", 24)(reference["texts"].tolist())
    np.testing.assert_allclose(found, reference["plain"], rtol=0, atol=2e-6)


def test_texts_are_read_line_by_line_or_by_their_column(tmp_path):
  (tmp_path / "a.txt").write_text("one\n\ntwo\n")
  (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
  assert embed.read_texts(str(tmp_path / "a.txt"), "text") == ["one", "", "two"]
  assert embed.read_texts(str(tmp_path / "a.jsonl"), "body") == ["one", "two"]
  (tmp_path / "a.csv").write_text("id;body\n1;one\n2;two\n")
  assert embed.read_texts(str(tmp_path / "a.csv"), "body") == ["one", "two"]
  (tmp_path / "none.txt").write_text("")
  with pytest.raises(DataError, match="none.txt has no texts"):
    embed.read_texts(str(tmp_path / "none.txt"), "text")


@pytest.mark.parametrize("row, told", [
    ({"text": "one", "image": "a.png"}, "a.jsonl:2: has images, which the model does not see"),
    ({"body": "one"}, "a.jsonl:2: no text in 'text'; its columns are body. Name it by --key"),
    ({"text": ""}, "a.jsonl: 1 rows have nothing in 'text', which has no embedding"),
    ({"text": {"text": " "}}, "a.jsonl:2: text is empty"),
])
def test_a_row_without_a_text_is_told(row, told, tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + json.dumps(row) + "\n")
  with pytest.raises(DataError, match=told):
    embed.read_texts(str(tmp_path / "a.jsonl"), "text")
