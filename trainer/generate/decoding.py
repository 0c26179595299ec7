"""What the device does while texts are generated (trainer/generate/sampler.py): a state of rows is made, begun with
prompts, decoded for a chunk of steps, and given other sizes. Pure functions, which the sampler compiles.

B rows, N prompts, T tokens of a prompt, M completions begun at a time, D hidden size, V vocabulary, C steps of a chunk;
R and Q rows and pages that are kept; L layers with experts, of which each token goes through k.
"""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention.pages import Table
from trainer.generate.sampling import draw
from trainer.generate.stop_strings import NOTHING, Automaton


class State(NamedTuple):
  """The rows being decoded, on the device."""

  cache: Any
  # Hidden state of each row's last token, from which its next one is drawn.
  hidden_BxD: jax.Array
  # Tokens drawn so far, and the data of the random key that the place of the next one is folded into.
  counts_B: jax.Array
  keys_Bx2: jax.Array
  # Tokens that each row may have.
  limits_B: jax.Array
  # How much of a stop string each ends with, or which is complete; see `trainer.generate.stop_strings.Automaton`.
  strings_B: jax.Array
  # Rows without a text, or whose text has ended.
  done_B: jax.Array


class Chunk(NamedTuple):
  """What a chunk of steps gives to the host."""

  tokens_BxC: jax.Array
  logprobs_BxC: jax.Array
  full_logprobs_BxC: jax.Array
  counts_B: jax.Array
  strings_B: jax.Array
  done_B: jax.Array
  # Those that each token went through, int16, -1: it went through none; None: not recorded.
  experts_BxCxLxk: jax.Array | None = None


def empty(model: Any, rows: int, length: int, pages: int | None = None) -> State:
  """Rows without a text; see `trainer.generate.slots.Sizes`."""
  cache, tokens_B = model.empty_cache(rows, length, pages), jnp.zeros(rows, jnp.int32)
  return State(cache, _no_hidden(model, rows), tokens_B, jnp.zeros((rows, 2), jnp.uint32), tokens_B, tokens_B,
               tokens_B == 0)


def room(model: Any, rows: int, length: int) -> tuple:
  """(hidden states of last tokens, a cache), without any text, for prompts that are run in chunks."""
  return _no_hidden(model, rows), model.empty_cache(rows, length)


# {model: shape and type of tokens' hidden states}. It takes tracing the whole model to learn, and every program asks.
_hidden_xD: weakref.WeakKeyDictionary[Any, jax.ShapeDtypeStruct] = weakref.WeakKeyDictionary()


def _no_hidden(model: Any, rows: int) -> jax.Array:
  if model not in _hidden_xD:
    tokens_B = jnp.zeros(rows, jnp.int32)
    read = jax.eval_shape(model.decoding_params, model.abstract_params())
    _hidden_xD[model] = jax.eval_shape(model.decode, read, tokens_B, tokens_B > 0, model.empty_cache(rows, 1))[0]
  like = _hidden_xD[model]
  return jnp.zeros((rows, *like.shape[1:]), like.dtype)


def prefill(model: Any, params: Any, tokens_NxT: jax.Array, lengths_N: jax.Array, seen: dict[str, jax.Array],
            record: bool = False) -> tuple:
  """(hidden states of each prompt's last token, a cache with the prompts, with `record` also the experts of their
  tokens); `seen` is what a batch says of images and of the order of reading."""
  hidden_NxTxD, *left = _extend(model, params, tokens_NxT, lengths_N, seen, None, record)
  return hidden_NxTxD[jnp.arange(len(lengths_N)), lengths_N - 1], *left


def extend(model: Any, params: Any, cache: Any, last_NxD: jax.Array, tokens_NxT: jax.Array, lengths_N: jax.Array,
           record: bool = False) -> tuple:
  """As `prefill`, of further tokens of prompts that the cache holds the beginnings of; of some there may be none."""
  hidden_NxTxD, *left = _extend(model, params, tokens_NxT, lengths_N, {}, cache, record)
  newest_NxD = hidden_NxTxD[jnp.arange(len(lengths_N)), jnp.maximum(lengths_N - 1, 0)]
  return jnp.where(lengths_N[:, None] > 0, newest_NxD, last_NxD), *left


def _extend(model: Any, params: Any, tokens_NxT: jax.Array, lengths_N: jax.Array, seen: dict[str, jax.Array],
            cache: Any, record: bool) -> tuple:
  real_NxT = jnp.arange(tokens_NxT.shape[1]) < lengths_N[:, None]
  batch = dict(tokens=tokens_NxT, segment_ids=real_NxT.astype(jnp.int32), **seen)
  return model.extend(params, batch, cache, **(dict(record=True) if record else {}))


def keep(model: Any, length: int, state: State, row_1: jax.Array, table: Table | None = None) -> Any:
  """A cache of its own for the text in a row."""
  return model.copied_cache(model.empty_cache(1, length), _with_table(state.cache, table), jnp.zeros_like(row_1), row_1)


def _with_table(cache: Any, table: Table | None) -> Any:
  """Tables are of the host, which gives them to each program anew."""
  return cache if table is None else cache._replace(table=jax.tree.map(jnp.asarray, table))


def _without_table(cache: Any, table: Table | None) -> Any:
  return cache if table is None else cache._replace(table=None)


def begin(model: Any, state: State, last_NxD: jax.Array, begun: Any, given: tuple[jax.Array, ...],
           table: Table | None = None) -> State:
  """Prompts put into rows of the state, each of which is begun once; of one beyond the last nothing is.

  `given`: of each completion its row, the number of its prompt among those that were run, the data of its key, its
  limit, and how many tokens of it, and what state of stop strings, its prompt ends with.
  """
  rows_M, sources_M, keys_Mx2, limits_M, counts_M, strings_M = given

  def put(old_B: jax.Array, new_M: Any) -> jax.Array:
    return old_B.at[rows_M].set(new_M, mode="drop", unique_indices=True)

  cache = _without_table(model.copied_cache(_with_table(state.cache, table), begun, rows_M, sources_M), table)
  return State(cache, put(state.hidden_BxD, last_NxD[sources_M]), put(state.counts_B, counts_M),
                put(state.keys_Bx2, keys_Mx2), put(state.limits_B, limits_M), put(state.strings_B, strings_M),
                put(state.done_B, False))


def resized(model: Any, length: int, state: State, rows_R: jax.Array, pages_Q: jax.Array | None = None) -> State:
  """These rows and pages of the state, in this order; one beyond the last is an empty one."""

  def take(old_B: jax.Array, fill: Any = 0) -> jax.Array:
    return old_B.at[rows_R].get(mode="fill", fill_value=fill)

  return State(model.resized_cache(state.cache, rows_R, length, pages_Q), take(state.hidden_BxD), take(state.counts_B),
                take(state.keys_Bx2), take(state.limits_B), take(state.strings_B), take(state.done_B, True))


class DecodeOptions(NamedTuple):
  """What the program that decodes depends on."""

  # Tokens of a row at a time, at most.
  chunk: int
  # See `draw`.
  greedy: bool
  truncated: bool
  # Whether the experts of tokens are given, too.
  record: bool = False


def decode(model: Any, options: DecodeOptions, params: Any, state: State, given: tuple[jax.Array, ...],
           automaton: Automaton = NOTHING, table: Table | None = None) -> tuple[State, Chunk]:
  """Up to `chunk` tokens for each row that is not done; fewer if enough rows are done before."""
  chunk, greedy, truncated, record = options
  stops, numbers, top_k, enough = given
  B = state.done_B.shape[0]
  keys_B = jax.random.wrap_key_data(state.keys_Bx2, impl="threefry2x32")

  def goes_on(carry: tuple) -> jax.Array:
    column, state, *_ = carry
    return (column < chunk) & (jnp.sum(state.done_B) < enough)

  def step(carry: tuple) -> tuple:
    column, state, found, experts_BxCxLxk = carry
    logits_BxV = model.unembed(params, state.hidden_BxD[:, None])[:, 0]
    drawn = draw(jax.vmap(jax.random.fold_in)(keys_B, state.counts_B), logits_BxV, numbers, top_k, greedy=greedy,
                 truncated=truncated)
    found = tuple(part.at[:, column].set(new) for part, new in zip(found, drawn, strict=True))
    tokens_B, counts_B = drawn[0], state.counts_B + ~state.done_B
    kinds_B = jnp.take(automaton.classes_V, tokens_B, mode="clip")
    strings_B = jnp.where(state.done_B, state.strings_B, jnp.asarray(automaton.moves_SxC)[state.strings_B, kinds_B])
    done_B = (state.done_B | jnp.isin(tokens_B, stops) | (strings_B >= automaton.found) |
              (counts_B >= state.limits_B))
    hidden_BxD, cache, *chosen = model.decode(params, tokens_B, ~done_B, state.cache, **recording)
    if record:
      experts_BxCxLxk = experts_BxCxLxk.at[:, column].set(jnp.where(done_B[:, None, None], -1, chosen[0]))
    state = State(cache, hidden_BxD, counts_B, state.keys_Bx2, state.limits_B, strings_B, done_B)
    return column + 1, state, found, experts_BxCxLxk

  zeros_BxC = jnp.zeros((B, chunk), jnp.float32)
  found = zeros_BxC.astype(jnp.int32), zeros_BxC, zeros_BxC
  recording: dict[str, Any] = dict(record=True) if record else {}
  experts_BxCxLxk = jnp.full((B, chunk, *model.routing), -1, jnp.int16) if record else None
  state = state._replace(cache=_with_table(state.cache, table))
  _, state, found, experts_BxCxLxk = jax.lax.while_loop(goes_on, step, (0, state, found, experts_BxCxLxk))
  state = state._replace(cache=_without_table(state.cache, table))
  return state, Chunk(*found, state.counts_B, state.strings_B, state.done_B, experts_BxCxLxk)
