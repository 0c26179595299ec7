"""Writes what test_quantised.py reads: matrices stored by bitsandbytes and in float8, and what these libraries read.

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==5.24.0 bitsandbytes==0.50.2
    peers/bin/python tests/models/hf/quantised/make_references.py
"""

from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes import functional
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

FOLDER = Path(__file__).parent


def four_bits(kind: str, double: bool, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
  weight = torch.randn(shape).to(dtype)
  parameter = bitsandbytes.nn.Params4bit(weight, quant_type=kind, compress_statistics=double, blocksize=64).to("cpu")
  state = parameter.quant_state
  stored = {"weight": parameter.data} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
  return stored | {"expected": functional.dequantize_4bit(parameter.data, state)}


def eight_bits() -> dict[str, torch.Tensor]:
  codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(12, 40).half())
  return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8),
          "expected": functional.int8_vectorwise_dequant(codes, scales).bfloat16()}


def float8(block: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
  codes = torch.randn(16, 24).mul(50).to(torch.float8_e4m3fn)
  scales = (torch.rand(16 // block[0], 24 // block[1]) / 7).to(dtype)
  expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
  return {"weight": codes, "weight_scale_inv": scales, "expected": expected}


def main() -> None:
  torch.manual_seed(0)
  for name, made in {
      "nf4": four_bits("nf4", False, torch.bfloat16, (24, 40)),
      "nf4_double": four_bits("nf4", True, torch.bfloat16, (130, 128)),
      "fp4_odd": four_bits("fp4", False, torch.float32, (7, 9)),
      "int8": eight_bits(),
      "fp8": float8((4, 8), torch.float32),
      "fp8_one": float8((16, 24), torch.bfloat16),
      "fp8_rows": float8((1, 24), torch.float32),
  }.items():
    save_file({key: part.contiguous() for key, part in made.items()}, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
  main()
