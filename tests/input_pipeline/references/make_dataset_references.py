"""Writes references/datasets: the same rows as Hugging Face's `datasets` keeps them, in each of its ways.

    python tests/input_pipeline/references/make_dataset_references.py      # needs `pip install datasets trl`

`rows.jsonl` is what was given to it. Where Arrow pads objects, TRL's `remove_none_values` gives the rows back.
"""

import json
import shutil
from pathlib import Path

from datasets import Dataset, DatasetDict, Features, Json, List, Value
from trl.trainer.utils import remove_none_values

FOLDER = Path(__file__).parent / "datasets"


def tool(name, **properties):
  parameters = {"type": "object", "properties": properties, "required": list(properties)}
  return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def calls(said, *called):
  return {"role": "assistant", "content": said, "tool_calls": [
      {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in called]}


ROWS = [
    {"messages": [{"role": "user", "content": "Weather in Bonn?"}, calls("Let me see.", ("weather", {"town": "Bonn"})),
                  {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "It is sunny."}],
     "tools": [tool("weather", town={"type": "string", "enum": ["Bonn", "Köln"]})]},
    {"messages": [{"role": "user", "content": "1 + 2, and now?"},
                  calls("", ("add", {"a": 1, "b": 2}), ("now", {})),
                  {"role": "tool", "content": "3"}, {"role": "tool", "content": "12:00"},
                  {"role": "assistant", "content": "3, at noon."}],
     "tools": [tool("add", a={"type": "integer"}, b={"type": "integer", "description": "the other"}), tool("now")]},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}], "tools": []},
]


def main():
  shutil.rmtree(FOLDER, ignore_errors=True)
  FOLDER.mkdir()
  (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), "utf-8")
  padded = Dataset.from_list(ROWS)
  assert padded[0] != ROWS[0] and [remove_none_values(row) for row in padded] == ROWS
  message = {"role": Value("string"), "content": Value("string"), "tool_calls": List(Json())}
  as_json = Dataset.from_list(ROWS, features=Features({"messages": List(message), "tools": List(Json())}))
  assert [remove_none_values(row) for row in as_json] == ROWS
  whole = Dataset.from_list(ROWS, features=Features({"messages": Json(), "tools": Json()}))
  assert list(whole) == ROWS
  mixed = Dataset.from_list(ROWS, on_mixed_types="use_json")
  assert [remove_none_values(row) for row in mixed] == ROWS
  for name, data in (("padded", padded), ("json", as_json), ("whole", whole), ("mixed", mixed)):
    data.to_parquet(FOLDER / f"{name}.parquet")
  as_json.save_to_disk(FOLDER / "saved", num_shards=2)
  DatasetDict(train=padded, test=whole.select([1])).save_to_disk(FOLDER / "splits")
  padded.to_json(FOLDER / "list.json", orient="records", lines=False, indent=2)


if __name__ == "__main__":
  main()
