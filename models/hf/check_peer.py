"""The other side of models/hf/check.py, in an environment with torch and transformers: check_peer.py FOLDER TOKENS OUT

Writes what enters each layer, logits and loss of the folder's model on the tokens, in float32, to OUT.npz, and the
gradients as a folder OUT of the same form, in the places of the parameters.
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers


def main() -> None:
  folder, tokens, out = sys.argv[1:]
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  if hasattr(model, "set_experts_implementation"):  # torch's grouped products want sizes of whole 16 bytes
    model.set_experts_implementation("eager")
  # PyTorch leaves the rows that the padding token reads out of an embedding's gradient.
  for module in model.modules():
    if isinstance(module, torch.nn.Embedding):
      module.padding_idx = None
  ids_BxT = torch.from_numpy(np.load(tokens)).long()
  done = model(input_ids=ids_BxT, output_hidden_states=True, use_cache=False)
  loss = torch.nn.functional.cross_entropy(done.logits[:, :-1].flatten(0, 1), ids_BxT[:, 1:].flatten())
  loss.backward()
  # What leaves the last layer is told behind the final norm, which some models scale: the logits stand for it.
  found = {f"layer {i}": x for i, x in enumerate(done.hidden_states[:-1])}
  found |= {"logits": done.logits, "loss": loss}
  np.savez(f"{out}.npz", **{name: value.detach().float().numpy() for name, value in found.items()})
  for p in (*model.parameters(), *model.buffers()):  # buffers, too, are tensors of the folder
    p.data = torch.zeros_like(p) if p.grad is None else p.grad
  model.save_pretrained(out)


if __name__ == "__main__":
  main()
