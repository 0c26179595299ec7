"""Does Weft compute a Hugging Face folder as transformers does? python -m models.hf.check FOLDER [--peer PYTHON]

Both load the folder in float32 and go through the same random tokens. Prints how far apart are what enters each layer,
the logits, the loss and the gradients of each tensor, and where they part first. --peer is a Python with torch and
transformers (default: this one). Ends with exit code 1 where something is apart by more than --tolerance of its norm.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from models import hf
from models.hf import families, files
from models.hf.images import TextPart

PEER = Path(__file__).resolve().parent / "check_peer.py"
# Tensors whose gradients are shown: those that differ most.
SHOWN = 5
# What names of gradients begin with; and the share of the norm of all, float32's rounding, below which one is zero.
GRADIENT, ROUNDING = "gradient ", float(np.finfo(np.float32).eps)


def ignored(folder: str | Path) -> tuple[str, ...]:
  """The tower, beside a text model that can be read alone: what is compared is text."""
  content, tower = files.read_config(folder), ("vision_config",)
  alone = isinstance(families.find(content, f"{folder}/{files.CONFIG}", tower), TextPart)
  return tower if alone and content.get("vision_config") else ()


def ours(folder: str | Path, tokens_BxT: np.ndarray, out: Path) -> dict[str, np.ndarray]:
  """{"layer i": what enters it, "logits", "loss", "gradient NAME": by the tensors of the folder}.

  Args:
    tokens_BxT: rows of one text each.
    out: gradients are written here in between, as a folder of their own.

  Raises:
    HFError: the folder cannot be read, or is a model of images.
  """
  model: Any
  model, params = hf.load(folder, progress=True, ignored=ignored(folder))
  if model.spec.vision is not None:
    raise hf.HFError(f"{folder} is a model of images; what is compared is text alone.")

  def loss(params: Any) -> jax.Array:
    logps = jax.nn.log_softmax(model.logits(params, tokens_BxT)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logps, tokens_BxT[:, 1:, None], 2))

  batch = dict(tokens=jnp.asarray(tokens_BxT), positions=None, segment_ids=None)
  inputs, logits = jax.jit(lambda p: (model.layer_inputs(p, batch), model.logits(p, tokens_BxT)))(params)
  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  hf.save(model, gradients, out, dtype="float32", overwrite=True)
  found = {f"layer {i}": np.asarray(x) for i, x in enumerate(inputs)}
  return found | {"logits": np.asarray(logits), "loss": np.asarray(value)} | _gradients(out)


def theirs(folder: str | Path, tokens_BxT: np.ndarray, python: str, scratch: Path) -> dict[str, np.ndarray]:
  """The same of transformers.

  Raises:
    HFError: the other program failed.
  """
  np.save(scratch / "tokens.npy", tokens_BxT)
  done = subprocess.run([python, str(PEER), str(folder), str(scratch / "tokens.npy"), str(scratch / "theirs")],
                        capture_output=True, text=True)
  if done.returncode:
    raise hf.HFError(f"{python} {PEER.name} failed; it needs torch and transformers (--peer). It said:\n"
                     + "\n".join(done.stderr.splitlines()[-5:]))
  return dict(np.load(scratch / "theirs.npz")) | _gradients(scratch / "theirs")


def _gradients(folder: Path) -> dict[str, np.ndarray]:
  """Of a folder that holds them in the places of the parameters; with names as where there is no tower."""
  return {f"{GRADIENT}{name.replace('model.language_model.', 'model.')}": values
          for file in files.weights_in(folder) if file.suffix == ".safetensors"
          for name, values in load_file(file).items()}


def apart(a: np.ndarray, b: np.ndarray, zero: float = 0.0) -> float:
  """The norm of the difference, of the other's norm; 0 where the norms of both are below `zero`."""
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if max(np.linalg.norm(a), np.linalg.norm(b)) < zero:
    return 0.0
  return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def report(mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tolerance: float) -> tuple[str, bool]:
  """(lines to be printed, whether all of it agrees)."""
  # A gradient that is zero (a router's that chooses one expert) is so to the rounding of the whole.
  whole = float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for name, x in other.items()
                            if name.startswith(GRADIENT))))
  by_name = {name: apart(mine[name], other[name], ROUNDING * whole if name.startswith(GRADIENT) else 0.0)
             for name in mine if name in other}
  forward = {name: value for name, value in by_name.items() if not name.startswith(GRADIENT)}
  gradients = sorted(((value, name) for name, value in by_name.items() if name not in forward), reverse=True)
  lines = [f"{name:<12} {value:.1e}{'  <' * (value > tolerance)}" for name, value in forward.items()]
  lines += [f"{name}  {value:.1e}{'  <' * (value > tolerance)}" for value, name in gradients[:SHOWN]]
  if len(gradients) > SHOWN:
    lines.append(f"… and {len(gradients) - SHOWN} more gradients, which are closer")
  if absent := sorted(name for name in mine if name not in other):
    lines.append(f"not compared, since transformers did not write it: {', '.join(absent[:SHOWN])}"
                 + f" and {len(absent) - SHOWN} more" * (len(absent) > SHOWN))
  far = [name for name, value in by_name.items() if value > tolerance]
  first = next((name for name in forward if name in far), None)
  if not far:
    lines.append(f"They agree: nothing is apart by more than {tolerance:g} of its norm.")
  elif first is None:
    lines.append("Values agree, gradients do not.")
  elif first.startswith("layer ") and first != "layer 0":
    lines.append(f"They part in layer {int(first.split()[1]) - 1}: what enters it agrees, what leaves it does not.")
  else:
    before = "in what enters the first layer: the embedding, its factor, or positions"
    lines.append(f"They part {before if first == 'layer 0' else 'in the last layer or behind it'}.")
  return "\n".join(lines), not far


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folder")
  parser.add_argument("--peer", default=sys.executable, help="a Python with torch and transformers")
  parser.add_argument("--length", type=int, default=64, help="tokens of each of two texts")
  parser.add_argument("--tolerance", type=float, default=1e-4)
  args = parser.parse_args()
  try:
    _, keys, notes = hf.architecture(args.folder, ignored(args.folder))
    print("\n".join(notes))
    tokens_BxT = np.random.default_rng(0).integers(0, keys["vocab_size"], (2, args.length)).astype(np.int32)
    with tempfile.TemporaryDirectory() as scratch:
      mine = ours(args.folder, tokens_BxT, Path(scratch) / "gradients")
      text, agree = report(mine, theirs(args.folder, tokens_BxT, args.peer, Path(scratch)), args.tolerance)
  except hf.HFError as error:
    sys.exit(f"HFError: {error}")
  print(text)
  sys.exit(not agree)


if __name__ == "__main__":
  main()
