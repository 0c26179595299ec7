"""Scores of lm_eval's own `hf` model (PyTorch, transformers) on the tasks beside, for
tests/trainer/lm_eval/test_command.py.

    python tests/trainer/lm_eval_reference.py FOLDER > tests/trainer/lm_eval_tasks/reference.json

FOLDER: what `tests.tiny.hf_folder(FOLDER)` writes. In an environment with torch, transformers and lm_eval; Weft is not
imported. Each sample's requests with what the model answered; of generation the texts.
"""

import json
import sys
import tempfile
from pathlib import Path

MAX_LENGTH = 64


def write_tasks(folder: Path) -> Path:
  """The tasks with the path of their questions in them."""
  here = Path(__file__).resolve().parent / "lm_eval_tasks"
  for path in here.glob("*.yaml"):
    text = path.read_text(encoding="utf-8").replace("QUESTIONS", str(here / "questions.jsonl"))
    (folder / path.name).write_text(text, encoding="utf-8")
  return folder


def answers(results: dict) -> dict:
  """{task: [[request's texts, what was answered], …] of each sample}."""
  return {task: [[[list(map(str, arguments if isinstance(arguments, (list, tuple)) else [arguments])), answer]
                  for arguments, answer in zip(sample["arguments"], sample["filtered_resps"]
                                               if len(sample["arguments"]) > 1 else [sample["filtered_resps"]],
                                               strict=True)]
                 for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
          for task, samples in results["samples"].items()}


def main(folder: str) -> None:
  import lm_eval
  from lm_eval.models.huggingface import HFLM
  from lm_eval.tasks import TaskManager
  found = dict(answers={}, results={})
  # Of whole texts it puts a BOS before the first window anyway; a second one would be scored as a part of the text.
  for tasks, add_bos in ((["weft_colours", "weft_says"], True), (["weft_words"], False)):
    lm = HFLM(pretrained=folder, dtype="float32", device="cpu", max_length=MAX_LENGTH, batch_size=2,
              add_bos_token=add_bos)
    with tempfile.TemporaryDirectory() as made:
      results = lm_eval.simple_evaluate(
          model=lm, tasks=tasks, log_samples=True, bootstrap_iters=0,
          task_manager=TaskManager(include_path=str(write_tasks(Path(made))), include_defaults=False))
    found["answers"] |= answers(results)
    found["results"] |= results["results"]
  print(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
  main(sys.argv[1])
