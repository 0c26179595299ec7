"""Whether a compiled program gives the same bits each time it runs, read from its text.

    program = jax.jit(f).lower(*arguments).compile()
    for operation in unordered(program.as_text()): print(operation)

What adds in an order that is left to chance: scattered additions to places that may be the same, the gradient of
windowed maxima, running sums by CUB, cuDNN's backward passes of attention and convolutions where XLA was not told
otherwise, and kernels with atomic additions. Products of matrices, sorts, reductions, and the kernels of Weft's own
add in a fixed order.

Which order that is depends on the kernel, and XLA for GPU by itself chooses kernels by timing them, so that two runs
differ though each of their programs repeats itself. A step that is to be the same is compiled without (UNTIMED).
"""

import os
import re
from collections.abc import Callable
from typing import Any

from absl import logging

from trainer.errors import ConfigError
from trainer.planning import collectives
from trainer.startup import UNTIMED, untimed_flags

_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(")
_DTYPE, _COMBINES = re.compile(r" = \(?([a-z]+\d*)\["), re.compile(r"to_apply=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Passes of cuDNN's back through attention and convolutions, of which some algorithms add atomically.
_CUDNN = re.compile(r"__cudnn\$(fmha.*|conv)Backward")
# Of a kernel of Triton's, as text, or in the table of names of MLIR's bytecode, which is what XLA keeps.
_ATOMIC = re.compile(r"\btt\.atomic_|\\00atomic_(rmw|cas)\\00")
# The same whatever comes first, of any numbers; and of whole numbers.
_IN_ANY_ORDER, _OF_INTEGERS = {"maximum", "minimum", "and", "or"}, {"add", "multiply", "xor"}
# What XLA for GPU is told: to time no kernels, and to take none that adds in an order left to chance.
IN_ORDER = UNTIMED | {"xla_gpu_exclude_nondeterministic_ops": True}
# So many operations a message names.
MOST_NAMED = 8


def promised(config: Any, platform: str) -> bool:
  """Whether a run is held to give the same bits each time, where that does not come by itself."""
  return bool(config.deterministic) and platform == "gpu"


def of(config: Any, platform: str) -> Callable[[Any], Any]:
  """How a step that is lowered is compiled for that platform."""
  return compile_in_order if promised(config, platform) else lambda lowered: lowered.compile()


def notes(config: Any, platform: str) -> list[str]:
  """What is to be said at the start: where XLA was not told for the whole process, as `python -m trainer` tells it, the
  step alone is held to the promise."""
  said = os.environ.get("XLA_FLAGS", "").split()
  missing = [flag for flag in (f"{name}={value}" for name, value in untimed_flags().items()) if flag not in said]
  if not promised(config, platform) or not missing:
    return []
  return ["deterministic: the step chooses no kernels by timing them, but evaluations and rollouts do, and may differ "
          f"from run to run in their last bits; XLA_FLAGS={' '.join(missing)!r}, set before JAX starts, has them "
          "choose none either"]


def compile_in_order(lowered: Any) -> Any:
  """The program (`jax.stages.Compiled`) that gives the same bits each time.

  XLA is told to leave out what adds in an order left to chance only where there is something of it: what it takes in
  its place may be slow (for scattered additions, a loop over all rows).

  Raises:
    ConfigError: names the operations that are there all the same.
  """
  compiled = lowered.compile(compiler_options=UNTIMED)
  if found := unordered(compiled.as_text()):
    logging.warning("The step is compiled again, by an XLA that keeps an order, which may be slower: %s", found[0])
    compiled = lowered.compile(compiler_options=IN_ORDER)
    check(compiled.as_text(), told=True)
  return compiled


def check(text: str, told: bool = False) -> None:
  """Refuses to promise that a run can be repeated to the bit where the program of its step does not hold it."""
  if found := unordered(text, told):
    more = f"\n  and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    raise ConfigError(
        "deterministic=True promises that two runs are equal to the bit, but these operations of the compiled step "
        "add in an order that is left to chance:\n  " + "\n  ".join(found[:MOST_NAMED]) + more + "\nIn a model or "
        "loss of your own, write the gradient of what is gathered as sums (models/lookup.py has one for tables), or "
        "say where indices are unique. --config.deterministic=False trains without the promise.")


def unordered(text: str, told: bool = False) -> list[str]:
  """The operations of a compiled program that may give other bits each time: `kind name (where it comes from)`.

  `told`: XLA was told IN_ORDER, which it tells cuDNN, too.
  """
  bodies, found = collectives.computations(text), []
  for line in (line for lines in bodies.values() for line in lines):
    match = _OPERATION.match(line)
    if match and (kind := _kind(line, match[2], bodies, told)):
      name = _NAME.search(line)
      found.append(f"{kind} {match[1]}{f' ({name[1]})' if name else ''}")
  return found


def _kind(line: str, operation: str, bodies: dict[str, list[str]], told: bool) -> str | None:
  """What is to be called unordered in this line; None: nothing."""
  if operation == "select-and-scatter":
    return operation
  if operation == "scatter" and "unique_indices=true" not in line:
    dtype, combines = _DTYPE.search(line), _COMBINES.search(line)
    root = [body for body in bodies.get(combines[1] if combines else "", ()) if body.lstrip().startswith("ROOT ")]
    match = _OPERATION.match(root[0]) if root else None
    how = match[2] if match else "parameter"
    exact = how in _IN_ANY_ORDER or how in _OF_INTEGERS and dtype is not None and dtype[1][0] in "sup"
    return None if exact else "scatter, one value over another," if how == "parameter" else f"scatter, {how},"
  if operation == "custom-call" and (target := _TARGET.search(line)):
    if _CUDNN.match(target[1]) and not told:
      return target[1]
    if "cub_scan" in target[1] and (dtype := _DTYPE.search(line)) and dtype[1][0] not in "sup":
      return "running sum"
    if "triton" in target[1] and _ATOMIC.search(line):
      return "kernel with atomic operations"
  return None
