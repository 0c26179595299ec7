"""The cache: a text fed in parts has the hidden states it has as a whole, whatever the layers, padding and row."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import cache as cache_lib
from models.attention.pages import Table
from tests.models.common import (
  COHERE,
  DEEPSEEK_MOE,
  FAMILIES,
  GEMMA3N,
  GEMMA4,
  GEMMA4_MOE,
  GEMMA4_SHARED,
  GPT_OSS,
  GRANITE4,
  INDEXED,
  LLAMA4,
  LLAMA4_MOE,
  NEMOTRON_3,
  NEMOTRON_H,
  QWEN3_NEXT,
  VOCAB,
  make,
  random_params,
)
from trainer import tree

YARN = dict(type="yarn", factor=4.0, original_positions=8)
LLAMA3 = dict(type="llama3", factor=4.0, original_positions=8)
DYNAMIC = dict(type="dynamic", factor=2.0, original_positions=16)
# Families that are not tried here, and mixtures of experts, generate in tests/trainer/generate/test_sampler.py.
CASES = {
    **FAMILIES,
    "unrolled": dict(window=4, layer_pattern=("local",), num_layers=2, scan_layers=False,
                     rope_scaling=dict(type="linear", factor=4.0)),
    "one layer": dict(window=4, layer_pattern=("local", "global"), num_layers=1, rope_scaling=DYNAMIC),
    "cohere": COHERE,
    "qwen3_next": QWEN3_NEXT,
    "granite4": GRANITE4,
    "nemotron_h": NEMOTRON_H,
    "nemotron_3": NEMOTRON_3,
    "gpt_oss": GPT_OSS,
    "ministral": dict(num_kv_heads=2, query_temperature=dict(scale=0.5, floor=3), qk_norm=True, qk_norm_over="rotated",
                      activation="xielu"),
    "llama4": LLAMA4,
    "llama4_moe": LLAMA4_MOE,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4_moe": GEMMA4_MOE,
    "gemma4_shared": GEMMA4_SHARED,
    "deepseek": dict(DEEPSEEK_MOE, lora=dict(rank=2), rope_scaling=YARN),
    "indexed": dict(DEEPSEEK_MOE, num_layers=4, latent=INDEXED["latent"], rope_scaling=YARN),
    "yarn": dict(num_layers=1, rope_scaling=YARN),
    "lora": dict(lora=dict(rank=2), num_layers=2, rope_scaling=LLAMA3),
}
LENGTH = 16
# Prompts shorter than, as long as and longer than a window; one more row of the cache stays unused.
PROMPTS = (1, 4, 9)


@functools.cache
def case(name):
  """Model, parameters, three texts, and their hidden states as a whole."""
  model = make(**CASES[name])
  params = random_params(model)
  texts = np.random.default_rng(2).integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
  return model, params, texts, np.asarray(jax.jit(model.apply)(params, dict(tokens=texts)).hidden)


def padded(texts, side):
  """The batch of the prompts, padded to ten tokens."""
  width = 10
  tokens, segments = np.full((3, width), 7, np.int32), np.zeros((3, width), np.int32)
  for row, length in enumerate(PROMPTS):
    where = slice(0, length) if side == "right" else slice(width - length, width)
    tokens[row, where], segments[row, where] = texts[row, :length], 1
  return dict(tokens=tokens, segment_ids=segments)


@functools.cache
def _jitted(model, name, _apart, _page):
  if name == "decode":
    return jax.jit(lambda params, *given: model.decode(model.decoding_params(params), *given))
  return jax.jit(lambda *given: getattr(model, name)(*given))  # of the method itself JAX would have one trace for all


def jitted(model, name):
  """That method, traced once for what tests change."""
  return _jitted(model, name, model._one_by_one, cache_lib.PAGE)


def decode_of(model):
  return jitted(model, "decode")


def begin(model, params, batch, cache, rows, sources=None):
  """(hidden states, the cache with these rows begun)"""
  hidden, begun = jitted(model, "extend")(params, batch)
  sources = np.arange(len(rows)) if sources is None else sources
  return hidden, jitted(model, "copied_cache")(cache, begun, np.asarray(rows), sources)


def run(model, params, texts, side="right", rows=(2, 0, 3), cache=None):
  """Hidden states of every token after the prompts, [(row of texts, position, hidden)], and the last cache."""
  cache = model.empty_cache(4, LENGTH) if cache is None else cache
  rows = np.asarray(rows)
  hidden, cache = begin(model, params, padded(texts, side), cache, rows)
  found = []
  for row, length in enumerate(PROMPTS):
    at = length - 1 if side == "right" else -1
    found.append((row, length - 1, np.asarray(hidden[row, at])))
  decode, lengths = decode_of(model), np.array(PROMPTS)
  for step in range(LENGTH - min(PROMPTS)):
    # Every third step one row pauses, so that rows are at different places in their texts.
    active = (lengths < LENGTH) & (np.arange(3) != (step // 2 if step % 3 == 2 else -1))
    tokens, moving = np.full(4, 5, np.int32), np.zeros(4, bool)
    tokens[rows], moving[rows] = texts[np.arange(3), np.minimum(lengths, LENGTH - 1)], active
    hidden, cache = decode(params, tokens, moving, cache)
    found += [(row, lengths[row], np.asarray(hidden[rows[row]])) for row in np.flatnonzero(active)]
    lengths = lengths + active
  return found, cache


@pytest.mark.parametrize("name,apart", [
    *((name, True) for name in sorted(CASES.keys() - {"llama", "olmo"})), ("gemma", False), ("lora", False),
    ("qwen3_next", False), ("granite4", False), ("nemotron_h", False), ("nemotron_3", False),
    ("deepseek", False), ("indexed", False), ("gemma4", False), ("gemma4_shared", False), ("llama4", False),
    ("gemma3n", False)])
def test_texts_fed_in_parts_equal_whole_ones(name, apart, monkeypatch):
  """`apart`: each layer with a cache of its own, as on CPU, or in one scan over all of them, as elsewhere."""
  model, params, texts, whole = case(name)
  monkeypatch.setattr(type(model), "_one_by_one", apart)
  found, cache = run(model, params, texts)
  assert len(found) >= 20
  for row, position, hidden in found:
    np.testing.assert_allclose(hidden, whole[row, position], atol=2e-5, rtol=2e-5, err_msg=f"{row} {position}")
  assert cache.lengths[1] == 0  # no text went there


@pytest.mark.parametrize("name,apart", [("gemma", True), ("gemma", False), ("deepseek", True), ("gpt_oss", True),
                                        ("indexed", True), ("qwen3_next", True), ("nemotron_h", True), ("gemma4", True),
                                        ("gemma4_shared", True), ("llama4", True), ("gemma3n", True)])
def test_texts_in_pages_equal_whole_ones(name, apart, monkeypatch):
  """Pages in no order, among them some that no row has and that hold what was there before."""
  monkeypatch.setattr(cache_lib, "PAGE", 4)
  model, params, texts, whole = case(name)
  monkeypatch.setattr(type(model), "_one_by_one", apart)
  rng, J, spare = np.random.default_rng(0), LENGTH // 4, 3
  Q = 4 * J + spare
  pages = rng.permutation(Q)[:4 * J].reshape(4, J)
  owners, firsts = np.full(Q, 4), np.zeros(Q, int)
  for row in range(4):
    owners[pages[row]], firsts[pages[row]] = row, 4 * np.arange(J)
  cache = jax.tree.map(lambda part: part + 7, model.empty_cache(4, LENGTH, Q))
  cache = cache._replace(lengths=cache.lengths - 7, table=Table(*map(jnp.asarray, (pages, owners, firsts))))
  found, cache = run(model, params, texts, cache=cache)
  assert len(found) >= 20
  for row, position, hidden in found:
    np.testing.assert_allclose(hidden, whole[row, position], atol=2e-5, rtol=2e-5, err_msg=f"{row} {position}")
  for part, kind in zip(cache.keys, model.spec.layer_pattern, strict=False):  # nothing was written where no row is
    assert kind in ("local", "chunked", "delta", "mamba", "mlp", "moe") or (np.asarray(part[:, owners == 4]) == 7).all()
  smaller = jax.jit(model.resized_cache, static_argnums=2)(cache, np.array([3, 0]), LENGTH, np.array([pages[3, 0], Q]))
  for part, kept, kind in zip(cache.keys, smaller.keys, model.spec.layer_pattern, strict=False):
    if kind not in ("local", "chunked", "delta", "mamba", "mlp", "moe"):
      np.testing.assert_array_equal(kept, jnp.stack([part[:, pages[3, 0]], jnp.zeros_like(part[:, 0])], 1))


# Tokens of each of three texts in each of five chunks of up to six: more than a window, one, and none.
CHUNKS = ((6, 2, 1), (1, 6, 5), (5, 0, 6), (0, 6, 3), (4, 2, 0))


def in_chunks(model, params, texts, cache):
  """(hidden states of every token, [(text, position, hidden)], the last cache): texts run chunk by chunk."""
  extend, found, ends = jitted(model, "extend"), [], np.zeros(3, int)
  for sizes in CHUNKS:
    real = np.arange(6) < np.array(sizes)[:, None]
    tokens = np.where(real, texts[np.arange(3)[:, None], np.minimum(ends[:, None] + np.arange(6), LENGTH - 1)], 7)
    hidden, cache = extend(params, dict(tokens=tokens, segment_ids=real.astype(np.int32)), cache)
    found += [(row, ends[row] + n, np.asarray(hidden[row, n])) for row, size in enumerate(sizes) for n in range(size)]
    ends += sizes
    np.testing.assert_array_equal(cache.lengths, ends)
  return found, cache


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"llama", "olmo"}))
def test_texts_run_in_chunks_equal_whole_ones(name):
  """Several tokens of each text onto what was run of it, at first nothing, and then one."""
  model, params, texts, whole = case(name)
  found, cache = in_chunks(model, params, texts, model.empty_cache(3, LENGTH))
  assert len(found) == 47
  last, _ = decode_of(model)(params, texts[:, -1], np.array([0, 0, 1], bool), cache)
  for row, position, hidden in [*found, (2, LENGTH - 1, last[2])]:
    np.testing.assert_allclose(hidden, whole[row, position], atol=2e-5, rtol=2e-5, err_msg=f"{row} {position}")


@pytest.mark.parametrize("name", ["gemma", "qwen3_next", "gpt_oss", "deepseek", "indexed"])
def test_chunks_onto_rows_from_pages_and_back(name, monkeypatch):
  """A text goes on in a row of pages, from there in a cache of its own, and in another row's pages again."""
  monkeypatch.setattr(cache_lib, "PAGE", 4)
  model, params, texts, whole = case(name)
  pages = np.random.default_rng(0).permutation(2 * LENGTH // 4).reshape(2, -1)
  owners, firsts = np.zeros(pages.size, int), np.zeros(pages.size, int)
  for row in range(2):
    owners[pages[row]], firsts[pages[row]] = row, 4 * np.arange(LENGTH // 4)
  paged = model.empty_cache(2, LENGTH, pages.size)._replace(table=Table(*map(jnp.asarray, (pages, owners, firsts))))
  extend, copied = jitted(model, "extend"), jitted(model, "copied_cache")
  _, begun = extend(params, dict(tokens=texts[:1, :6]))
  paged = copied(paged, begun, np.array([1]), np.array([0]))
  _, paged = decode_of(model)(params, texts[[0, 0], 6], np.array([False, True]), paged)
  own = copied(model.empty_cache(1, 14), paged, np.array([0]), np.array([1]))
  hidden, own = extend(params, dict(tokens=texts[:1, 7:12]), own)
  np.testing.assert_allclose(hidden[0], whole[0, 7:12], atol=2e-5, rtol=2e-5)
  paged = copied(paged, own, np.array([0]), np.array([0]))
  np.testing.assert_array_equal(paged.lengths, [12, 7])
  for row, position in ((0, 12), (1, 7)):
    hidden, _ = decode_of(model)(params, texts[[0, 0], position], np.arange(2) == row, paged)
    np.testing.assert_allclose(hidden[row], whole[0, position], atol=2e-5, rtol=2e-5)


def test_a_cache_for_bfloat16_holds_its_numbers_in_float32_on_cpu():
  """XLA for CPU would convert all of it for each token; what is computed with them does not change."""
  model = make(compute_dtype=jnp.bfloat16, num_layers=2)
  params, tokens, active = random_params(model), np.arange(3, dtype=np.int32), np.ones(3, bool)

  @jax.jit
  def two(cache):
    _, cache = model.decode(model.decoding_params(params), tokens, active, cache)
    return model.decode(model.decoding_params(params), tokens + 1, active, cache)

  wide = model.empty_cache(3, 8)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, wide)
  (hidden, kept), (expected, kept_narrow) = two(wide), two(narrow)
  assert hidden.dtype == expected.dtype == jnp.bfloat16
  np.testing.assert_array_equal(hidden, expected)
  for a, b in zip((*kept.keys, *kept.values), (*kept_narrow.keys, *kept_narrow.values), strict=True):
    assert (a.dtype, b.dtype) == (jnp.float32, jnp.bfloat16) and float(jnp.abs(a).max()) > 0
    np.testing.assert_array_equal(a, b.astype(jnp.float32))


@pytest.mark.parametrize("recurrent", [QWEN3_NEXT, GRANITE4], ids=["delta", "mamba"])
def test_a_recurrent_layer_takes_one_token_after_another_as_all_at_once(recurrent):
  """With a convolution over more inputs than one token brings: what is kept of them moves on."""
  kind = "delta" if recurrent is QWEN3_NEXT else "mamba"
  model = make(**{**recurrent, "num_layers": 1, "layer_pattern": (kind,)})
  params, texts = random_params(model), np.random.default_rng(2).integers(0, VOCAB, (2, 6)).astype(np.int32)
  whole = np.asarray(jax.jit(model.apply)(params, dict(tokens=texts)).hidden)
  cache, decode = model.empty_cache(2, 6), decode_of(model)
  for at in range(6):
    hidden, cache = decode(params, texts[:, at], np.ones(2, bool), cache)
    np.testing.assert_allclose(hidden, whole[:, at], atol=1e-5)


def test_what_chooses_and_what_scales_is_not_rounded_for_decoding():
  model = make(compute_dtype=jnp.bfloat16, num_layers=1, moe=dict(num_experts=4, expert_size=8))
  read = jax.eval_shape(model.decoding_params, model.abstract_params())
  dtypes = {path: leaf.dtype for path, leaf in tree.flatten(read["blocks"][0]).items()}
  wide = {path for path, dtype in dtypes.items() if dtype == jnp.float32}
  assert wide == {path for path in dtypes if "router" in path or path.endswith("/scale")} and len(wide) >= 3
  assert {dtypes[path] for path in dtypes.keys() - wide} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("options", [
    dict(num_layers=2, qkv_bias=True, mlp_bias=True), dict(moe=dict(num_experts=4, expert_size=8)),
])
def test_parameters_in_the_dtype_of_products_change_no_bit(options):
  """Kernels and tables are rounded once instead of for each token; norms, and what chooses experts, are float32."""
  model = make(compute_dtype=jnp.bfloat16, **options)
  params = random_params(model)
  read = model.decoding_params(params)
  dtypes = {path: leaf.dtype for path, leaf in tree.flatten(read["blocks"][0]).items()}
  assert all(dtype == jnp.float32 for path, dtype in dtypes.items() if "router" in path or "scale" in path)
  assert read["embed"]["embedding"].dtype == dtypes["attn/q/kernel_across"] == jnp.bfloat16
  apart = make(**options).decoding_params(params)  # a model that computes in float32 leaves them as they are
  tokens, active = np.arange(3, dtype=np.int32), np.ones(3, bool)

  def two(params):
    _, cache = model.decode(params, tokens, active, model.empty_cache(3, 8))
    hidden, cache = model.decode(params, tokens + 4, active, cache)
    return hidden, cache, model.unembed(params, hidden[:, None])

  for a, b in zip(jax.tree.leaves(jax.jit(two)(apart)), jax.tree.leaves(jax.jit(two)(read)), strict=True):
    np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


@pytest.mark.parametrize("name", ["gemma", "gpt2", "qwen3_next", "granite4"])
def test_the_side_of_the_padding_and_the_row_do_not_matter(name):
  model, params, texts, _ = case(name)
  (right, _), (left, _) = run(model, params, texts), run(model, params, texts, "left", (0, 1, 2))
  for (row, position, a), (other, there, b) in zip(right, left, strict=True):
    assert (row, position) == (other, there)
    np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["gemma", "qwen3_next", "granite4"])
def test_a_row_begun_anew_does_not_see_what_was_there(name):
  model, params, texts, _ = case(name)
  _, used = run(model, params, texts)
  fresh = model.empty_cache(4, LENGTH)
  batch = dict(tokens=texts[:1, :3])
  results = []
  for cache in (used, fresh):
    _, cache = begin(model, params, batch, cache, [2])
    assert cache.lengths[2] == 3
    active = np.arange(4) == 2
    results.append(np.asarray(decode_of(model)(params, np.full(4, 9, np.int32), active, cache)[0][2]))
  np.testing.assert_array_equal(*results)


def test_one_prompt_begins_several_rows():
  model, params, texts, whole = case("llama")
  cache = model.empty_cache(4, LENGTH)
  _, cache = begin(model, params, dict(tokens=texts[:2, :5]), cache, [3, 1, 0, 4], np.array([1, 1, 0, 0]))
  np.testing.assert_array_equal(cache.lengths, [5, 5, 0, 5])
  hidden, _ = decode_of(model)(params, texts[[0, 1, 0, 1], 5], np.array([1, 1, 0, 1], bool), cache)
  np.testing.assert_allclose(hidden[np.array([0, 1, 3])], whole[[0, 1, 1], 5], atol=2e-5)


@pytest.mark.parametrize("name", ["gemma", "llama", "qwen3_next", "nemotron_h", "llama4"])
def test_rows_chosen_anew_with_more_room_go_on_as_before(name):
  """Rows in another order, one of them twice and one empty, with slots of windows that had not been filled."""
  model, params, texts, _ = case(name)
  cache = model.empty_cache(4, 2)
  _, cache = begin(model, params, dict(tokens=texts[:2, :2]), cache, [3, 1])
  larger = jax.jit(model.resized_cache, static_argnums=2)(cache, np.array([1, 3, 4, 3]), LENGTH)
  np.testing.assert_array_equal(larger.lengths, [2, 2, 0, 2])
  assert jax.tree.map(jnp.shape, larger) == jax.tree.map(jnp.shape, model.empty_cache(4, LENGTH))
  _, expected = begin(model, params, dict(tokens=texts[:2, :2]), model.empty_cache(4, LENGTH), [1, 0])
  expected = jax.jit(model.resized_cache, static_argnums=2)(expected, np.array([0, 1, 4, 1]), 2)  # not less room
  empty = [np.asarray(part[:, 2]) for part in jax.tree.leaves((larger.keys, larger.values))]
  for step in range(2, 6):
    tokens, active = texts[[1, 0, 0, 0], step], np.array([1, 1, 0, 1], bool)
    found, larger = decode_of(model)(params, tokens, active, larger)
    hidden, expected = decode_of(model)(params, tokens, active, expected)
    np.testing.assert_array_equal(found[active], hidden[active])
  for before, part in zip(empty, jax.tree.leaves((larger.keys, larger.values)), strict=True):
    np.testing.assert_array_equal(part[:, 2], before)


def test_layers_with_a_window_keep_no_more_than_it():
  model = make(window=3, layer_pattern=("local", "global"), num_layers=3, num_kv_heads=2)
  shapes = [[part.shape for part in jax.eval_shape(lambda apart=apart: cache_lib.empty(
      model.spec, 5, 64, jnp.float32, apart)).keys] for apart in (False, True)]
  assert shapes == [[(2, 5, 2, 3, 4), (1, 5, 2, 64, 4)], [(1, 5, 2, 3, 4), (1, 5, 2, 64, 4), (1, 5, 2, 3, 4)]]
  assert [part.shape for part in jax.eval_shape(lambda: model.empty_cache(5, 64)).keys] == shapes[1]  # on CPU


def test_the_position_in_each_slot():
  np.testing.assert_array_equal(cache_lib.positions_of(jnp.array([0, 2, 4, 6]), 4),
                                [[-4, -3, -2, -1], [0, 1, -2, -1], [0, 1, 2, 3], [4, 5, 2, 3]])


def test_models_say_how_long_a_text_they_can_generate():
  lengths = {name: make(**CASES[name]).max_length for name in ("llama", "gpt2", "yarn", "one layer")}
  assert lengths == {"llama": None, "gpt2": 16, "yarn": None, "one layer": 16}


@pytest.mark.parametrize("axes", [(), (1, 1, 2)])
def test_where_positions_have_axes_a_row_has_a_shift(axes):
  """By how much the position of the next token is behind what its number says, of a row that has had images."""
  spec = make(num_layers=1).spec
  known = "num_layers layer_pattern kv_source layer_type recurrent window_of heads_of mixer_of latent".split()
  of = SimpleNamespace(**{name: getattr(spec, name) for name in known}, ropes={"global": SimpleNamespace(axes=axes)})
  found = cache_lib.empty(of, 3, 8, jnp.float32).shift
  assert found is None if not axes else found.tolist() == [0, 0, 0]
