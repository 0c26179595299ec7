"""Makes the folders of tests/models/hf/image_training: DPO, and adapters of PEFT, of tiny models of images and text.

    python tests/models/hf/make_image_training_references.py [CASE …]

needs torch, transformers, peft and Pillow. The models are those of native_references, and of
tests/input_pipeline/references/split for smolvlm. A case has adapters/, as PEFT writes them, and reference.npz, in
float64 but for what PEFT's files hold:

    prompt{i}, image{i}_{j}, chosen{i}, rejected{i}    ids of two prompts with images, and of completions. An image is
                           uint8 [H, W, 3] in multiples of a tile, or [squares, S, S, 3]
    dpo                    the mean over both pairs of -log σ(BETA ((π_c - r_c) - (π_r - r_r))), where π are sums of
                           log p of completions and r those of a model with all parameters times SHARE
    dpo:NAME               its gradient, by the name of the tensor in the file, of all but LEFT_OUT
    adapted{i}             logits with the adapters, [n, V], of prompt and chosen completion
    sft, sft:NAME          the mean cross-entropy of the chosen completions with the adapters, and their gradients
"""

import copy
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_native_references import batch as native_batch
from make_native_references import images_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
FOLDER, SPLIT = HERE / "image_training", HERE.parents[1] / "input_pipeline" / "references" / "split"
BETA, SHARE = 0.5, 0.9
LEFT_OUT = re.compile(r"(text_model|language_model|^model)\.layers\.[1-9]|embed_tokens|lm_head|"
                      r"layer_scalar|put_m(in|ax)$|\.std_(bias|scale)$")  # the last are buffers
# What PEFT adapts, by the ends of names: in the text model, in the tower, and between them.
TARGETS = {"smolvlm": ["q_proj", "v_proj", "modality_projection.proj"], "qwen2_vl": ["q_proj", "down_proj", "attn.qkv"],
           "qwen2_5_vl": ["v_proj", "gate_proj", "merger.mlp.0"], "qwen3_vl": ["o_proj", "linear_fc1"],
           "qwen3_5": ["q_proj", "in_proj_qkv", "linear_fc1"],
           "gemma4": ["per_layer_input_gate", "q_proj.linear", "gate_proj.linear", "embedding_projection"],
           "mistral3": ["merging_layer", "attention.o_proj", "self_attn.v_proj"],
           "gemma4_local": ["v_proj.linear", "down_proj.linear", "embedding_projection"]}


def prompts(name: str) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
  """Ids and images of two prompts."""
  if name == "smolvlm":
    held = np.load(SPLIT / "reference.npz")
    ends = [int(np.argmax(held[f"weights{i}"])) for i in (0, 1)]
    return [held[f"ids{i}"][:end] for i, end in enumerate(ends)], [
        [held["squares0"]], [held["squares1"][:7], held["squares1"][7:]]]
  data, pictures = native_batch()
  return [data["tokens"][i, :data["prefix"][i]] for i in (0, 1)], pictures


def seen(name: str, images: list[np.ndarray]) -> dict[str, torch.Tensor]:
  """What transformers' forward takes for the images of one text."""
  if name == "smolvlm":
    squares = np.concatenate(images).transpose(0, 3, 1, 2)
    return dict(pixel_values=torch.tensor(squares / 127.5 - 1)[None])
  found = images_of(name, images)
  return found | dict(pixel_values=found["pixel_values"].double())


def logits_of(model: torch.nn.Module, name: str, prompt: np.ndarray, more: np.ndarray, images: list) -> torch.Tensor:
  ids = torch.tensor(np.concatenate([prompt, more]).astype(np.int64))[None]
  types = {} if name == "smolvlm" else dict(mm_token_type_ids=(ids == model.config.image_token_id).int())
  return model(input_ids=ids, use_cache=False, **seen(name, images), **types).logits[0]


def log_probs(logits: torch.Tensor, more: np.ndarray) -> torch.Tensor:
  """Of the last tokens, [n]."""
  n = len(more)
  return torch.log_softmax(logits[-n - 1:-1], -1).gather(-1, torch.tensor(more.astype(np.int64))[:, None])[:, 0]


def dpo(model: torch.nn.Module, name: str, pairs: list) -> tuple[float, dict[str, np.ndarray]]:
  """The loss, and its gradient by the names that a saved file has."""
  other = copy.deepcopy(model)
  with torch.no_grad():
    for p in other.parameters():
      p.mul_(SHARE)
  total = 0.0
  for prompt, images, chosen, rejected in pairs:
    sums = []
    for more in (chosen, rejected):
      policy = log_probs(logits_of(model, name, prompt, more, images), more).sum()
      with torch.no_grad():
        reference = log_probs(logits_of(other, name, prompt, more, images), more).sum()
      sums.append(policy - reference)
    total = total - torch.nn.functional.logsigmoid(BETA * (sums[0] - sums[1])) / len(pairs)
  total.backward()
  with torch.no_grad():
    for p in model.parameters():
      p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
  with tempfile.TemporaryDirectory() as saved:
    model.save_pretrained(saved)
    return float(total.detach()), load_file(Path(saved) / "model.safetensors")


def adapted(base: Path, name: str, pairs: list, out: Path) -> dict[str, np.ndarray]:
  """Writes random adapters; logits, loss and gradients with them."""
  torch.manual_seed(0)
  model = get_peft_model(load(base), LoraConfig(r=2, lora_alpha=6, lora_dropout=0.1, target_modules=TARGETS[name],
                                                task_type="CAUSAL_LM"))
  with torch.no_grad():
    for key, p in model.named_parameters():
      if "lora_" in key:
        p.add_(0.2 * torch.randn(p.shape))
  model.save_pretrained(out)
  (out / "README.md").unlink(missing_ok=True)
  config = re.sub(r'("base_model_name_or_path": ").*"', r'\1base"', (out / "adapter_config.json").read_text())
  (out / "adapter_config.json").write_text(config)
  model = PeftModel.from_pretrained(load(base), out, is_trainable=True).eval().double()
  arrays, total, count = {}, 0.0, 0
  for i, (prompt, images, chosen, _) in enumerate(pairs):
    found = logits_of(model, name, prompt, chosen, images)
    arrays[f"adapted{i}"] = found.detach().numpy().astype(np.float32)
    total, count = total - log_probs(found, chosen).sum(), count + len(chosen)
  (total / count).backward()
  arrays["sft"] = float(total.detach() / count)
  gradients = {f"sft:{key.replace('.default', '')}": p.grad.numpy().astype(np.float32)
               for key, p in model.named_parameters() if p.grad is not None}
  assert all(np.abs(values).max() > 0 for values in gradients.values())
  return arrays | gradients


def load(folder: Path) -> torch.nn.Module:
  return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make(name: str) -> None:
  base, out = SPLIT if name == "smolvlm" else HERE / "native_references" / name, FOLDER / name
  shutil.rmtree(out, ignore_errors=True)
  (out / "adapters").mkdir(parents=True)
  rng, arrays, pairs = np.random.default_rng(2), {}, []
  for i, (prompt, images) in enumerate(zip(*prompts(name), strict=True)):
    chosen, rejected = (rng.integers(16, 50, size).astype(np.int32) for size in (4 + i, 7 - 3 * i))
    pairs.append((prompt, images, chosen, rejected))
    arrays |= {f"prompt{i}": prompt, f"chosen{i}": chosen, f"rejected{i}": rejected}
    arrays |= {f"image{i}_{j}": image for j, image in enumerate(images)}
  arrays |= adapted(base, name, pairs, out / "adapters")
  arrays["dpo"], gradients = dpo(load(base).double(), name, pairs)
  arrays |= {f"dpo:{key}": values.astype(np.float32) for key, values in gradients.items() if not LEFT_OUT.search(key)}
  np.savez_compressed(out / "reference.npz", **arrays)
  print(f"{name}: dpo {arrays['dpo']:.4f}, sft {arrays['sft']:.4f}, "
        f"{sum(f.stat().st_size for f in out.rglob('*') if f.is_file())} bytes")


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  softmax = torch.nn.functional.softmax
  torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim, dtype=(
      torch.float64 if x.dtype == torch.float64 else dtype))
  to, as_float = torch.Tensor.to, torch.Tensor.float

  def kept(self, *args, **kwargs):  # of norms, which go to float32
    return self if self.dtype == torch.float64 and args[:1] == (torch.float32,) else to(self, *args, **kwargs)

  for case_name in sys.argv[1:] or TARGETS:
    of_norms = case_name.startswith(("gemma4", "mistral3"))  # the others were made without
    torch.Tensor.to, torch.Tensor.float = (kept, torch.Tensor.double) if of_norms else (to, as_float)
    make(case_name)
