"""Modules that predict tokens further ahead against transformers' layers: make_mtp_references.py made the files in
mtp_references/."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf
from trainer import tree
from trainer.strategies import seq

REFERENCES = Path(__file__).parent / "mtp_references"
CASES = sorted(p.name for p in REFERENCES.iterdir())
SPLIT, WEIGHT = 9, 0.3  # of make_mtp_references.py
CFG = SimpleNamespace(label_smoothing=0.0, z_loss=0.0, mtp_weight=WEIGHT)


@pytest.fixture(scope="module", params=CASES)
def case(request):
  """(folder, model, params, reference, functions from parameters and a batch to the modules' logits, and to the loss
  and its gradient)"""
  folder = REFERENCES / request.param
  with np.load(folder / "reference.npz") as reference:
    reference = dict(reference)
  model, params = hf.load(folder, mtp_layers=len(reference["logits"]))

  @jax.jit
  def run(params, batch):
    ahead = model.apply(params, batch).ahead
    return jax.numpy.stack([model.unembed(params, hidden) for hidden in ahead])

  @jax.jit
  @jax.value_and_grad
  def trained(params, batch):
    terms, _ = seq.loss(model, params, batch, None, CFG)
    return sum(term.sum.sum() / term.weight.sum() for name, term in terms.items() if not name.startswith("moe/"))

  return folder, model, params, reference, run, trained


def batch(tokens, segments=None):
  segments = np.ones_like(tokens) if segments is None else segments
  starts = np.diff(segments, axis=1, prepend=-1) != 0
  index = np.arange(tokens.shape[1])
  positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
  return dict(tokens=tokens, segment_ids=segments.astype(np.int32), positions=positions.astype(np.int32),
              loss_weights=(~starts & (segments > 0)).astype(np.float32))


def close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_logits_are_those_of_transformers(case):
  _, _, params, reference, run, _ = case
  logits = run(params, batch(reference["tokens"]))
  for k, expected in enumerate(reference["logits"], 1):
    close(logits[k - 1, :, :-k], expected[:, :-k])


# Gradients take twice as long to compile as logits; JAX derives them.
@pytest.mark.slow
def test_loss_and_gradients_are_those_of_transformers(case, tmp_path):
  _, model, params, reference, _, trained = case
  loss, grads = trained(params, batch(reference["tokens"]))
  assert float(loss) == pytest.approx(reference["loss"], rel=1e-6)
  hf.save(model, grads, tmp_path)  # under published names
  found = load_file(tmp_path / "model.safetensors")
  for i, name in enumerate(reference["gradient_names"]):
    close(found[str(name)], reference[f"gradient_{i}"])


def test_packed_documents_are_as_apart(case):
  _, _, params, reference, run, _ = case
  tokens = np.stack([reference["tokens"][0]] * 2)
  segments = np.where(np.arange(tokens.shape[1]) < SPLIT, 1, [[2], [0]])
  logits = run(params, batch(tokens, segments))
  for k, expected in enumerate(reference["documents"], 1):
    for part in (slice(0, SPLIT - k), slice(SPLIT, tokens.shape[1] - k)):
      close(logits[k - 1, 0, part], expected[part])
    close(logits[k - 1, 1, :SPLIT - k], expected[:SPLIT - k])


def test_what_is_written_is_what_was_read(case, tmp_path):
  folder, model, params, *_ = case
  hf.save(model, params, tmp_path)
  ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path, folder))
  assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
  ours, theirs = (json.loads((at / "config.json").read_text()) for at in (tmp_path, folder))
  count = "num_nextn_predict_layers"
  theirs.setdefault(count, 1) if folder.name == "qwen3_next" else None  # vLLM asks for it
  ours.pop("torch_dtype", None)
  assert ours == theirs


def test_without_a_word_they_are_passed_over(case, tmp_path):
  folder, model, params, *_ = case
  plain, fewer = hf.load(folder)
  kept = {path: leaf for path, leaf in tree.flatten(params).items() if not path.startswith("mtp/")}
  assert {path: np.asarray(leaf).tobytes() for path, leaf in tree.flatten(fewer).items()} == {
      path: np.asarray(leaf).tobytes() for path, leaf in kept.items()}
  hf.save(plain, fewer, tmp_path)
  saved = json.loads((tmp_path / "config.json").read_text())
  assert not any(saved.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"))
  assert not any("mtp." in name or "eh_proj" in name for name in load_file(tmp_path / "model.safetensors"))


def test_copies_that_differ_and_tensors_that_are_missing_are_told(tmp_path):
  folder = shutil.copytree(REFERENCES / "deepseek_v3", tmp_path / "folder")
  tensors = load_file(folder / "model.safetensors")
  copy = "model.layers.3.shared_head.head.weight"
  save_file(tensors | {copy: tensors[copy] + 1}, folder / "model.safetensors")
  with pytest.raises(hf.HFError, match=f"{copy}.* is not equal to lm_head.weight.*mtp_layers=0"):
    hf.load(folder, mtp_layers=2)
  assert hf.load(folder)  # passed over
  save_file({name: part for name, part in tensors.items() if "enorm" not in name}, folder / "model.safetensors")
  with pytest.raises(hf.HFError, match="- model.layers.2.enorm.weight"):
    hf.load(folder, mtp_layers=2)
  save_file({name: part for name, part in tensors.items() if "embed_tokens" not in name or ".layers." not in name},
            folder / "model.safetensors")
  hf.load(folder, mtp_layers=2)  # a copy need not be there
  with pytest.raises(hf.HFError, match=r"\+ model.layers.2.mlp.extra.weight"):
    save_file(tensors | {"model.layers.2.mlp.extra.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    hf.load(folder, mtp_layers=2)
