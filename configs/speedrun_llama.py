"""The speedrun on accelerators and data of your own: a Hugging Face folder goes on to be pretrained, is fine-tuned on
conversations, aligned on preference pairs, and trained on questions with verifiable answers.

    python -m trainer.speedrun --config=configs/speedrun_llama.py --workdir=DIR --set=model.hf=FOLDER \
      --set=seq.input.sources.main.path='texts/*.parquet' --set=sft.input.sources.main.path='chats/*.jsonl' \
      --set=dpo.input.sources.main.path='pairs/*.jsonl' --set=grpo.input.sources.main.path='gsm8k/train*.jsonl'

The numbers are for a model of 1 to 3 billion parameters (Llama 3.2, Qwen 3, Gemma 3) on the GPUs or TPU chips of one
host; the parameters are split over all of them. A base model whose tokenizer has no chat template needs
--set=chat.template=chatml (docs/sft.md). The last stage's `export` is a Hugging Face folder.
"""

from ml_collections import ConfigDict

from configs import dpo, grpo, sft
from configs.speedrun import previous
from trainer.config import defaults, evaluator, source

STAGES = {
    "seq": {"bits per byte": "eval/val/bits_per_byte"},
    "sft": {"exact match": "eval/gsm8k/accuracy"},
    "dpo": {"preference accuracy": "eval/pairs/rewards/accuracies", "exact match": "eval/gsm8k/accuracy"},
    "grpo": {"exact match": "eval/gsm8k/accuracy", "pass@1": "eval/sampled/pass@1"},
}
QUESTIONS = ("A train leaves at 9:40 and arrives at 13:05. How many minutes does it travel?",)
# Questions with answers, as grpo.input.sources.main.path has them; those of its validation part are never trained on.
GSM8K = "path/to/gsm8k.jsonl"


def get_config(arg: str = "seq:runs/speedrun") -> ConfigDict:
  """`arg`: STAGE:FOLDER, where the folder holds the workdirs of the stages before, by their names."""
  stage, _, folder = arg.partition(":")
  c = {"seq": _seq, "sft": sft.get_config, "dpo": dpo.get_config, "grpo": grpo.get_config}[stage]()
  if before := previous(STAGES, stage):
    c.init_from.path = f"{folder}/{before}"
  c.export.path = "export" if stage == "grpo" else None
  c.mesh.update(data=1, fsdp=-1)
  if stage in ("sft", "dpo"):
    c.evals.gsm8k = _questions(temperature=0.0)
  if stage == "grpo":
    c.evals.sampled = _questions(temperature=1.0)
  return c


def _seq() -> ConfigDict:
  c = defaults()
  c.model.hf = "path/to/a/hugging_face_folder"
  c.input.sources.main = source(type="parquet", path="path/to/documents/*.parquet", split="train",
                                validation_fraction=0.001)
  # 2.1 billion tokens, half a million a step.
  c.seq_len = 4096
  c.batch_size = 128
  c.grad_accum_steps = 8
  c.total_steps = 4000
  c.remat = "full"
  c.optimizer.learning_rate = 5e-5
  c.schedule.update(name="wsd", floor=0.0)
  c.schedule.update(warmup_percent=1.0, decay_percent=20.0)
  c.evals.val = evaluator(type="loss", eval_percent=25.0, max_documents=2048)
  c.ckpt_percent = 5.0
  return c


def _questions(temperature: float) -> ConfigDict:
  made = grpo.get_config().evals.gsm8k.copy_and_resolve_references()
  made.update(eval_percent=50.0, temperature=temperature)
  made.sources = dict(main=source(type="jsonl", path=GSM8K, validation_fraction=0.02))
  return made
