"""Trains a chat model to reason by verifiable rewards: a Hugging Face folder and questions with answers in.

    python -m trainer --config=configs/grpo.py --workdir=DIR \
      --config.model.hf=FOLDER --config.input.sources.main.path='gsm8k/train*.jsonl'

A line of the JSONL is {"question": "…", "answer": "… #### 72"}, as in GSM8K; the number after #### is what the last
number of a completion is compared with. Other recipes: --config.strategy.preset=dapo (or dr_grpo, gspo, cispo, sapo,
luspo, gdpo, rloo, reinforce++). Adapters in place of all parameters: --config.model.lora.rank=16. The result is in
DIR/export.
"""

from ml_collections import ConfigDict

from trainer.config import defaults, evaluator, reward, source, strategy


def get_config(arg: str | None = None) -> ConfigDict:
  """No argument."""
  c = defaults()
  c.strategy = strategy("grpo", preset="grpo")
  # Architecture, parameters, tokenizer and chat template; give it on the command line.
  c.model.hf = "path/to/a/hugging_face_folder"
  c.input.sources.main = source(type="jsonl", path="path/to/gsm8k.jsonl", split="train", validation_fraction=0.02)

  # 64 questions with 8 answers each, in 2 optimizer steps.
  c.rollout.num_prompts = 64
  c.rollout.group_size = 8
  c.rollout.updates = 2
  c.rollout.prompt_key = "question"
  c.rollout.max_new_tokens = 512
  c.rollout.batch_size = 256
  c.rollout.rewards.right = reward(type="numeric", answer_key="answer")

  # Prompt and completion fit into a row, which holds several of them; 4 rows are computed at a time.
  c.seq_len = 2048
  c.batch_size = 4
  c.total_steps = 500
  c.remat = "full"

  c.optimizer.learning_rate = 1e-6
  c.optimizer.weight_decay = 0.0
  c.schedule.name = "constant"
  c.schedule.warmup_percent = 2.0

  c.evals.gsm8k = evaluator(type="generate", eval_percent=10.0, max_documents=128, max_new_tokens=512, temperature=0.0,
                            batch_size=128, prompt_key="question", answer_key="answer",
                            extract=r"-?\$?\d[\d,]*(?:\.\d+)?")
  c.ckpt_percent = 10.0
  c.export.path = "export"
  c.export.dtype = "bfloat16"
  return c
