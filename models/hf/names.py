"""Names of tensors before which a program has put something: taken off where that is safe, named where it is not."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Modules that other programs put around a model or its parts; in a name they say nothing of the tensor.
AROUND = {"_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP",
          "_checkpoint_wrapped_module": "activation checkpointing"}
# The same, where all names of a folder begin so.
BEFORE = {"module.": "DistributedDataParallel or DeepSpeed", "base_model.model.": "PEFT"}
_AROUND = re.compile(rf"(?<![^.])({'|'.join(AROUND)})\.")
# What PEFT puts beside and around a module that has adapters.
ADAPTERS = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|original_module|"
                      r"modules_to_save)\.")


def unwrapped(names: Iterable[str], keep: str | None = None) -> tuple[dict[str, str], str]:
  """({name as in a file: name without what programs put around}, a sentence on what was taken off, "" for nothing).

  Args:
    names: of all tensors of a folder.
    keep: of BEFORE, what is a part of the names here.
  """
  found: dict[str, str] = {name: name for name in names}
  taken: dict[str, str] = {}
  while found:
    taken |= {part: AROUND[part] for now in found.values() for part in _AROUND.findall(now)}
    new = {name: _AROUND.sub("", now) for name, now in found.items()}
    for before, by in BEFORE.items():
      if before != keep and all(now.startswith(before) for now in new.values()):
        new = {name: now.removeprefix(before) for name, now in new.items()}
        taken[before.removesuffix(".")] = by
    if new == found:
      break
    found = new
  if not taken or len(set(found.values())) < len(found):  # two would have one name: they mean something else
    return {name: name for name in names}, ""
  note = ", ".join(f"{part!r} (of {by})" for part, by in taken.items())
  return found, f"the names of its tensors are read without {note}"


def hint(present: Sequence[str], wanted: Iterable[Iterable[str]], where: Any) -> str:
  """A sentence on why the names of a folder's tensors are others than those that are wanted; "" if it is not known.

  Args:
    wanted: those that a family has, in each of its spellings.
  """
  if adapted := [name for name in present if ADAPTERS.search(name)]:
    return (f"{where} holds adapters beside their base ({adapted[0]!r:.200}), and whether they are added to it already "
            "cannot be seen. Save it anew where it came from: model.merge_and_unload().save_pretrained(DIR) for the "
            "whole model, or model.save_pretrained(DIR) for the adapters alone, which model.lora.peft=DIR reads.")
  spellings = [set(names) for names in wanted]
  if any(2 * len(names & set(present)) > len(names) for names in spellings):
    return ""  # most are as wanted
  for names in spellings:
    counts: Counter[str] = Counter()
    for name in present:
      counts.update(name[:i + 1] for i, letter in enumerate(name) if letter == "." and name[i + 1:] in names)
    before, count = counts.most_common(1)[0] if counts else ("", 0)
    if 2 * count > len(names):
      note = (f"{where}: {count} of its {len(present)} tensors have the names that are wanted behind {before!r:.200}, "
              "which some program has put before them.")
      if not re.fullmatch(r"[\w.-]+", before):  # nothing to be pasted into a shell
        return f"{note} Take it off where the folder was made."
      files = f"'{where}/model*.safetensors'"
      taking = f"{{k.removeprefix('{before}'): v for k, v in load_file(f).items()}}"
      return (f"{note} If they are this model, take it off: python -c \"import glob, ml_dtypes; from safetensors.numpy "
              f"import *; [save_file({taking}, f, {{'format': 'pt'}}) for f in glob.glob({files})]\"; where there is "
              f"an index, also sed -i 's/\"{re.escape(before)}/\"/' {where}/model.safetensors.index.json")
  return ""


def renamed(tensors: Mapping[str, Any], keep: str | None = None) -> tuple[dict[str, Any], str]:
  """`tensors` by their names of `unwrapped`, and its sentence."""
  names, note = unwrapped(tensors, keep)
  return {names[name]: tensor for name, tensor in tensors.items()}, note
