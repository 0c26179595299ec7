"""A head that scores sequences against transformers: make_score_references.py made the files in score_references/."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import hf
from models.hf import families
from models.spec import ARCHITECTURE_KEYS
from trainer.errors import ConfigError
from trainer.strategies import sequences

REFERENCES = Path(__file__).parent / "score_references"
CASES = sorted(p.name for p in REFERENCES.iterdir())


@pytest.fixture(scope="module", params=CASES)
def case(request):
  """(folder, model, params, reference)"""
  folder = REFERENCES / request.param
  with np.load(folder / "reference.npz") as reference:
    return folder, *hf.load(folder, dtype="float32"), dict(reference)


def padded(reference):
  """The texts, a row each."""
  tokens = reference["tokens"]
  there = (tokens > 0).astype(np.int32)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return dict(tokens=tokens, positions=positions, segment_ids=there, segment_roles=np.ones((len(tokens), 1), np.int32))


def packed(reference):
  """The texts one after another in one row, with padding behind them and room for one more."""
  texts = [row[row > 0] for row in reference["tokens"]]
  sizes, rest = [len(text) for text in texts], 4
  batch = dict(tokens=np.concatenate([*texts, np.zeros(rest)]),
               positions=np.concatenate([*map(np.arange, sizes), np.zeros(rest)]),
               segment_ids=np.concatenate([np.repeat(np.arange(1, len(texts) + 1), sizes), np.zeros(rest)]))
  return {key: values.astype(np.int32)[None] for key, values in batch.items()} | dict(
      segment_roles=np.array([[1] * len(texts) + [0]], np.int32))


def scores(model, params, batch):
  """[B, S, num_labels]"""
  return sequences.scores(model, params, model.apply(params, batch).hidden, batch)


def close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_scores_are_those_of_transformers(case):
  _, model, params, reference = case
  close(scores(model, params, padded(reference))[:, 0], reference["scores"])


def test_so_they_are_in_packed_rows(case):
  _, model, params, reference = case
  close(scores(model, params, packed(reference))[0, :-1], reference["scores"])


@pytest.mark.parametrize("laid", [padded, packed])
def test_gradients_are_those_of_transformers(case, laid, tmp_path):
  _, model, params, reference = case
  batch = laid(reference)
  there = jnp.asarray(batch["segment_roles"] > 0)[:, :, None]
  grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(scores(model, p, batch)) * there)))(params)
  hf.save(model, grads, tmp_path)  # under transformers' names
  found = load_file(tmp_path / "model.safetensors")
  for i, name in enumerate(reference["gradient_names"]):
    close(found[str(name)], reference[f"gradient_{i}"])


def test_what_is_written_is_what_was_read(case, tmp_path):
  folder, model, params, _ = case
  hf.save(model, params, tmp_path)
  ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path, folder))
  assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
  ours, theirs = (json.loads((at / "config.json").read_text()) for at in (tmp_path, folder))
  ours.pop("torch_dtype", None)
  assert ours == theirs


def test_a_config_of_its_own_is_read_back(case, tmp_path):
  """As of a model that began from nothing: config.json is written by the family alone."""
  folder, model, params, _ = case
  model.hf_config = None
  hf.save(model, params, tmp_path)
  written, original = (json.loads((at / "config.json").read_text()) for at in (tmp_path, folder))
  assert written["architectures"] == original["architectures"]
  assert len(written["id2label"]) == model.num_labels
  keys = [hf.architecture(at)[1] for at in (tmp_path, folder)]
  assert keys[0] == keys[1] and keys[0]["head"] == "score" and set(keys[0]) == set(ARCHITECTURE_KEYS)


def test_labels_keep_their_names(tmp_path):
  model, params = hf.load(REFERENCES / "gemma2")
  names = {"0": "bad", "1": "fair", "2": "good"}
  model.hf_config |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
  hf.save(model, params, tmp_path)
  assert json.loads((tmp_path / "config.json").read_text())["id2label"] == names


def test_it_predicts_no_tokens_and_a_language_model_scores_nothing():
  model, params = hf.load(REFERENCES / "llama")
  with pytest.raises(ConfigError, match="predicts no tokens: this needs --config.model.head=lm"):
    model.unembedding(params)
  assert "unembed" not in params and params["score"]["kernel"].shape == (16, 1)
  model, params = hf.load(REFERENCES.parent / "references" / "llama")
  with pytest.raises(ConfigError, match="scores nothing: this needs --config.model.head=score"):
    model.score(params, jnp.zeros(16))


def test_a_family_without_such_an_architecture_says_so():
  _, keys, _ = hf.architecture(REFERENCES.parent / "references" / "cohere")
  with pytest.raises(hf.HFError, match="transformers has no such architecture with a head that scores"):
    families.COHERE.write({**keys, "head": "score"})
