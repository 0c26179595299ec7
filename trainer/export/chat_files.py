"""The chat template of a tokenizer's folder: one, in every place where a reader looks.

| place | who reads it |
|---|---|
| chat_template.jinja, additional_chat_templates/NAME.jinja | transformers from 4.50 on; here before all others |
| `chat_template` of tokenizer_config.json | transformers before, and servers that read this file alone |
| chat_template.json, `chat_template` of processor_config.json | processors of models of images, before all others |

Of several templates with names transformers takes `tool_use` by itself where there are tools, else `default`.
"""

import json
import re
from pathlib import Path
from typing import Any

from input_pipeline.chat.template import MORE, ChatTemplate
from input_pipeline.tokenizer import hf_folder
from trainer import atomic
from trainer.errors import DataError

DEFAULT, TOOLS = "default", "tool_use"


def write(folder: Path, template: ChatTemplate, own: bool) -> None:
  """Writes the template that conversations were trained with into a folder that has tokenizer_config.json.

  Args:
    folder: of a tokenizer.
    template: with the one that it has for tools, if any.
    own: it is the folder's own. Else those with other names are of another format, and go.

  Raises:
    DataError: a file of the folder is not what its name says.
    OSError: a file cannot be written.
  """
  found = _others(folder) if own else {}
  named = {DEFAULT: template.source, **found}
  if template.tool_use is not None:
    named[TOOLS] = template.tool_use.source
  for old in folder.glob(f"{MORE}/*.jinja"):
    if old.stem not in named:
      old.unlink()
  (folder / MORE).mkdir(exist_ok=True)
  for name, source in named.items():
    atomic.write(folder / ("chat_template.jinja" if name == DEFAULT else f"{MORE}/{name}.jinja"), source)
  if not any((folder / MORE).iterdir()):
    (folder / MORE).rmdir()

  alone = template.source if len(named) == 1 else None
  listed = [{"name": name, "template": source} for name, source in named.items()]
  _set(folder / "tokenizer_config.json", alone or listed)
  if alone is None:  # processors refuse chat_template.json beside others with names
    (folder / "chat_template.json").unlink(missing_ok=True)
  for name in ("chat_template.json", "processor_config.json"):
    if "chat_template" in hf_folder.read_json(folder / name):
      _set(folder / name, alone or named)


def _others(folder: Path) -> dict[str, str]:
  """{name: template} of the folder's templates that nobody takes unless asked for them by name."""
  listed = hf_folder.read_json(folder / "tokenizer_config.json").get("chat_template")
  found = {entry["name"]: entry["template"] for entry in listed} if isinstance(listed, list) else {}
  found |= {file.stem: hf_folder.read_text(file) for file in sorted((folder / MORE).glob("*.jinja"))}
  if others := [name for name in found if not re.fullmatch(r"\w[\w.-]*", name)]:
    raise DataError(f"{folder}: a chat template has the name {others[0]!r:.80}; allowed: letters, digits, '_', '-' and "
                    "'.', for it is the name of a file, too. Rename it in tokenizer_config.json.")
  return {name: source for name, source in found.items() if name not in (DEFAULT, TOOLS)}


def _set(file: Path, value: Any) -> None:
  content = {**hf_folder.read_json(file), "chat_template": value}
  atomic.write(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
