"""A plain PyTorch loop for pretraining, the peer of benchmarks/parity's seq: python torch_loop.py FOLDER OUT

Trains the batches of FOLDER/batches.npz, which Weft has packed, with a Llama of transformers and the settings of
FOLDER/settings.json, and writes OUT: loss and gradient norm of each step, and versions. Documents in a row are kept
apart by a mask. The loss is the mean over all tokens with a weight.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers


def visible(segment_ids: torch.Tensor) -> torch.Tensor:
  """What is added to scores, float32 [B, 1, T, T]: 0 for earlier tokens of the same document, else very little.

  Padding is segment 0, a document like the others here: its tokens have no weight.
  """
  same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
  return torch.where(same.tril(), 0.0, torch.finfo(torch.float32).min)


def optimizer(model: torch.nn.Module, s: dict) -> torch.optim.Optimizer:
  """AdamW that decays matrices and embeddings alone."""
  matrices = [p for p in model.parameters() if p.ndim > 1]
  others = [p for p in model.parameters() if p.ndim == 1]
  groups = [dict(params=matrices, weight_decay=s["weight_decay"]), dict(params=others, weight_decay=0.0)]
  return torch.optim.AdamW(groups, lr=s["learning_rate"], betas=(s["b1"], s["b2"]), eps=s["eps"])


def main() -> None:
  folder, out = map(Path, sys.argv[1:])
  s = json.loads((folder / "settings.json").read_text())
  batches = {name: torch.from_numpy(array) for name, array in np.load(folder / "batches.npz").items()}
  model = transformers.AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
  model.train()
  adamw = optimizer(model, s)
  schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5 * (1 + math.cos(math.pi * step / s["steps"])))
  steps = []
  for step in range(s["steps"]):
    ids, segments, positions, weights = (batches[name][step] for name in (
        "tokens", "segment_ids", "positions", "loss_weights"))
    logits = model(input_ids=ids.long(), position_ids=positions.long(), attention_mask=visible(segments)).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().long(),
                                               reduction="none")
    loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
    adamw.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip_norm"])
    adamw.step()
    schedule.step()
    steps.append({"loss": loss.item(), "grad_norm": norm.item()})
  versions = {module.__name__: module.__version__ for module in (transformers, torch)}
  out.write_text(json.dumps({"versions": versions, "steps": steps}))


if __name__ == "__main__":
  main()
