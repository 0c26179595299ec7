"""TRL's side of benchmarks/parity, in an environment of its own: python trl_peer.py FOLDER OUT [--as-is]

Trains the rows of FOLDER/rows.jsonl in the order of FOLDER/order.json with the settings of FOLDER/settings.json, and
writes OUT: loss and gradient norm of each step, and versions. Four things are made as Weft has them, unless `--as-is`
leaves them to TRL: the newline that the template writes behind the last message is not trained (sft, dpo, kto),
completions that estimate kto's divergence are those of order.json, the embedding of the padding token has its gradient,
and gradient norms are summed in float64.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import datasets
import peft
import torch
import transformers
import trl

TRAINERS = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig),
            "reward": (trl.RewardTrainer, trl.RewardConfig), "kto": (trl.KTOTrainer, trl.KTOConfig),
            "lora": (trl.SFTTrainer, trl.SFTConfig), "bf16": (trl.SFTTrainer, trl.SFTConfig)}
BEHIND, BETWEEN = "'<|im_end|>' + '\n'", "'<|im_end|>' + ('' if loop.last and not add_generation_prompt else '\n')"


class Kept(transformers.TrainerCallback):
  """Loss and gradient norm of each step, as TRL logs them."""

  def __init__(self):
    self.steps = []

  def on_log(self, args, state, control, logs=None, **kwargs):
    if "loss" in logs:
      self.steps.append({key: float(logs[key]) for key in ("loss", "grad_norm")})


def options(settings: dict, part: str, folder: str) -> dict:
  """Of TRL's config: what settings.json says, and else what has no effect on the numbers."""
  s = settings
  named = dict(
      output_dir=folder, per_device_train_batch_size=s["batch_size"], max_steps=s["steps"], max_length=None,
      learning_rate=s["learning_rate"], lr_scheduler_type="cosine", warmup_steps=0, optim="adamw_torch",
      adam_beta1=s["b1"], adam_beta2=s["b2"], adam_epsilon=s["eps"], weight_decay=s["weight_decay"],
      max_grad_norm=s["clip_norm"], bf16=s["compute"] == "bfloat16", use_cpu=True,
      train_sampling_strategy="sequential", logging_steps=1,
      save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=False, seed=s["seed"])
  more = {"beta": s["beta"]} if part in ("dpo", "kto") else {}
  return named | more | ({"center_rewards_coefficient": s["center"]} if part == "reward" else {})


def clip_by_exact_norm(parameters, max_norm, *args, **kwargs):
  """As torch.nn.utils.clip_grad_norm_, whose norm of many float32 numbers on CPU is too small: -0.3% of 28 million
  normal ones (torch 2.13)."""
  gradients = [p.grad for p in parameters if p.grad is not None]
  norm = sum(g.double().square().sum() for g in gradients).sqrt().float()
  for g in gradients:
    g.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
  return norm


class Offline(trl.GRPOTrainer):
  """GRPO on responses that are there: TRL computes advantages, log-probs and the loss.

  Keeps the first step's advantages, by the text of prompt and response.
  """

  def __init__(self, model, args, rows, tokenizer, kept):
    self.rows, self.advantages = rows, {}
    super().__init__(
        model=model, args=args, processing_class=tokenizer, rollout_func=self.respond, callbacks=[kept],
        reward_funcs=lambda reward, **columns: reward,
        train_dataset=datasets.Dataset.from_list([{"prompt": str(i)} for i in range(len(rows))]))

  def respond(self, prompts, trainer):
    group = len(self.rows[0]["responses"])
    pairs = [(self.rows[int(prompt)], i % group) for i, prompt in enumerate(prompts)]
    return {"prompt_ids": [row["prompt"] for row, _ in pairs], "logprobs": None,
            "completion_ids": [row["responses"][i] for row, i in pairs],
            "reward": [row["rewards"][i] for row, i in pairs]}

  def _compute_loss(self, model, inputs):
    if not self.advantages:
      decode, masks = self.processing_class.decode, (inputs["prompt_mask"].bool(), inputs["completion_mask"].bool())
      for i, advantage in enumerate(inputs["advantages"].flatten().tolist()):
        ids = [*inputs["prompt_ids"][i][masks[0][i]].tolist(), *inputs["completion_ids"][i][masks[1][i]].tolist()]
        self.advantages[decode(ids, skip_special_tokens=True)] = advantage
    return super()._compute_loss(model, inputs)


def grpo_options(named: dict, group: int) -> dict:
  """Of GRPOConfig: GRPO with a mean for each completion, one step a rollout, no reference."""
  del named["max_length"], named["train_sampling_strategy"]
  return named | dict(num_generations=group, beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group",
                      num_iterations=1, shuffle_dataset=False, temperature=1.0)


def supervised(model, tokenizer, named, rows, args, part, kept):
  """The trainer of rows in the order of order.json."""
  order = [taken for step in json.loads((args.folder / "order.json").read_text()) for taken in step]
  make, config = TRAINERS[part]
  trainer = make(model=model, args=config(**named), processing_class=tokenizer, callbacks=[kept],
                 train_dataset=datasets.Dataset.from_list([rows[taken["row"]] for taken in order]))
  if part == "kto" and not args.as_is:
    data = trainer.train_dataset
    completions = {taken["row"]: ids for taken, ids in zip(order, data["completion_ids"], strict=True)}
    trainer.train_dataset = data.remove_columns("KL_completion_ids").add_column(
        "KL_completion_ids", [completions[taken["other"]] for taken in order])
  return trainer


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folder", type=Path)
  parser.add_argument("out", type=Path)
  parser.add_argument("--as-is", action="store_true")
  parser.add_argument("--adapter", action="store_true", help="write OUT, a folder: a new adapter as PEFT begins one")
  args = parser.parse_args()
  settings = json.loads((args.folder / "settings.json").read_text())
  part = settings["part"]
  rows = [json.loads(line) for line in (args.folder / "rows.jsonl").read_text("utf-8").splitlines()]
  tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
  if not args.as_is:
    torch.nn.utils.clip_grad_norm_ = clip_by_exact_norm
    if BEHIND not in tokenizer.chat_template:
      raise SystemExit(f"the template of {settings['model']} has no {BEHIND!r}.")
    if part != "reward":  # it is a text's last token, whose score is the text's
      tokenizer.chat_template = tokenizer.chat_template.replace(BEHIND, BETWEEN)
  auto = transformers.AutoModelForSequenceClassification if part == "reward" else transformers.AutoModelForCausalLM
  model = auto.from_pretrained(settings["model"], dtype=torch.float32)
  if not args.as_is:
    # PyTorch leaves the rows that this token reads out of the embedding's gradient, also where it is no padding.
    model.get_input_embeddings().padding_idx = None
  if args.adapter:
    torch.manual_seed(settings["seed"])
    config = peft.PeftConfig.from_pretrained(args.folder / "adapter")
    peft.get_peft_model(model, config).save_pretrained(args.out)
    return
  if part == "lora":
    model = peft.PeftModel.from_pretrained(model, args.folder / "adapter", is_trainable=True)
  kept, found = Kept(), {}
  with tempfile.TemporaryDirectory() as folder:
    named = options(settings, part, folder)
    if part == "grpo":
      config = trl.GRPOConfig(**grpo_options(named, len(rows[0]["responses"])))
      trainer = Offline(model, config, rows, tokenizer, kept)
      trainer.train()
      found["advantages"] = trainer.advantages
    else:
      trainer = supervised(model, tokenizer, named, rows, args, part, kept)
      trainer.train()
  versions = {module.__name__: module.__version__ for module in (trl, peft, transformers, torch)}
  args.out.write_text(json.dumps({"versions": versions, "steps": kept.steps, **found}))


if __name__ == "__main__":
  main()
