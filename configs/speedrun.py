"""From nothing to a small assistant that has learned from rewards, in four runs on a CPU.

    python -m trainer.speedrun --config=configs/speedrun.py --workdir=runs/speedrun

`seq` reads the sources of Python's standard library; `sft` is shown conversations, in which functions are documented
and exercises solved; `dpo` prefers a function's own docstring to another's; `grpo` solves exercises, and is told
whether the answer was right. Each begins with what the one before has learned, and is an ordinary run:

    python -m trainer --config=configs/speedrun.py:sft:runs/speedrun --workdir=runs/speedrun/sft

A speedrun of your own is a file with these two names, STAGES and get_config (docs/tutorial.md).
"""

from ml_collections import ConfigDict

from configs import quickstart
from trainer.config import evaluator, reward, source, strategy

# {stage: {what the table says: a metric of that stage's evaluations}}, in their order.
STAGES = {
    "seq": {"bits per byte": "eval/val/bits_per_byte"},
    "sft": {"exact match": "eval/sums/accuracy", "pass@1": "eval/sampled/pass@1"},
    "dpo": {"preference accuracy": "eval/pairs/rewards/accuracies", "exact match": "eval/sums/accuracy",
            "pass@1": "eval/sampled/pass@1"},
    "grpo": {"exact match": "eval/sums/accuracy", "pass@1": "eval/sampled/pass@1"},
}
# What the model is asked in the end.
QUESTIONS = ("What is 7 + 58?", "What is 64 - 81?", "Document def is_open(self)")


def get_config(arg: str = "seq:runs/speedrun") -> ConfigDict:
  """`arg`: STAGE:FOLDER, where the folder holds the workdirs of the stages before, by their names."""
  stage, _, folder = arg.partition(":")
  c = {"seq": _seq, "sft": _sft, "dpo": _dpo, "grpo": _grpo}[stage]()
  if before := previous(STAGES, stage):
    c.init_from.path = f"{folder}/{before}"
    c.tokenizer.type = "hf"
    c.tokenizer.path = f"{folder}/{before}/tokenizer.json"
  else:
    c.tokenizer.split_digits = True
  return c


def previous(stages: dict, stage: str) -> str | None:
  """The stage before this one; None for the first."""
  return dict(zip(list(stages)[1:], stages, strict=False)).get(stage)


def _seq() -> ConfigDict:
  c = quickstart.get_config()
  del c.evals.samples
  return c


def _sft() -> ConfigDict:
  c = _seq()
  c.strategy = strategy("sft")
  c.chat.template = "plain"
  c.input.sources = dict(
      docstrings=source(type="python_docstrings", dataset="chat", split="train"),
      sums=source(type="arithmetic", dataset="chat", split="train", weight=7.0))
  c.batch_size = 16
  c.total_steps = 450
  c.evals = dict(sums=_exercises(temperature=0.0), sampled=_exercises(temperature=1.0))
  return c


def _dpo() -> ConfigDict:
  c = _sft()
  c.strategy = strategy("dpo", loss={"sigmoid": 1.0, "sft": 1.0}, beta=0.1)
  c.input.sources = dict(pairs=source(type="python_docstring_pairs", dataset="chat", split="train"))
  c.batch_size = 8
  c.total_steps = 200
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 3e-4
  c.evals.pairs = evaluator(type="preference", eval_percent=50.0, batch_size=32, max_documents=512,
                            sources=dict(pairs=source(type="python_docstring_pairs", dataset="chat")))
  return c


def _grpo() -> ConfigDict:
  c = _sft()
  c.strategy = strategy("grpo")
  c.input.sources = dict(sums=source(type="arithmetic", dataset="chat", split="train"))
  c.rollout.update(num_prompts=128, group_size=8, max_new_tokens=8, batch_size=256)
  c.rollout.rewards.right = reward(type="exact_match")
  c.batch_size = 8
  c.total_steps = 150
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 3e-4
  c.schedule = dict(name="constant", warmup_percent=0.0)
  return c


def _exercises(temperature: float) -> ConfigDict:
  """Sums that no stage has trained on."""
  return evaluator(type="generate", eval_percent=50.0, max_documents=256, max_new_tokens=8, temperature=temperature,
                   batch_size=256, sources=dict(sums=source(type="arithmetic", dataset="chat")))
