"""Models of images and text against transformers: image_references/ was made by make_image_references.py beside it."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf
from models.hf import families, files
from models.hf.family import Family
from models.spec import ARCHITECTURE_KEYS
from trainer import tree as tree_lib
from trainer.distributed import mesh as mesh_lib

REFERENCES = Path(__file__).parent / "image_references"
CASES = sorted(p.name for p in REFERENCES.iterdir())
SLOW = ("llava_clip_memory", "paligemma2")  # each is of the family of another
# Whose gradients, which take twice as long to compile as logits, are compared by default, too: one of either tower.
GRADIENTS = ("gemma3", "llava_clip")


@dataclasses.dataclass
class Case:
  """A reference, and what Weft makes of it."""

  folder: Path
  family: Family
  model: object
  params: dict
  reference: dict[str, np.ndarray]
  # [2, T, V] of the batch.
  logits: np.ndarray
  # To the loss, [], and its gradient, {path: array}.
  with_gradients: Callable[[], tuple[np.ndarray, dict]]
  logits_of: Callable


def content_of(name: str, file: str = "config.json") -> dict:
  return json.loads((REFERENCES / name / file).read_text())


def read(content: dict) -> dict:
  return families.find(content, "DIR/config.json").read(content, "DIR/config.json")


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def case(request):
  folder = REFERENCES / request.param
  model, params = hf.load(folder, dtype="float32")
  with np.load(folder / "reference.npz") as opened:
    reference = dict(opened)
  family = families.find(content_of(request.param), request.param)

  def logits_of(params, tokens, lengths, prefix, images):
    place_T = jnp.arange(tokens.shape[1])
    batch = dict(tokens=tokens, segment_ids=jnp.int32(place_T < lengths[:, None]), images=images)
    if model.spec.vision.attention == "prefix":
      batch["prefix_length"] = prefix
    return model.logits(params, batch)

  def loss(params, tokens, lengths, prefix, images):
    logits, place_T = logits_of(params, tokens, lengths, prefix, images), jnp.arange(tokens.shape[1])
    weights = ((place_T >= prefix[:, None]) & (place_T < lengths[:, None]))[:, 1:]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return -(log_probs * weights).sum() / weights.sum(), logits

  batch = [jnp.asarray(reference[key]) for key in ("tokens", "lengths", "prefix", "images")]

  @functools.cache
  def run():
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *batch)

  def with_gradients():
    (value, _), gradients = run()
    return np.asarray(value), tree_lib.flatten(gradients)

  logits = run()[0][1] if request.param in GRADIENTS else jax.jit(logits_of)(params, *batch)
  return Case(folder, family, model, params, reference, np.asarray(logits), with_gradients,
              lambda tokens: jax.jit(model.logits)(params, tokens))


def assert_close(actual, expected, tolerance: float):
  """Relative to the largest expected value."""
  largest = np.abs(expected).max()
  np.testing.assert_allclose(np.asarray(actual) / largest, expected / largest, rtol=0, atol=tolerance)


def test_every_wrapper_and_tower_has_a_reference():
  read_keys = [read(content_of(name)) for name in CASES]
  assert {keys["vision.tower"] for keys in read_keys} == {"siglip", "clip"}
  names = {families.find(content_of(name), name).model_types for name in CASES}
  native = {(name,) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
                                  "qwen3_5_moe", "gemma4", "mistral3")}  # see test_native.py
  assert names == {wrapper.model_types for wrapper in families.WRAPPERS} - native


def test_logits_of_images_and_text(case):
  """Row 0 has two images, row 1 one and padding."""
  real = np.arange(case.reference["tokens"].shape[1]) < case.reference["lengths"][:, None]
  assert not real.all() and case.reference["images"][1, 1].max() == 0
  assert_close(case.logits * real[..., None], case.reference["logits"], 1e-5)


def test_logits_of_text_alone(case):
  assert_close(case.logits_of(case.reference["text"]), case.reference["text_logits"], 1e-5)


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=() if name in GRADIENTS else pytest.mark.slow) for name in CASES], indirect=True)
def test_loss_with_a_masked_prefix_and_gradients(case):
  loss, gradients = case.with_gradients()
  np.testing.assert_allclose(loss, case.reference["loss"], rtol=1e-5)
  names = [str(name) for name in case.reference["gradient_names"]]
  assert len(names) >= 5 and sum("vision_" in name for name in names) >= 3
  for i, name in enumerate(names):  # both are of float32: on another processor one of Gemma 3's is 1.007e-5 apart
    assert_close(theirs(name, gradients), case.reference[f"gradient_{i}"], 1.2e-5)


def theirs(name: str, ours: dict) -> np.ndarray:
  """A tensor by its name in memory, made of ours in another way than by the families' tables."""
  leaves = {path: np.asarray(leaf) for path, leaf in ours.items()}
  linears = {"linear": "linear", "linear_1": "up", "linear_2": "down"}
  if name.endswith("mm_input_projection_weight"):
    return leaves["projector/linear/kernel"]
  part, *_, owner, leaf = name.removeprefix("model.").split(".")
  if part == "multi_modal_projector":
    if owner == "mm_soft_emb_norm":
      return leaves["projector/norm/scale"]
    values = leaves[f"projector/{linears[owner]}/{'kernel' if leaf == 'weight' else 'bias'}"]
    return values.T
  if part == "connector":
    return leaves["projector/linear/kernel"].T
  if leaf == "class_embedding":
    return leaves["vision/cls_embed/embedding"][0]
  if owner == "patch_embedding":
    kernel = leaves["vision/patch_embed/kernel"]
    side = round((len(kernel) / 3) ** 0.5)
    return np.einsum("hwcd->dchw", kernel.reshape(side, side, 3, -1))
  known = {"position_embedding": "vision/pos_embed/embedding", "pre_layrnorm": "vision/pre_norm/scale"}
  if owner in known:
    return leaves[known[owner]]
  prefix = {"vision_tower": "vision/", "vision_model": "vision/", "language_model": "", "text_model": ""}[part]
  return leaves[f"{prefix}blocks/attn/{owner[0]}/kernel"][0].T


def test_tensors_are_the_parameters_of_the_model(case):
  listed = {tensor.ours for tensor in case.family.tensors(read(content_of(case.folder.name)))}
  assert listed == set(tree_lib.flatten(case.params))


def test_saved_and_read_again_it_is_the_same_to_the_bit(case, tmp_path):
  """The names are those of published folders, whatever they were."""
  hf.save(case.model, case.params, tmp_path / "out")
  assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((case.folder / "config.json").read_text())
  _, again = hf.load(tmp_path / "out")
  before, after = (tree_lib.flatten(tree) for tree in (case.params, again))
  assert before.keys() == after.keys()
  assert all(np.array_equal(before[path], after[path]) for path in before)
  old, new = (files.TensorFolder(folder) for folder in (case.folder, tmp_path / "out"))
  contents = [sorted((info.shape, folder.read(name).tobytes()) for name, info in folder.tensors.items())
              for folder in (old, new)]
  assert contents[0] == contents[1]
  beginnings = ("language_model.model.", "language_model.lm_head.", "vision_tower.vision_model.",
                "multi_modal_projector.", "model.text_model.", "model.vision_model.", "model.connector.", "lm_head.")
  assert all(name.startswith(beginnings) for name in new.tensors)


@pytest.mark.parametrize("name", CASES)
def test_both_layouts_say_the_same(name):
  new, old = read(content_of(name)), read(content_of(name, "config_4.json"))
  assert new == old
  assert set(new) == set(ARCHITECTURE_KEYS)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_reads_back_and_finds_its_family(name):
  model = read(content_of(name))
  family, written = families.match(model)
  if name != "idefics3":  # which is the same function as smolvlm
    assert family is families.find(content_of(name), name)
  assert read(json.loads(json.dumps(written))) == model
  assert family.notes(written) == []


@pytest.mark.devices(8)
def test_each_device_reads_its_shards():
  """Kernels of patches and class tokens lie in the file in another form than here."""
  folder = REFERENCES / "llava_clip"
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=4, tensor=2))
  _, whole = hf.load(folder)
  _, sharded = hf.load(folder, shardings=lambda abstract: mesh_lib.param_shardings(abstract, mesh)[0])
  one, other = tree_lib.flatten(whole), tree_lib.flatten(sharded)
  assert any(len(leaf.sharding.device_set) > 1 and not leaf.is_fully_replicated for leaf in other.values())
  assert all(np.array_equal(one[path], np.asarray(other[path])) for path in one)
