"""How long a program compiled for TPUs computes, and how long it waits for transfers: its schedule, walked through.

The compiler settles the order of everything, and writes down how many cycles it expects an operation to take. A
transfer begins where the order says so, or when the one before it over the same links has ended, and takes as long as
these links need; where the order has it end, the program waits for what is left of it. Loops are walked through once
and count as often as they run. Nobody writes down what attention's kernels cost: the model knows what they multiply.
Other such kernels take as long as reading what enters them and writing what leaves them.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer import collectives
from trainer.collectives import Collective

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"\d+","bytes_accessed":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Attention's, and how many products each makes of the two that its output is made of (Dao et al. 2022): the scores are
# made again in both of the gradient, or once where one makes all gradients.
_ATTENTION = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# What the compiler says where it does not know.
_NO_CYCLES = 2**62


class Speeds(NamedTuple):
  """Of a chip: cycles, floating-point operations, and bytes of its memory, in a second."""

  cycles: float
  flops: float
  memory: float


class Walked(NamedTuple):
  """Seconds of a computation; of its transfers {(kind, axes): (seconds under way, seconds waited for)}."""

  computes: float
  transfers: dict[tuple[str, tuple[str, ...]], tuple[float, float]]

  @property
  def waits(self) -> float:
    return sum(waited for _, waited in self.transfers.values())

  @property
  def seconds(self) -> float:
    return self.computes + self.waits


def walk(text: str, mesh: Any, speeds: Speeds, seconds_of: Callable[[Collective], float], attention: float = 0.0
         ) -> Walked | None:
  """The whole program; None if its compiler wrote down no cycles.

  Args:
    text: `compiled.as_text()`.
    mesh: whose axes are to be named.
    speeds: of a chip.
    seconds_of: how long a collective takes once.
    attention: the seconds that one of the products of attention's forward pass takes, in all layers.
  """
  if not _CYCLES.search(text):
    return None
  bodies = collectives.computations(text)
  kernels = _attention(bodies, attention)
  return _Walk(bodies, collectives.located(bodies, mesh), speeds, seconds_of, kernels).of("ENTRY")


def _attention(bodies: dict[str, list[str]], seconds: float) -> dict[str, float]:
  """{fwd, dq, dkv: seconds of each of these kernels, once}, all the same, whatever the layer: their sum is right."""
  counts = dict.fromkeys(_PRODUCTS, 0)
  for computation, times in collectives.times_of(bodies).items():
    for kernel in map(_attention_kernel, bodies.get(computation, ())):
      if kernel:
        counts[kernel] += times
  products = _PRODUCTS | ({} if counts["dq"] else {"dkv": 5})
  # The gradient's run once for each layer, or part of one; the forward pass may run again.
  once = max(counts["dq"], counts["dkv"]) or counts["fwd"]
  return {kernel: number * seconds / once for kernel, number in products.items()} if once else {}


def _attention_kernel(line: str) -> str | None:
  operation = collectives.operation_of(line) if _KERNEL in line else None
  found = operation and _ATTENTION.match(operation[0])
  return found[1] if found else None


class _Walk:
  """What is known of each computation so far."""

  def __init__(self, bodies: dict[str, list[str]], located: dict[str, dict[int, Collective]], speeds: Speeds,
               seconds_of: Callable[[Collective], float], kernels: dict[str, float]):
    self.bodies, self.located, self.speeds, self.seconds_of, self.kernels = bodies, located, speeds, seconds_of, kernels
    self.done: dict[str, Walked] = {}

  def of(self, name: str) -> Walked:
    if name not in self.done:
      self.done[name] = self._walk(name)
    return self.done[name]

  def _walk(self, name: str) -> Walked:
    now, computes = 0.0, 0.0
    transfers: dict[Any, tuple[float, float]] = {}
    free: dict[tuple[str, ...], float] = {}  # when the links along these axes are
    under_way: dict[str, tuple[Collective, float | None]] = {}  # when it will have ended; None: it has not begun
    lines, here = self.bodies.get(name, []), self.located.get(name, {})
    fused = {number: self._inside(line) for number, line in enumerate(lines) if collectives.FUSION.search(line)}
    last = {one.channel: number for number, ones in fused.items() for one in ones if one.channel}

    def begin(one: Collective) -> float:
      seconds = self.seconds_of(one)
      free[one.axes] = max(now, free.get(one.axes, 0.0)) + seconds
      add({(one.kind, one.axes): (seconds, 0.0)})
      return free[one.axes]

    def wait(one: Collective, end: float) -> float:
      add({(one.kind, one.axes): (0.0, max(0.0, end - now))})
      return max(now, end)

    def add(more: dict[Any, tuple[float, float]], times: int = 1) -> None:
      for key, (needed, waited) in more.items():
        before = transfers.get(key, (0.0, 0.0))
        transfers[key] = (before[0] + times * needed, before[1] + times * waited)

    for number, line in enumerate(lines):
      operation = collectives.operation_of(line)
      if operation is None:
        continue
      handle, kind = operation
      if kind.endswith("-done"):
        for before in [before for before in under_way if collectives.refers_to(line, before)]:
          one, end = under_way.pop(before)
          now = wait(one, now if end is None else end)
      elif kind.endswith("-update"):
        for before in [before for before in under_way if collectives.refers_to(line, before)]:
          one, end = under_way.pop(before)
          under_way[handle] = (one, begin(one) if end is None else end)
      elif kind in ("send", "recv") or kind.endswith("-start"):
        for one in [here[number]] if number in here else self._inside(line):
          # On SparseCores programs are loaded before there is anything to send.
          waiting = kind == "call-start" and "call-start()" in line
          under_way[handle] = (one, None if waiting else begin(one))
      elif number in here:
        now = wait(here[number], begin(here[number]))
      elif ones := fused.get(number):
        for one in ones:
          if one.channel not in under_way:
            under_way[one.channel] = (one, begin(one))
        seconds = self._cost(line)
        now, computes = now + seconds, computes + seconds
        for one in ones:
          if last.get(one.channel, number) == number:
            now = wait(*under_way.pop(one.channel))
      else:
        inner, times = self._inner(line, kind)
        seconds = self._cost(line) + inner.computes * times
        add(inner.transfers, times)
        now, computes = now + seconds + inner.waits * times, computes + seconds
    return Walked(computes, transfers)

  def _inner(self, line: str, kind: str) -> tuple[Walked, int]:
    """(what an operation runs, how often): of branches the one that takes longest."""
    if kind not in ("while", "conditional", "call"):
      return Walked(0.0, {}), 1
    calls = [(self.of(called), times) for called, times in collectives.calls(line, self.bodies)]
    return max(calls, key=lambda call: call[0].seconds, default=(Walked(0.0, {}), 1))

  def _inside(self, line: str) -> list[Collective]:
    """The collectives in what an operation calls."""
    return [one for called in collectives.called_by(line) for one in self.located.get(called, {}).values()]

  def _cost(self, line: str) -> float:
    """Seconds of one operation by itself."""
    cycles, cost = _CYCLES.search(line), _COST.search(line)
    if cycles and int(cycles[1]) < _NO_CYCLES:
      return int(cycles[1]) / self.speeds.cycles
    if cost:
      return max(int(cost[1]) / self.speeds.flops, int(cost[2]) / self.speeds.memory)
    if _KERNEL not in line:
      return 0.0
    return max(collectives.bytes_of(line) / self.speeds.memory, self.kernels.get(_attention_kernel(line) or "", 0.0))
