"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, into ours and back, bit by bit.

Theirs is one pair of matrices for each layer and module, `base_model.model.<module>.lora_A.weight` [r, in] and
`lora_B.weight` [out, r]; ours are `lora_a` [L, in, r] and `lora_b` [L, r, out] beside a kernel. The families' tensor
names (models/hf/family.py) say which module is which kernel. Where several of our kernels are one module of theirs, as
query, key and value of GPT-2's c_attn, their adapters become one: if the parts have the same A, with that A and their
B's end to end; else with n times the rank, the A's above one another and the B's as blocks on the diagonal.

r rank, L layers.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from models import lora as lora_lib
from models.hf import files, peft_config, peft_tokens, peft_whole
from models.hf import names as names_lib
from models.hf.errors import HFError
from models.hf.peft_modules import PARTS, ROOT, AdapterLayout, Module, modules, target_of

CONFIG, TENSORS = peft_config.CONFIG, "adapter_model.safetensors"


# ---------------------------------------------------------------------------------------------------- reading


def load_adapters(folder: str | Path, wanted: Mapping[str, Any], layout: AdapterLayout) -> dict[str, jax.Array]:
  """Adapters in PEFT's format as ours.

  Args:
    folder: with adapter_config.json and adapter_model.safetensors.
    wanted: {path: ShapeDtypeStruct, with a sharding or without} of all the adapters' leaves, and of what
      `model.lora.modules_to_save` names.
    layout: of the model; its `shapes` may lack the adapters.

  Returns:
    {path: array} for `wanted`, each in its dtype and in its place. Of whole parameters and of
      tables with rows only those that the file has.

  Raises:
    HFError: files that are missing or damaged, an option that is not ours, another rank or scale, adapters that do not
      stand where `model.lora.targets` has them.
  """
  folder, layout = files.existing_folder(folder), layout._replace(shapes={**layout.shapes, **wanted})
  config, tensors, lora = peft_config.read(folder), _read_tensors(folder), layout.lora
  peft_config.check_dora(config, lora, folder / CONFIG)
  found: dict[str, list[np.ndarray]] = {
      path: [] for path in wanted if lora_lib.is_adapter(path) and not path.endswith("/lora_rows")}
  unused, problems = set(tensors), []
  whole = _read_whole(tensors, {path: leaf for path, leaf in wanted.items() if not lora_lib.is_adapter(path)}, unused,
                      layout, str(folder / TENSORS))
  of_tokens = peft_tokens.read(tensors, wanted, unused, layout, config, folder / CONFIG)
  for ways in modules(layout):
    prefix, module = max(((prefix, way) for way in ways for prefix in layout.family.prefixes),
                         key=lambda choice: sum(choice[1].name(choice[0], choice[1].layers[0], part) in tensors
                                                for part in "AB"))
    _check_layout(config, module, folder / CONFIG)
    every = [module.name(prefix, i) for i in module.layers]
    rank = peft_config.check_scale(config, every, len(module.paths), lora, folder / CONFIG)
    wrong = _read_module(module, prefix, rank, tensors, layout, folder, found)
    unused -= {module.name(prefix, i, part) for i in module.layers for part in PARTS
               if part != "M" or layout.lengths is not None}
    problems += wrong
    if all(map(lora_lib.is_table, module.kernels)) and not wrong:
      unused -= peft_tokens.check(module, prefix, tensors, layout, config, folder / CONFIG)
  problems += [f"+ {name} {tensors[name].shape}: matches no target here" for name in sorted(unused)]
  if problems:
    more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
    raise HFError(f"the adapters of {folder} are not those of model.lora.targets={tuple(lora['targets'])} "
                  f"({len(problems)} differences; -: missing there, +: only there, !: other shape):\n  "
                  + "\n  ".join(problems[:20] + more)
                  + f"\nIts target_modules are {config.get('target_modules')}, its modules_to_save "
                  f"{config.get('modules_to_save')}; choose model.lora.targets, modules_to_save to match.")
  values = whole | of_tokens | {path: np.stack(layers).reshape(wanted[path].shape) for path, layers in found.items()}
  return {path: _place(values[path], leaf) for path, leaf in wanted.items() if path in values}


def _read_module(module: Module, prefix: str, rank: int, tensors: Mapping[str, np.ndarray], layout: AdapterLayout,
                 folder: Path, found: dict[str, list[np.ndarray]]) -> list[str]:
  """Appends a module's adapters of all layers, of that rank in the file, to those in `found`. What does not fit."""
  lengths, size = layout.lengths, layout.shapes[module.paths[0][0]].shape[-2]
  expected: dict[str, tuple[int, ...]] = {
      "A": (rank * module.experts, size), "B": (sum(module.outs), rank * module.experts)}
  if lengths is not None:
    expected["M"] = (sum(module.outs),)
  problems: list[str] = []
  for layer in module.layers:
    names = {part: module.name(prefix, layer, part) for part in expected}
    wrong = [_difference(names[part], tensors, shape) for part, shape in expected.items()
             if names[part] not in tensors or tensors[names[part]].shape != shape]
    problems += wrong
    if wrong:
      continue
    for a, b in module.apart(tensors[names["A"]], tensors[names["B"]][module.order]):
      parts = _take_apart(a, b, module, layout.lora["rank"], layer, folder)
      for (path_a, path_b), (a, b) in zip(module.paths, parts, strict=True):
        found[path_a].append(a.T)
        found[path_b].append(b.T)
    if lengths is not None:
      m = tensors[names["M"]][module.order].astype(np.float32)
      for (kernel, path), rows in zip(module.magnitudes, module.rows, strict=True):
        found[path].append(m[rows] - module.of_layers(lengths(kernel))[len(found[path])])
  return problems


def _read_whole(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, Any], unused: set[str], layout: AdapterLayout,
                where: str) -> dict[str, np.ndarray]:
  """The whole parameters in a file, whose names leave `unused`; see `peft_whole.Tensors`."""
  if not wanted:
    return {}
  named = {name.removeprefix(ROOT): values for name, values in tensors.items()
           if not re.search(r"\.(lora_|token_adapter\.|base_layer\.)", name)}
  whole = peft_whole.Tensors(layout, wanted, where, named)
  unused -= {ROOT + name for name in (*whole.of, *whole.twins)}
  return whole.read(named, wanted, where)


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
  if module.kind == "linear" and bool(config.get("fan_in_fan_out")) != module.plain:
    kind = "[in, out], as transformers' Conv1D keeps it" if module.plain else "[out, in], as a Linear keeps it"
    raise HFError(f"{where}: fan_in_fan_out is {config.get('fan_in_fan_out')!r}, but the matrix of {module.theirs} is "
                  f"{kind}. Set fan_in_fan_out to {'true' if module.plain else 'false'} there.")


# ---------------------------------------------------------------------------------------------------- writing


def save_adapters(out: str | Path, read: lora_lib.ReadLeaf, layout: AdapterLayout, *, base: str | None,
                  dtype: Any = None) -> None:
  """Writes adapters in PEFT's format; `PeftModel.from_pretrained` loads them onto the base.

  Args:
    out: a folder, made if missing; adapters in it are replaced.
    read: gives `leaf[index]` of an adapter's leaf, or of one that `model.lora.modules_to_save` names.
    base: what base_model_name_or_path is to say.
    dtype: of the tensors; None: that of ours.

  Raises:
    HFError: an adapted kernel is no module of the family; the files cannot be written.
  """
  out = Path(out).expanduser().absolute()
  prefix, tensors, ranks = layout.family.prefixes[0], {}, {}
  shapes, lora, lengths = layout.shapes, layout.lora, layout.lengths
  # PEFT looks for modules, and for parameters of experts, in a loaded model.
  chosen = [next((way for way in ways if way.theirs.startswith(layout.family.in_memory)
                  and not (way.kind == "experts" and way.theirs.endswith(".weight"))), ways[0])
            for ways in modules(layout)]
  for module in chosen:
    every = slice(None)
    layers = range(len(module.layers))
    leaves = [tuple(np.stack([np.asarray(read(path, module.index(i, every, every))) for i in layers]) for path in pair)
              for pair in module.paths]
    if dtype is not None:
      leaves = [tuple(leaf.astype(dtype) for leaf in pair) for pair in leaves]
    same = all(a.tobytes() == leaves[0][0].tobytes() for a, _ in leaves)
    ranks[module] = lora["rank"] * (1 if same else len(leaves))
    for i, layer in enumerate(module.layers):
      a, b = module.together([
          _put_together([(a[place].T, b[place].T) for a, b in leaves], module, ranks[module], same)
          for place in ([(i, expert) for expert in range(module.experts)] if module.kind == "experts" else [(i,)])])
      for part, values in zip("AB", (a, b[np.argsort(module.order)]), strict=True):
        tensors[module.name(prefix, layer, part)] = np.ascontiguousarray(values)
      if lengths is not None:
        m = np.concatenate([module.of_layers(lengths(kernel))[i]
                            + np.asarray(read(path, module.index(i, every)), np.float32)
                            for kernel, path in module.magnitudes])
        tensors[module.name(prefix, layer, "M")] = m[np.argsort(module.order)].astype(dtype or np.float32)
    if module.tokens:
      tensors |= peft_tokens.twins(module, prefix, tensors, layout)
  targets = {module: module.theirs.rpartition("{layer}.")[2] if module.kind == "experts"
             else target_of(module.theirs, chosen, layout) for module in chosen}
  other = {targets[module]: rank // lora["rank"] for module, rank in ranks.items() if rank != lora["rank"]}
  rows, indices = peft_tokens.write(read, prefix, layout, dtype)
  tensors |= rows
  modules_to_save = None
  if paths := peft_whole.paths(shapes, lora):
    whole = peft_whole.Tensors(layout, paths, str(out))
    tensors |= {ROOT + name: values for name, values in whole.write(read, shapes, dtype).items()}
    modules_to_save = whole.modules()
  named = peft_config.targets(targets[module] for module in chosen if module.kind != "experts")
  config = peft_config.content(lora, named, other, any(module.plain for module in chosen), base, modules_to_save,
                               peft_whole.SCORE in shapes)
  if parameters := sorted(targets[module] for module in chosen if module.kind == "experts"):
    config["target_parameters"] = parameters
  if indices:
    config["trainable_token_indices"] = indices
  if peft_tokens.tied(shapes) and any(module.tokens for module in chosen):
    config["ensure_weight_tying"] = True
  try:
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).unlink(missing_ok=True)  # without it, a half-written folder cannot be taken for a whole one
    files.save_tensors(tensors, out / TENSORS)
    files.write_json(out / CONFIG, config)
  except (OSError, safetensors.SafetensorError) as e:
    raise HFError(f"the adapters could not be written to {out}: {e}. Free space or fix the folder's permissions, then "
                  "run the same command again.") from e


def _put_together(pairs: list[tuple[np.ndarray, np.ndarray]], module: Module, rank: int,
                  same: bool) -> tuple[np.ndarray, np.ndarray]:
  """A [rank, in] and B [out, rank] of a module, from those of our kernels."""
  a = pairs[0][0] if same else np.concatenate([a for a, _ in pairs])
  b = np.zeros((sum(module.outs), rank), a.dtype)
  for i, ((_, part), rows) in enumerate(zip(pairs, module.rows, strict=True)):
    width = part.shape[1]
    b[rows, 0 if same else i * width:width if same else (i + 1) * width] = part
  return a, b
