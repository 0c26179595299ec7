"""The notebook runs from top to bottom, every night: with fewer steps and documents, shorter texts, and no other
change."""

import json
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests import tiny
from trainer.config import checks as config_checks

NOTEBOOK = tiny.ROOT / "notebooks" / "first_run.ipynb"


def test_its_config_is_one():
  """The cells before the run; all of them are run every night."""
  cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
  assert "train(config, workdir)" in cells[2]
  names, path = {}, list(sys.path)
  for cell in cells[:2]:
    exec(cell, names)
  sys.path[:] = path
  assert config_checks.resolve(names["config"]).total_steps == 400


@pytest.mark.slow
def test_it_trains_samples_and_plots(monkeypatch):
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    if cell.cell_type == "code":
      for key, less in (("total_steps = ", "16"), ("max_documents = ", "40"), ("train_megabytes=", "0.1"),
                        ("max_new_tokens=", "8")):
        cell.source = re.sub(rf"{key}[\d.]+", f"{key}{less}", cell.source)
      cell.outputs = []
  for name, value in tiny.environment(1).items():
    monkeypatch.setenv(name, value)
  NotebookClient(notebook, timeout=300, kernel_name="python3",
                 resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()

  outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
  printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
  losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
  assert losses[-1] < losses[0]
  assert "def " in printed and printed.count("'") >= 6  # what it wrote, as Python shows strings
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


def test_it_is_kept_as_it_was_run():
  """GitHub and the site show what it printed and drew; progress bars and errors are not kept."""
  notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
  code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
  assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell["outputs"]]
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
  assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
  assert NOTEBOOK.stat().st_size < 400_000
