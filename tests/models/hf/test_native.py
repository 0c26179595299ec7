"""Qwen2-VL, 2.5, Qwen3-VL, Qwen3.5 and Gemma 4 against transformers: native_references/ comes of
make_native_references.py."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models import api, config, hf, tiles
from models import lora as lora_lib
from models.hf import families, files
from models.hf.errors import HFError
from models.hf.family import Family
from models.spec import ARCHITECTURE_KEYS
from tests.models.hf.native_names import of_gemma4, of_pixtral
from tests.models.hf.test_images import assert_close
from trainer import tree as tree_lib
from trainer.distributed import mesh as mesh_lib

REFERENCES = Path(__file__).parent / "native_references"
CASES = sorted(p.name for p in REFERENCES.iterdir())
# Whose gradients, which take twice as long to compile as logits, are compared by default, too: features for several
# layers, and a tower with norms and factors of its own. JAX derives those of the others.
GRADIENTS = ("gemma4", "qwen3_vl")


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


def content_of(name: str, file: str = "config.json") -> dict:
  return json.loads((REFERENCES / name / file).read_text())


def read(content: dict) -> dict:
  return families.find(content, "DIR/config.json").read(content, "DIR/config.json")


def arrays(reference: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The batch of the reference, in which the model itself finds the tiles' places."""
  place_T = np.arange(reference["tokens"].shape[1])
  return dict(tokens=reference["tokens"], segment_ids=np.int32(place_T < reference["lengths"][:, None]),
              images=reference["images"], image_grid=reference["grid"])


@pytest.fixture(scope="module", params=CASES)
def case(request):
  folder = REFERENCES / request.param
  model, params = hf.load(folder, dtype="float32")
  with np.load(folder / "reference.npz") as opened:
    reference = dict(opened)

  def loss(params, batch, prefix):
    logits, tokens, place_T = model.logits(params, batch), batch["tokens"], jnp.arange(batch["tokens"].shape[1])
    weights = ((place_T >= prefix[:, None]) & (batch["segment_ids"] > 0))[:, 1:]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return -(log_probs * weights).sum() / weights.sum(), logits

  batch = {key: jnp.asarray(value) for key, value in arrays(reference).items()}

  @functools.cache
  def run():
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, jnp.asarray(reference["prefix"]))

  def with_gradients():
    (value, _), gradients = run()
    return np.asarray(value), tree_lib.flatten(gradients)

  logits = run()[0][1] if request.param in GRADIENTS else jax.jit(model.logits)(params, batch)
  return Case(folder, families.find(content_of(request.param), request.param), model, params, reference,
              np.asarray(logits), with_gradients)


def test_logits_of_images_and_text(case):
  """Row 0 has two images of different sizes, row 1 one of 4 × 5 tiles, and padding."""
  real = arrays(case.reference)["segment_ids"] > 0
  assert not real.all() and case.reference["grid"][0, -1, 0] == 0
  assert_close(case.logits * real[..., None], case.reference["logits"], 1e-5)


def test_positions(case):
  """Of the real tokens; a text goes on behind the larger of an image's sides. In Gemma 4 tokens are counted."""
  if "positions" not in case.reference:
    assert not any(rope.axes for rope in case.model.spec.ropes.values())
    return
  batch = arrays(case.reference)
  held = batch["tokens"] == case.model.vision.image_token
  index = np.where(held, np.cumsum(held, axis=1), 0)
  found = np.asarray(tiles.positions(jnp.asarray(case.reference["grid"]), index, batch["segment_ids"]))
  np.testing.assert_array_equal(found * (batch["segment_ids"] > 0)[..., None], case.reference["positions"])


def test_logits_of_text_alone(case):
  assert_close(jax.jit(case.model.logits)(case.params, case.reference["text"]), case.reference["text_logits"], 1e-5)


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=() if name in GRADIENTS else pytest.mark.slow) for name in CASES], indirect=True)
def test_loss_and_gradients(case):
  loss, gradients = case.with_gradients()
  np.testing.assert_allclose(loss, case.reference["loss"], rtol=1e-5)
  names = [str(name) for name in case.reference["gradient_names"]]
  assert len(names) >= 8
  assert not any(np.any(g) for path, g in gradients.items() if re.search("/clip/|/standard/|layer_scale", path))
  for i, name in enumerate(names):
    assert_close(theirs(name, gradients), case.reference[f"gradient_{i}"], 1e-5)


def theirs(name: str, ours: dict) -> np.ndarray:
  """A tensor by its name in memory, made of ours in another way than by the families' tables."""
  *_, owner, leaf = name.split(".")
  if re.search("vision_tower.(patch_conv|ln_pre|transformer)|multi_modal_projector", name):
    return of_pixtral(name, ours)
  if re.search("vision_tower|embed_vision|embed_tokens_per_layer", name):
    return of_gemma4(name, ours)
  kind = "kernel" if leaf == "weight" else "bias"
  if owner == "q_proj":
    return np.asarray(ours["blocks/attn/q/kernel"][0]).T
  if owner == "per_layer_model_projection":
    return np.asarray(ours["per_layer_proj/kernel"]).T
  if owner == "in_proj_qkv":
    return np.concatenate([np.asarray(ours[f"blocks/delta/{p}/kernel"][0]).T for p in "qkv"])
  if leaf == "A_log":  # of layer 2, the second that has the delta rule
    return np.asarray(ours["blocks/delta/A_log"][1])
  if "merger" in name:
    found = {"ln_q": "norm", "norm": "norm", "0": "up", "2": "down", "linear_fc1": "up", "linear_fc2": "down"}[owner]
    path = f"{found}/{'scale' if found == 'norm' else kind}"
    if "deepstack" in name:
      return np.asarray(ours[f"projector/deepstack/{path}"][int(name.split(".")[-3])]).T
    return np.asarray(ours[f"projector/{path}"]).T
  if owner == "pos_embed":
    return np.asarray(ours["vision/pos_embed/embedding"])
  if owner == "proj":
    kernel = np.asarray(ours["vision/patch_embed/kernel"])
    return np.einsum("thwcd->dcthw", kernel.reshape(2, 4, 4, 3, -1))
  if owner == "qkv":
    return np.concatenate([np.asarray(ours[f"vision/blocks/attn/{p}/{kind}"][0]).T for p in "qkv"])
  if owner == "norm1":
    return np.asarray(ours["vision/blocks/attn_norm/scale"][1])
  return np.asarray(ours[f"vision/blocks/mlp/{'gate' if owner == 'gate_proj' else 'up'}/kernel"][0]).T


def test_packed_is_as_alone(case):
  """Both rows in one, in another order, their tiles behind one another and unused ones at the end."""
  r = case.reference
  sizes, counts = r["lengths"][::-1], (r["grid"][::-1, :, 0] > 0).sum(1)
  both = np.concatenate([r["tokens"][row, :r["lengths"][row]] for row in (1, 0)])
  grid = np.concatenate([r["grid"][1, :counts[0]], r["grid"][0, :counts[1]] + [1, 0, 0, 0, 0, 0],
                         np.zeros((3, 6), np.int32)])
  images = np.concatenate([r["images"][1, :counts[0]], r["images"][0, :counts[1]],
                           np.full((3, *r["images"].shape[2:]), 9, np.uint8)])
  batch = dict(tokens=both[None], segment_ids=np.repeat([1, 2], sizes)[None].astype(np.int32), images=images[None],
               image_grid=grid[None].astype(np.int32))
  logits = np.asarray(jax.jit(case.model.logits)(case.params, batch))[0]
  for row, found in ((1, logits[:sizes[0]]), (0, logits[sizes[0]:])):
    assert_close(found, r["logits"][row, :r["lengths"][row]], 1e-5)


def test_decoding_is_as_teacher_forcing(case):
  """The prompt is what stands before the last tokens, images included; each of these is then given one by one, or they
  are run together."""
  r, model = case.reference, case.model
  batch, cut = arrays(r), r["prefix"]
  prompt = dict(batch, segment_ids=np.int32(np.arange(batch["tokens"].shape[1]) < cut[:, None]))
  params = model.decoding_params(case.params)
  _, begun = jax.jit(model.extend)(case.params, prompt)
  cache = model.empty_cache(2, 40)
  cache = jax.jit(model.copied_cache)(cache, begun, jnp.array([1, 0]), jnp.array([0, 1]))
  cache = model.resized_cache(cache, jnp.array([1, 0]), 48)
  at = np.arange(2)[:, None], cut[:, None] + np.arange(4)
  hidden, _ = jax.jit(model.extend)(case.params, dict(tokens=jnp.asarray(batch["tokens"][at])), cache)
  assert_close(np.asarray(model.unembed(case.params, hidden)), r["logits"][at], 1e-5)
  step = jax.jit(model.decode)
  for n in range(4):
    tokens = jnp.asarray(batch["tokens"][np.arange(2), cut + n])
    hidden, cache = step(params, tokens, jnp.ones(2, bool), cache)
    logits = np.asarray(model.unembed(case.params, hidden[:, None]))[:, 0]
    assert_close(logits, r["logits"][np.arange(2), cut + n], 1e-5)


def test_tensors_are_the_parameters_of_the_model(case):
  listed = {path for tensor in case.family.tensors(read(content_of(case.folder.name)))
            for path in ((tensor.ours,) if isinstance(tensor.ours, str) else tensor.ours)}
  assert listed == set(tree_lib.flatten(case.params))


def test_saved_and_read_again_it_is_the_same_to_the_bit(case, tmp_path):
  hf.save(case.model, case.params, tmp_path / "out")
  assert json.loads((tmp_path / "out/config.json").read_text()) == content_of(case.folder.name)
  _, again = hf.load(tmp_path / "out")
  before, after = (tree_lib.flatten(tree) for tree in (case.params, again))
  assert before.keys() == after.keys()
  assert all(np.array_equal(before[path], after[path]) for path in before)
  old, new = (files.TensorFolder(folder) for folder in (case.folder, tmp_path / "out"))
  assert old.tensors.keys() == new.tensors.keys()
  assert all(old.read(name).tobytes() == new.read(name).tobytes() for name in old.tensors)


@pytest.mark.parametrize("name", CASES)
def test_both_layouts_say_the_same(name):
  """That of transformers 5, and that of published folders, whose text model has no object of its own in Qwen 2."""
  new, old = read(content_of(name)), read(content_of(name, "config_4.json"))
  assert new == old and ("text_config" in content_of(name, "config_4.json")) == (not name.startswith("qwen2"))
  assert set(new) == set(ARCHITECTURE_KEYS)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_reads_back_and_finds_its_family(name):
  model = read(content_of(name))
  family, written = families.match(model)
  assert family is families.find(content_of(name), name)
  assert read(json.loads(json.dumps(written))) == model
  assert family.notes(written) == []


def test_experts_are_read_either_way_round(tmp_path):
  """As published, inputs first, and as transformers 5 saves them; where a shape does not tell, they are refused."""
  name = "qwen3_vl_moe"
  shutil.copytree(REFERENCES / name, tmp_path / "other")
  given = files.TensorFolder(REFERENCES / name)
  turned = {key: given.read(key).swapaxes(1, 2) if re.search("experts.(gate_up|down)_proj$", key) else given.read(key)
            for key in given.tensors}
  safetensors.numpy.save_file({key: np.ascontiguousarray(value) for key, value in turned.items()},
                              tmp_path / "other/model.safetensors")
  before, after = (tree_lib.flatten(hf.load(folder)[1]) for folder in (REFERENCES / name, tmp_path / "other"))
  assert all(np.array_equal(before[path], after[path]) for path in before)
  content = content_of(name)
  content["text_config"]["moe_intermediate_size"] = 8
  with pytest.raises(HFError, match="moe_intermediate_size is 8; allowed: neither hidden_size, 16, nor half of it"):
    read(content)


@pytest.mark.parametrize("part, key, value, message", [
    ("vision_config", "temporal_patch_size", 3, "temporal_patch_size is 3"),
    ("vision_config", "window_size", 4, "window_size is 4; allowed: 8 or more"),
    ("vision_config", "out_hidden_size", 99, "the hidden_size of the text model, 16"),
    ("vision_config", "fullatt_block_indexes", ["a"], "numbers of layers"),
    ("vision_config", "rope_parameters", {"rope_theta": 500.0}, "rope_theta is 500.0"),
    ("vision_config", "registers", 4, "registers = 4"),
    ("text_config", "rope_parameters", {"mrope_section": [1, 2], "type": "mrope"}, "three numbers of pairs"),
    ("text_config", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic'"),
])
def test_what_is_not_computed_is_refused_by_name(part, key, value, message):
  content = content_of("qwen2_5_vl")
  content[part] = {**content[part], key: value}
  with pytest.raises(HFError, match=message):
    read(content)


@pytest.mark.parametrize("part, key, value, message", [
    ("vision_config", "num_position_embeddings", 24, "num_position_embeddings is 24; allowed: a square number"),
    ("vision_config", "deepstack_visual_indexes", [2, 0], "each above the one before it"),
    ("vision_config", "deepstack_visual_indexes", [0, 4], "numbers of layers from 0 to 3"),
    ("vision_config", "deepstack_visual_indexes", [0, 1, 2, 3], "as many as the text model has layers, 3"),
    ("text_config", "rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved is False; allowed: True"),
])
def test_what_qwen3_vl_does_not_compute_is_refused_by_name(part, key, value, message):
  content = content_of("qwen3_vl")
  content[part] = {**content[part], key: value}
  with pytest.raises(HFError, match=message):
    read(content)


@pytest.mark.parametrize("part, key, value, message", [
    ("vision_config", "deepstack_visual_indexes", [1], r"deepstack_visual_indexes = \[1\]: the tower qwen3_vl has no"),
    ("vision_config", "num_position_embeddings", 24, "a square number"),
    ("vision_config", "out_hidden_size", 99, "the hidden_size of the text model, 16"),
    ("text_config", "attn_output_gate", False, "attn_output_gate is False; allowed: True"),
    ("text_config", "layer_types", ["linear_attention", "full_attention", "sliding_attention"], "linear_attention"),
    ("text_config", "rope_parameters", {"rope_type": "llama3"}, "rope_type is 'llama3'"),
    ("text_config", "rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved is False; allowed: True"),
])
def test_what_qwen3_5_does_not_compute_is_refused_by_name(part, key, value, message):
  content = content_of("qwen3_5")
  content[part] = {**content[part], key: value}
  with pytest.raises(HFError, match=message):
    read(content)


def loaded(**changed):
  """The model of Qwen3-VL's reference with other keys of the config, its parameters, and the batch."""
  folder = REFERENCES / "qwen3_vl"
  section = config.model()
  hf.set_keys(section, read(content_of("qwen3_vl")))
  remat = changed.pop("remat", "none")
  section.update(changed)
  model = api.make_model(section, vocab_size=61, params_dtype="float32", compute_dtype="float32", remat=remat)
  _, params = hf.load(folder)
  with np.load(folder / "reference.npz") as opened:
    return model, params, dict(opened)


def gradients_of(model, params, batch):
  def loss(params, batch):
    return jnp.sum(jnp.tanh(model.apply(params, batch).hidden) * (batch["segment_ids"] > 0)[..., None])

  return jax.jit(jax.value_and_grad(loss))(params, batch)


def assert_alike(gradients, expected):
  largest = max(np.abs(g).max() for g in jax.tree.leaves(expected))
  for path, g in tree_lib.flatten(gradients).items():
    wanted = np.asarray(tree_lib.flatten(expected)[path])
    # Some are 0 but for rounding: a bias of keys shifts all scores alike.
    np.testing.assert_allclose(g, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max() + 1e-6 * largest, err_msg=path)


@pytest.mark.parametrize("changed", [dict(scan_layers=False), dict(remat="nothing_saveable")], ids=str)
def test_features_for_the_first_layers_are_the_same_however_layers_run(changed):
  model, params, reference = loaded()
  batch = arrays(reference)
  value, expected = gradients_of(model, params, batch)
  other, gradients = gradients_of(loaded(**changed)[0], params, batch)
  np.testing.assert_allclose(other, value, rtol=1e-5)
  assert_alike(gradients, expected)


def test_adapters_of_the_deepstack_are_merged_as_they_compute():
  """A pair for each of its mergers, beside stacked kernels."""
  model, params, reference = loaded(lora=dict(rank=2, targets=("deepstack/(up|down)/kernel",)))
  start = tree_lib.flatten(jax.jit(model.init)(jax.random.key(0)))
  flat = {**start, **tree_lib.flatten(params)}
  flat |= {path: jax.random.normal(jax.random.key(i), leaf.shape) for i, (path, leaf) in enumerate(start.items())
           if path.endswith("lora_b")}
  assert flat["projector/deepstack/up/lora_a"].shape == (2, 64, 2)
  adapted = tree_lib.unflatten(flat)
  logits = jax.jit(model.logits)(adapted, arrays(reference))
  merged = lora_lib.merge(adapted, model.spec.lora)
  assert_close(jax.jit(loaded()[0].logits)(merged, arrays(reference)), np.asarray(logits), 1e-5)
  assert np.abs(np.asarray(logits)[0] - reference["logits"][0]).max() > 1e-2


@pytest.mark.devices(8)
@pytest.mark.parametrize("name, sizes", [
    *((name, dict(data=2, fsdp=2, tensor=2)) for name in ("qwen3_5_moe", "qwen3_vl", "mistral3", "gemma4_local")),
    *((name, dict(data=1, fsdp=2, context=2, tensor=2)) for name in ("gemma4", "qwen2_5_vl"))], ids=str)
def test_eight_devices_compute_what_one_does(name, sizes):
  model, params = hf.load(REFERENCES / name)
  with np.load(REFERENCES / name / "reference.npz") as opened:
    batch = arrays(dict(opened))
  room = -batch["tokens"].shape[1] % 8
  batch = {key: np.pad(value, ((0, 0), (0, room))) if value.ndim == 2 else value for key, value in batch.items()}
  batch = {key: np.concatenate([value] * 4) for key, value in batch.items()}
  value, expected = gradients_of(model, params, batch)
  mesh = mesh_lib.make_mesh(sizes)
  placed, _ = mesh_lib.param_shardings(model.abstract_params(), mesh)
  if name == "qwen3_vl":
    specs = {path: tuple(sharding.spec) for path, sharding in tree_lib.flatten(placed).items()}
    assert specs["projector/deepstack/up/kernel"] == (None, "fsdp", "tensor")
    assert specs["projector/deepstack/down/kernel"] == (None, "tensor", "fsdp")
  if name == "mistral3":
    specs = {path: tuple(sharding.spec) for path, sharding in tree_lib.flatten(placed).items()}
    assert specs["projector/merge/kernel"] == ("fsdp", "tensor")
  if name == "gemma4_local":
    specs = {path: tuple(sharding.spec) for path, sharding in tree_lib.flatten(placed).items()}
    assert specs["vision/axis_embed/embedding"] == (None, None, "fsdp")
    assert specs["vision/blocks/mlp/down/kernel"] == (None, "tensor", "fsdp")
  with mesh_lib.activation_rules(mesh):
    rows = mesh_lib.batch_sharding(mesh)
    found, gradients = gradients_of(model, jax.device_put(params, placed), jax.device_put(batch, rows))
  np.testing.assert_allclose(found, value, rtol=1e-5)
  assert_alike(gradients, expected)


def test_flops_of_a_tile_count_the_mergers():
  """Of Qwen3-VL by hand: 4 layers of 16, 4 patches of 96 numbers a tile, 3 mergers of 64 × 64 + 64 × 16."""
  model, _, _ = loaded()
  tower = 4 * (2 * 96 * 16 + 4 * (2 * (4 * 16 * 16 + 2 * 16 * 20) + 4 * (4 * 3) * 16))
  mergers = 3 * 2 * (64 * 64 + 64 * 16)
  found = model.flops_per_token(20, images_per_row=3) - model.flops_per_token(20)
  np.testing.assert_allclose(found, 3 * 3 * (tower + mergers) / 20)
