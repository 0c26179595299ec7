"""Programs of generation, with a model that is a table: the logits after token t are row t, whatever came before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.generate import decoding
from trainer.generate.decoding import DecodeOptions, State
from trainer.generate.stop_strings import Automaton

# After 0 comes 3, after 3 comes 1, then 4, 2 and 2 for ever.
TABLE = np.log(np.array([[1, 1, 1, 6, 1], [1, 1, 1, 1, 4], [1, 2, 12, 1, 1], [1, 5, 1, 1, 2], [1, 1, 3, 1, 1]], float))
LOGPROBS = TABLE - np.log(np.exp(TABLE).sum(axis=1, keepdims=True))
CHAIN = {0: [3, 1, 4, 2, 2], 4: [2, 2, 2, 2, 2], 1: [4, 2, 2, 2, 2]}


class Chain:
  """Its cache holds the tokens of each row, in the order in which they were run; hidden states are the last token, or
  the one so many after it as the parameters say (`shift`)."""

  routing, vocab_size, max_length = (1, 1), 5, None

  def _hidden(self, params, tokens):
    return ((tokens + params.get("shift", 0)) % 5)[..., None].astype(jnp.float32)

  def has_beginnings(self, length):
    return True

  def beginning_of_cache(self, cache, length):
    return cache | {"length": jnp.minimum(cache["length"], length)}

  def empty_cache(self, rows, length, pages=None):
    return {"tokens": jnp.full((rows, length), -1), "length": jnp.zeros(rows, jnp.int32)}

  def abstract_params(self):
    return {}

  def decoding_params(self, params):
    return params

  def unembed(self, params, hidden):
    return jnp.asarray(TABLE, jnp.float32)[hidden[..., 0].astype(jnp.int32)]

  def decode(self, params, tokens_B, there_B, cache, record=False):
    rows = jnp.arange(len(tokens_B))
    at = jnp.where(there_B, cache["length"], cache["tokens"].shape[1])
    cache = {"tokens": cache["tokens"].at[rows, at].set(tokens_B, mode="drop"), "length": cache["length"] + there_B}
    hidden = self._hidden(params, tokens_B)
    return (hidden, cache, tokens_B[:, None, None].astype(jnp.int16)) if record else (hidden, cache)

  def extend(self, params, batch, cache, record=False):
    tokens, real = batch["tokens"], batch["segment_ids"] > 0
    cache = self.empty_cache(*tokens.shape) if cache is None else cache
    for column in range(tokens.shape[1]):
      _, cache = self.decode(params, tokens[:, column], real[:, column], cache)
    hidden = self._hidden(params, tokens)
    return (hidden, cache, tokens[..., None, None].astype(jnp.int16)) if record else (hidden, cache)

  def copied_cache(self, cache, begun, rows_M, sources_M):
    length = cache["tokens"].shape[1]
    begun = self._as_long(begun, length)
    return {name: cache[name].at[rows_M].set(begun[name][sources_M], mode="drop") for name in cache}

  def _as_long(self, cache, length):
    tokens = cache["tokens"][:, :length]
    return cache | {"tokens": jnp.pad(tokens, ((0, 0), (0, length - tokens.shape[1])), constant_values=-1)}

  def resized_cache(self, cache, rows_R, length, pages_Q):
    return {"tokens": self._as_long(cache, length)["tokens"].at[rows_R].get(mode="fill", fill_value=-1),
            "length": cache["length"].at[rows_R].get(mode="fill", fill_value=0)}


MODEL = Chain()


def state(last, counts, limits, done, strings=None):
  """Rows whose last tokens these are, with room for 8."""
  rows = len(last)
  return State(MODEL.empty_cache(rows, 8), jnp.asarray(last, jnp.float32)[:, None], jnp.asarray(counts, jnp.int32),
               jnp.zeros((rows, 2), jnp.uint32), jnp.asarray(limits, jnp.int32),
               jnp.zeros(rows, jnp.int32) if strings is None else jnp.asarray(strings, jnp.int32), jnp.asarray(done))


@functools.cache
def program(chunk, greedy=True, record=False):
  return jax.jit(functools.partial(decoding.decode, MODEL, DecodeOptions(chunk, greedy, False, record)))


def decoded(begun, chunk=4, enough=99, stops=(2,), temperature=1.0, greedy=True, record=False, **automaton):
  given = (jnp.asarray(stops), jnp.asarray([temperature, 1.0, 0.0]), jnp.int32(0), jnp.int32(enough))
  after, found = program(chunk, greedy, record)({}, begun, given, **automaton)
  return after, jax.tree.map(np.asarray, found)


def test_rows_go_on_to_a_stop_token_their_limit_or_the_end_of_the_chunk():
  """From 0 four tokens, the last of which, 2, is a stop; a row without a text; one with two more tokens; one whose
  first is the stop."""
  after, found = decoded(state([0, 3, 0, 4], [0, 7, 5, 0], [9, 9, 7, 9], [False, True, False, False]))
  assert found.counts_B.tolist() == [4, 7, 7, 1] and found.done_B.tolist() == [True, True, True, True]
  for row, ids in ((0, CHAIN[0][:4]), (2, CHAIN[0][:2]), (3, CHAIN[4][:1])):
    before = [[0, 3, 0, 4][row], *ids]
    assert found.tokens_BxC[row, :len(ids)].tolist() == ids
    for part in (found.logprobs_BxC, found.full_logprobs_BxC):
      np.testing.assert_allclose(part[row, :len(ids)], [LOGPROBS[a, b] for a, b in zip(before, ids, strict=False)],
                                 rtol=1e-5)
  # What ends a text is not run: nothing follows it.
  assert [row[row >= 0].tolist() for row in np.asarray(after.cache["tokens"])] == [[3, 1, 4], [], [3], []]


def test_what_a_chunk_leaves_goes_on_in_the_next():
  after, found = decoded(state([0], [0], [9], [False]), chunk=2)
  assert found.tokens_BxC.tolist() == [[3, 1]] and found.counts_B.tolist() == [2] and not found.done_B.any()
  again, more = decoded(after, chunk=2)
  assert more.tokens_BxC.tolist() == [[4, 2]] and more.counts_B.tolist() == [4] and more.done_B.all()
  assert np.asarray(again.cache["tokens"])[0, :4].tolist() == [3, 1, 4, -1]


@pytest.mark.parametrize("enough, counts", [(1, [2, 2, 2]), (2, [2, 3, 3]), (3, [2, 3, 4]), (99, [2, 3, 4])])
def test_the_host_looks_when_enough_rows_are_done(enough, counts):
  """Limits of 2, 3 and 4 tokens; a chunk has up to 4."""
  _, found = decoded(state([0, 0, 0], [0, 0, 0], [2, 3, 4], [False] * 3), enough=enough, stops=(-1,))
  assert found.counts_B.tolist() == counts


def test_a_stop_string_ends_a_text_whichever_chunk_it_began_in():
  """The string "14", of which the second row has the 1 from before."""
  ends = Automaton(np.array([0, 1, 0, 0, 2, 0], np.int32), np.array([[0, 1, 0], [0, 1, 2], [0, 1, 0]], np.int32), 2)
  begun = state([0, 1, 1], [0, 3, 3], [9, 9, 9], [False] * 3, strings=[0, 1, 0])
  _, found = decoded(begun, stops=(-1,), automaton=ends)
  assert found.counts_B.tolist() == [3, 4, 7] and found.done_B.tolist() == [True, True, False]
  assert found.strings_B.tolist() == [2, 2, 0]


def test_experts_are_those_of_tokens_that_were_run():
  """Each goes through the expert of its number; the last one of a text through none."""
  _, found = decoded(state([0], [0], [9], [False]), record=True)
  assert found.tokens_BxC[0].tolist() == [3, 1, 4, 2]
  assert found.experts_BxCxLxk[0, :, 0, 0].tolist() == [3, 1, 4, -1]


def test_what_is_drawn_depends_on_the_key_and_the_place_of_the_token_alone():
  """Rows of one key with other tokens before them, in another chunk: from the same logits the same is drawn."""
  keys = jnp.asarray([[1, 2]] * 4 + [[1, 3]] * 4, jnp.uint32)
  begun = state([0] * 8, [5, 5, 6, 7] * 2, [99] * 8, [False] * 8)._replace(keys_Bx2=keys)
  drawn = decoded(begun, chunk=1, stops=(-1,), greedy=False, temperature=9.0)[1].tokens_BxC[:, 0]
  assert drawn[0] == drawn[1] and drawn[4] == drawn[5]
  flat = [decoded(begun._replace(keys_Bx2=keys + shift), chunk=1, stops=(-1,), greedy=False,
                  temperature=9.0)[1].tokens_BxC[:, 0].tolist() for shift in range(8)]
  assert any(row[1] != row[2] for row in flat) and any(row[0] != row[4] for row in flat)
  # Of 64 draws from nearly even logits at temperature 9 none of five tokens has them all.
  assert len({token for row in flat for token in row}) == 5


def test_prompts_are_run_to_their_own_ends_and_further_ones_behind_them():
  tokens = jnp.asarray([[3, 1, 4], [1, 0, 0]])
  last, cache, experts = decoding.prefill(MODEL, {}, tokens, jnp.asarray([3, 1]), {}, record=True)
  assert last[:, 0].tolist() == [4, 1] and cache["length"].tolist() == [3, 1] and experts.shape == (2, 3, 1, 1)
  cache = MODEL._as_long(cache, 8)
  last, cache = decoding.extend(MODEL, {}, cache, last, jnp.asarray([[0, 0], [2, 3]]), jnp.asarray([0, 2]))
  assert last[:, 0].tolist() == [4, 3] and cache["length"].tolist() == [3, 3]
  assert cache["tokens"][1, :3].tolist() == [1, 2, 3]


def test_completions_begin_in_their_rows_with_what_their_prompts_leave():
  """Two of prompt 1 in rows 2 and 0, the second of which goes on after three tokens; row 9 is none."""
  last, cache = decoding.prefill(MODEL, {}, jnp.asarray([[3, 1], [4, 0]]), jnp.asarray([2, 1]), {})
  before = state([7, 7, 7], [9, 8, 9], [1, 2, 1], [True, False, True], strings=[4, 5, 4])
  given = tuple(map(jnp.asarray, ([2, 0, 9], [1, 1, 0], np.array([[1, 2], [3, 4], [5, 6]], np.uint32), [11, 12, 13],
                                  [0, 3, 0], [0, 6, 0])))
  after = decoding.begin(MODEL, before, last, cache, given)
  assert after.hidden_BxD[:, 0].tolist() == [4, 7, 4] and after.counts_B.tolist() == [3, 8, 0]
  assert after.keys_Bx2.tolist() == [[3, 4], [0, 0], [1, 2]] and after.limits_B.tolist() == [12, 2, 11]
  assert after.strings_B.tolist() == [6, 5, 0] and after.done_B.tolist() == [False] * 3
  assert after.cache["length"].tolist() == [1, 0, 1] and after.cache["tokens"][:, 0].tolist() == [4, -1, 4]


def test_rows_are_kept_in_another_order_and_empty_ones_are_done():
  before = state([1, 2, 3], [4, 5, 6], [7, 8, 9], [False, True, False], strings=[1, 2, 3])
  after = decoding.resized(MODEL, 16, before, jnp.asarray([2, 0, 3]))
  assert after.hidden_BxD[:, 0].tolist() == [3, 1, 0] and after.counts_B.tolist() == [6, 4, 0]
  assert after.limits_B.tolist() == [9, 7, 0] and after.strings_B.tolist() == [3, 1, 0]
  assert after.done_B.tolist() == [False, False, True] and after.cache["tokens"].shape == (3, 16)


def test_a_state_without_texts_is_done():
  empty = decoding.empty(MODEL, 3, 5)
  assert empty.done_B.tolist() == [True] * 3 and empty.hidden_BxD.shape == (3, 1)
  assert [part.tolist() for part in (empty.counts_B, empty.limits_B, empty.strings_B)] == [[0] * 3] * 3
  hidden, cache = decoding.room(MODEL, 2, 7)
  assert hidden.shape == (2, 1) and cache["tokens"].shape == (2, 7)
