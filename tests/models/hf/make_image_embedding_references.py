"""Makes tests/models/hf/image_embedding_references.npz: what transformers makes of the folders of image_references and
native_references without their heads, and losses of the embeddings.

    python tests/models/hf/make_image_embedding_references.py

needs what make_native_references.py beside it needs. The four texts are rows 0 and 1 of a folder's reference.npz, which
have images, and text[:, :5] and text[:, 4:] of it, which have none; of PaliGemma all tokens of a text are its prefix.
Of each CASE:

    CASE/names                       of the tensors of the bare body that AutoModel loads
    CASE/last, CASE/mean [4, D]      pooled hidden states, float64
    CASE/infonce, CASE/siglip        losses of the pairs (row 0, the first text) and (the second text, row 1), as
                                     means over both; of `last` at temperature 0.2, of `mean` at 0.2 with bias -2
    CASE/LOSS_gradient_I             by the parameter CASE/gradient_names[I], float32, rounded from float64; of
                                     infonce where I is even, else of siglip
"""

import sys
from pathlib import Path

import make_image_references as images
import make_native_references as native
import numpy as np
import torch
import transformers
from transformers import AutoModel

OUT = Path(__file__).parent / "image_embedding_references.npz"
TEMPERATURE, BIAS = 0.2, -2.0
# Entries of a parameter whose gradient is kept.
LARGEST = 400


def in_double(fn):
  """`fn()` with softmaxes in the dtype of what they are given."""
  softmax = torch.nn.functional.softmax
  torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim, dtype=x.dtype)
  try:
    return fn()
  finally:
    torch.nn.functional.softmax = softmax


def given(name: str, data: dict, row: int) -> dict:
  """What the body takes for a row with images."""
  if name in images.CASES:
    found = images.inputs(images.CASES[name], data, slice(row, row + 1))
  else:
    pictures = [joined(data["images"][i], data["grid"][i]) for i in range(2)]
    found = native.inputs(name, data, pictures, slice(row, row + 1))
  found.pop("labels")
  if "token_type_ids" in found and images.CASES[name]["model_type"] == "paligemma":
    found["token_type_ids"] = torch.zeros_like(found["token_type_ids"])
  return {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
          for key, value in found.items()}


def joined(tiles: np.ndarray, grid: np.ndarray) -> list[np.ndarray]:
  """The images of a row again."""
  found = []
  for number in range(1, grid[:, 0].max() + 1):
    rows, columns = grid[grid[:, 0] == number][0, 3:5]
    own = tiles[grid[:, 0] == number].reshape(rows, columns, *tiles.shape[1:])
    found.append(own.swapaxes(1, 2).reshape(rows * tiles.shape[1], columns * tiles.shape[2], 3))
  return found


def of_text(name: str, ids: np.ndarray) -> dict:
  tokens = torch.tensor(ids)[None].long()
  if name in images.CASES:
    return dict(input_ids=tokens, use_cache=False,
                **images.token_types(images.CASES[name], tokens, torch.tensor([len(ids)])))
  return dict(input_ids=tokens, use_cache=False)


def losses(last: torch.Tensor, mean: torch.Tensor) -> dict[str, torch.Tensor]:
  """Row 0 and the second text are queries, the first text and row 1 their positives."""
  last, mean = (torch.nn.functional.normalize(x, dim=-1) for x in (last, mean))
  logits = last[[0, 3]] @ last[[2, 1]].T / TEMPERATURE
  pairs = mean[[0, 3]] @ mean[[2, 1]].T / TEMPERATURE + BIAS
  return {"infonce": torch.nn.functional.cross_entropy(logits, torch.arange(2)),
          "siglip": -torch.nn.functional.logsigmoid((2 * torch.eye(2, dtype=pairs.dtype) - 1) * pairs).sum() / 2}


def make(name: str, found: dict) -> None:
  folder = (images if name in images.CASES else native).FOLDER / name
  with np.load(folder / "reference.npz") as opened:
    data = dict(opened)
  body, told = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                         experts_implementation="eager", output_loading_info=True)
  assert not told["missing_keys"] and all(key.endswith("lm_head.weight") for key in told["unexpected_keys"]), told
  body.eval()
  pooled = {"last": [], "mean": []}
  for row in range(2):
    hidden = body(**given(name, data, row)).last_hidden_state[0, :data["lengths"][row]]
    pooled["last"].append(hidden[-1])
    pooled["mean"].append(hidden.mean(0))
  for ids in (data["text"][0, :5], data["text"][0, 4:]):
    hidden = body(**of_text(name, ids)).last_hidden_state[0]
    pooled["last"].append(hidden[-1])
    pooled["mean"].append(hidden.mean(0))
  stacked = {kind: torch.stack(vectors) for kind, vectors in pooled.items()}
  assert all(x.dtype == torch.float64 for x in stacked.values())
  parameters = dict(body.named_parameters())
  names = [key for key in (str(name).removeprefix("model.") for name in data["gradient_names"])
           if key in parameters and parameters[key].numel() <= LARGEST]
  found[f"{name}/names"] = sorted(body.state_dict())
  found[f"{name}/gradient_names"] = names
  for kind, vectors in stacked.items():
    found[f"{name}/{kind}"] = vectors.detach().numpy()
  for nth, (kind, loss) in enumerate(losses(**stacked).items()):
    found[f"{name}/{kind}"] = loss.item()
    gradients = torch.autograd.grad(loss, [parameters[key] for key in names], retain_graph=True)
    for i, gradient in enumerate(gradients):
      assert gradient.abs().max() > 0, names[i]
      if i % 2 == nth:
        found[f"{name}/{kind}_gradient_{i}"] = gradient.float().numpy()
  print(name, body.__class__.__name__, {kind: found[f"{name}/{kind}"] for kind in ("infonce", "siglip")}, len(names))


def main() -> None:
  found: dict = {"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}
  for name in sys.argv[1:] or [*images.CASES, *native.CASES]:
    in_double(lambda name=name: make(name, found))
  np.savez_compressed(OUT, **found)


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  main()
