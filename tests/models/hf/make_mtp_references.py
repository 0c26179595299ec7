"""Makes the folders of tests/models/hf/mtp_references: tiny random models with modules that predict tokens further
ahead, made of transformers' own layers under the names of published folders.

    python tests/models/hf/make_mtp_references.py [CASE …]

needs torch and transformers 5; the tests need neither. transformers passes such modules over. A module is put together
here as DeepSeek-V3 (arXiv 2412.19437, eq. 21 to 23) and the programs that draft with them say: a projection of the
normalised embedding of the token k further and the normalised hidden state that the unembedding was given before, a
layer of the model, a norm, the model's unembedding. A case has config.json, safetensors and reference.npz:

    tokens [2, T]        logits [D, 2, T, V]        of each module
    documents [D, T, V]  those of row 0 where tokens before and from SPLIT on are documents of their own
    loss, gradient_names, gradient_0, …    of the cross-entropy with WEIGHT / D times the modules'
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_references import DELTA, EXPERTS, LATENT, SPLIT, T, V, like, randomise
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "mtp_references"
WEIGHT = 0.3
QWEN = dict(DELTA, shared_expert_intermediate_size=20, num_hidden_layers=2)

# {name: (modules, entries of config.json)}
CASES = {
    "deepseek_v3": (2, like("deepseek_v3", **LATENT, q_lora_rank=14, norm_topk_prob=True)),
    "glm4_moe": (1, like("glm4_moe", head_dim=8, use_qk_norm=True, n_routed_experts=8, num_experts_per_tok=2,
                         moe_intermediate_size=12, first_k_dense_replace=1, routed_scaling_factor=2.5)),
    "qwen3_next": (1, like("qwen3_next", **EXPERTS, **QWEN)),
    "qwen3_5": (1, like("qwen3_5_text", **DELTA, num_hidden_layers=2)),
}
# What counts modules in config.json.
COUNTS = {"deepseek_v3": "num_nextn_predict_layers", "glm4_moe": "num_nextn_predict_layers",
          "qwen3_5": "mtp_num_hidden_layers"}  # that of Qwen3-Next does not say


class Module(torch.nn.Module):
  """What stands before and behind the layer."""

  def __init__(self, norm: type, size: int, eps: float):
    super().__init__()
    self.enorm, self.hnorm, self.last_norm = (norm(size, eps=eps) for _ in range(3))
    self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)


def names_of(modules: int, layers: int, apart: bool) -> list[dict[str, str]]:
  """{ours: theirs} for each module, without ".weight"."""
  if apart:
    return [{"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
             "last_norm": "mtp.norm"}]
  return [{ours: f"model.layers.{layers + k}.{theirs}" for ours, theirs in (
      ("enorm", "enorm"), ("hnorm", "hnorm"), ("eh_proj", "eh_proj"), ("last_norm", "shared_head.norm"))}
      for k in range(modules)]


def run(model, layers: list, modules: list[Module], tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
  """(logits of the model, those of each module [B, T - k, V])"""
  hidden = model.model(tokens, use_cache=False).last_hidden_state
  logits, further = model.lm_head(hidden), []
  for k, (module, layer) in enumerate(zip(modules, layers, strict=True), 1):
    read = model.model.embed_tokens(tokens[:, k:])
    x = module.eh_proj(torch.cat([module.enorm(read), module.hnorm(hidden[:, :-1])], -1))
    places = torch.arange(x.shape[1])
    mask = torch.where(places[:, None] >= places, 0.0, torch.finfo(torch.float32).min)[None, None]
    rotation = model.model.rotary_emb(x, places[None])
    out = layer(x, attention_mask=mask, position_ids=places[None], position_embeddings=rotation)
    hidden = module.last_norm(out[0] if isinstance(out, tuple) else out)
    further.append(model.lm_head(hidden))
  return logits, further


def filled(further: list[torch.Tensor]) -> np.ndarray:
  """With zeros where a module predicts nothing."""
  return np.stack([np.pad(part.detach().numpy(), ((0, 0), (0, k), (0, 0))) for k, part in enumerate(further, 1)])


def make(name: str) -> None:
  folder, (number, config) = FOLDER / name, CASES[name]
  shutil.rmtree(folder, ignore_errors=True)
  config, layers, apart = dict(config), config["num_hidden_layers"], name.startswith("qwen")
  if apart:
    config["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
  made = AutoConfig.for_model(config.pop("model_type"), **config | dict(num_hidden_layers=layers + number))
  model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
  model.set_experts_implementation("eager")
  modules = [Module(type(model.model.norm), made.hidden_size, made.rms_norm_eps) for _ in range(number)]
  generator = torch.Generator().manual_seed(0)
  for part in (model, *modules):
    randomise(part, generator)
  model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  names = names_of(number, layers, apart)
  tensors = load_file(folder / "model.safetensors")
  if apart:
    tensors = {key.replace(f"model.layers.{layers}.", "mtp.layers.0."): value for key, value in tensors.items()}
  for k, (module, theirs) in enumerate(zip(modules, names, strict=True)):
    tensors |= {f"{theirs[ours]}.weight": getattr(module, ours).weight.detach() for ours in theirs}
    if not apart:
      where = f"model.layers.{layers + k}"
      tensors |= {f"{where}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
                  f"{where}.shared_head.head.weight": tensors["lm_head.weight"].clone()}
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  content = json.loads((folder / "config.json").read_text()) | dict(num_hidden_layers=layers)
  content |= {COUNTS[name]: number} if name in COUNTS else {}
  if "layer_types" in content:
    content["layer_types"] = content["layer_types"][:layers]
  if "mlp_layer_types" in content:
    content["mlp_layer_types"] = content["mlp_layer_types"][:layers]
  (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

  own = list(model.model.layers[layers:])
  model.model.layers = model.model.layers[:layers]
  model.config.num_hidden_layers = layers
  tokens = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(1))
  logits, further = run(model, own, modules, tokens)
  loss = cross_entropy(logits[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))
  for k, part in enumerate(further, 1):
    loss = loss + WEIGHT / number * cross_entropy(part[:, :-1].reshape(-1, V), tokens[:, k + 1:].reshape(-1))
  loss.backward()
  grads = {"model.embed_tokens.weight": model.model.embed_tokens.weight.grad,
           "model.layers.0.mlp.down_proj.weight": getattr(getattr(
               model.model.layers[0].mlp, "down_proj", None), "weight", model.model.norm.weight).grad}
  if grads["model.layers.0.mlp.down_proj.weight"].ndim == 1:
    grads["model.norm.weight"] = grads.pop("model.layers.0.mlp.down_proj.weight")
  for module, theirs in zip(modules, names, strict=True):
    grads |= {f"{theirs[ours]}.weight": getattr(module, ours).weight.grad for ours in theirs}
  for k, layer in enumerate(own):
    where = "mtp.layers.0" if apart else f"model.layers.{layers + k}"
    grads[f"{where}.self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight.grad
    if hasattr(layer.mlp, "gate"):
      grads[f"{where}.mlp.gate.weight"] = layer.mlp.gate.weight.grad
  apart_logits = [filled(run(model, own, modules, part)[1])[:, 0] for part in (tokens[:1, :SPLIT], tokens[:1, SPLIT:])]
  np.savez_compressed(
      folder / "reference.npz", tokens=tokens.numpy().astype(np.int32), logits=filled(further),
      documents=np.concatenate(apart_logits, axis=1), loss=loss.item(), gradient_names=list(grads),
      versions=[f"{m.__name__} {m.__version__}" for m in (torch, transformers)],
      **{f"gradient_{i}": grad.numpy() for i, grad in enumerate(grads.values())})
  print(f"{name}: loss {loss.item():.4f}, |logits| up to {max(part.abs().max().item() for part in further):.2f}")


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  for case_name in sys.argv[1:] or CASES:
    make(case_name)
