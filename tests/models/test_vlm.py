"""Images in texts: features where their tokens are, who sees whom, and what must not change a number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import make_model
from tests.models import vision
from tests.models.common import VOCAB, config, make, paths
from tests.models.initial import initial
from tests.models.vision import IMAGE_TOKEN, KINDS, K, images, make_vlm, np_features, packed, tanh_loss, vlm
from trainer import tree
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.optim import optimizer as optim

BATCH = packed()
INDEX, SEGMENTS = BATCH["image_index"], BATCH["segment_ids"]
REAL = SEGMENTS > 0


def batch_for(kind, **changed):
  """BATCH with the `block_ids` that the kind's attention has for it; the prefix ends two tokens after an image."""
  if kind == "prefix":
    at = np.cumsum(np.ones_like(SEGMENTS), 1) - 1
    ends = np.where(SEGMENTS == 1, np.array([[7], [15]]), 14)
    changed = dict(block_ids=((at < ends) & REAL).astype(np.int32)) | changed
  return BATCH | changed


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_a_text_whose_embeddings_are_the_features(kind):
  """The tower and the projector in numpy; then a decoder of text alone, with the features as entries of its table."""
  model, params, hidden = vlm(kind)
  batch, embedding = batch_for(kind), np.asarray(params["embed"]["embedding"])
  scale = 4.0 if model.spec.scale_embeddings else 1.0
  features = [np_features(model.spec.vision, params, image) / scale for row in BATCH["images"] for image in row]
  table = np.concatenate([embedding, *features])
  numbers = len(embedding) + 2 * K * np.arange(2)[:, None] + INDEX - 1
  text = make(num_layers=2, num_kv_heads=2, vocab_size=len(table), attention_block=5,
              norm_scale_plus_one=model.spec.norm_scale_plus_one, scale_embeddings=model.spec.scale_embeddings)
  own = {key: value for key, value in params.items() if key in ("blocks", "final_norm")}
  blocks = batch.get("block_ids", (INDEX + K - 1) // K if kind == "pool" else np.zeros_like(INDEX))
  expected = jax.jit(lambda p, b: text.apply(p, b).hidden)(
      own | {"embed": {"embedding": jnp.asarray(table, jnp.float32)}},
      dict(tokens=np.where(INDEX > 0, numbers, BATCH["tokens"]), segment_ids=SEGMENTS, block_ids=blocks))
  np.testing.assert_allclose(np.asarray(hidden(params, batch))[REAL], expected[REAL], atol=3e-5, rtol=3e-5)


def affected(hidden, params, batch, changed):
  """[B, T]: where hidden states differ between two batches, bit for bit; False at padding."""
  return (np.asarray(hidden(params, batch)) != np.asarray(hidden(params, changed))).any(-1) & REAL


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_changes_its_own_text_alone_from_where_it_is_seen(kind):
  _, params, hidden = vlm(kind)
  batch = batch_for(kind)
  for row, image in ((0, 0), (0, 1), (1, 1)):
    pixels = BATCH["images"].copy()
    pixels[row, image] = 255 - pixels[row, image]
    first = np.argmax(INDEX[row] == 1 + K * image)
    # A prefix sees the image from its beginning on.
    start = first if kind != "prefix" else np.argmax(SEGMENTS[row] == SEGMENTS[row, first])
    expected = np.zeros_like(REAL)
    expected[row, start:] = SEGMENTS[row, start:] == SEGMENTS[row, first]
    np.testing.assert_array_equal(affected(hidden, params, batch, batch | dict(images=pixels)), expected)


def test_who_sees_whom_within_and_around_an_image():
  """Changing the first or the last patch of an image, from where on is there a difference?"""
  first, last = np.argmax(INDEX[1] == 1), np.argmax(INDEX[1] == K)
  for kind, tower in (("siglip", "causal"), ("pool", "image")):
    model, params, hidden = vlm(kind)
    assert model.spec.vision.attention == tower
    features = jax.random.normal(jax.random.key(0), (2, 2 * K, 16))
    for at, token in ((0, first), (K - 1, last)):
      changed = features.at[1, at].add(1.0)
      a, b = (np.asarray(model_on_features(model, params, f)) for f in (features, changed))
      start = np.argmax((a != b).any(-1)[1])
      assert start == (token if kind == "siglip" else first)
      assert not (a != b).any(-1)[0].any()


def model_on_features(model, params, features):
  """Hidden states of BATCH with these features in place of the images'."""
  table = jnp.concatenate([params["embed"]["embedding"], features.reshape(-1, 16)])
  text = make(num_layers=2, num_kv_heads=2, vocab_size=len(table), attention_block=5,
              norm_scale_plus_one=model.spec.norm_scale_plus_one)
  tokens = np.where(INDEX > 0, 56 + 2 * K * np.arange(2)[:, None] + INDEX - 1, BATCH["tokens"])
  blocks = {} if model.spec.vision.attention == "causal" else dict(block_ids=(INDEX + K - 1) // K)
  own = {key: params[key] for key in ("blocks", "final_norm")} | {"embed": {"embedding": table}}
  return text.apply(own, dict(tokens=tokens, segment_ids=SEGMENTS, **blocks)).hidden


def test_nothing_after_the_prefix_is_seen_by_it():
  _, params, hidden = vlm("prefix")
  tokens = BATCH["tokens"][:1]
  one = dict(tokens=tokens, images=BATCH["images"][:1], image_index=INDEX[:1], prefix_length=np.array([14]))
  before = np.asarray(hidden(params, one))
  for at, start in ((13, 0), (14, 14), (15, 15)):
    other = tokens.copy()
    other[0, at] = 3
    moved = (np.asarray(hidden(params, one | dict(tokens=other))) != before).any(-1)[0]
    np.testing.assert_array_equal(moved, np.arange(16) >= start)


def test_packed_texts_with_images_equal_each_alone():
  """I3 and T11f: with images at other places of the row, and more rows and slots than images."""
  for kind in ("clip", "pool", "prefix"):
    model, params, hidden = vlm(kind)
    batch = batch_for(kind)
    together = np.asarray(hidden(params, batch))
    for row, segment, used in ((0, 1, [0]), (0, 2, [1]), (1, 1, [0, 1])):
      where = np.flatnonzero(SEGMENTS[row] == segment)
      n = len(where)
      alone = {key: np.zeros((2, 16), np.int32) for key in ("tokens", "segment_ids", "image_index", "block_ids")}
      own = INDEX[row, where]
      alone["tokens"][1, :n], alone["segment_ids"][1, :n] = BATCH["tokens"][row, where], 1
      # The features go to the slots behind the first one.
      alone["image_index"][1, :n] = np.where(own > 0, own + K * (1 - used[0]), 0)
      alone["images"] = np.zeros((2, 3, 8, 8, 3), np.uint8)
      alone["images"][1, 1 : 1 + len(used)] = BATCH["images"][row, used]
      if kind == "prefix":
        alone["block_ids"][1, :n] = batch["block_ids"][row, where]
      else:
        del alone["block_ids"]
      np.testing.assert_allclose(hidden(params, alone)[1, :n], together[row, where], atol=2e-5, rtol=2e-5)


def test_unused_images_and_ids_of_image_tokens_change_nothing_bitwise():
  """Not one bit of loss and gradients: whatever is in a slot that no token has, and in the tokens' own ids."""
  model, params, _ = vlm("clip")
  index = np.where(INDEX > K, 0, INDEX)
  index[1] = np.where(INDEX[1] > K, INDEX[1], 0)
  batch = BATCH | dict(image_index=index)
  unused = np.zeros((2, 2), bool)
  unused[0, 1] = unused[1, 0] = True
  empty = np.where(unused[..., None, None, None], 0, BATCH["images"]).astype(np.uint8)
  changed = dict(images=empty), dict(tokens=np.where(index > 0, 10**6, BATCH["tokens"]))
  run = jax.jit(lambda params, batch: jax.value_and_grad(tanh_loss(model, BATCH | batch))(params))
  traced = ("images", "tokens", "image_index")
  value, grads = run(params, {key: batch[key] for key in traced})
  assert np.abs(grads["vision"]["patch_embed"]["kernel"]).max() > 0
  for change in changed:
    other_value, other_grads = run(params, {key: (batch | change)[key] for key in traced})
    np.testing.assert_array_equal(other_value, value)
    for path, g in paths(other_grads).items():
      np.testing.assert_array_equal(g, paths(grads)[path], err_msg=path)


def test_what_is_not_given_follows_from_the_tokens():
  """`logits` and `apply` without image_index and block_ids; floats that are normalised already."""
  model, params, hidden = vlm("pool")
  given = np.asarray(hidden(params, BATCH))
  derived = {key: value for key, value in BATCH.items() if key != "image_index"}
  np.testing.assert_allclose(np.asarray(hidden(params, derived))[REAL], given[REAL], atol=1e-6)
  floats = (BATCH["images"].astype(np.float32) / 255 - 0.5) / 0.5
  np.testing.assert_allclose(np.asarray(hidden(params, derived | dict(images=floats)))[REAL], given[REAL], atol=1e-5)
  compiled = jax.jit(functools.partial(model.logits, segment_ids=SEGMENTS))
  logits = compiled(params, BATCH["tokens"], images=BATCH["images"])
  np.testing.assert_allclose(logits[REAL], model.unembed(params, given)[REAL], atol=1e-5)


def test_all_tokens_given_to_logits_are_prefix_unless_said_otherwise():
  model, params, hidden = vlm("prefix")
  tokens, pixels = BATCH["tokens"][1:, 2:], BATCH["images"][1:]
  one = dict(tokens=tokens, images=pixels)
  for length, arguments in ((14, {}), (9, dict(prefix_length=9))):
    blocks = (np.arange(14)[None] < length).astype(np.int32)
    expected = model.unembed(params, hidden(params, one | dict(block_ids=blocks)))
    found = model.logits(params, tokens, images=pixels, **arguments)
    np.testing.assert_allclose(found[..., :VOCAB], expected[..., :VOCAB], atol=1e-5)
  with pytest.raises(ValueError, match="needs block_ids, or prefix_length"):
    model.logits(params, one)


def test_a_batch_without_images_is_text():
  """The same numbers as a model without a tower, whose parameters have the same initial values."""
  for kind in ("siglip", "prefix"):
    model, params, hidden = vlm(kind)
    text = make(num_layers=2, num_kv_heads=2, attention_block=5)
    batch = dict(tokens=BATCH["tokens"] % 7, segment_ids=SEGMENTS)
    own = {key: params[key] for key in text.abstract_params()}
    np.testing.assert_array_equal(hidden(params, batch), jax.jit(text.apply)(own, batch).hidden)
  fresh, plain = (paths(jax.jit(m.init)(jax.random.key(1))) for m in (model, text))
  for path, leaf in plain.items():
    np.testing.assert_array_equal(leaf, fresh[path], err_msg=path)
  other = paths(jax.jit(make_vlm("clip").init)(jax.random.key(1)))
  np.testing.assert_array_equal(other["vision/blocks/attn/q/kernel"][:2], fresh["vision/blocks/attn/q/kernel"])
  assert (fresh["vision/blocks/attn/q/kernel"][0] != fresh["vision/blocks/attn/q/kernel"][1]).all()
  assert (fresh["vision/blocks/attn/q/kernel"] != fresh["vision/blocks/attn/k/kernel"]).all()


def test_what_does_not_fit_is_refused():
  model, params, hidden = vlm("siglip")
  text = make(num_layers=2)
  for changed, message in (
      (dict(images=None), "image_index, but no images"),
      (dict(images=BATCH["images"][:1]), "with the 2 rows of the tokens"),
      (dict(images=BATCH["images"][:, 0]), r"allowed: \[rows, images of a row, size, size, 3\]"),
      (dict(images=BATCH["images"], image_index=None, tokens=np.where(INDEX == 2, 0, BATCH["tokens"])),
       f"row 0 has 7 tokens {IMAGE_TOKEN}.*allowed: 4 tokens for each image"),
      (dict(images=BATCH["images"][:, :1], image_index=None), f"row 0 has 8 tokens {IMAGE_TOKEN}.* and 1 images"),
      (dict(prefix_length=3), "prefix_length is for models.*this one's is 'causal'"),
  ):
    with pytest.raises(ValueError, match=message):
      model.apply(params, BATCH | changed)
  with pytest.raises(ValueError, match="takes no images"):
    text.apply(None, BATCH)
  with pytest.raises(ValueError, match="image_token must say"):
    unnamed = make_vlm("siglip", vision=dict(image_token=None))
    unnamed.apply(params, BATCH | dict(image_index=None))
  # Traced, a number beyond the features cannot be refused, and is not another image's feature.
  beyond = np.where(INDEX == 2 * K, 2 * K + 1, INDEX)
  found = np.isnan(hidden(params, BATCH | dict(image_index=beyond))).any(-1)
  assert found[beyond == 2 * K + 1].all()


@functools.cache
def one_device():
  model, params, _ = vlm("pool")
  return jax.jit(jax.value_and_grad(lambda p, b: tanh_loss(model, b)(p)))(params, eight(BATCH))


def eight(batch):
  """Eight rows: the two of `batch` four times."""
  return {key: jnp.tile(value, (4, *[1] * (value.ndim - 1))) for key, value in batch.items()}


@pytest.mark.devices(8)
@pytest.mark.parametrize("sizes", [
    dict(data=1, fsdp=8), dict(data=2, fsdp=2, tensor=2), dict(data=1, fsdp=2, context=2, tensor=2)], ids=str)
def test_eight_devices_compute_the_same(sizes):
  model, params, _ = vlm("pool")
  mesh = mesh_lib.make_mesh(sizes)
  placed, _ = mesh_lib.param_shardings(model.abstract_params(), mesh)
  specs = {path: tuple(sharding.spec) for path, sharding in tree.flatten(placed).items()}
  if sizes.get("context", 1) == 1 < sizes.get("tensor", 1):
    assert specs["vision/blocks/mlp/up/kernel"] == (None, "fsdp", "tensor")
    assert specs["vision/patch_embed/kernel"] == (None, "fsdp") == specs["vision/pos_embed/embedding"]
    assert specs["projector/linear/kernel"] == ("fsdp", "tensor")
  batch = eight(BATCH)
  with mesh_lib.activation_rules(mesh):
    rows = mesh_lib.batch_sharding(mesh)
    run = jax.jit(jax.value_and_grad(lambda p, b: tanh_loss(model, b)(p)), in_shardings=(placed, rows))
    value, grads = run(jax.device_put(params, placed), jax.device_put(batch, rows))
  expected_value, expected = one_device()
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  largest = max(np.abs(g).max() for g in jax.tree.leaves(expected))
  for path, g in paths(grads).items():
    wanted = paths(expected)[path]
    # Some are 0 but for rounding: a bias of keys shifts all scores alike.
    np.testing.assert_allclose(g, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max() + 1e-6 * largest, err_msg=path)


def optimizer_for(model, **changed):
  c = defaults()
  c.optimizer.update(changed)
  return optim.make_optimizer(c.optimizer, c.schedule, model.abstract_params(), total_steps=10, only=model.trained_only,
                              to_steps=lambda cfg, prefix, default=None, where="": 0)


def kernel_gradients(model, **changed):
  """How many products in the gradient's program have the shape of one of the tower's MLP kernels."""
  optimizer = optimizer_for(model, **changed)
  trained, frozen = optimizer.split(model.abstract_params())

  def loss(trained, frozen):
    return tanh_loss(model, BATCH)(optimizer.merge(trained, frozen))

  text = str(jax.make_jaxpr(jax.grad(loss))(trained, frozen))
  products = text.count(":f32[12,20] = dot_general"), text.count(":f32[20,12] = dot_general")
  memory = [path for path in tree.flatten(jax.eval_shape(optimizer.init, trained)) if "vision/" in path]
  return sum(products), memory


def test_a_frozen_tower_has_no_gradient_and_no_optimizer_memory():
  model = make_vlm("siglip", scan_layers=False)
  products, memory = kernel_gradients(model)
  assert products == 4 and memory  # up and down, in two layers
  assert kernel_gradients(model, freeze=("vision/.*",)) == (0, [])


def test_adapters_are_the_decoders_unless_targets_name_the_tower():
  model = make_vlm("siglip", lora=dict(rank=2), scan_layers=False)
  assert not [path for path in paths(model.abstract_params()) if "lora" in path and not path.startswith("blocks/")]
  assert kernel_gradients(model) == (0, [])
  targets = ("blocks/attn/[qv]/kernel", "^projector/linear/kernel")
  both = make_vlm("siglip", num_layers=1, lora=dict(rank=2, targets=targets))
  adapted = {path.rpartition("/")[0] for path in paths(both.abstract_params()) if "lora" in path}
  assert adapted == {f"{at}blocks/attn/{name}" for at in ("", "vision/") for name in "qv"} | {"projector/linear"}
  params = vision.random_params(both)
  grads = paths(jax.jit(jax.grad(tanh_loss(both, BATCH)))(params))
  assert np.any(grads["vision/blocks/attn/v/lora_b"]) and np.any(grads["projector/linear/lora_a"])


def test_quantised_base_and_tower():
  """Only matrices of the decoder are quantised."""
  cfg = config(num_layers=2, vision=vision.SIGLIP, lora=dict(rank=2))
  model = make_model(cfg, vocab_size=VOCAB, params_dtype=jnp.float32, compute_dtype=jnp.float32, frozen="int8")
  dtypes = {path: leaf.dtype for path, leaf in paths(model.abstract_params()).items()}
  assert dtypes["blocks/mlp/up/kernel_int8"] == jnp.int8
  own = {path: dtype for path, dtype in dtypes.items() if path.startswith(("vision", "projector"))}
  assert own["vision/blocks/mlp/up/kernel"] == jnp.bfloat16 and set(own.values()) == {jnp.dtype("bfloat16")}
  assert jax.eval_shape(model.apply, model.abstract_params(), BATCH).hidden.shape == (2, 16, 16)


@pytest.mark.parametrize("kind", ["siglip", "pool", "prefix"])
def test_texts_fed_in_parts_equal_whole_ones(kind):
  """The prompt with its images into the cache, then a token at a time, causally."""
  model = make_vlm(kind, window=6, layer_pattern=("local", "global"))
  params = vision.random_params(model)
  tokens, index = BATCH["tokens"][1:, 2:], INDEX[1:, 2:]
  blocks = dict(siglip=None, pool=(index + K - 1) // K, prefix=(np.arange(14)[None] < 11).astype(np.int32))[kind]
  whole = dict(tokens=tokens, images=BATCH["images"][1:], image_index=index, block_ids=blocks)
  expected = np.asarray(jax.jit(model.apply)(params, whole).hidden)
  prompt = {key: None if value is None else value if key == "images" else value[:, :11] for key, value in whole.items()}
  hidden, begun = jax.jit(model.extend)(params, prompt)
  cache = jax.jit(model.copied_cache)(model.empty_cache(1, 14), begun, np.array([0]), np.array([0]))
  np.testing.assert_allclose(hidden, expected[:, :11], atol=2e-5, rtol=2e-5)
  decode = jax.jit(lambda params, *given: model.decode(model.decoding_params(params), *given))
  for at in range(11, 14):
    hidden, cache = decode(params, tokens[:, at], np.array([True]), cache)
    np.testing.assert_allclose(hidden, expected[:, at], atol=2e-5, rtol=2e-5)


def test_flops_of_images_are_shared_out_among_the_rows_tokens():
  model = make_vlm("siglip")
  plain = model.flops_per_token(16)
  assert plain == make(num_layers=2, num_kv_heads=2).flops_per_token(16)
  forward = 2 * 4 * 48 * 12 + 2 * (2 * 4 * (4 * 144 + 2 * 240) + 4 * 16 * 12) + 2 * 4 * 12 * 16
  np.testing.assert_allclose(model.flops_per_token(16, images_per_row=2) - plain, 3 * 2 * forward / 16)
  np.testing.assert_allclose(model.flops_per_token(16, images_per_row=2, tower_frozen=True) - plain, 2 * forward / 16)


def test_one_step_learns_to_tell_images_apart():
  """Projector and tower get a gradient that lowers the loss of a text which only its image tells from another."""
  model = make_vlm("siglip")
  params = initial(model)
  tokens = np.array([[IMAGE_TOKEN] * K + [1, 2], [IMAGE_TOKEN] * K + [1, 3]], np.int32)
  batch = dict(tokens=tokens, images=images(2, 1))

  def loss(params):
    logprobs = jax.nn.log_softmax(model.logits(params, batch)[:, K, :VOCAB])
    return -logprobs[np.arange(2), tokens[:, K + 1]].mean()

  @jax.jit
  def step(params):
    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)

  for _ in range(60):
    value, params = step(params)
  assert value < 0.5 * np.log(2)  # half of what guessing between the two costs
