"""adapter_config.json of PEFT: what of it is read, what is refused, and what is written."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.hf import files
from models.hf.errors import HFError
from models.hf.source import cannot_matter

CONFIG = "adapter_config.json"
# What changes the function, or the base, in ways that are not ours: these keys must have one of these values.
MUST: dict[str, Any] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM", "SEQ_CLS", None), "bias": ("none",),
    "use_dora": (True, False, None), "layers_to_transform": (None, []), "layer_replication": (None, []),
    "lora_bias": (False, None), "alora_invocation_tokens": (None, []), "use_qalora": (False, None),
    # The others (pissa, olora, loftq, …) change the base as well.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
READ = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "ensure_weight_tying",
        "trainable_token_indices")
# Without effect on what a trained adapter computes; which modules have one or stand as a whole, their tensors say.
INERT = ("target_modules", "target_parameters", "modules_to_save", "exclude_modules", "lora_dropout",
         "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "layers_pattern",
         "megatron_core", "qalora_group_size", "runtime_config")


def read(folder: Path) -> dict[str, Any]:
  """adapter_config.json, with no option that is not ours."""
  file = folder / CONFIG
  if not file.is_file():
    raise HFError(f"{folder} has no {CONFIG}, so it holds no adapters in PEFT's format.")
  config = files.read_json(file)
  for key, allowed in MUST.items():
    if key in config and not any(config[key] == value and type(config[key]) is type(value) for value in allowed):
      shown = ", ".join(map(str, allowed))
      raise HFError(f"{file}: {key} is {config[key]!r}; adapters are read with {key} = {shown}. Merge this adapter "
                    "into its base with PEFT (merge_and_unload) and load the result as model.hf.")
  if config.get("peft_type") is None:
    raise HFError(f"{file}: peft_type is missing; it must be LORA.")
  unknown = {key: value for key, value in config.items()
             if key not in MUST and key not in READ and key not in INERT and not cannot_matter(key, value)}
  if unknown:
    keys = ", ".join(f"{key} = {value!r:.80}" for key, value in [*unknown.items()][:20])
    raise HFError(f"{file}: {keys}: not known here, and it could change what the adapters compute. Merge this adapter "
                  "into its base with PEFT (merge_and_unload) and load the result as model.hf.")
  for key in ("r", "lora_alpha"):
    if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float) or not (
        0 < config[key] < 2**31):
      raise HFError(f"{file}: {key} is {config.get(key)!r:.80}; it must be a number above 0 and below 2 ** 31.")
  for key in ("rank_pattern", "alpha_pattern"):
    if not isinstance(config.get(key) or {}, dict):
      raise HFError(f"{file}: {key} is {config[key]!r}; it must be an object, {{module: number}}.")
  return config


def check_scale(config: Mapping[str, Any], names: list[str], parts: int, lora: Mapping[str, Any], where: Path) -> int:
  """The rank in the file of the module with these names, one a layer; rank and scale fit ours."""
  found = {(_of_module(config.get("rank_pattern"), name, config["r"], where),
            _of_module(config.get("alpha_pattern"), name, config["lora_alpha"], where)) for name in names}
  if len(found) > 1:
    raise HFError(f"{where}: by rank_pattern and alpha_pattern the layers of {names[0]} differ, (rank, alpha) = "
                  f"{sorted(found)}; here all layers have the same.")
  rank, alpha = found.pop()
  scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
  ours = lora["alpha"] / (math.sqrt(lora["rank"]) if lora["rslora"] else lora["rank"])
  if rank not in (lora["rank"], parts * lora["rank"]) or not math.isclose(scale, ours, rel_tol=1e-12):
    rslora = bool(config.get("use_rslora"))
    raise HFError(f"{where}: {names[0]} has rank {rank} and scale {scale:g} (lora_alpha {alpha:g}"
                  f"{', rsLoRA' * rslora}), but the config has rank {lora['rank']} and scale {ours:g}. Set "
                  f"model.lora.rank={rank}, model.lora.alpha={alpha:g}, model.lora.rslora={rslora}; all modules must "
                  "have the same.")
  return rank


def _of_module(pattern: Mapping[str, Any] | None, name: str, default: Any, where: Path) -> Any:
  """The value for a module: that of the first key, a regex, that matches its name or the end of it, as in PEFT."""
  for key, value in (pattern or {}).items():
    if len(key) > 200 or re.search(r"\)[*+{]", key) or len(re.findall(r"[*+{]", key)) > 3:
      raise HFError(f"{where}: the pattern {key!r:.80} could take for ever to be tried. Name the modules in full, or "
                    "with at most three of * + { and none of them behind a bracket.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
      raise HFError(f"{where}: rank_pattern or alpha_pattern gives {value!r:.80} for {key!r:.80}; it must be a number "
                    "above 0.")
    try:
      fits = re.match(rf"(.*\.)?({key})$", name)
    except re.error as e:
      raise HFError(f"{where}: {key!r} is not a regular expression: {e}.") from e
    if fits:
      return value
  return default


def targets(ends: Iterable[str]) -> list[str] | str:
  """target_modules: ends of names; or a regex of whole names, where an end has the number of a layer in it."""
  ends = sorted(set(ends))
  numbered = [end for end in ends if "\\" in end]
  others = [re.escape(end) for end in ends if end not in numbered]
  return rf"(.*\.)?({'|'.join((*numbered, *others))})" if numbered else ends


def check_dora(config: Mapping[str, Any], lora: Mapping[str, Any], where: Path) -> None:
  """Whether lengths of columns are trained is the same there and here."""
  if bool(config.get("use_dora")) != lora["dora"]:
    raise HFError(f"{where}: use_dora is {config.get('use_dora')}, but model.lora.dora={lora['dora']}. Set "
                  f"model.lora.dora={bool(config.get('use_dora'))}.")


def content(lora: Mapping[str, Any], targets: list[str] | str, wider: Mapping[str, int], plain: bool, base: str | None,
            whole: list[str] | None, scores: bool) -> dict[str, Any]:
  """The content of adapter_config.json, in keys that every PEFT since rsLoRA (0.8) knows.

  Args:
    wider: {target: how many times the rank it has}; those that are not named have the rank.
  """
  ranks = {target: n * lora["rank"] for target, n in wider.items()}
  alphas = {target: number(lora["alpha"] * (math.sqrt(n) if lora["rslora"] else n)) for target, n in wider.items()}
  return {
      "peft_type": "LORA", "task_type": "SEQ_CLS" if scores else "CAUSAL_LM", "auto_mapping": None,
      "base_model_name_or_path": base,
      "revision": None, "inference_mode": True, "r": lora["rank"], "lora_alpha": number(lora["alpha"]),
      "use_rslora": lora["rslora"], "lora_dropout": lora["dropout"], "target_modules": targets, "bias": "none",
      "fan_in_fan_out": plain, "rank_pattern": ranks, "alpha_pattern": alphas, "modules_to_save": whole,
      "layers_to_transform": None, "layers_pattern": None, "init_lora_weights": True,
      **({"use_dora": True} if lora["dora"] else {}),
  }


def number(value: float) -> int | float:
  return int(value) if float(value).is_integer() else value
