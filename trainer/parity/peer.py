"""The first steps of a run of Weft again, in PyTorch, with transformers' model: python peer.py FOLDER

FOLDER is what `python -m trainer.parity` wrote: settings.json, batches.npz, the initial parameters as a Hugging Face
folder, maybe an adapter in PEFT's format, and Weft's losses. Each document of a packed row is computed by itself, so
that a row's attention and positions are held to what they are to mean. All is in float32, without dropout. Prints loss
and gradient norm of each step of both, and writes FOLDER/peer.json; ends with exit code 1 where a loss differs by more
than 1e-3. Needs torch, transformers and tqdm, for adapters peft; not Weft.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from torch.nn import functional
from tqdm import tqdm

BOUND = 1e-3


def load(settings: dict, folder: Path) -> torch.nn.Module:
  """The model, without dropout."""
  model = transformers.AutoModelForCausalLM.from_pretrained(folder / settings["model"], dtype=torch.float32)
  # PyTorch leaves the rows that the padding token reads out of the embedding's gradient, also where it is no padding.
  model.get_input_embeddings().padding_idx = None
  if settings["adapter"]:
    import peft
    model = peft.PeftModel.from_pretrained(model, folder / settings["adapter"], is_trainable=True)
  return model.eval()


def groups(settings: dict, model: torch.nn.Module) -> list[dict]:
  """What is trained, as PyTorch's parameter groups: {params, lr: one of each step, weight_decay}.

  A parameter that has another name in memory than in files (experts in one array, say) gets the only group of the
  tensors that have no parameter of their name.
  """
  if settings["adapter"]:
    (only,) = settings["groups"]
    return [dict(only, params=[p for p in model.parameters() if p.requires_grad])]
  of_tensor = {name: i for i, group in enumerate([*settings["groups"], {"tensors": settings["frozen"]}])
               for name in group["tensors"]}
  parameters = dict(model.named_parameters())
  others = {i for name, i in of_tensor.items() if name not in parameters}
  found = [dict(group, params=[]) for group in settings["groups"]]
  for name, parameter in parameters.items():
    if name not in of_tensor and len(others) != 1:
      sys.exit(f"transformers calls a parameter {name}, which no tensor of the files is called, and the tensors that "
               f"have no parameter differ in what the optimizer does with them. Give them equal factors, with "
               "--config.optimizer.wd_mults, lr_mults and freeze.")
    i = of_tensor[name] if name in of_tensor else next(iter(others))
    if i == len(found):
      parameter.requires_grad_(False)
    else:
      found[i]["params"].append(parameter)
  return [group for group in found if group["params"]]


def documents_of(batches: dict[str, np.ndarray], step: int) -> list[tuple[torch.Tensor, ...]]:
  """(tokens [n], positions [n], loss weights [n]) of each document in the rows of a step."""
  names = ("segment_ids", "tokens", "positions", "loss_weights")
  return [tuple(torch.from_numpy(array[segments == segment]) for array in row)
          for segments, *row in zip(*(batches[f"{step}/{name}"] for name in names), strict=True)
          for segment in range(1, segments.max(initial=0) + 1)]


def logits_of(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
  """Of what follows each token but the last, [n - 1, V]."""
  return model(input_ids=ids[None].long(), position_ids=positions[None].long()).logits[0, :-1]


def of_targets(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
  return functional.log_softmax(logits, -1).gather(-1, ids[1:, None].long())[:, 0]


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor, o: dict) -> torch.Tensor:
  """The loss of each token but the first, [n - 1]."""
  loss = -of_targets(logits, ids)
  total = torch.logsumexp(logits, -1)
  smoothing = o["label_smoothing"]
  likely = torch.exp(-loss).detach()
  loss = (1 - smoothing) * loss + smoothing * (total - logits.mean(-1)) + o["z_loss"] * total**2
  return likely * loss if o.get("dft") else loss


def train_tokens(model: torch.nn.Module, documents: list, o: dict) -> float:
  """Adds the gradient of the mean over the step's weights; returns that mean."""
  weight = sum(float(weights[1:].double().sum()) for _, _, weights in documents)
  total = 0.0
  for ids, positions, weights in documents:
    if len(ids) > 1 and weights[1:].any():
      loss = (cross_entropy(logits_of(model, ids, positions), ids, o) * weights[1:]).sum() / weight
      loss.backward()
      total += loss.item()
  return total


def completion(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor):
  """The log-probability of a completion."""
  return (of_targets(logits_of(model, ids, positions), ids) * (weights[1:] > 0)).sum()


def train_pairs(model: torch.nn.Module, documents: list, o: dict, reference: list[float]) -> float:
  """Of chosen and rejected, which follow one another, DPO's sigmoid loss (arXiv 2305.18290, eq. 7), a mean over pairs,
  and as `sft` the chosen ones' mean over tokens. As `train_tokens`."""
  total, count = 0.0, len(documents) // 2
  tokens = sum(int((weights[1:] > 0).sum()) for _, _, weights in documents[::2])
  for pair in range(count):
    chosen, rejected = (completion(model, *documents[2 * pair + side]) for side in (0, 1))
    score = o["beta"] * (chosen - reference[2 * pair] - rejected + reference[2 * pair + 1])
    smoothing = o["label_smoothing"]
    compared = -(1 - smoothing) * functional.logsigmoid(score) - smoothing * functional.logsigmoid(-score)
    loss = o["loss"].get("sigmoid", 0.0) * compared / count - o["loss"].get("sft", 0.0) * chosen / tokens
    loss.backward()
    total += loss.item()
  return total


def clip(parameters: list[torch.Tensor], bound: float) -> float:
  """As torch.nn.utils.clip_grad_norm_, whose norm of many float32 numbers on CPU is too small (docs/parity.md)."""
  gradients = [p.grad for p in parameters if p.grad is not None]
  norm = float(sum(g.double().square().sum() for g in gradients).sqrt())
  if bound and norm > bound:
    for g in gradients:
      g.mul_(bound / norm)
  return norm


def table(weft: list[dict], peer: list[dict]) -> str:
  """Each step, and the largest differences."""
  lines = ["step        Weft's loss     the peer's    apart   gradient norm     the peer's    apart"]
  worst = {"loss": 0.0, "grad_norm": 0.0}
  for step, (a, b) in enumerate(zip(weft, peer, strict=True), 1):
    apart = {"loss": abs(a["loss"] - b["loss"]),
             "grad_norm": abs(a["grad_norm"] - b["grad_norm"]) / max(b["grad_norm"], 1e-30)}
    worst = {key: max(value, apart[key]) for key, value in worst.items()}
    lines.append(f"{step:>4}  " + "  ".join(f"{a[key]:>15.6f} {b[key]:>14.6f}  {apart[key]:.1e}" for key in worst))
  return "\n".join([*lines, f"{len(weft)} steps: losses differ by at most {worst['loss']:.1e}, gradient norms by "
                    f"{worst['grad_norm']:.1e} of themselves"])


def main() -> None:
  folder = Path(sys.argv[1])
  settings = json.loads((folder / "settings.json").read_text())
  batches = dict(np.load(folder / "batches.npz"))
  model, options = load(settings, folder), settings["options"]
  trained = groups(settings, model)
  parameters = [p for group in trained for p in group["params"]]
  optimizer = torch.optim.AdamW(
      [dict(params=group["params"], weight_decay=group["weight_decay"]) for group in trained], lr=0.0,
      betas=(settings["b1"], settings["b2"]), eps=settings["eps"])
  references = {}
  if settings["strategy"] == "dpo":
    with torch.no_grad():
      references = {step: [float(completion(model, *document)) for document in documents_of(batches, step)]
                    for step in tqdm(range(settings["steps"]), "reference")}
  steps = []
  for step in tqdm(range(settings["steps"]), "peer"):
    optimizer.zero_grad()
    taken = documents_of(batches, step)
    if settings["strategy"] == "dpo":
      loss = train_pairs(model, taken, options, references[step])
    else:
      loss = train_tokens(model, taken, options)
    steps.append({"loss": loss, "grad_norm": clip(parameters, settings["clip_norm"])})
    for group, of in zip(optimizer.param_groups, trained, strict=True):
      group["lr"] = of["lr"][step]
    optimizer.step()
  versions = {module.__name__: module.__version__ for module in (transformers, torch)}
  (folder / "peer.json").write_text(json.dumps({"versions": versions, "steps": steps}))
  weft = json.loads((folder / "weft.json").read_text())
  print(table(weft, steps))
  print(", ".join(f"{name} {version}" for name, version in versions.items()))
  sys.exit(any(abs(a["loss"] - b["loss"]) > BOUND for a, b in zip(weft, steps, strict=True)))


if __name__ == "__main__":
  main()
