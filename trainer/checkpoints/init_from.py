"""Where the parameters of a run that begins come from: fresh, another run, a Hugging Face folder, PEFT's adapters.

Each array is read straight onto the devices that hold it, and once: fresh values are made only for what nothing else
provides.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from input_pipeline.tokenizer import new_tokens
from models import hf, lora
from models.quantization import quantize
from trainer import tree
from trainer.checkpoints import checkpoint
from trainer.checkpoints.fingerprint import fingerprint
from trainer.errors import ConfigError

Leaves = dict[str, Any]  # arrays or their shapes, by path
# What the folder of a language model may lack: the head that scores sequences, scalars of similarities, what predicts
# tokens further ahead.
NEW = re.compile("^(score|similarity|mtp)/")
# Where all parameters come from if nothing provides any.
ALL_FRESH = "fresh parameters"
# What has an entry for each token, and along which dimension.
EMBEDDINGS = {"embed/embedding": 0, "per_layer_embed/embedding": 0, "unembed/kernel": 1}


@dataclass(frozen=True)
class Origin:
  """Where parameters come from: the keys of `init_from`, `model` and `model.lora` that say it."""

  path: str | None
  remap: tuple
  ignore: tuple
  folder: str | None  # a Hugging Face folder
  peft: str | None  # a folder with adapters
  fresh: bool
  seed: int
  tokenizer: Any  # the section, for its new tokens; None: the folder has rows for all
  hf_ignore: tuple  # entries of the folder's config.json that have no effect
  typed: dict | None  # architecture keys as this config has them, to compare with the folder's; None: no folder
  model: Any  # the section
  resume: str | None = None  # a run that is gone on with as a whole


def origin_of(config: Any) -> Origin:
  """Where the parameters of the run come from."""
  start, section = config.init_from, config.model
  folder = start.hf or section.hf
  return Origin(start.path, start.remap, start.ignore, folder, section.lora.peft if section.lora.rank else None,
                start.fresh, config.seed, config.tokenizer, section.hf_ignore,
                None if folder is None else hf.keys_of(section, section.vocab_size), section, config.resume)


def look(config: Any, found: Any) -> None:
  """Looks whether what a run is to begin from is there, before its data are read, for hours say.

  Args:
    found: what is gone on with in its place; None: the run begins.

  Raises:
    ConfigError, HFError: it is not there, or a Hugging Face folder's files are not whole.
  """
  start, folder = config.init_from, config.init_from.hf or config.model.hf
  if found is None and not start.fresh:
    if start.path:
      checkpoint.find(start.path)
    if folder:
      hf.TensorFolder(folder)


def first_params(origin: Origin, model: Any, target: Any, *, partial: bool = False) -> tuple[Any, str]:
  """The parameters that a run begins with, and a sentence on where they come from.

  The order: `origin.path`, then adapters from `origin.peft`, then what is lacking from the Hugging Face folder; the
  rest is fresh.

  Args:
    target: nested dict of ShapeDtypeStructs with shardings.
    partial: `target` is a part of the parameters, so that other runs may have more than it wants.

  Raises:
    ConfigError: listing both sides, if names or shapes do not match up.
  """
  stored = tree.flatten(target)
  # What is kept quantised comes from elsewhere in full precision, an array at a time.
  wanted = quantize.logical(stored)
  found, sources = {}, []

  def take(leaves: Iterable[tuple[str, jax.Array]], what: str) -> None:
    names = []
    for path, leaf in leaves:
      found.update(quantize.store(path, leaf, stored))
      names.append(path)
      wanted.pop(path)
    if names:
      sources.append(f"{len(names)} arrays from {what}")

  if origin.path:
    take(_from_run(origin, dict(wanted), partial=partial), origin.path)
  if origin.peft:
    trained = lora.trained(origin.model.lora.modules_to_save)
    adapters = {path: leaf for path, leaf in wanted.items() if re.search(trained, path)}
    if not any(map(lora.is_adapter, adapters)) and not partial:
      raise ConfigError(f"both init_from.path={origin.path!r} and model.lora.peft={origin.peft!r} hold adapters; give "
                        "one.")
    if adapters:
      take(_from_peft(origin, model, adapters, stored), origin.peft)
  if origin.folder and not origin.fresh:
    base = {path: leaf for path, leaf in wanted.items() if not lora.is_adapter(path)}
    take(_from_hugging_face(origin, model, base), origin.folder)
  fresh = {path: leaf for path, leaf in stored.items() if path not in found}
  if fresh:
    found |= _fresh(model, origin.seed, fresh)
    sources.append(f"{len(fresh)} fresh arrays" if sources else ALL_FRESH)
  return tree.unflatten({path: found[path] for path in stored}), ", ".join(sources)


def has_fresh(where: str) -> bool:
  """Whether that sentence of `first_params` says that some parameters are fresh; it has names of folders in it, too."""
  return where == ALL_FRESH or re.search(r", \d+ fresh arrays$", where) is not None


def check_base(config: Any, base: Any, where: str, folder: Path) -> None:
  """Compares a base made again with the one that a checkpoint's adapters belong to.

  Args:
    base: the parameters that the checkpoint leaves out; `where` says where they come from.

  Raises:
    ConfigError: files that it comes from have changed.
  """
  wanted = checkpoint.read_meta(folder).get("pinned", {}).get("base")
  if wanted is None or fingerprint(base) == wanted:
    return
  message = (f"{folder} holds adapters of a base with the fingerprint {wanted}; the one made again ({where}) has "
          f"{fingerprint(base)}.")
  if config.precision.frozen in quantize.KINDS or not (config.model.hf or config.init_from.path):
    logging.warning("%s It was rounded or drawn on another kind of device than this, which may differ in the last bit; "
                    "if its files have changed as well, what follows is wrong.", message)
    return
  raise ConfigError(f"{message} Its files have changed since; put back those that the run started from "
                    f"({config.model.hf or config.init_from.path}), or export with --adapter=peft.")


def _fresh(model: Any, seed: int, wanted: Leaves) -> Leaves:
  """Initial values of some of the parameters; each is a function of (seed, path) alone."""
  return initialiser(model, wanted)(jax.random.key(seed))


def initialiser(model: Any, wanted: Leaves) -> Callable[[jax.Array], Leaves]:
  """A program that makes these parameters from a key."""
  shardings = {path: leaf.sharding for path, leaf in wanted.items()}

  def init(rng):
    leaves = tree.flatten(model.init(rng))
    return {path: leaves[path] for path in wanted}

  return jax.jit(init, out_shardings=shardings)


def _base_shapes(model: Any) -> Leaves:
  """All parameters but adapters, as a checkpoint from elsewhere has them."""
  shapes = quantize.logical(tree.flatten(model.abstract_params()))
  return {path: leaf for path, leaf in shapes.items() if not lora.is_adapter(path)}


def _check_typed(origin: Origin, keys: dict[str, Any], shapes: Leaves, folder: str) -> None:
  """Refuses a config whose own keys make other shapes than the folder's config.json: its parameters cannot be read.

  An unembedding of its own, or none, is no matter of shapes (models/hf/convert.py); a head may be new.
  """
  theirs = tree.flatten(hf.abstract_params(keys))
  differ = [path for path in sorted({*shapes, *theirs} - {"unembed/kernel"} - _new(shapes, keys))
            if path not in shapes or path not in theirs or shapes[path].shape != theirs[path].shape]
  if not differ:
    return
  typed = origin.typed or hf.keys_of(origin.model, origin.model.vocab_size)
  changed = [key for key, value in keys.items() if typed[key] != value]
  changes = ", ".join(f"model.{key}={typed[key]!r} (config.json: {keys[key]!r})" for key in changed)
  shape = {name: tuple(of[differ[0]].shape) if differ[0] in of else "none"
           for name, of in (("here", shapes), ("there", theirs))}
  if origin.model.hf is not None and Path(origin.model.hf) != Path(folder):
    changes += f", those of model.hf={origin.model.hf}"
  raise ConfigError(f"this config has {changes}, with which the model has other parameters than {folder} holds: "
                    f"{differ[0]} is {shape['here']} here, {shape['there']} there"
                    f"{f', and {len(differ) - 1} more' if len(differ) > 1 else ''}. Leave out what is not meant "
                    "(unset, a key has the value of config.json), or begin with fresh parameters: "
                    "--config.init_from.fresh=True.")


def _from_hugging_face(origin: Origin, model: Any, wanted: Leaves) -> Iterator[tuple[str, jax.Array]]:
  """Parameters of a Hugging Face folder, in our dtypes and places."""
  if wanted:
    folder = origin.folder
    family, keys, _ = hf.architecture(folder, origin.hf_ignore)
    shapes, tensors = _base_shapes(model), hf.TensorFolder(folder)
    if family.ahead is not None and family.ahead.of(tensors.tensors):
      keys["mtp_layers"] = origin.model.mtp_layers
    rows = None if origin.tokenizer is None else new_tokens.rows(origin.tokenizer)
    grown = {} if rows is None else _grown(keys["vocab_size"], shapes)
    shapes |= {path: jax.ShapeDtypeStruct(shape, shapes[path].dtype) for path, shape in grown.items()}
    _check_typed(origin, keys, shapes, folder)
    if keys["head"] == "lm" != origin.model.head:
      shapes = tree.flatten(hf.abstract_params(keys))
    if new := [path for path in _new(shapes, keys) if path.startswith("mtp/")]:
      logging.warning("%s holds nothing that predicts tokens further ahead: model.mtp_layers=%s begin fresh", folder,
                      origin.model.mtp_layers)
      shapes = {path: leaf for path, leaf in shapes.items() if path not in new}
    wanted = {path: leaf for path, leaf in wanted.items() if path not in _new(wanted, keys)}
    if tensors.note:
      logging.log_first_n(logging.WARNING, "%s: %s", 1, folder, tensors.note)
    plan = hf.plan(family, keys, tree.unflatten(shapes), tensors).only(wanted)
    # What gets new rows is read as a whole, since the folder's number of rows may not be one that devices share.
    changed = {path for path in EMBEDDINGS if path in wanted and rows is not None and (path in grown or rows.means)}
    shardings = {path: _whole(leaf.sharding) if path in changed else leaf.sharding for path, leaf in wanted.items()}
    dtypes = {path: leaf.dtype for path, leaf in wanted.items()}
    for path, leaf in hf.iter_params(plan, tensors, shardings, dtypes, progress=True):
      yield path, _with_new_rows(leaf, wanted[path], rows, EMBEDDINGS[path]) if path in changed else leaf


def _new(paths: Iterable[str], keys: dict[str, Any]) -> set[str]:
  """Those of the parameters that a folder with these keys does not have: of a new head, of new modules."""
  has = {"score/": keys["head"] == "score", "mtp/": keys["mtp_layers"] > 0}
  return {path for path in paths if NEW.search(path) and not any(
      held and path.startswith(part) for part, held in has.items())}


def _grown(vocab_size: int, shapes: Leaves) -> dict[str, tuple[int, ...]]:
  """{path: its shape in a folder of so many entries} of what has more entries here."""
  found = {}
  for path, axis in EMBEDDINGS.items():
    if path in shapes and shapes[path].shape[axis] > vocab_size:
      shape = list(shapes[path].shape)
      shape[axis] = vocab_size
      found[path] = tuple(shape)
  return found


def _whole(sharding: Any) -> Any:
  """The same devices, each with everything."""
  if isinstance(sharding, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return sharding


def _with_new_rows(old: jax.Array, wanted: Any, rows: new_tokens.NewRows, axis: int) -> jax.Array:
  """An embedding or unembedding with entries for new tokens, as `wanted` has it.

  An entry that nothing is said of begins as the mean of all old tokens' (Hewitt 2021, "Initializing new word embeddings
  for pretrained language models"), so that the softmax hardly changes.
  """
  num_old = min(rows.old, old.shape[axis])

  def extend(old):
    table = jnp.moveaxis(old, axis, 0)
    mean = table[:num_old].astype(jnp.float32).mean(0)
    more = wanted.shape[axis] - len(table)
    table = jnp.concatenate([table, jnp.broadcast_to(mean.astype(table.dtype), (more, *table.shape[1:]))])
    begun = [table[jnp.array(words)].astype(jnp.float32).mean(0) if words else mean for words in rows.means.values()]
    if begun:  # at once: a copy of the table for each would take long to compile
      table = table.at[jnp.array([*rows.means])].set(jnp.stack(begun).astype(table.dtype))
    return jnp.moveaxis(table, 0, axis)

  return jax.jit(extend, out_shardings=wanted.sharding)(old)


def _from_peft(origin: Origin, model: Any, wanted: Leaves, stored: Leaves) -> Iterator[tuple[str, jax.Array]]:
  """Adapters in PEFT's format and the whole parameters among them. Modules are named as in the family of the base."""
  shapes = _base_shapes(model)
  if origin.folder:
    family, keys, _ = hf.architecture(origin.folder, origin.hf_ignore)
  else:
    keys = hf.keys_of(origin.model, model.vocab_size)
    family, _ = hf.config_json(keys)

  def base(kernel: str) -> Leaves:
    sharding = _whole(next(iter(wanted.values())).sharding)
    placed = {path: getattr(leaf, "sharding", sharding) for path, leaf in stored.items()}
    parts = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed.get(path, sharding))
             for path, leaf in tree.flatten(model.abstract_params()).items()
             if path == kernel or re.fullmatch(rf"{kernel}_(int8|nf4|scale)", path)}
    found, _ = first_params(dataclasses.replace(origin, peft=None), model, tree.unflatten(parts), partial=True)
    return tree.flatten(found)

  @functools.cache
  def lengths(kernel: str) -> np.ndarray:
    return np.asarray(base_lengths(kernel, base(kernel)))

  @functools.cache
  def table(path: str) -> np.ndarray:
    return base_table(path, base(path))

  loaded = hf.load_adapters(origin.peft, wanted, hf.AdapterLayout(
      family, keys, shapes, origin.model.lora, lengths if origin.model.lora.dora else None, table))
  yield from loaded.items()


def base_table(path: str, base: Leaves) -> np.ndarray:
  """Of a table of tokens the rows, float32 [V, D]."""
  rows = np.asarray(base[path]).astype(np.float32)
  return rows.T if path == "unembed/kernel" else rows


def base_lengths(kernel: str, base: Leaves) -> jax.Array:
  """|W| float32 [L, out] of the columns of a kernel [L, in, out], as layers have it, quantised or not."""
  if kernel in base:
    return jax.jit(lambda w: lora.lengths(w.astype(jnp.float32)))(base[kernel])
  parts = {end: base[kernel + end] for end in ("_int8", "_nf4", "_scale") if kernel + end in base}
  return jax.jit(lambda parts: lora.lengths(quantize.dequantize(parts, jnp.float32)))(parts)


def _from_run(cfg: Origin, wanted: Leaves, *, partial: bool) -> Iterator[tuple[str, jax.Array]]:
  """Parameters of another run, matched by name after `remap`.

  `ignore`d ones are left out; so are adapters and a new head, which the run does not have, and, where the base
  has a source of its own, what an adapter checkpoint does not hold.
  """
  path = checkpoint.find(cfg.path)
  saved = checkpoint.param_shapes(path)
  ignored = tree.select(cfg.ignore, wanted, "init_from.ignore")
  tree.select([pattern for pattern, _ in cfg.remap], saved, "init_from.remap")
  renamed: dict[str, str] = {}
  dropped: list[str] = []
  for name in saved:
    new = name
    for pattern, replacement in cfg.remap:
      new = re.sub(pattern, replacement, new)
    if not new or new == "unembed/kernel" and cfg.model.head != "lm":  # tokens are no longer predicted
      dropped.append(name)
      continue
    if new in renamed:
      raise ConfigError(f"init_from.remap maps both {renamed[new]} and {name} of {path} to {new}.")
    renamed[new] = name

  trained = lora.trained(cfg.model.lora.modules_to_save)
  adapters_only = cfg.folder is not None and all(re.search(trained, name) for name in renamed)

  def may_lack(name: str) -> bool:
    return name in ignored or name not in renamed and (adapters_only or lora.is_new(name))

  problems = tree.compare({p: leaf for p, leaf in wanted.items() if not may_lack(p)},
                              {new: saved[old] for new, old in renamed.items()
                               if new not in ignored and (new in wanted or not partial)})
  if problems:
    listed = "\n  ".join(problems[:40])
    raise ConfigError(
        f"init_from {path} does not fit this model ({len(problems)} in all; -: only here, +: only there, "
        f"!: other shape):\n  {listed}\nMap names with init_from.remap=((regex, replacement),), keep fresh values "
        "with init_from.ignore=(regex,); a checkpoint's extra parameters are dropped by remapping them onto '': "
        "((regex, ''),).")
  ours = [p for p in wanted if p in renamed and p not in ignored]
  if not ours:
    raise ConfigError(f"of the parameters of {path} none is loaded: init_from.ignore and .remap leave nothing. "
                      "Give less of them, or no init_from.path.")
  logging.info("init_from: %d parameters loaded from %s, %d kept fresh, %d of the checkpoint dropped", len(ours), path,
               len(wanted) - len(ours), len(dropped))
  loaded = checkpoint.restore_params(path, {renamed[p]: wanted[p] for p in ours})
  yield from ((p, loaded.pop(renamed[p])) for p in ours)
