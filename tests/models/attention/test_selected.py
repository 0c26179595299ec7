"""Attention to chosen keys, against loops in float64."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import mask, selected
from models.attention.mask import QKV, Rule, TokenIds
from models.attention.pages import Seen, Table
from models.attention.rope import Rope, rope_table
from tests.models.common import DEEPSEEK_MOE, INDEXED, make, paths, random_params

T, H, K, V, N, I, COUNT = 11, 2, 4, 3, 2, 4, 3  # noqa: E741
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)


def whole(rng, *shape):
  """Small whole numbers, so that scores are exact, I ** -0.5 being 1/2, and tie."""
  return rng.integers(-1, 2, shape).astype(np.float32)


def asked(rng, *lead):
  return whole(rng, *lead, N, I), whole(rng, *lead, N)


def best(q_NxI, w_N, k_SxI, seen_S):
  """Of one query, by a stable sort: of equal scores the first."""
  scores_S = w_N.astype(np.float64) @ np.maximum(q_NxI.astype(np.float64) @ k_SxI.T.astype(np.float64), 0)
  return set(sorted(np.flatnonzero(seen_S), key=lambda s: -scores_S[s])[:COUNT]), scores_S


def visible(row, query):
  return (SEGMENTS[row] == SEGMENTS[row, query]) & (np.arange(T) <= query) & (SEGMENTS[row, query] > 0)


@pytest.mark.parametrize("block", [4, 16])
def test_the_highest_scores_of_the_own_document_and_of_ties_the_first(block):
  rng, ties = np.random.default_rng(0), 0
  (q, w), k = asked(rng, 2, T), whole(rng, 2, T, I)
  chosen = np.asarray(jax.jit(lambda *given: selected.choose(given, k, TokenIds(jnp.asarray(SEGMENTS)), None, COUNT,
                                                             block))(q, w))
  assert chosen.shape == (2, T, COUNT)
  for row, query in np.argwhere(SEGMENTS > 0):
    seen = visible(row, query)
    expected, scores = best(q[row, query], w[row, query], k[row], seen)
    assert {s for s in chosen[row, query].tolist() if seen[s]} == expected
    ties += len({scores[s] for s in expected} & {scores[s] for s in np.flatnonzero(seen) if s not in expected})
  assert ties > 5


def test_texts_that_share_a_prompt_choose_among_its_keys_and_their_own():
  rng = np.random.default_rng(4)
  segments, prompts = np.array([1] * 4 + [2] * 4 + [3] * 3), np.array([0] * 4 + [1] * 7)
  (q, w), k = asked(rng, 1, T), whole(rng, 1, T, I)
  tokens = TokenIds(jnp.asarray(segments[None]), prompts=jnp.asarray(prompts[None]))
  chosen = np.asarray(selected.choose((q, w), k, tokens, None, COUNT, 4))[0]
  for query in range(T):
    seen = ((segments == segments[query]) | (segments == prompts[query])) & (np.arange(T) <= query)
    assert {s for s in chosen[query].tolist() if seen[s]} == best(q[0, query], w[0, query], k[0], seen)[0]


def test_behind_a_cache_its_keys_are_among_them():
  """Of which some slots hold nothing; and of the newest token alone, from rows and from pages in no order."""
  rng, before, new = np.random.default_rng(1), 8, 3
  lengths = np.array([5, 0])
  (q, w), k = asked(rng, 2, new), whole(rng, 2, before + new, I)
  behind = np.where(np.arange(before) < lengths[:, None], lengths[:, None] - np.arange(before), 0)
  tokens = TokenIds(jnp.array([[1, 1, 1], [1, 1, 0]]))
  chosen = np.asarray(selected.choose((q, w), k, tokens, mask.behind(jnp.asarray(behind)), COUNT, 2))
  for row, query in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
    seen = np.concatenate([behind[row] > 0, np.arange(new) <= query])
    assert {s for s in chosen[row, query].tolist() if seen[s]} == best(q[row, query], w[row, query], k[row], seen)[0]

  seen = np.arange(before) < np.array([[6], [2]])
  rows = Seen(None, None, jnp.asarray(seen))
  asking, old = (jnp.asarray(q[:, :1]), jnp.asarray(w[:, :1])), k[:, :before]
  chosen = selected.choose_of_past(asking, old, rows, COUNT)
  marked = np.asarray(selected.narrowed(rows, chosen).seen_BxS)
  for row in range(2):
    assert set(np.flatnonzero(marked[row])) == best(q[row, 0], w[row, 0], old[row], seen[row])[0]
  pages = np.array([[3, 0], [1, 4]])  # page 2 has no row
  owners, firsts = np.array([0, 1, 2, 0, 1]), np.array([4, 0, 0, 0, 4])
  by_page, seen_by_page = np.full((5, 4, I), 9, np.float32), np.zeros((5, 4), bool)
  by_page[pages], seen_by_page[pages] = old.reshape(2, 2, 4, I), seen.reshape(2, 2, 4)
  paged = Seen(None, None, jnp.asarray(seen_by_page), Table(*map(jnp.asarray, (pages, owners, firsts))))
  assert paged.positions == before
  np.testing.assert_array_equal(selected.choose_of_past(asking, by_page, paged, COUNT), chosen)
  np.testing.assert_array_equal(selected.narrowed(paged, chosen).seen_BxS[pages].reshape(2, -1), marked)


@pytest.mark.parametrize("block, cap", [(4, None), (16, 1.5)])
def test_output_and_gradients_are_those_of_a_softmax_over_the_chosen(block, cap, monkeypatch):
  """With fewer queries at a time than a block has where there are many keys."""
  monkeypatch.setattr(selected, "PAIRS", 3 * T if cap else 2**20)
  rng = np.random.default_rng(2)
  q, k, v, cotangent = (rng.normal(size=(2, T, H, size)).astype(np.float32) for size in (K, K, V, V))
  chosen = np.argsort(rng.random((2, T, T)), axis=-1)[:, :, :COUNT]
  chosen[:, :, 0] = np.arange(T)  # each sees itself
  tokens = TokenIds(jnp.asarray(SEGMENTS))
  allowed = np.array([[visible(row, t) & np.isin(np.arange(T), chosen[row, t]) for t in range(T)] for row in range(2)])

  def dense(q, k, v):
    scores = 0.7 * jnp.einsum("bthk,bshk->bhts", q, k)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    weights = jnp.where(allowed[:, None], jnp.exp(scores), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("bhts,bshv->bthv", weights, v)

  def ours(q, k, v):
    return selected.attend(Rule(0.7, cap), QKV(q, k, v), jnp.asarray(chosen), tokens, None, block)

  with jax.enable_x64(True):
    wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
    expected, pull = jax.vjp(dense, *wide)
    expected = [expected, *pull(jnp.asarray(cotangent, jnp.float64))]
  found, pull = jax.vjp(jax.jit(ours), q, k, v)
  for a, b in zip([found, *pull(cotangent)], expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert (np.asarray(found)[SEGMENTS == 0] == 0).all()


@pytest.mark.parametrize("block", [8, 64])
def test_no_more_than_the_scores_of_some_queries_exist_at_a_time(block):
  """Forward and backward, there is no array of all queries and all keys, unless they are one block."""
  size = 48

  def step(q, k, asking, keys):
    tokens = TokenIds(jnp.ones((1, size), jnp.int32))
    chosen = selected.choose(asking, keys, tokens, None, COUNT, block)
    return selected.attend(Rule(1.0), QKV(q, k, k), chosen, tokens, None, block).sum()

  q, asking = jnp.ones((1, size, H, K)), (jnp.ones((1, size, N, I)), jnp.ones((1, size, N)))
  program = str(jax.make_jaxpr(jax.grad(step, (0, 1)))(q, q, asking, jnp.ones((1, size, I))))
  assert (f"{size},{size}]" in program) == (block > size)


def test_indexers_have_no_gradient_and_nothing_else_lacks_one():
  model = make(**DEEPSEEK_MOE | dict(num_layers=4, latent=INDEXED["latent"]))
  tokens = np.random.default_rng(3).integers(0, 50, (2, 12)).astype(np.int32)
  gradients = jax.jit(jax.grad(lambda params: jnp.square(model.logits(params, tokens)[..., :50]).sum()))(
      random_params(model))
  still = {path for path, g in paths(gradients).items() if not np.asarray(g).any()}
  assert still == {path for path in paths(gradients) if "/indexer/" in path} | {"blocks/moe/router/choice_bias"}
  assert {path.split("/")[2] for path in still if "indexer" in path} == {"queries", "keys", "keys_norm", "weights"}
  assert gradients["blocks"]["indexer"]["keys"]["kernel"].shape[0] == 2  # layers 1 and 3 use those of 0 and 2


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_how_far_a_key_is_from_its_query(interleaved):
  """Queries and keys rotate in the same way, the first pairs of an indexer's head alone."""
  rng = np.random.default_rng(0)
  vector = rng.normal(size=8).astype(np.float32)
  same = jnp.asarray(np.tile(vector, (1, T, 1)))
  rope = rope_table(Rope(10.0, 4), jnp.arange(T)[None], jnp.ones((1, T), jnp.int32))
  indexer = SimpleNamespace(spec=SimpleNamespace(index_heads=1, index_rope_interleaved=interleaved),
                            queries=lambda x: x, keys=lambda x: x, keys_norm=lambda x: x,
                            weights=SimpleNamespace(kernel=jnp.ones((8, 1))))
  q_BxTxNxI, w_BxTxN = selected.Indexer.queries_of(indexer, same, same, rope)
  k_BxTx1xI = selected.Indexer.keys_of(indexer, same, rope)
  scores = np.asarray(jnp.einsum("ti,si->ts", q_BxTxNxI[0, :, 0], k_BxTx1xI[0, :, 0]))
  pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
  frequencies = 10.0 ** -np.array([0.0, 0.5])
  for t in range(T):
    for s in range(T):
      turned = sum((vector[a]**2 + vector[b]**2) * np.cos((t - s) * frequency)
                   for (a, b), frequency in zip(pairs, frequencies, strict=True))
      assert scores[t, s] == pytest.approx(turned + (vector[4:]**2).sum(), rel=1e-5)
  np.testing.assert_allclose(w_BxTxN[0, :, 0], vector.sum(), rtol=1e-5)
