"""Checkpoints in few bits, as other programs publish them: each tensor is read as the numbers that it stands for, in 16
bits, a slice at a time. What `precision.frozen` then keeps them in is another matter (models/quantization).

May import: nothing else of models.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.hf.errors import HFError
from models.hf.quantised import awq, bitsandbytes, fp8, gptq, mxfp4

# By quant_method of quantization_config: {name of a tensor: the names of what it is made of, and its TensorInfo} of a
# folder's tensors; what is known of the options.
METHODS: dict[str, tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, tuple[tuple[str, ...], Any]]],
                         Callable[[Mapping[str, Any]], str]]] = {
    "awq": (awq.find, awq.problem),
    "bitsandbytes": (bitsandbytes.find, bitsandbytes.problem),
    "fp8": (fp8.find, fp8.problem),
    "gptq": (gptq.find, gptq.problem),
    "mxfp4": (mxfp4.find, lambda options: ""),
}


def check(options: Mapping[str, Any], where: str) -> None:
  """Refuses what is not read of `quantization_config`: HFError, naming the method or the option."""
  method = options.get("quant_method")
  plain = "Fetch the model in float32, bfloat16 or float16."
  if method not in METHODS:
    raise HFError(f"{where}: quantization_config has quant_method {method!r}; read are {', '.join(METHODS)}. {plain}")
  if problem := METHODS[method][1](options):
    raise HFError(f"{where}: quantization_config (quant_method {method!r}) has {problem}. {plain}")


def joined(tensors: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
  """{name: TensorInfo}, with one tensor in the place of those that it is made of.

  Args:
    options: `quantization_config`; None: nothing is quantised.
  """
  found = dict(tensors)
  method = options.get("quant_method") if isinstance(options, Mapping) else None
  if method in METHODS and not METHODS[method][1](options):
    for name, (parts, info) in METHODS[method][0](tensors, options).items():
      for part in parts:
        found.pop(part, None)
      found[name] = info
  return found
