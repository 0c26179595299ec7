"""The chat template in a folder: whichever place a reader looks in, it finds what was trained."""

import json

import pytest

from input_pipeline.chat import template as chat
from trainer.errors import DataError
from trainer.export import chat_files

NEW = chat.ChatTemplate("new {{ messages }}")
WITH_TOOLS = chat.ChatTemplate("new {{ messages }}", tool_use=chat.ChatTemplate("new {{ tools }}"))
LISTED = [{"name": name, "template": f"old {name}"} for name in ("default", "tool_use", "rag")]


def folder_with(path, places):
  """A folder with the old template in some places; {file: content}, of JSON files their `chat_template`."""
  for name, content in {"tokenizer_config.json": None, **places}.items():
    (path / name).parent.mkdir(exist_ok=True)
    more = {} if content is None else {"chat_template": content}
    (path / name).write_text(content if name.endswith(".jinja") else json.dumps({"keep": "é", **more}))
  return path


def places(path):
  """{place: template} of everything in the folder that a reader may take; of lists {name: template}."""
  found = {str(file.relative_to(path)): file.read_text() for file in path.rglob("*.jinja")}
  for file in path.glob("*.json"):
    content = json.loads(file.read_text())
    if "chat_template" in content:
      value = content["chat_template"]
      found[file.name] = {e["name"]: e["template"] for e in value} if isinstance(value, list) else value
  return found


PLACES = {
    "none": {},
    "jinja": {"chat_template.jinja": "old"},
    "config": {"tokenizer_config.json": "old"},
    "both": {"chat_template.jinja": "old", "tokenizer_config.json": "older"},
    "list": {"tokenizer_config.json": LISTED},
    "names": {"chat_template.jinja": "old", "additional_chat_templates/tool_use.jinja": "old tool_use",
              "additional_chat_templates/rag.jinja": "old rag"},
    "processor": {"chat_template.json": "old", "processor_config.json": "old"},
    "all": {"chat_template.jinja": "old", "tokenizer_config.json": LISTED, "chat_template.json": "old",
            "additional_chat_templates/rag.jinja": "old rag", "processor_config.json": {"default": "old"}},
}


@pytest.mark.parametrize("name", PLACES)
def test_another_template_is_the_only_one(tmp_path, name):
  folder = folder_with(tmp_path, PLACES[name])
  chat_files.write(folder, NEW, own=False)
  processors = {file for file in ("chat_template.json", "processor_config.json") if file in PLACES[name]}
  assert places(folder) == dict.fromkeys({"chat_template.jinja", "tokenizer_config.json", *processors}, NEW.source)
  assert not (folder / "additional_chat_templates").exists()
  assert json.loads((folder / "tokenizer_config.json").read_text())["keep"] == "é"


@pytest.mark.parametrize("name", PLACES)
def test_one_for_tools_stands_beside_it_in_every_place(tmp_path, name):
  folder = folder_with(tmp_path, PLACES[name])
  chat_files.write(folder, WITH_TOOLS, own=False)
  both = {"default": "new {{ messages }}", "tool_use": "new {{ tools }}"}
  processor = {"processor_config.json": both} if "processor_config.json" in PLACES[name] else {}
  assert places(folder) == {"chat_template.jinja": both["default"], "tokenizer_config.json": both, **processor,
                            "additional_chat_templates/tool_use.jinja": both["tool_use"]}
  again = chat.load_template(folder, special_tokens={})
  assert again.render([{"role": "user", "content": "a"}], tools=[{}]) == "new [{}]"


@pytest.mark.parametrize("name", ["list", "names"])
def test_the_folders_own_keeps_those_that_are_asked_for_by_name(tmp_path, name):
  folder = folder_with(tmp_path, PLACES[name])
  own = chat.load_template(folder, special_tokens={})
  chat_files.write(folder, own, own=True)
  chat_files.write(folder, own, own=True)  # as at every start of a run
  everything = {"default": own.source, "tool_use": "old tool_use", "rag": "old rag"}
  assert places(folder) == {"chat_template.jinja": own.source, "tokenizer_config.json": everything,
                            "additional_chat_templates/tool_use.jinja": "old tool_use",
                            "additional_chat_templates/rag.jinja": "old rag"}


def test_a_name_that_is_no_files_is_refused(tmp_path):
  folder = folder_with(tmp_path, {"tokenizer_config.json": [*LISTED, {"name": "../rag", "template": ""}]})
  with pytest.raises(DataError, match=r"has the name '\.\./rag'"):
    chat_files.write(folder, NEW, own=True)
