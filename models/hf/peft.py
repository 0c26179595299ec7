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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from models import lora as lora_lib
from models.hf import files, peft_config, peft_whole
from models.hf import names as names_lib
from models.hf.entry import group_order
from models.hf.errors import HFError
from models.hf.family import Family

CONFIG, TENSORS = peft_config.CONFIG, "adapter_model.safetensors"
ROOT = "base_model.model."
PARTS = {"A": "lora_A.weight", "B": "lora_B.weight", "M": "lora_magnitude_vector"}
# |W| [L, out], or [out], of the kernel of that path: their file has lengths, ours are differences from these
# (models/lora.py).
Lengths = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Module:
  """A module of theirs, and the kernels of ours that it is.

  Args:
    theirs: its name with the placeholder {layer}, without the family's prefix.
    kernels: paths of ours.
    outs: the number of outputs of each.
    adapted: whether each has adapters.
    plain: its matrix is kept as ours, [in, out] (transformers' Conv1D, PEFT's fan_in_fan_out).
    layers, groups: as in `models.hf.family.Tensor`. A name without the placeholder is of one module, whose kernels have
      no dimension of layers (a projector's): its layers are (0,).
  """

  theirs: str
  kernels: tuple[str, ...]
  outs: tuple[int, ...]
  adapted: tuple[bool, ...]
  plain: bool
  layers: tuple[int, ...]
  groups: int = 1

  @property
  def stacked(self) -> bool:
    """Whether its kernels have a dimension of layers."""
    return "{layer}" in self.theirs

  @property
  def order(self) -> np.ndarray:
    """Their outputs, kernel after kernel."""
    return group_order(self.outs, self.groups)

  def index(self, layer: int, *rest: slice) -> tuple[int | slice, ...]:
    """Of a layer of one of our leaves."""
    return (layer, *rest) if self.stacked else rest

  def of_layers(self, lengths: np.ndarray) -> np.ndarray:
    """[L, out] of what `Lengths` gives."""
    return lengths if self.stacked else lengths[None]

  @property
  def paths(self) -> list[tuple[str, str]]:
    """(lora_a, lora_b) of each kernel that has adapters."""
    return [lora_lib.pair(kernel) for kernel, adapted in zip(self.kernels, self.adapted, strict=True) if adapted]

  @property
  def magnitudes(self) -> list[tuple[str, str]]:
    """(kernel, lora_m beside it) of each kernel that has adapters, if all have."""
    if not all(self.adapted):
      free = [kernel for kernel, adapted in zip(self.kernels, self.adapted, strict=True) if not adapted]
      raise HFError(f"{self.theirs} holds {', '.join(free)}, too, which model.lora.targets does not match: DoRA trains "
                    "the lengths of a whole module. Add them, or have model.lora.dora=False.")
    return [(kernel, lora_lib.magnitude(kernel)) for kernel in self.kernels]

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
      layers = tensor.layers or tuple(range(shapes[kernels[0]].shape[0] if "{layer}" in tensor.theirs else 1))
      module = Module(tensor.theirs.removesuffix(".weight"), kernels, tuple(shapes[k].shape[-1] for k in kernels),
                      tuple(k in adapted for k in kernels), not tensor.transpose, layers, groups)
      ways.setdefault(frozenset(adapted.intersection(kernels)), []).append(module)
  if missing := adapted - frozenset().union(*ways):
    raise HFError(f"the family {family.name} has no module for {', '.join(sorted(missing))}, so that adapters there "
                  "have no place in PEFT's format. Export them merged, or leave them out of model.lora.targets.")
  return list(ways.values())


# ---------------------------------------------------------------------------------------------------- reading


def load_adapters(folder: str | Path, wanted: Mapping[str, Any], *, family: Family, keys: Mapping[str, Any],
                  shapes: Mapping[str, Any], lora: Mapping[str, Any],
                  lengths: Lengths | None = None) -> dict[str, jax.Array]:
  """Adapters in PEFT's format as ours.

  Args:
    folder: with adapter_config.json and adapter_model.safetensors.
    wanted: {path: ShapeDtypeStruct, with a sharding or without} of all the adapters' leaves, and of what
      `model.lora.modules_to_save` names.
    family, keys, shapes: see `modules`; `shapes` may lack the adapters.
    lora: the config's section `model.lora`.
    lengths: see `Lengths`; needed with `lora.dora`.

  Returns:
    {path: array} for `wanted`, each in its dtype and in its place. Of whole parameters only those that the file has.

  Raises:
    HFError: files that are missing or damaged, an option that is not ours, another rank or scale, adapters that do not
      stand where `model.lora.targets` has them.
  """
  folder, shapes = files.existing_folder(folder), {**shapes, **wanted}
  config, tensors = peft_config.read(folder), _read_tensors(folder)
  peft_config.check_dora(config, lora, folder / CONFIG)
  found: dict[str, list[np.ndarray]] = {path: [] for path in wanted if lora_lib.is_adapter(path)}
  unused, problems = set(tensors), []
  whole = _read_whole(tensors, {path: leaf for path, leaf in wanted.items() if path not in found}, unused,
                      family=family, keys=keys, shapes=shapes, where=str(folder / TENSORS))
  for ways in modules(family, keys, shapes):
    prefix, module = max(((prefix, way) for way in ways for prefix in family.prefixes),
                         key=lambda choice: sum(_name(*choice, choice[1].layers[0], part) in tensors for part in "AB"))
    _check_layout(config, module, folder / CONFIG)
    size = shapes[module.paths[0][0]].shape[-2]
    every = [prefix + module.theirs.format(layer=i) for i in module.layers]
    rank = peft_config.check_scale(config, every, len(module.paths), lora, folder / CONFIG)
    expected: dict[str, tuple[int, ...]] = {"A": (rank, size), "B": (sum(module.outs), rank)}
    if lengths is not None:
      expected["M"] = (sum(module.outs),)
    for layer in module.layers:
      names = {part: _name(prefix, module, layer, part) for part in expected}
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
        if lengths is not None:
          m = tensors[names["M"]][module.order].astype(np.float32)
          for (kernel, path), rows in zip(module.magnitudes, module.rows, strict=True):
            found[path].append(m[rows] - module.of_layers(lengths(kernel))[len(found[path])])
  problems += [f"+ {name} {tensors[name].shape}: matches no target here" for name in sorted(unused)]
  if problems:
    more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
    raise HFError(f"the adapters of {folder} are not those of model.lora.targets={tuple(lora['targets'])} "
                  f"({len(problems)} differences; -: missing there, +: only there, !: other shape):\n  "
                  + "\n  ".join(problems[:20] + more)
                  + f"\nIts target_modules are {config.get('target_modules')}, its modules_to_save "
                  f"{config.get('modules_to_save')}; choose model.lora.targets, modules_to_save to match.")
  values = whole | {path: np.stack(layers).reshape(wanted[path].shape) for path, layers in found.items()}
  return {path: _place(values[path], leaf) for path, leaf in wanted.items() if path in values}


def _read_whole(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, Any], unused: set[str], *, family: Family,
                keys: Mapping[str, Any], shapes: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
  """The whole parameters in a file, whose names leave `unused`; see `peft_whole.Tensors`."""
  if not wanted:
    return {}
  named = {name.removeprefix(ROOT): values for name, values in tensors.items() if ".lora_" not in name}
  whole = peft_whole.Tensors(family, keys, shapes, wanted, where, named)
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
  if bool(config.get("fan_in_fan_out")) != module.plain:
    kind = "[in, out], as transformers' Conv1D keeps it" if module.plain else "[out, in], as a Linear keeps it"
    raise HFError(f"{where}: fan_in_fan_out is {config.get('fan_in_fan_out')!r}, but the matrix of {module.theirs} is "
                  f"{kind}. Set fan_in_fan_out to {'true' if module.plain else 'false'} there.")


# ---------------------------------------------------------------------------------------------------- writing


def save_adapters(out: str | Path, read: lora_lib.ReadLeaf, *, family: Family, keys: Mapping[str, Any],
                  shapes: Mapping[str, Any], lora: Mapping[str, Any], base: str | None, dtype: Any = None,
                  lengths: Lengths | None = None) -> None:
  """Writes adapters in PEFT's format; `PeftModel.from_pretrained` loads them onto the base.

  Args:
    out: a folder, made if missing; adapters in it are replaced.
    read: gives `leaf[index]` of an adapter's leaf, or of one that `model.lora.modules_to_save` names.
    family, keys, shapes: see `modules`.
    lora: the config's section `model.lora`.
    base: what base_model_name_or_path is to say.
    dtype: of the tensors; None: that of ours.
    lengths: see `Lengths`; needed with `lora.dora`.

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
    layers = range(len(module.layers))
    leaves = [tuple(np.stack([np.asarray(read(path, module.index(i, every, every))) for i in layers]) for path in pair)
              for pair in module.paths]
    if dtype is not None:
      leaves = [tuple(leaf.astype(dtype) for leaf in pair) for pair in leaves]
    same = all(a.tobytes() == leaves[0][0].tobytes() for a, _ in leaves)
    ranks[module] = lora["rank"] * (1 if same else len(leaves))
    for i, layer in enumerate(module.layers):
      a, b = _put_together([(a[i].T, b[i].T) for a, b in leaves], module, ranks[module], same)
      for part, values in zip("AB", (a, b[np.argsort(module.order)]), strict=True):
        tensors[_name(prefix, module, layer, part)] = np.ascontiguousarray(values)
      if lengths is not None:
        m = np.concatenate([module.of_layers(lengths(kernel))[i]
                            + np.asarray(read(path, module.index(i, every)), np.float32)
                            for kernel, path in module.magnitudes])
        tensors[_name(prefix, module, layer, "M")] = m[np.argsort(module.order)].astype(dtype or np.float32)
  targets = {module: target_of(module.theirs, chosen, family, keys) for module in chosen}
  other = {targets[module]: rank // lora["rank"] for module, rank in ranks.items() if rank != lora["rank"]}
  modules_to_save = None
  if paths := peft_whole.paths(shapes, lora):
    whole = peft_whole.Tensors(family, keys, shapes, paths, str(out))
    tensors |= {ROOT + name: values for name, values in whole.write(read, shapes, dtype).items()}
    modules_to_save = whole.modules()
  config = peft_config.content(
      lora, peft_config.targets(targets.values()), {k: n * lora["rank"] for k, n in other.items()},
      {k: peft_config.number(lora["alpha"] * (math.sqrt(n) if lora["rslora"] else n)) for k, n in other.items()},
      all(module.plain for module in chosen), base, modules_to_save, peft_whole.SCORE in shapes)
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
  """The shortest end of a module's name that no module without adapters has, as a regex: PEFT finds modules by it.
  Where in some layers the module of that name has none, it has the numbers of the others."""
  adapted: dict[str, set[int]] = {}
  for module in chosen:
    adapted.setdefault(module.theirs, set()).update(module.layers)
  tensors = [tensor for tensor in family.tensors(dict(keys)) if tensor.theirs.startswith(family.in_memory)]
  free = {name for tensor in tensors if (name := tensor.theirs.rpartition(".")[0]) not in adapted
          or not adapted[name].issuperset(tensor.layers or ())}
  layers = rf"({'|'.join(map(str, sorted(adapted[theirs])))})" if theirs in free else r"\d+"
  parts = theirs.split(".")
  for start in reversed(range(len(parts))):
    end = ".".join(parts[start:])
    others = free - {theirs} if "{layer}" in end else free
    # A number alone also ends the names of layers, which are modules without a matrix.
    if not parts[start].isdigit() and not any(name == end or name.endswith(f".{end}") for name in others):
      return end.replace(".", r"\.").replace("{layer}", layers) if "{layer}" in end else end
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


def _name(prefix: str, module: Module, layer: int, part: str) -> str:
  """`part`: A, B, or M for the lengths of DoRA."""
  return f"{ROOT}{prefix}{module.theirs.format(layer=layer)}.{PARTS[part]}"
