"""Bodies of models of images and text, whose hidden states are pooled: image_embedding_references.npz is what
transformers' bare bodies make of the same folders (make_image_embedding_references.py)."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline.batches import Arrays, empty_batch
from input_pipeline.examples.roles import POSITIVE, QUERY
from models import api, hf
from models.config import model as model_section
from models.hf import files
from tests.models.hf import test_images, test_native
from tests.models.hf.test_images import assert_close
from trainer import tree as tree_lib
from trainer.config import strategy
from trainer.generate import image_tokens
from trainer.strategies import contrastive, similarity

REFERENCE = Path(__file__).parent / "image_embedding_references.npz"
NATIVE = test_native.CASES
# Costly, or of the family of another.
SLOW = (*test_images.SLOW, "gemma3", "gemma4", "gemma4_local", "idefics3", "llava_clip", "pixtral", "qwen2_vl",
        "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
# Of gradients, which divide what float32 rounds by the temperature; by 5 here.
BOUNDS = {"mistral3": 2e-5}
CASES = (*test_images.CASES, *NATIVE)


def folder_of(name):
  return (test_native if name in NATIVE else test_images).REFERENCES / name


def held(name):
  with np.load(REFERENCE) as opened:
    return {key.removeprefix(f"{name}/"): opened[key] for key in opened.files if key.startswith(f"{name}/")}


def bare(name):
  """The folder's model without its head."""
  model, params = hf.load(folder_of(name))
  section, keys = model_section(), {**model.architecture, "head": "embedding", "final_logit_cap": None}
  hf.set_keys(section, keys)
  made = api.make_model(section, vocab_size=keys["vocab_size"], params_dtype="float32", compute_dtype="float32")
  made.architecture, made.hf_config = keys, model.hf_config
  params.pop("unembed", None)
  assert tree_lib.flatten(made.abstract_params()).keys() == tree_lib.flatten(params).keys()
  return made, params


def packed(model, name):
  """Two rows of a query and its positive, in each of which one has images, and room behind them."""
  with np.load(folder_of(name) / "reference.npz") as opened:
    r = dict(opened)
  native = name in NATIVE
  texts = [r["tokens"][row, :r["lengths"][row]] for row in range(2)] + [r["text"][0, :5], r["text"][0, 4:]]
  images = [joined(r, row) if native else [i for i in r["images"][row] if i.any()] for row in range(2)] + [[], []]
  layout = image_tokens.layout_of(model)
  length = max(len(texts[0]) + 5, len(texts[1]) + len(texts[3])) + 3
  batch = empty_batch(2, length, 0, Arrays(2))
  batch |= image_tokens.empty(layout, 2, length, 1 + max(len(r["images"][0]), 1))
  for row, pair in enumerate(((0, 2), (3, 1))):
    begin = first = 0
    for segment, number in enumerate(pair, 1):
      ids, here = texts[number], slice(begin, begin + len(texts[number]))
      batch["tokens"][row, here], batch["positions"][row, here] = ids, np.arange(len(ids))
      batch["segment_ids"][row, here] = segment
      part = image_tokens.of_text(layout, ids, images[number], len(ids), name)
      image_tokens.put(layout, batch, part, row, begin, first)
      begin, first = here.stop, first + len(part.images)
    batch["segment_roles"][row] = QUERY, POSITIVE
  return batch


def joined(r, row):
  """The images of a row, of its tiles."""
  found, tiles, grid = [], r["images"][row], r["grid"][row]
  for number in range(1, grid[:, 0].max() + 1):
    rows, columns = grid[grid[:, 0] == number][0, 3:5]
    own = tiles[grid[:, 0] == number].reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    found.append(own.reshape(rows * tiles.shape[1], columns * tiles.shape[2], 3))
  return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_embeddings_losses_and_gradients_are_those_of_transformers_bodies(name):
  model, params = bare(name)
  batch, expected = packed(model, name), held(name)
  cfgs = [strategy("contrastive", temperature=0.2), strategy(
      "contrastive", loss="siglip", pooling="mean", temperature=0.2, bias=-2.0)]
  cfgs[0].pooling = "last"

  def losses_of(params):
    out = model.apply(params, batch)
    once = SimpleNamespace(apply=lambda *args, **options: out)  # one program, of one forward pass
    losses = [contrastive.loss(once, params, batch, None, cfg)[0]["loss"].sum.sum() / 2 for cfg in cfgs]
    pooled = {pooling: similarity.embeddings(out.hidden, batch, pooling) for pooling in ("last", "mean")}
    return jnp.stack(losses), (losses, pooled)

  @jax.jit
  def run(params):
    _, pull, found = jax.vjp(losses_of, params, has_aux=True)
    return jax.lax.map(lambda row: pull(row)[0], jnp.eye(2)), found

  gradients, (losses, pooled) = run(params)
  for pooling, found in pooled.items():
    unit = expected[pooling] / np.linalg.norm(expected[pooling], axis=-1, keepdims=True)
    np.testing.assert_allclose(found.reshape(4, -1)[np.array([0, 3, 1, 2])], unit, rtol=0, atol=1e-5)
  theirs = (test_native if name in NATIVE else test_images).theirs
  for nth, kind in enumerate(("infonce", "siglip")):
    np.testing.assert_allclose(losses[nth], expected[kind], rtol=1e-5)
    ours = {path: gradient[nth] for path, gradient in tree_lib.flatten(gradients).items()}
    compared = [i for i in range(len(expected["gradient_names"])) if f"{kind}_gradient_{i}" in expected]
    assert compared
    for i in compared:
      found = theirs(f"model.{expected['gradient_names'][i]}", ours)
      assert_close(found, expected[f"{kind}_gradient_{i}"], BOUNDS.get(name, 1e-5))


@pytest.mark.parametrize("name", CASES)
def test_a_body_is_written_with_the_names_that_transformers_reads(name, tmp_path):
  model, params = bare(name)
  hf.save(model, params, tmp_path)
  ours, theirs = ({key for key in names if ".experts." not in key} for names in (  # which may be one by one in files
      load_file(tmp_path / files.SINGLE), held(name)["names"].tolist()))
  assert ours == {key for key in theirs if not key.endswith(("position_ids", "inv_freq", "embed_scale"))}
  whole, body = (files.read_config(at)["architectures"][0] for at in (folder_of(name), tmp_path))
  assert body == whole.replace("ForConditionalGeneration", "Model")
  again, read = hf.load(tmp_path)
  assert again.architecture == model.architecture
  one, other = tree_lib.flatten(params), tree_lib.flatten(read)
  assert one.keys() == other.keys() and all(np.array_equal(one[path], other[path]) for path in one)
