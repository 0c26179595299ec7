"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, into ours and back, bit by bit.

Theirs is one pair of matrices for each layer and module, `base_model.model.<module>.lora_A.weight` [r, in] and
`lora_B.weight` [out, r]; ours are `lora_a` [L, in, r] and `lora_b` [L, r, out] beside a kernel. The families' tensor
names (models/hf/family.py) say which module is which kernel. Where several of our kernels are one module of theirs, as
query, key and value of GPT-2's c_attn, their adapters become one: if the parts have the same A, with that A and their
B's end to end; else with n times the rank, the A's above one another and the B's as blocks on the diagonal.

r rank, L layers.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from models import lora as lora_lib
from models.hf import files
from models.hf import names as names_lib
from models.hf.entry import group_order
from models.hf.errors import HFError
from models.hf.family import Family
from models.hf.keys import cannot_matter

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ROOT = "base_model.model."
# What changes the function, or the base, in ways that are not ours: these keys must have one of these values.
MUST: dict[str, Any] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None), "bias": ("none",), "use_dora": (False, None),
    "modules_to_save": (None, []), "layers_to_transform": (None, []), "layer_replication": (None, []),
    "lora_bias": (False, None), "target_parameters": (None, []), "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []), "use_qalora": (False, None),
    # The others (pissa, olora, loftq, …) change the base as well.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
READ = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")
# Without effect on what a trained adapter computes; which modules have one, their tensors say.
INERT = ("target_modules", "exclude_modules", "lora_dropout", "base_model_name_or_path", "revision", "inference_mode",
         "auto_mapping", "peft_version", "layers_pattern", "megatron_core", "qalora_group_size", "ensure_weight_tying",
         "runtime_config")


@dataclass(frozen=True)
class Module:
  """A module of theirs, and the kernels of ours that it is.

  Args:
    theirs: its name with the placeholder {layer}, without the family's prefix.
    kernels: paths of ours.
    outs: the number of outputs of each.
    adapted: whether each has adapters.
    plain: its matrix is kept as ours, [in, out] (transformers' Conv1D, PEFT's fan_in_fan_out).
    layers, groups: as in `models.hf.family.Tensor`.
  """

  theirs: str
  kernels: tuple[str, ...]
  outs: tuple[int, ...]
  adapted: tuple[bool, ...]
  plain: bool
  layers: tuple[int, ...]
  groups: int = 1

  @property
  def order(self) -> np.ndarray:
    """Their outputs, kernel after kernel."""
    return group_order(self.outs, self.groups)

  @property
  def paths(self) -> list[tuple[str, str]]:
    """(lora_a, lora_b) of each kernel that has adapters."""
    return [lora_lib.pair(kernel) for kernel, adapted in zip(self.kernels, self.adapted, strict=True) if adapted]

  @property
  def rows(self) -> list[slice]:
    """Where the outputs of each kernel that has adapters lie among theirs."""
    ends = np.cumsum(self.outs)
    return [slice(int(end) - out, int(end)) for out, end, adapted in zip(self.outs, ends, self.adapted, strict=True)
            if adapted]


def modules(family: Family, keys: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[list[Module]]:
  """For every adapted kernel's module, the ways in which the family may name it, the first being the one written.

  Args:
    family: of the base.
    keys: {dotted model key: value}.
    shapes: {path: object with .shape} of all our parameters, adapters included, kernels unquantised.

  Raises:
    HFError: an adapted kernel is no module of this family.
  """
  adapted = {lora_lib.kernel_of(path) for path in shapes if lora_lib.is_adapter(path)}
  ways: dict[frozenset[str], list[Module]] = {}
  for tensor in family.tensors(dict(keys)):
    kernels = (tensor.ours,) if isinstance(tensor.ours, str) else tuple(tensor.ours)
    if not adapted.isdisjoint(kernels) and tensor.theirs.endswith(".weight") and "{expert}" not in tensor.theirs:
      groups = tensor.groups if isinstance(tensor.groups, int) else 1
      layers = tensor.layers or tuple(range(shapes[kernels[0]].shape[0]))
      module = Module(tensor.theirs.removesuffix(".weight"), kernels, tuple(shapes[k].shape[-1] for k in kernels),
                      tuple(k in adapted for k in kernels), not tensor.transpose, layers, groups)
      ways.setdefault(frozenset(adapted.intersection(kernels)), []).append(module)
  if missing := adapted - frozenset().union(*ways):
    raise HFError(f"the family {family.name} has no module for {', '.join(sorted(missing))}, so that adapters there "
                  "have no place in PEFT's format. Export them merged, or leave them out of model.lora.targets.")
  return list(ways.values())


# ---------------------------------------------------------------------------------------------------- reading


def load_adapters(folder: str | Path, wanted: Mapping[str, Any], *, family: Family, keys: Mapping[str, Any],
                  shapes: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Adapters in PEFT's format as ours.

  Args:
    folder: with adapter_config.json and adapter_model.safetensors.
    wanted: {path: ShapeDtypeStruct, with a sharding or without} of all the adapters' leaves.
    family, keys, shapes: see `modules`; `shapes` may lack the adapters.
    lora: the config's section `model.lora`.

  Returns:
    {path: array} for `wanted`, each in its dtype and in its place.

  Raises:
    HFError: files that are missing or damaged, an option that is not ours, another rank or scale, adapters that do not
      stand where `model.lora.targets` has them.
  """
  folder, shapes = files.existing_folder(folder), {**shapes, **wanted}
  config, tensors = _read_config(folder), _read_tensors(folder)
  found: dict[str, list[np.ndarray]] = {path: [] for path in wanted}
  unused, problems = set(tensors), []
  for ways in modules(family, keys, shapes):
    prefix, module = max(((prefix, way) for way in ways for prefix in family.prefixes),
                         key=lambda choice: sum(_name(*choice, choice[1].layers[0], part) in tensors for part in "AB"))
    _check_layout(config, module, folder / CONFIG)
    size = shapes[module.paths[0][0]].shape[1]
    every = [prefix + module.theirs.format(layer=i) for i in module.layers]
    rank = _check_scale(config, every, len(module.paths), lora, folder / CONFIG)
    expected = {"A": (rank, size), "B": (sum(module.outs), rank)}
    for layer in module.layers:
      names = {part: _name(prefix, module, layer, part) for part in "AB"}
      wrong = [_difference(names[part], tensors, shape) for part, shape in expected.items()
               if names[part] not in tensors or tensors[names[part]].shape != shape]
      problems += wrong
      unused -= set(names.values())
      if not wrong:
        b = tensors[names["B"]][module.order]
        parts = _take_apart(tensors[names["A"]], b, module, lora["rank"], layer, folder)
        for (path_a, path_b), (a, b) in zip(module.paths, parts, strict=True):
          found[path_a].append(a.T)
          found[path_b].append(b.T)
  problems += [f"+ {name} {tensors[name].shape}: matches no target here" for name in sorted(unused)]
  if problems:
    more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
    raise HFError(f"the adapters of {folder} are not those of model.lora.targets={tuple(lora['targets'])} "
                  f"({len(problems)} differences; -: missing there, +: only there, !: other shape):\n  "
                  + "\n  ".join(problems[:20] + more)
                  + f"\nIts target_modules are {config.get('target_modules')}; choose model.lora.targets to match.")
  return {path: _place(np.stack(found[path]), leaf) for path, leaf in wanted.items()}


def _difference(name: str, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> str:
  if name not in tensors:
    return f"- {name} {shape}: not in the file"
  return f"! {name}: {tensors[name].shape} in the file, {shape} by {CONFIG} and the model"


def _take_apart(a: np.ndarray, b: np.ndarray, module: Module, rank: int, layer: int,
                folder: Path) -> Iterable[tuple[np.ndarray, np.ndarray]]:
  """(A [r, in], B [out, r]) of each of our kernels that has adapters, of one module's pair.

  Raises:
    HFError: outputs that have no adapters here are changed, or the parts cannot be told apart.
  """
  rows = module.rows
  others = np.ones(b.shape[0], bool)
  for part in rows:
    others[part] = False
  if np.any(b[others]):
    free = [kernel for kernel, adapted in zip(module.kernels, module.adapted, strict=True) if not adapted]
    raise HFError(f"{folder}: the adapters of {module.theirs.format(layer=layer)} change {', '.join(free)} too, "
                  "which model.lora.targets does not match. Add them.")
  if a.shape[0] == rank:
    return [(a, b[part]) for part in rows]
  blocks = [slice(i * rank, (i + 1) * rank) for i in range(len(rows))]
  for part, block in zip(rows, blocks, strict=True):
    rest = np.delete(b[part], np.r_[block], axis=1)
    if np.any(rest):
      raise HFError(f"{folder}: {module.theirs.format(layer=layer)} has rank {a.shape[0]}, and its matrix B is not "
                    f"made of {len(rows)} blocks of rank {rank}, as its parts {', '.join(module.kernels)} need it. "
                    f"Set model.lora.rank={a.shape[0]} and model.lora.alpha to keep the scale.")
  return [(a[block], b[part, block]) for part, block in zip(rows, blocks, strict=True)]


def _place(values: np.ndarray, leaf: Any) -> jax.Array:
  values = values.astype(leaf.dtype)
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    return jnp.array(values)
  # A copy, since on CPU the array could be the host's memory, which cannot be donated.
  return jnp.copy(jax.make_array_from_callback(values.shape, sharding, lambda index: values[index]))


def _read_config(folder: Path) -> dict[str, Any]:
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


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
  file = folder / TENSORS
  if not file.is_file():
    foreign = sorted(p.name for p in folder.glob("adapter_model.*"))
    others = f", only {', '.join(foreign)}; pickled weights can run code and are never opened" if foreign else ""
    raise HFError(f"{folder} has no {TENSORS}{others}. Save the adapters again with PEFT's save_pretrained.")
  for name, info in files.read_header(file).items():
    if info.dtype not in files.DTYPES:
      raise HFError(f"{file}: tensor {name!r} is {info.dtype}; parameters are {', '.join(files.DTYPES)}.")
  tensors, _ = names_lib.renamed(safetensors.numpy.load_file(file), keep=ROOT)
  return tensors


def _check_layout(config: Mapping[str, Any], module: Module, where: Path) -> None:
  if bool(config.get("fan_in_fan_out")) != module.plain:
    kind = "[in, out], as transformers' Conv1D keeps it" if module.plain else "[out, in], as a Linear keeps it"
    raise HFError(f"{where}: fan_in_fan_out is {config.get('fan_in_fan_out')!r}, but the matrix of {module.theirs} is "
                  f"{kind}. Set fan_in_fan_out to {'true' if module.plain else 'false'} there.")


def _check_scale(config: Mapping[str, Any], names: list[str], parts: int, lora: Mapping[str, Any], where: Path) -> int:
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


# ---------------------------------------------------------------------------------------------------- writing


def save_adapters(out: str | Path, read: lora_lib.ReadLeaf, *, family: Family, keys: Mapping[str, Any],
                  shapes: Mapping[str, Any], lora: Mapping[str, Any], base: str | None, dtype: Any = None) -> None:
  """Writes adapters in PEFT's format; `PeftModel.from_pretrained` loads them onto the base.

  Args:
    out: a folder, made if missing; adapters in it are replaced.
    read: gives `leaf[index]` of an adapter's leaf.
    family, keys, shapes: see `modules`.
    lora: the config's section `model.lora`.
    base: what base_model_name_or_path is to say.
    dtype: of the tensors; None: that of ours.

  Raises:
    HFError: an adapted kernel is no module of the family; the files cannot be written.
  """
  out = Path(out).expanduser().absolute()
  prefix, tensors, ranks = family.prefixes[0], {}, {}
  # PEFT looks for modules in a loaded model.
  chosen = [next((way for way in ways if way.theirs.startswith(family.in_memory)), ways[0])
            for ways in modules(family, keys, shapes)]
  for module in chosen:
    every = slice(None)
    leaves = [tuple(np.stack([np.asarray(read(path, (i, every, every))) for i, _ in enumerate(module.layers)])
                    for path in pair) for pair in module.paths]
    if dtype is not None:
      leaves = [tuple(leaf.astype(dtype) for leaf in pair) for pair in leaves]
    same = all(a.tobytes() == leaves[0][0].tobytes() for a, _ in leaves)
    ranks[module] = lora["rank"] * (1 if same else len(leaves))
    for i, layer in enumerate(module.layers):
      a, b = _put_together([(a[i].T, b[i].T) for a, b in leaves], module, ranks[module], same)
      for part, values in zip("AB", (a, b[np.argsort(module.order)]), strict=True):
        tensors[_name(prefix, module, layer, part)] = np.ascontiguousarray(values)
  targets = {module: target_of(module.theirs, chosen, family, keys) for module in chosen}
  other = {targets[module]: rank // lora["rank"] for module, rank in ranks.items() if rank != lora["rank"]}
  config = _config(lora, _targets(targets.values()), {k: n * lora["rank"] for k, n in other.items()},
                   {k: _number(lora["alpha"] * (math.sqrt(n) if lora["rslora"] else n)) for k, n in other.items()},
                   all(module.plain for module in chosen), base)
  try:
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).unlink(missing_ok=True)  # without it, a half-written folder cannot be taken for a whole one
    files.save_tensors(tensors, out / TENSORS)
    temporary = out / f"{CONFIG}.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, out / CONFIG)
  except (OSError, safetensors.SafetensorError) as e:
    raise HFError(f"the adapters could not be written to {out}: {e}. Free space or fix the folder's permissions, then "
                  "run the same command again.") from e


def target_of(theirs: str, chosen: Iterable[Module], family: Family, keys: Mapping[str, Any]) -> str:
  """The shortest end of a module's name that no module without adapters has, as a regex: PEFT finds modules by it."""
  adapted = {module.theirs for module in chosen}
  names = {tensor.theirs.rpartition(".")[0] for tensor in family.tensors(dict(keys))
           if tensor.theirs.startswith(family.in_memory)} | adapted
  parts = theirs.split(".")
  for start in reversed(range(len(parts))):
    end = ".".join(parts[start:])
    if all(name in adapted for name in names if name == end or name.endswith(f".{end}")):
      return end.replace(".", r"\.").replace("{layer}", r"\d+") if "{layer}" in end else end
  raise AssertionError(f"{theirs} is among its own names")


def _put_together(pairs: list[tuple[np.ndarray, np.ndarray]], module: Module, rank: int,
                  same: bool) -> tuple[np.ndarray, np.ndarray]:
  """A [rank, in] and B [out, rank] of a module, from those of our kernels."""
  a = pairs[0][0] if same else np.concatenate([a for a, _ in pairs])
  b = np.zeros((sum(module.outs), rank), a.dtype)
  for i, ((_, part), rows) in enumerate(zip(pairs, module.rows, strict=True)):
    width = part.shape[1]
    b[rows, 0 if same else i * width:width if same else (i + 1) * width] = part
  return a, b


def _targets(ends: Iterable[str]) -> list[str] | str:
  """target_modules: ends of names; or a regex of whole names, where an end has the number of a layer in it."""
  ends, numbered = sorted(ends), [end for end in ends if "\\d" in end]
  others = [re.escape(end) for end in ends if end not in numbered]
  return rf"(.*\.)?({'|'.join((*numbered, *others))})" if numbered else ends


def _config(lora: Mapping[str, Any], targets: list[str] | str, ranks: dict[str, int], alphas: dict[str, Any],
            plain: bool, base: str | None) -> dict[str, Any]:
  """The content of adapter_config.json, in keys that every PEFT since rsLoRA (0.8) knows."""
  return {
      "peft_type": "LORA", "task_type": "CAUSAL_LM", "auto_mapping": None, "base_model_name_or_path": base,
      "revision": None, "inference_mode": True, "r": lora["rank"], "lora_alpha": _number(lora["alpha"]),
      "use_rslora": lora["rslora"], "lora_dropout": lora["dropout"], "target_modules": targets, "bias": "none",
      "fan_in_fan_out": plain, "rank_pattern": ranks, "alpha_pattern": alphas, "modules_to_save": None,
      "layers_to_transform": None, "layers_pattern": None, "init_lora_weights": True,
  }


def _number(value: float) -> int | float:
  return int(value) if float(value).is_integer() else value


def _name(prefix: str, module: Module, layer: int, part: str) -> str:
  return f"{ROOT}{prefix}{module.theirs.format(layer=layer)}.lora_{part}.weight"
