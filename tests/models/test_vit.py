"""Towers against numpy ones; the order of patches and pixels; which layers count; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import api, vit
from models.attention import blocked
from models.layers import Scope
from models.remat import remat_policy
from tests.models.common import T, config, make
from tests.models.vision import CLIP, POOL, SIGLIP, images, make_vlm, np_tower
from trainer.errors import ConfigError


def tower(vision, seed=0, remat="none", **changed):
  """(spec, parameters {"vision": …} that are nowhere 0 or 1, compiled features of images [N, …])."""
  spec = make(vision=vision, **changed).spec
  f32 = jnp.dtype("float32")
  graph, state = nnx.split(vit.Tower(spec, Scope(jax.random.key(seed), f32, f32, path="vision")))
  rng = np.random.default_rng(seed)
  params = jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), nnx.to_pure_dict(state))

  def features(params, pixels):
    return nnx.merge(graph, params["vision"])(pixels, remat_policy(remat))

  return spec, {"vision": params}, jax.jit(features)


@pytest.mark.parametrize("vision,scan", [(SIGLIP, True), (SIGLIP, False), (CLIP, True), (CLIP, False),
                                         (CLIP | dict(feature_layer=-1), True)])
def test_features_equal_the_numpy_tower(vision, scan):
  """The decoder's own choices (Gemma's here) have no part in it."""
  gemma = dict(norm_scale_plus_one=True, qk_norm=True, attention_logit_cap=1.5, window=2, layer_pattern=("local",))
  spec, params, features = tower(vision, scan_layers=scan, norm_position="sandwich", **gemma)
  pixels = images(3)
  found = np.asarray(features(params, pixels))
  assert found.shape == (3, 4, 12)
  for image, rows in zip(pixels, found, strict=True):
    np.testing.assert_allclose(rows, np_tower(spec.vision, params, image), atol=2e-5, rtol=2e-5)


def test_layers_drop_out_each_by_a_key_of_its_own(monkeypatch):
  keys = []

  def run(spec, blocks, layer, remat, x):
    for index in range(3):
      x, _ = layer(0, x, lambda x, context: (x, keys.append(context.key)), index)
    return x, None

  monkeypatch.setattr(vit, "run_blocks", run)
  f32 = jnp.dtype("float32")
  made = vit.Tower(make(vision=SIGLIP).spec, Scope(jax.random.key(0), f32, f32, path="vision"))
  made(images(1), remat_policy("none"), jax.random.key(5))
  assert len({jax.random.key_data(key).tobytes() for key in keys}) == 3


def test_patches_times_a_flat_kernel_is_a_convolution():
  rng = np.random.default_rng(0)
  pixels, kernel = rng.normal(size=(2, 12, 12, 3)), rng.normal(size=(4, 4, 3, 5))
  inputs = (jnp.asarray(x, jnp.float32) for x in (pixels, kernel))
  conv = jax.lax.conv_general_dilated(*inputs, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
  found = vit.patches(pixels, 4) @ kernel.reshape(-1, 5)
  np.testing.assert_allclose(found, conv.reshape(2, 9, 5), atol=1e-4)


def test_pixels_are_normalised_once():
  clip = [0.48145466, 0.4578275, 0.40821073]
  for vision, mean, std in ((SIGLIP, [0.5] * 3, [0.5] * 3), (CLIP | dict(std=(1.0, 2.0, 4.0)), clip, [1, 2, 4])):
    spec = make(vision=vision).spec.vision
    raw = images(2)
    once = vit.pixels(jnp.asarray(raw), spec)
    np.testing.assert_allclose(once, (raw / 255 - mean) / std, atol=1e-6)
    np.testing.assert_array_equal(vit.pixels(once, spec), once)
  for wrong in (raw[:, :4], raw[..., :1], raw.astype(np.int32)):
    with pytest.raises(ValueError, match=r"allowed: uint8 .*\[\.\.\., 8, 8, 3\]"):
      vit.pixels(jnp.asarray(wrong), spec)


def test_patches_of_an_image_see_each_other_and_no_other_image():
  _, params, features = tower(SIGLIP)
  pixels = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
  before = np.asarray(features(params, pixels))
  for patch in range(4):
    changed = pixels.copy()
    changed[0, patch // 2 * 4, patch % 2 * 4] += 1.0
    after = np.asarray(features(params, changed))
    assert (after[0] != before[0]).any(-1).all()
    np.testing.assert_array_equal(after[1], before[1])


def test_only_layers_before_the_features_have_gradients():
  """With -2 the last layer and the final norm are there, for checkpoints, and change nothing."""
  for layer, used in ((-1, 3), (-2, 2), (-3, 1)):
    _, params, features = tower(CLIP | dict(feature_layer=layer))
    mix = np.linspace(-1, 1, 12)
    grads = jax.jit(jax.grad(lambda p, f=features, m=mix: jnp.square(f(p, images(1)) @ m).sum()))(params)["vision"]
    for name in ("q", "v", "o"):
      moved = np.abs(grads["blocks"]["attn"][name]["kernel"]).max((1, 2)) > 0
      np.testing.assert_array_equal(moved, np.arange(3) < used)
    assert bool(np.any(grads["final_norm"]["scale"])) == (layer == -1)
    assert np.any(grads["patch_embed"]["kernel"]) and np.any(grads["cls_embed"]["embedding"])


@pytest.mark.parametrize("scan", [True, False])
def test_remat_changes_no_gradient(scan):
  def grads(remat):
    _, params, features = tower(SIGLIP, remat=remat, scan_layers=scan)
    traced = jax.jit(jax.grad(lambda p: jnp.tanh(features(p, images(2))).sum())).trace(params)
    assert ("prevent_cse" in str(traced.jaxpr)) == (remat == "full")
    return jax.tree.leaves(traced.lower().compile()(params))

  full, none = grads("full"), grads("none")
  largest = max(np.abs(g).max() for g in none)
  for a, b in zip(full, none, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest)


def test_parameter_layout():
  def shapes(kind):
    flat = jax.tree_util.tree_leaves_with_path(make_vlm(kind).abstract_params())
    named = {"/".join(key.key for key in path): leaf.shape for path, leaf in flat}
    return {path: shape for path, shape in named.items() if path.startswith(("vision", "projector"))}

  def blocks(layers, width, hidden):
    square = (layers, width, width)
    kernels = {f"attn/{name}": square for name in "qkvo"} | {"mlp/up": (layers, width, hidden),
                                                             "mlp/down": (layers, hidden, width)}
    found = {f"vision/blocks/{name}/kernel": shape for name, shape in kernels.items()}
    found |= {f"vision/blocks/{name}/bias": (layers, shape[-1]) for name, shape in kernels.items()}
    norms = [f"{name}_norm/{end}" for name in ("attn", "mlp") for end in ("scale", "bias")]
    return found | {f"vision/blocks/{name}": (layers, width) for name in norms}

  norm = {"vision/final_norm/scale": (12,), "vision/final_norm/bias": (12,)}
  assert shapes("siglip") == blocks(2, 12, 20) | norm | {
      "vision/patch_embed/kernel": (48, 12), "vision/patch_embed/bias": (12,), "vision/pos_embed/embedding": (4, 12),
      "projector/linear/kernel": (12, 16), "projector/linear/bias": (16,)}
  assert shapes("clip") == blocks(3, 12, 20) | norm | {
      "vision/patch_embed/kernel": (48, 12), "vision/pos_embed/embedding": (5, 12),
      "vision/cls_embed/embedding": (1, 12), "vision/pre_norm/scale": (12,), "vision/pre_norm/bias": (12,),
      "projector/up/kernel": (12, 16), "projector/up/bias": (16,),
      "projector/down/kernel": (16, 16), "projector/down/bias": (16,)}
  assert {path: shape for path, shape in shapes("pool").items() if "projector" in path} == {
      "projector/linear/kernel": (12, 16), "projector/norm/scale": (12,)}


def test_flops_of_an_image_against_the_compiler(monkeypatch):
  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1000)  # what is in a loop it counts once
  vision = SIGLIP | dict(image_size=32, hidden_size=64, intermediate_size=128)
  spec, params, features = tower(vision, scan_layers=False)
  counted = features.lower(params, jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)).compile().cost_analysis()["flops"]
  np.testing.assert_allclose(vit.flops_per_image(spec.vision), counted, rtol=0.1)


BAD = [
    (dict(tower="vit"), "vision.tower: found 'vit', allowed: none, siglip, clip"),
    (dict(patch_size=9), "patch_size: found 9; allowed: at most image_size=8"),
    (dict(num_heads=5), "num_heads: found 5, which does not divide hidden_size=12"),
    (dict(num_layers=0), "vision.num_layers: found 0"),
    (dict(feature_layer=0), r"feature_layer: found 0, allowed: -1 .* to -2"),
    (dict(feature_layer=-3), r"feature_layer: found -3, allowed: -1 .* to -2"),
    (dict(activation="swiglu"), "vision.activation: found 'swiglu', allowed: gelu"),
    (dict(mean=(0.5,)), "three numbers each"),
    (dict(std=(0.5, 0.5, 0.0)), "those of std above 0"),
    (dict(projector="qformer"), "vision.projector: found 'qformer', allowed: linear, mlp, pool"),
    (dict(tokens_per_image=2), "found 2, but the projector 'linear' gives one token for each of the 4 patches"),
    (dict(projector="pool"), "vision.tokens_per_image: found None"),
    (POOL | dict(tokens_per_image=9), r"found 9; allowed for 4 × 4 patches: the squares of 1, 2, 4"),
    (dict(attention="full"), "vision.attention: found 'full', allowed: causal, image, local_image, prefix"),
    (dict(image_token=-1), "image_token: found -1"),
]


@pytest.mark.parametrize("changed,message", BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_configs_are_refused_with_what_is_allowed(changed, message):
  with pytest.raises(ConfigError, match=message):
    api.validate(config(vision=SIGLIP | changed), T)


def test_without_a_tower_the_rest_of_the_section_changes_nothing():
  assert make(vision=SIGLIP | dict(tower="none", patch_size=0)).spec == make().spec
  assert "model.vision.tokens_per_image = 4: (image_size / patch_size) ** 2" in make(vision=SIGLIP).reasons
  assert not any("in no patch" in reason for reason in make(vision=SIGLIP).reasons)
  assert any("the last 1 of 9 pixels" in reason for reason in make(vision=SIGLIP | dict(image_size=9)).reasons)
