"""Writes what transformers' classes take for each entry that a config.json leaves out, into config_defaults.json.

    python tests/models/hf/make_config_defaults.py

in an environment with transformers (5.24), for the config.json of one folder of `references` for each class, and for
the vision_config of one folder for each class of towers. Some of it depends on the other entries (the size of heads,
say), so that each is left out of a file that has the others.
"""

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
# Of each class the attributes that not all have: those that describe the model.
OWN = json.loads((HERE / "config_attributes.json").read_text())


def defaults(make: type, content: dict, keys: set[str]) -> dict:
  """{entry: value} of those that are no lists or objects, and of rotary positions."""
  found = {}
  for key in sorted(keys):
    without = {name: value for name, value in content.items() if name != key}
    try:
      value = make(**without).to_dict().get(key)
    except (TypeError, ValueError, StrictDataclassError):  # of another model's size, which the others do not fit
      continue
    if isinstance(value, int | float | str) or key == "rope_parameters" and value:
      found[key] = value
  return found


def main():
  told, kinds = {}, set()
  for file in sorted(HERE.glob("references/*/config.json")):
    content = json.loads(file.read_text())
    if content["model_type"] in OWN and content["model_type"] not in kinds:
      kinds.add(content["model_type"])
      own = {*OWN[content["model_type"]], "tie_word_embeddings"} - {"use_cache"}
      told[file.parent.name] = defaults(CONFIG_MAPPING[content["model_type"]], content, own)
  for file in sorted(HERE.glob("*_references/*/config.json")):
    content = json.loads(file.read_text())
    tower = content.get("vision_config", {})
    if tower.get("model_type") in OWN and tower["model_type"] not in kinds:
      kinds.add(tower["model_type"])
      make = CONFIG_MAPPING[content["model_type"]].sub_configs["vision_config"]
      make = CONFIG_MAPPING[tower["model_type"]] if make.__name__ == "AutoConfig" else make
      told[file.parent.relative_to(HERE).as_posix()] = defaults(make, tower, set(OWN[tower["model_type"]]))
  lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entries)}" for name, entries in told.items())
  (HERE / "config_defaults.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
  main()
