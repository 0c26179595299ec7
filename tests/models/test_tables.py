"""Tables of tokens with adapters, or with rows that alone are trained: as if put by hand into a model without."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora, tables
from tests import tiny
from trainer import tree
from trainer.errors import ConfigError

ROWS = (17, 3, 9)
KINDS = {
    "tied": (dict(targets=("^embed/",)), True),
    "untied": (dict(targets=("^embed/", "^unembed/")), False),
    "read alone": (dict(targets=("^embed/",)), False),
    "rows, tied": (dict(targets=(), trainable_token_indices=ROWS), True),
    "rows, untied": (dict(targets=("attn/q/",), trainable_token_indices=ROWS), False),
}
TOKENS = np.random.default_rng(1).integers(0, 24, (2, 12)).astype(np.int32)


@functools.cache
def made(kind):
  """(model, parameters, all of them random, the same model without adapters)."""
  options, tied = KINDS[kind]
  model = tiny.model(tie_embeddings=tied, lora=dict(rank=3, alpha=6.0, **options))
  rng = np.random.default_rng(0)
  params = {path: jnp.asarray(path.endswith("scale") + 0.3 * rng.normal(size=leaf.shape), jnp.float32)
            for path, leaf in tree.flatten(model.abstract_params()).items()}
  return model, tree.unflatten(params), plain(tied)


@functools.cache
def plain(tied):
  return tiny.model(tie_embeddings=tied)


@functools.cache
def compiled(model):
  return jax.jit(model.logits, compiler_options=tiny.AS_USERS)


def logits(model, params):
  return np.asarray(compiled(model)(params, TOKENS))


def by_hand(params):
  """In float64: what each table is with its adapter or rows."""
  flat = {path: np.float64(leaf) for path, leaf in tree.flatten(params).items()}
  for path in ("embed/embedding", "unembed/kernel"):
    part = path.partition("/")[0]
    if f"{part}/lora_a" in flat:
      flat[path] = flat[path] + 2.0 * flat[f"{part}/lora_a"] @ flat[f"{part}/lora_b"]
    for i, token in enumerate(ROWS if f"{part}/lora_rows" in flat else ()):
      if part == "embed":
        flat[path][token] += flat["embed/lora_rows"][i]
      else:
        flat[path][:, token] += flat["unembed/lora_rows"][i]
  if "blocks/attn/q/lora_a" in flat:
    flat["blocks/attn/q/kernel"] += 2.0 * flat["blocks/attn/q/lora_a"] @ flat["blocks/attn/q/lora_b"]
  return tree.unflatten({p: jnp.asarray(x, jnp.float32) for p, x in flat.items() if not lora.is_adapter(p)})


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_moved_for_what_is_read_and_what_is_predicted(kind):
  model, params, base = made(kind)
  expected = logits(base, by_hand(params))
  np.testing.assert_allclose(logits(model, params), expected, atol=2e-5)
  np.testing.assert_allclose(logits(base, lora.merge(params, model.spec.lora)), expected, atol=2e-5)
  without = tree.unflatten({p: x for p, x in tree.flatten(params).items() if not lora.is_adapter(p)})
  assert np.abs(expected - logits(base, without)).max() > 0.5
  np.testing.assert_array_equal(logits(model, lora.off(params)), logits(base, without))


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_ones_change_nothing(kind):
  """A table's A begins as zeros and its B with variance 1, as in PEFT; rows begin as no difference."""
  model, _, base = made(kind)
  params, alone = (jax.jit(m.init)(jax.random.key(3)) for m in (model, base))
  np.testing.assert_array_equal(logits(model, params), logits(base, alone))
  flat = tree.flatten(params)
  if "embed/lora_a" in flat:
    assert not np.any(flat["embed/lora_a"]) and 0.7 < np.std(flat["embed/lora_b"]) < 1.3
    assert flat["embed/lora_a"].shape == (24, 3) and flat["embed/lora_b"].shape == (3, 16)
  else:
    assert flat["embed/lora_rows"].shape == (3, 16) and not np.any(flat["embed/lora_rows"])


@pytest.mark.parametrize("kind", KINDS)
def test_merging_slice_by_slice_is_merging(kind):
  model, params, _ = made(kind)
  flat, merged = tree.flatten(params), tree.flatten(lora.merge(params, model.spec.lora))
  read = lora.merged_reader(*[lambda path, index: np.asarray(flat[path][index])] * 2, flat, model.spec.lora)
  for path in [path for path in merged if lora.is_table(path)]:
    for index in ((slice(0, 24), slice(0, 16)), (slice(2, 10), slice(5, 16)), (slice(17, 18), slice(0, 3))):
      index = index if path.startswith("embed") else index[::-1]
      np.testing.assert_allclose(read(path, index), merged[path][index], atol=1e-6, err_msg=path)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_predicts_with_the_table_made_once(kind):
  model, params, _ = made(kind)
  expected = logits(model, params)
  ready = model.decoding_params(params)
  assert (tables.MERGED in ready) == (kind != "read alone")
  cache = model.empty_cache(2, 12)
  active = jnp.ones(2, bool)
  decode = jax.jit(lambda *given: model.decode(ready, *given))
  for t in range(4):
    hidden, cache = decode(TOKENS[:, t], active, cache)
    np.testing.assert_allclose(model.unembed(ready, hidden[:, None])[:, 0], expected[:, t], atol=1e-4)


@pytest.mark.parametrize("kind", ["rows, tied", "rows, untied"])
def test_only_rows_of_these_tokens_have_a_gradient(kind):
  """That of a model all of whose table is trained, at these rows."""
  model, params, base = made(kind)

  def loss(model):
    return lambda params: jnp.sum(jnp.square(model.logits(params, TOKENS)))

  found = tree.flatten(jax.jit(jax.grad(loss(model)))(params))
  of_base = tree.flatten(jax.jit(jax.grad(loss(base)))(by_hand(params)))
  for path, table in (("embed/lora_rows", of_base["embed/embedding"]),
                      ("unembed/lora_rows", None if kind == "rows, tied" else of_base["unembed/kernel"].T)):
    if table is not None:
      expected = table[np.array(ROWS)]
      np.testing.assert_allclose(found[path], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_places_of_ids():
  found = np.asarray(lora.places_of(ROWS, jnp.asarray([[3, 17, 0], [23, 9, 18]])))
  np.testing.assert_array_equal(found, [[1, 0, 3], [3, 2, 3]])


def test_a_token_beyond_the_table_is_noticed():
  model, params, _ = made("rows, tied")
  assert np.isnan(model.apply(params, dict(tokens=jnp.asarray([[1, 99]]))).hidden[0, 1]).all()


def test_flops_against_a_hand_count():
  """A token's row of A is read, not multiplied by; B is for what is read, and again for what is predicted."""
  base = made("tied")[2].flops_per_token(8) / 6  # in weights, attention's products as well
  frozen = 2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * 24
  assert made("tied")[0].flops_per_token(8) == 6 * base - 2 * frozen + 6 * (3 * 24 + 2 * 3 * 16)
  untied = 6 * base - 2 * frozen + 6 * (3 * 16 + 3 * (24 + 16))
  assert made("untied")[0].flops_per_token(8) == untied
  assert made("read alone")[0].flops_per_token(8) == untied - 6 * 3 * (24 + 16)


@pytest.mark.parametrize("changed, message", [
    (dict(targets=("^embed/",), dora=True), "dora is True, .* embed/embedding: adapters of tables have none"),
    (dict(targets=("^embed/",), dropout=0.1), "dropout is 0.1, .* embed/embedding: .* Set model.lora.dropout=0.0"),
    (dict(targets=("^embed/",), trainable_token_indices=(3,)), "trains rows of embed/embedding, which .* matches, too"),
    (dict(trainable_token_indices=(3, 24)), "found 24; ids of tokens are whole numbers from 0 to 23"),
    (dict(trainable_token_indices=(-1,)), "found -1; ids"),
    (dict(trainable_token_indices=("<a>",)), "found '<a>'; ids"),
    (dict(trainable_token_indices=(3, 5, 3)), "has 3 more than once"),
    (dict(trainable_token_indices=(3,), modules_to_save=("^embed/",)), "matches embed/embedding, which have adapters"),
    (dict(trainable_token_indices=(3,), rank=0), "model.lora.rank is 0, .*Set model.lora.rank=1"),
])
def test_what_cannot_be_is_refused(changed, message):
  with pytest.raises(ConfigError, match=message):
    tiny.model(tie_embeddings=True, lora={**dict(rank=2), **changed})


@pytest.mark.parametrize("tied", [False, True])
def test_the_unembedding_has_what_is_trained_in_closed_form(tied):
  """Adapters' product times their scale, and rows of single tokens, which are columns of what logits are made with."""
  rng = np.random.default_rng(0)
  base, a, b, rows = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 6), (4, 2), (2, 6), (2, 4)))
  spec = SimpleNamespace(tie_embeddings=tied, lora=SimpleNamespace(scale=2.5, trainable_token_indices=(1, 4)))
  head, kernel = ("embed", {"embedding": base.T}) if tied else ("unembed", {"kernel": base})
  product = dict(lora_a=b.T, lora_b=a.T) if tied else dict(lora_a=a, lora_b=b)
  np.testing.assert_allclose(tables.unembedding(jax.tree.map(jnp.asarray, {head: kernel | product}), spec),
                             base + 2.5 * (a @ b), rtol=1e-5)
  expected = base.copy()
  expected[:, [1, 4]] += rows.T
  params = jax.tree.map(jnp.asarray, {head: kernel | {"lora_rows": rows}})
  np.testing.assert_allclose(tables.unembedding(params, spec), expected, rtol=1e-5)
  assert tables.merged_unembedding({head: kernel}, spec, jnp.bfloat16) == {}
  (merged,) = tables.merged_unembedding(params, spec, jnp.bfloat16).values()
  assert merged.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(merged, np.float32), expected, rtol=2**-7)
