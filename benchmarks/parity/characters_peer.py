"""PyTorch's side of characters.py, in an environment of its own: python characters_peer.py FOLDER SEED OUT

A plain loop: GPT-2 of transformers without biases, AdamW that decays matrices and embeddings, a linear warm-up and a
cosine, windows of the text at random places, as nanoGPT has them. Writes OUT: {parameters, curve}.
"""

import json
import math
import sys
from pathlib import Path

import torch
import transformers


def main(folder: Path, seed: int, out: Path) -> None:
  s = json.loads((folder / "settings.json").read_text())
  torch.manual_seed(seed)
  number = {character: i for i, character in enumerate(s["vocab"])}
  train, held_out = (torch.tensor([number[c] for c in (folder / f"{name}.txt").read_text("utf-8")])
                     for name in ("train", "validation"))
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
      vocab_size=len(number), n_positions=s["length"], n_embd=s["width"], n_layer=s["layers"], n_head=s["heads"],
      activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
      bos_token_id=None, eos_token_id=None))
  for name, parameter in model.named_parameters():
    if name.endswith(".bias"):  # zero from the start
      parameter.requires_grad = False
  trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
  optimizer = torch.optim.AdamW(
      [{"params": [p for p in trained if p.dim() > 1], "weight_decay": s["weight_decay"]},
       {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}],
      lr=s["learning_rate"], betas=(s["b1"], s["b2"]))

  def rate(step: int) -> float:
    if step < s["warmup"]:
      return s["learning_rate"] * (step + 1) / (s["warmup"] + 1)
    part = (step - s["warmup"]) / (s["steps"] - s["warmup"])
    return s["learning_rate"] * (s["floor"] + (1 - s["floor"]) * 0.5 * (1 + math.cos(math.pi * part)))

  @torch.no_grad()
  def evaluate() -> float:
    count = (len(held_out) - 1) // s["length"]
    inputs, targets = (held_out[i:i + count * s["length"]].view(count, -1) for i in (0, 1))
    losses = [torch.nn.functional.cross_entropy(model(a).logits.transpose(1, 2), b, reduction="sum").item()
              for a, b in zip(inputs.split(64), targets.split(64), strict=True)]
    return sum(losses) / targets.numel()

  curve = [[0, evaluate()]]
  for step in range(s["steps"]):
    for group in optimizer.param_groups:
      group["lr"] = rate(step)
    at = torch.randint(len(train) - s["length"], (s["rows"],))
    inputs, targets = (torch.stack([train[i + shift:i + shift + s["length"]] for i in at]) for shift in (0, 1))
    loss = torch.nn.functional.cross_entropy(model(inputs).logits.transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, s["clip_norm"])
    optimizer.step()
    if (step + 1) % (s["steps"] // 10) == 0:
      curve.append([step + 1, evaluate()])
      print(*curve[-1], flush=True)
  out.write_text(json.dumps({"parameters": sum(p.numel() for p in trained), "curve": curve}))


if __name__ == "__main__":
  main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
