"""What a compiled program moves between devices, read from its text.

    program = jax.jit(f).lower(*arguments).compile()
    for moved in collectives(program.as_text(), mesh): print(moved)

Collectives inside loops count as often as the loop runs, where the compiler knows how often that is.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from models.attention.blocked import TIMES

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)(?: \([^)]*.*\) -> .*)? \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_AT_MOST = re.compile(rf' while\(.*op_name="[^"]*{TIMES}([\d.e+]+)\)*/while"')
_CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r" = [su]\d+\[\][^ ]* constant\((\d+)\)")
# How compilers for TPUs write a reduce-scatter: the name of a computation that reduces all and takes a part.
_REDUCES_A_PART = "all-reduce-scatter"
# Groups of devices: listed; numbered, reshaped and transposed; or as axes of a mesh, its devices perhaps reordered.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_NUMBERED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
                      r" ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
# Compilers for TPUs hand what crosses slices to the hosts, as a transfer that says what becomes of it.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
# Products, and whatever else takes time.
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
# Compilers for GPUs begin some apart from their end, to run beside others.
FUSION = re.compile(r" fusion(?:-start)?\(")
_WORK = re.compile(r" (?:dot|convolution|fusion(?:-start)?|while|custom-call|conditional|call)\(")
# But not single numbers: the counter of a loop, or the room that a transfer is given.
_COUNTS = re.compile(r"^\s+%?[\w.\-]+ = \w+\[\][^ ]* (?:fusion|custom-call)\(")
# What begins a computation of its own beside this one; on a TPU's SparseCores it is a call.
_BEGINS = re.compile(r" (?:async|call)-start\(")
_COPYING = {"copy", "transpose"}
_BITS = re.compile(r"^[a-z]+(\d+)")
# What a compiler for GPUs has begin and end at once, whatever is written between.
_SYNCHRONOUS = '"is_sync":true'


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of a program."""

  # One of KINDS.
  kind: str
  # Of what enters or of what leaves it, whichever is more, on one device, each time.
  bytes: int
  # Its shape, as in the text: bf16[8,128].
  shape: str
  # Devices that take part together.
  group_size: int
  # How often it runs in one run of the program, as far as the compiler knows.
  times: int
  # The mesh axes that these devices differ in; () without a mesh.
  axes: tuple[str, ...]
  # Where it comes from, as JAX named it.
  name: str
  # Whether something is computed while it is under way, in the order that the compiler has settled.
  hidden: bool = False

  @property
  def traffic(self) -> float:
    """Bytes that a device sends in one run of the program, if rings do it (Chan et al. 2007): (n - 1) / n of the array,
    twice for an all-reduce; all of it for a permutation."""
    if self.kind == "collective-permute":
      return float(self.bytes * self.times)
    share = (self.group_size - 1) / self.group_size
    return self.bytes * self.times * share * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str, mesh: Any = None) -> list[Collective]:
  """The collectives of a compiled program.

  Args:
    text: `compiled.as_text()`, after partitioning.
    mesh: whose axes are to be named.
  """
  bodies = computations(text)
  times = times_of(bodies)
  shape = None if mesh is None else mesh.devices.shape
  found: dict[Any, Collective] = {}
  fused = {called for lines in bodies.values() for line in lines if FUSION.search(line)
           for called in _CALLED.findall(line)}
  begun = _begun(bodies)
  for computation, lines in bodies.items():
    if not times.get(computation):
      continue
    multiplies = any(_PRODUCT.search(line) for line in lines)
    for number, line in enumerate(lines):
      match = _INSTRUCTION.match(line)
      between = _BETWEEN_SLICES.search(line) if match and match[3] == "send" else None
      kind = between[1].lower().replace("_", "-") if between else match and match[3].removesuffix("-start")
      # An operation's end (`-done`) moves nothing; a wrapped one is counted where it is.
      if kind not in KINDS:
        continue
      group = _across_slices(mesh) if between else _group(line, kind)
      size, largest = _moved(line, match, kind, len(group), between is not None)
      shown = "" if largest is None else f"{largest[1]}[{largest[2]}]"
      name = _NAME.search(line)
      axes = () if shape is None else _axes(group, shape, mesh.axis_names)
      if computation.startswith(_REDUCES_A_PART):
        kind = "reduce-scatter"
      channel = _CHANNEL.search(line) if computation in fused else None
      hidden = multiplies if channel else _computes_meanwhile(begun.get(computation, lines[number:]))
      one = Collective(kind, size, shown, len(group), times[computation], axes, name[1] if name else "", hidden)
      key = (kind, channel[1]) if channel else (computation, number)  # in several fusions, under one number
      before = found.get(key, one)
      found[key] = dataclasses.replace(max(one, before, key=lambda c: c.times), hidden=hidden or before.hidden)
  return list(found.values())


def summary(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float, float]]:
  """{(kind, axes): (how many run, bytes that a device sends, and of these while something is computed)}, the most bytes
  first."""
  total: dict[tuple[str, tuple[str, ...]], tuple[int, float, float]] = {}
  for one in found:
    count, sent, hidden = total.get((one.kind, one.axes), (0, 0.0, 0.0))
    total[one.kind, one.axes] = (count + one.times, sent + one.traffic, hidden + one.traffic * one.hidden)
  return dict(sorted(total.items(), key=lambda item: -item[1][1]))


def copies(text: str, shapes: Iterable[tuple[int, ...]]) -> list[tuple[str, int]]:
  """(dtype and shape, times) of copies and transposes, as steps of their own, of arrays with one of these shapes.

  Args:
    text: `compiled.as_text()`.
    shapes: of parameters, say, or of a device's parts of them. The order of dimensions and those of 1 do not matter.
  """
  wanted = {tuple(sorted(n for n in shape if n > 1)) for shape in shapes}
  bodies = computations(text)
  times = times_of(bodies)
  fused = {called for lines in bodies.values() for line in lines if FUSION.search(line)
           for called in _CALLED.findall(line)}
  found = []
  for computation, lines in bodies.items():
    if not times.get(computation) or computation in fused:
      continue
    for line in lines:
      match = _INSTRUCTION.match(line)
      array = match and _ARRAY.search(match[2])
      # A `copy-start` moves an array into other memory as it is.
      if array and _copies(line, match, bodies) and tuple(sorted(n for n in _ints(array[2]) if n > 1)) in wanted:
        found.append((f"{array[1]}[{array[2]}]", times[computation]))
  return found


def _copies(line: str, match: re.Match, bodies: dict[str, list[str]]) -> bool:
  """Whether that is a copy or a transpose; compilers for GPUs make fusions of them, with nothing else in it."""
  if match[3] not in ("fusion", "fusion-start"):
    return match[3] in _COPYING
  inner = [found[3] for called in _CALLED.findall(line) for found in map(_INSTRUCTION.match, bodies.get(called, ()))
           if found and found[3] not in ("parameter", "bitcast")]
  return bool(inner) and set(inner) <= _COPYING


def _moved(line: str, match: re.Match, kind: str, devices: int, between_slices: bool) -> tuple[int, re.Match | None]:
  """(bytes of what enters an operation or of what leaves it, whichever is more, its largest array); several may be
  joined into one."""
  outputs, operands = list(_ARRAY.finditer(match[2])), list(_ARRAY.finditer(_operands(line)))
  largest = max(outputs + operands, key=_bytes, default=None)
  if between_slices:
    return 0 if largest is None else _bytes(largest), largest
  if kind != match[3] and kind != "all-reduce":
    # The result of a beginning holds what enters, what leaves, and perhaps counters: (in, out, u32[]), or, of several,
    # ((in, in), (out, out)).
    return max((sum(map(_bytes, _ARRAY.finditer(part))) for part in _elements(match[2])), default=0), largest
  size = max(sum(map(_bytes, outputs)), sum(map(_bytes, operands)))
  # Texts may name operands without their shapes.
  return size * (devices if kind == "reduce-scatter" and not operands else 1), largest


def _elements(shape: str) -> list[str]:
  """The elements of a tuple's shape, which may be tuples themselves."""
  parts, depth = [""], 0
  for character in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
    depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
    if character == "," and depth == 0:
      parts.append("")
    else:
      parts[-1] += character
  return parts


def _begun(bodies: dict[str, list[str]]) -> dict[str, list[str]]:
  """{computation that runs on its own: the lines from the one that begins it}."""
  return {called: lines[number:] for lines in bodies.values() for number, line in enumerate(lines)
          if _BEGINS.search(line) for called in _CALLED.findall(line)}


def _computes_meanwhile(lines: list[str]) -> bool:
  """Whether anything is computed between a beginning, which stands in the first of these lines, and its end."""
  begins = operation_of(lines[0])
  if begins is None or not (begins[1].endswith("-start") or begins[1] == "send") or _SYNCHRONOUS in lines[0]:
    return False
  handle, works = begins[0], False
  for line in lines[1:]:
    operation = operation_of(line)
    if operation and operation[1].endswith(("-done", "-update")) and refers_to(line, handle):
      if operation[1].endswith("-done"):
        return works
      # A SparseCore's program is begun before it has anything to send, which it gets here.
      handle, works = operation[0], False
    works = works or bool(_WORK.search(line) and not _COUNTS.match(line))
  return works


def operation_of(line: str) -> tuple[str, str] | None:
  """(name, operation) of a line: `%x.1 = f32[] add(…)` is (x.1, add)."""
  match = _INSTRUCTION.match(line)
  return (match[1], match[3]) if match else None


def refers_to(line: str, name: str) -> bool:
  """Whether that is among a line's operands."""
  return re.search(rf"(?:^|[ (%,]){re.escape(name)}(?![\w.\-])", _operands(line)) is not None


def computations(text: str) -> dict[str, list[str]]:
  """The lines of each computation; the program's own is last and is named `ENTRY`."""
  bodies: dict[str, list[str]] = {}
  lines: list[str] | None = None
  for line in text.splitlines():
    if line.endswith("{") and not line.startswith(" ") and not line.startswith("HloModule"):
      match = _COMPUTATION.match(line)
      name = "ENTRY" if line.startswith("ENTRY") else match[1] if match else line.split()[0].lstrip("%")
      lines = bodies.setdefault(name, [])
    elif line == "}":  # lines of a kernel's own text may begin with it
      lines = None
    elif lines is not None:
      lines.append(line)
  return bodies


def times_of(bodies: dict[str, list[str]]) -> dict[str, int]:
  """How often each computation runs."""
  times = {"ENTRY": 1} if "ENTRY" in bodies else {}
  # A computation is printed after those that it calls.
  for name in reversed(bodies):
    for line in bodies[name]:
      for called, trips in calls(line, bodies):
        times[called] = times.get(called, 0) + times.get(name, 0) * trips
  return times


def calls(line: str, bodies: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
  """(computation that a line runs, how often)."""
  trips = _trips(line, bodies)
  for called in _CALLED.findall(line):
    yield called, trips
  for branches in _BRANCHES.findall(line):
    for called in branches.split(","):
      yield called.strip().lstrip("%"), 1


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
  """How often a loop runs: what the compiler says, else what its name says (models/attention/blocked.py), else the one
  number that its condition compares with (loops made by JAX count up from 0); 1 where none is known, and for what is no
  loop."""
  if said := _TRIPS.search(line):
    return int(said[1])
  if said := _AT_MOST.search(line):
    return round(float(said[1]))
  condition = _CONDITION.search(line)
  lines = bodies.get(condition[1], []) if condition else []
  lines = lines + [inner for one in lines for called in _CALLED.findall(one) for inner in bodies.get(called, [])]
  numbers = {int(match[1]) for match in map(_CONSTANT.search, lines) if match}
  return numbers.pop() if len(numbers) == 1 and any("direction=LT" in one for one in lines) else 1


def _across_slices(mesh: Any) -> list[int]:
  """A device of each slice, by its place in the mesh; of two where no mesh says how many there are."""
  if mesh is None or "slice" not in mesh.axis_names:
    return [0, 1]
  return list(range(0, mesh.devices.size, mesh.devices.size // mesh.shape["slice"]))


def _operands(line: str) -> str:
  """What stands between the operation's brackets."""
  start = line.index("(", _INSTRUCTION.match(line).start(3))
  depth = 0
  for at in range(start, len(line)):
    depth += {"(": 1, ")": -1}.get(line[at], 0)
    if depth == 0:
      return line[start + 1:at]
  return line[start + 1:]


def size_of(shape: str) -> int:
  """Bytes of an array whose shape is written so: bf16[8,128]."""
  return _bytes(_ARRAY.search(shape))


def _bytes(match: re.Match) -> int:
  bits = 8 if match[1] == "pred" else int((_BITS.match(match[1]) or [0, "0"])[1])
  return int(np.prod([int(n) for n in match[2].split(",") if n], dtype=np.int64)) * bits // 8


def _group(line: str, kind: str) -> list[int]:
  """The devices of one group: of a permutation, of the most that it joins."""
  if kind == "collective-permute":
    return _joined(line)
  if match := _LISTED.search(line):
    return _ints(match[1]) or [0]
  if match := _NUMBERED.search(line):
    return _order(match[2], match[3]).reshape(_ints(match[1]))[0].tolist()
  match = _OF_MESH.search(line)
  if match is None:
    return [0]
  # A part of an axis is 'name':(devices before it)size.
  sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
  used = {name: (int(before or 1), int(size or sizes[name]))
          for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[4])}
  count = int(np.prod(list(sizes.values())))
  numbers = (_order(match[2], match[3]) if match[2] else np.arange(count)).reshape(list(sizes.values()))
  kept = []
  for name, whole in sizes.items():
    before, size = used.get(name, (1, 1))
    kept.append(np.arange(size) * (whole // (before * size)))
  return numbers[np.ix_(*kept)].reshape(-1).tolist()


def _joined(line: str) -> list[int]:
  pairs = _PAIRS.search(line)
  groups: dict[int, set[int]] = {}
  for pair in re.findall(r"\{([\d,]+)\}", pairs[1] if pairs else ""):
    together = set.union(*(groups.get(device, {device}) for device in _ints(pair)))
    groups |= dict.fromkeys(together, together)
  return sorted(max(groups.values(), key=len)) if groups else [0]


def _order(dims: str, transposed: str | None) -> np.ndarray:
  numbers = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
  return numbers.transpose(_ints(transposed)) if transposed else numbers


def _ints(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _axes(group: list[int], shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
  coordinates = np.stack(np.unravel_index(group, shape))
  return tuple(name for name, row in zip(names, coordinates, strict=True) if len(set(row.tolist())) > 1)
