"""Writes tool_schemas.json: the functions of example_tools.py as transformers' `get_json_schema` describes them.

    python tests/input_pipeline/references/make_tool_references.py

in an environment with transformers; run with version 5.
"""

import json
from pathlib import Path

import example_tools
from transformers.utils import get_json_schema

if __name__ == "__main__":
  found = {function.__name__: get_json_schema(function) for function in example_tools.ALL}
  (Path(__file__).parent / "tool_schemas.json").write_text(json.dumps(found, indent=1) + "\n")
