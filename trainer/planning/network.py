"""What devices send one another in a step, over which links, and how long that takes.

Bytes are those that one device receives. With n devices along an axis and an array of S bytes in n parts, an all-gather
and a reduce-scatter move (n - 1) / n × S, an all-reduce twice that (a ring, as in Chan et al. 2007), and an all-to-all
of what a device holds (n - 1) / n of it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from models.experts.all_to_all import rounds_when_even
from models.sharding.logical_axes import names_of, size_of
from trainer import tree
from trainer.telemetry.hardware import Topology

# Axes over which a parameter's parts are gathered before it is used, see `gathered_axes`.
GATHERED = ("fsdp", "expert", "context")


class Link(NamedTuple):
  """What the devices along a mesh axis are connected by: its name, bytes/s in and out of each; over how many links on
  average what is sent to any of them goes; and of that what share leaves a node, through the sender's own port."""

  name: str
  bandwidth: float
  hops: float = 1.0
  leaves: float = 0.0


class Transfer(NamedTuple):
  """One kind of collective of a step.

  Attributes:
    kind: all-gather | reduce-scatter | all-reduce | all-to-all | ring.
    what: of what, in words.
    axes: the mesh axes whose devices take part.
    link: the slowest that it goes over.
    bytes: received by each device, in the whole step.
    seconds: at the link's bandwidth, without the others.
    hidden: whether it can go on while something else is computed.
  """

  kind: str
  what: str
  axes: tuple[str, ...]
  link: str
  bytes: float
  seconds: float
  hidden: bool


def links(topology: Topology, sizes: Mapping[str, int]) -> dict[str, Link]:
  """The link of each axis of the mesh, taking the innermost axes as the closest neighbours.

  In a torus an axis that covers whole dimensions goes round in both directions of each where these close (v5e, v6e: 16
  chips; v4, v5p: multiples of 4), else back and forth along one. Round a ring of n, what any device sends to any other
  passes n / 4 links on average, along a line n / 2. In a node all devices reach one another through a switch; an axis
  that leaves the node uses the network ports of all its devices in the node, but for what each device sends each.
  """
  chip = topology.chip
  found = {}
  dims = [(size, size) for size in sorted(topology.shape)] if chip.torus else []  # (what is left, whole)
  inside = topology.per_group
  for axis in reversed(list(sizes)):
    size = sizes[axis]
    if axis == "slice" and (topology.slices > 1 or not chip.torus):
      found[axis] = Link(chip.network, chip.network_bandwidth)
    elif chip.torus:
      ways, hops = 0, 1.0
      while size > 1 and dims:
        left, whole = dims.pop(0)
        common = math.gcd(size, left)
        closes = left == whole == common and (whole == 16 if chip.torus == 2 else whole % 4 == 0)
        ways += 2 if closes else 1 if common > 1 else 0
        hops = max(hops, common / (4 if closes else 2))
        size //= common
        if left > common:
          dims.insert(0, (left // common, whole))
          if common == 1:
            break
      found[axis] = Link(chip.link, max(ways, 1) * chip.link_bandwidth, hops)
    else:
      here = math.gcd(size, inside)
      inside //= here
      local = here == size
      found[axis] = Link(chip.link if local else chip.network,
                         chip.link_bandwidth if local else min(chip.link_bandwidth, here * chip.network_bandwidth),
                         leaves=(size - here) / max(1, size - 1))
  return found


def duration(topology: Topology, by_axis: Mapping[str, Link], kind: str, axes: tuple[str, ...], received: float,
             efficiency: float) -> float:
  """Seconds in which each device receives so many bytes along these axes, if nothing else is sent; `efficiency`: the
  share of the bandwidth that is reached."""
  ways = [by_axis[axis] for axis in axes]
  leaves = max(link.leaves for link in ways)
  if kind == "all-to-all" and leaves:
    # All numbers are for one device alone. Those of the others in a node, which bring parts of a whole, cannot help.
    return received * leaves / (topology.chip.network_bandwidth * efficiency)
  # An array in parts over several axes goes along all their links at once.
  bandwidths = [link.bandwidth for link in ways]
  bandwidth = sum(bandwidths) if topology.chip.torus and "slice" not in axes else min(bandwidths)
  return received * (max(link.hops for link in ways) if kind == "all-to-all" else 1.0) / (bandwidth * efficiency)


def transfers(config: Any, program: Any, shardings: Any, topology: Topology, mesh: Any, efficiency: float
              ) -> list[Transfer]:
  """The collectives of one optimizer step.

  Args:
    program: see `trainer.program`; what tensor, context and expert axes move is known of the built-in transformer.
    shardings: nested dict of the parameters' NamedShardings.
    topology, mesh: of the devices; the mesh may be abstract.
    efficiency: the share of a link's bandwidth that is reached.
  """
  sizes = dict(mesh.shape)
  by_axis = links(topology, sizes)
  found: dict[tuple, list[float]] = {}

  def add(kind: str, what: str, axes: tuple[str, ...], received: float, times: float, hidden: bool) -> None:
    axes = tuple(axis for axis in axes if sizes[axis] > 1)
    if not axes or not received:
      return
    slowest = min((by_axis[axis] for axis in axes), key=lambda link: link.bandwidth)
    total = found.setdefault((kind, what, axes, slowest.name, hidden), [0.0, 0.0])
    total[0] += received * times
    total[1] += times * duration(topology, by_axis, kind, axes, received, efficiency)

  number_bytes = np.dtype(config.precision.compute).itemsize
  _parameters(add, config, program, tree.flatten(shardings), mesh, topology.chip.hides_scatters)
  spec = getattr(program.model, "spec", None)
  if spec is not None:
    _activations(add, config, spec, sizes, number_bytes)
  return [Transfer(*key[:4], *total, key[4]) for key, total in found.items()]


def gathered_axes(path: str, used: set[str]) -> tuple[str, ...]:
  """Of the axes that a parameter is split over, those that are undone for its use; experts stay where they are."""
  return tuple(axis for axis in GATHERED if axis in used and not ("/experts/" in path and axis == "expert"))


def _parameters(add: Any, config: Any, program: Any, placed: Mapping[str, Any], mesh: Any, hides_scatters: bool
                ) -> None:
  """Parts gathered before use, forward and backward; gradients summed in float32, for each micro-batch."""
  number_bytes, micro = np.dtype(config.precision.compute).itemsize, config.grad_accum_steps
  for path, leaf in tree.flatten(program.abstract_state["params"]).items():
    used = {axis for axes in placed[path].spec for axis in names_of(axes)}
    gathered = gathered_axes(path, used)
    held = used - set(gathered)
    count, n = math.prod(leaf.shape) / size_of(mesh, tuple(held)), size_of(mesh, gathered)
    size, gradient = count * min(number_bytes, leaf.dtype.itemsize), count * 4
    add("all-gather", "parameters", gathered, size * (n - 1) / n, 2 * micro, True)
    if path not in program.optimizer.trainable:
      continue
    add("reduce-scatter", "gradients", gathered, gradient * (n - 1) / n, micro, hides_scatters)
    summed = tuple(axis for axis in ("data", *GATHERED) if axis not in used and mesh.shape[axis] > 1)
    for axes in (summed, tuple(axis for axis in ("slice",) if mesh.shape[axis] > 1)):
      n_sum = size_of(mesh, axes)
      add("all-reduce", "gradients", axes, 2 * gradient / n * (n_sum - 1) / n_sum, micro, True)


def _activations(add: Any, config: Any, spec: Any, sizes: Mapping[str, int], number_bytes: int) -> None:
  """What tensor, context and expert axes move, layer by layer."""
  t, c, e = sizes["tensor"], sizes["context"], sizes["expert"]
  shards = math.prod(sizes[axis] for axis in ("slice", "data", "fsdp", "expert"))
  tokens = config.batch_size * config.seq_len / (shards * c)  # of a step, on each device
  hidden, layers = tokens * spec.hidden_size * number_bytes, spec.num_layers
  # What a policy keeps is not moved again to be computed again (models/remat.py).
  again = 0 if config.remat in ("auto", "none", "everything_saveable", "attention_mlp") else 1
  attention_again = 0 if "attention" in config.remat else again
  if t > 1:
    # Attention and MLP each gather their input and scatter their output; the gradient does the reverse, and needs the
    # input once more.
    add("all-gather", "activations", ("tensor",), hidden * (t - 1) / t, layers * (6 + 2 * again), False)
    add("reduce-scatter", "activations", ("tensor",), hidden * (t - 1) / t, layers * (4 + again), False)
    add("all-gather", "hidden states for the logits", ("tensor",), hidden * (t - 1) / t, 2, False)
  if c > 1:
    whole = config.seq_len
    for layer in (i for i in range(layers) if spec.mixer_of(i).endswith("attn")):
      window = spec.window_of(layer)
      part = 1.0 if window is None else min(1.0, window / whole)
      keys = 2 * tokens * c * part * math.prod(spec.heads_of(spec.mixer_of(layer))) * number_bytes / t
      add("ring", "keys and values", ("context",), keys * (c - 1) / c, 2 + attention_again, False)
      # Gradients travel in float32.
      add("ring", "gradients of keys and values", ("context",), keys * 4 / number_bytes * (c - 1) / c, 1, False)
  if e > 1 and spec.moe is not None:
    # Devices along `tensor` have parts of all experts' widths, so that each of them sends whole tokens.
    sent, layers = hidden * spec.moe.experts_per_token * (e - 1) / e, len(spec.layers_with("moe"))
    # Forward there and back; backward the tokens there once more, and their gradients there and back. What goes there
    # does so in rounds while other tokens are computed, and once more after the last round.
    rounds = rounds_when_even(round(tokens * spec.moe.experts_per_token / config.grad_accum_steps))
    add("all-to-all", "tokens to their experts", ("expert",), sent * (1 + 1 / rounds), layers * (3 + again), True)
    add("all-to-all", "experts' outputs back", ("expert",), sent, layers * (2 + again), False)
