"""Experts on several devices: tokens travel to the experts that the router chose for them, and back.

Each of P devices of a mesh axis holds E / P experts and some tokens. However uneven the router's choice, no token is
dropped and memory stays bounded: tokens travel in rounds, in each of which every device sends every other one at most
C of its assignments (of a token to an expert), all at once (`all_to_all`). How many rounds there are, the devices agree
on when the step runs: `rounds_when_even` if the choice is even. Where others give each expert a capacity and drop what
exceeds it, or allocate for the case that all tokens choose one device, one more round is taken. While a round is
computed, the next one's tokens come in.

The gradient takes the same rounds again, with the experts' inputs sent once more: between the passes only what enters
is kept.

P devices along the axis, N tokens of a device, k experts per token, A = k N assignments, a of token a % N, D hidden
size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention.blocked import TIMES
from models.sharding import linear as projections

# More rounds: more of what travels does so beside products, and less is sent in vain in the last one, which is not full
# unless the choice is even. Fewer: larger products, and fewer sums of kernels' gradients.
FEWEST, MOST, ASSIGNMENTS = 2, 4, 2**14


class _Routing(NamedTuple):
  """Who sends what to whom, on one device."""

  # Assignments by the device of their expert, in the order of the tokens: int32 [A].
  order: jax.Array
  # Where in `order` each device's begin, and how many there are: int32 [P].
  firsts: jax.Array
  counts: jax.Array
  # The expert of each assignment among its device's own, int32 [A].
  experts: jax.Array


class Split(NamedTuple):
  """How experts' kernels [E, …] are split over a mesh; static."""

  # The axis that the experts are split over; None: every device has all.
  axis: str | None
  # Of each kernel: the axes over which it is split to save memory, and along which dimension.
  shards: tuple[tuple[tuple[str, ...], int], ...]
  # All axes of the mesh.
  axes: tuple[str, ...]

  def gather(self, kernels: tuple[jax.Array, ...], dtype: Any) -> tuple[jax.Array, ...]:
    """Whole kernels of this device's experts."""
    return tuple(projections.gather(w.astype(dtype), *shard) for w, shard in zip(kernels, self.shards, strict=True))

  def scatter(self, gradients: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Their gradients, summed over the devices in float32, and split and kept as the kernels are."""
    return tuple(projections.scatter(g.astype(jnp.float32), *shard).astype(w.dtype)
                 for g, w, shard in zip(gradients, kernels, self.shards, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def at_home(run: Callable, split: Split, x_NxD: jax.Array, experts_A: jax.Array, kernels: Any) -> jax.Array:
  """`exchange` where every device has all experts, in parts that are gathered; arguments as there."""
  return run(x_NxD, experts_A, split.gather(kernels, x_NxD.dtype))


def _at_home_fwd(run, split, x_NxD, experts_A, kernels):
  return at_home(run, split, x_NxD, experts_A, kernels), (x_NxD, experts_A, kernels)


def _at_home_bwd(run, split, saved, dy_AxD):
  x_NxD, experts_A, kernels = saved
  whole = split.gather(kernels, x_NxD.dtype)
  dx_NxD, dkernels = jax.vjp(lambda x, whole: run(x, experts_A, whole), x_NxD, whole)[1](dy_AxD)
  return dx_NxD, None, split.scatter(dkernels, kernels)


at_home.defvjp(_at_home_fwd, _at_home_bwd)


def exchange(run: Callable, split: Split, x_NxD: jax.Array, experts_A: jax.Array, kernels: Any,
             num_experts: int) -> jax.Array:
  """The outputs of the assigned experts, wherever they are: [A, D] in the dtype of x, 0 for assignments to none.

  To be called inside `jax.shard_map`.

  Args:
    run: `run(x [M, D], experts [M], kernels) -> [M, D]` computes with this device's E / P experts; where the expert is
      E / P, none, the token is any, as the output may be.
    split: how the kernels are split.
    experts_A: the expert of each assignment; `num_experts`: none.
    kernels: this device's part of its experts' kernels, in any dtype.
    num_experts: E, a multiple of P.
  """
  axis = split.axis
  P = jax.lax.axis_size(axis)
  A = experts_A.shape[0]
  when_even = rounds_when_even(A)
  capacity = max(1, -(-A // (P * when_even)))
  owners_A = experts_A // (num_experts // P)
  counts_P = jnp.sum(owners_A[:, None] == jnp.arange(P), axis=0, dtype=jnp.int32)
  # Stable: tokens keep their order. Assignments to no expert come last, and are never sent.
  routing = _Routing(jnp.argsort(owners_A, stable=True), jnp.cumsum(counts_P) - counts_P, counts_P,
                     experts_A % (num_experts // P))
  rounds = jax.lax.pmax((jnp.max(counts_P) + capacity - 1) // capacity, split.axes)
  static = _Static(run, split, capacity, when_even, num_experts // P)
  return _exchange(static, x_NxD, kernels, routing, rounds)


def rounds_when_even(assignments: int) -> int:
  """In how many rounds so many assignments of a device travel if each other device gets as many of them."""
  return min(MOST, max(FEWEST, assignments // ASSIGNMENTS))


class _Static(NamedTuple):
  """What the compiled program depends on."""

  run: Callable
  split: Split
  capacity: int
  rounds_when_even: int
  experts: int

  def send(self, x_PxCxD: jax.Array) -> jax.Array:
    """To each device its part; from each device a part. Its own inverse."""
    return jax.lax.all_to_all(x_PxCxD, self.split.axis, split_axis=0, concat_axis=0)

  def window(self, routing: _Routing, index: jax.Array) -> jax.Array:
    """The assignments [P, C] that leave in a round; distinct numbers from A on where there are none."""
    A = routing.order.shape[0]
    nth_PxC = jnp.broadcast_to(index * self.capacity + jnp.arange(self.capacity),
                               (routing.counts.shape[0], self.capacity))
    there_PxC = nth_PxC < routing.counts[:, None]
    picked_PxC = routing.order[jnp.where(there_PxC, routing.firsts[:, None] + nth_PxC, 0)]
    return jnp.where(there_PxC, picked_PxC, A + jnp.arange(nth_PxC.size).reshape(nth_PxC.shape))

  def arriving(self, x_NxD: jax.Array, routing: _Routing, window_PxC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens [P C, D], any where the expert is none; their experts [P C]) that this device gets in a round."""
    x_PxCxD = x_NxD.at[window_PxC % x_NxD.shape[0]].get(mode="clip")
    experts_PxC = routing.experts.at[window_PxC].get(mode="fill", fill_value=self.experts)
    return self.send(x_PxCxD).reshape(-1, x_NxD.shape[-1]), self.send(experts_PxC).reshape(-1)

  def returned(self, y_MxD: jax.Array, window_PxC: jax.Array, y_AxD: jax.Array) -> jax.Array:
    """`y_AxD` with what a round's experts made of this device's assignments."""
    y_PxCxD = self.send(y_MxD.reshape(*window_PxC.shape, -1))
    return y_AxD.at[window_PxC].set(y_PxCxD, mode="drop", unique_indices=True)

  def in_rounds(self, rounds: jax.Array, arriving: Callable, compute: Callable, results: Any) -> Any:
    """The results after all rounds.

    What the next round needs comes in while a round is computed, for the price of one transfer of nothing after the
    last. If outputs went back during the next round, too, loops would copy them each time, which by libtpu's count of
    cycles is more than that hides.

    Args:
      arriving: `index -> tree`, what comes in.
      compute: `(index, what came in, results) -> results`, which sends the outputs back.
      results: before the first round.
    """
    def one(index, carry):
      here, results = carry
      return arriving(index + 1), compute(index, here, results)

    with jax.named_scope(f"{TIMES}{self.rounds_when_even}"):
      return jax.lax.fori_loop(0, rounds, one, (arriving(0), results))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(static: _Static, x_NxD, kernels, routing: _Routing, rounds) -> jax.Array:
  whole = static.split.gather(kernels, x_NxD.dtype)
  zeros = jnp.zeros((routing.order.shape[0], x_NxD.shape[-1]), x_NxD.dtype)

  def arriving(index):
    return static.arriving(x_NxD, routing, static.window(routing, index))

  def compute(index, here, y_AxD):
    return static.returned(static.run(*here, whole), static.window(routing, index), y_AxD)

  return static.in_rounds(rounds, arriving, compute, zeros)


def _exchange_fwd(static, x_NxD, kernels, routing, rounds):
  return _exchange(static, x_NxD, kernels, routing, rounds), (x_NxD, kernels, routing, rounds)


def _exchange_bwd(static, saved, dy_AxD):
  x_NxD, kernels, routing, rounds = saved
  whole = static.split.gather(kernels, x_NxD.dtype)

  def arriving(index):
    window_PxC = static.window(routing, index)
    dy_PxCxD = static.send(dy_AxD.at[window_PxC].get(mode="clip"))
    return *static.arriving(x_NxD, routing, window_PxC), dy_PxCxD.reshape(-1, dy_AxD.shape[-1])

  def compute(index, here, gradients):
    (x_MxD, experts_M, dy_MxD), (dx_AxD, dkernels) = here, gradients
    _, backward = jax.vjp(lambda x, whole: static.run(x, experts_M, whole), x_MxD, whole)
    dx_MxD, more = backward(dy_MxD)
    dkernels = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dkernels, more)
    return static.returned(dx_MxD, static.window(routing, index), dx_AxD), dkernels

  zeros = (jnp.zeros(dy_AxD.shape, x_NxD.dtype), jax.tree.map(lambda k: jnp.zeros(k.shape, jnp.float32), whole))
  dx_AxD, dkernels = static.in_rounds(rounds, arriving, compute, zeros)
  # Summed in the order of the router's choice: a token's experts have each their own row.
  dx_NxD = sum(part_NxD.astype(jnp.float32) for part_NxD in jnp.split(dx_AxD, len(dx_AxD) // len(x_NxD)))
  return dx_NxD.astype(x_NxD.dtype), static.split.scatter(dkernels, kernels), None, None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
