"""TRL's side of benchmarks/parity/learning.py, in an environment of its own: python trl_learner.py FOLDER SEED OUT

Trains FOLDER/model by TRL's GRPOTrainer with its own sampler on FOLDER/train.jsonl, with the settings of
FOLDER/settings.json, and writes OUT: [updates, share of right answers to FOLDER/validation.jsonl], of each evaluation.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import datasets
import torch
import transformers
import trl


class Kept(transformers.TrainerCallback):
  """The reward of each evaluation."""

  def __init__(self):
    self.curve = []

  def on_evaluate(self, args, state, control, metrics=None, **kwargs):
    self.curve.append([state.global_step, metrics["eval_reward"]])


def right(completions: list[str], answer: list[str], **columns) -> list[float]:
  return [float(" ".join(said.split()) == wanted) for said, wanted in zip(completions, answer, strict=True)]


def main(folder: Path, seed: int, out: Path) -> None:
  s = json.loads((folder / "settings.json").read_text())
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
  tokenizer.pad_token = tokenizer.eos_token
  assert tokenizer("7").input_ids[0] == tokenizer.bos_token_id  # as texts were trained
  model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

  def exercises(split: str) -> datasets.Dataset:
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]
    return datasets.Dataset.from_list(
        [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows])

  kept = Kept()
  with tempfile.TemporaryDirectory() as scratch:
    options = trl.GRPOConfig(
        output_dir=scratch, seed=seed, max_steps=s["steps"], per_device_train_batch_size=s["prompts"] * s["group"],
        num_generations=s["group"], steps_per_generation=1, num_iterations=1, max_completion_length=s["new_tokens"],
        temperature=1.0, beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group",
        learning_rate=s["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch",
        adam_beta1=s["b1"], adam_beta2=s["b2"], adam_epsilon=s["eps"], weight_decay=0.0, max_grad_norm=s["clip_norm"],
        bf16=False, use_cpu=True, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
        logging_steps=s["steps"], eval_strategy="steps", eval_steps=s["steps"] // s["evals"], eval_on_start=True,
        per_device_eval_batch_size=s["held_out"], num_generations_eval=1)
    trainer = trl.GRPOTrainer(model=model, args=options, processing_class=tokenizer, reward_funcs=right,
                              train_dataset=exercises("train"), eval_dataset=exercises("validation"), callbacks=[kept])
    trainer.train()
  out.write_text(json.dumps(kept.curve))


if __name__ == "__main__":
  main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
