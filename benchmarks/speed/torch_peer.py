"""The peers of PyTorch, in an environment of their own: prints one line of JSON.

    pip install torch transformers trl datasets
    python benchmarks/speed/torch_peer.py CASE

hf, hf_compile: transformers in a plain loop with AdamW and clipping, as it is or with torch.compile. trl_sft, trl_dpo,
trl_grpo: TRL's trainers, from one optimizer step's end to the next one's. hf_generate: `generate` of transformers, one
batch a step; hf_rollouts: for groups of completions that end by themselves, several batches a step. memory LENGTH
VOCAB: two steps of the plain loop with one row, and how far memory rose.
"""

import json
import os
import random
import resource
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import peak
import sizes as s
import torch
import transformers


def make_model(vocab: int = s.VOCAB, length: int = s.SEQ):
  torch.manual_seed(0)
  return transformers.LlamaForCausalLM(transformers.LlamaConfig(
      vocab_size=vocab, hidden_size=s.HIDDEN, intermediate_size=s.FFN, num_hidden_layers=s.LAYERS,
      num_attention_heads=s.HEADS, num_key_value_heads=s.HEADS, max_position_embeddings=length,
      tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)).float()


def make_tokenizer():
  from tokenizers import Tokenizer, models, pre_tokenizers

  tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(s.words())}, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
  return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def memory(length: int, vocab: int) -> None:
  imported = peak.used_mb("VmRSS")
  batches = torch.randint(4, vocab, (2, 1, length))
  plain_loop(False, make_model(vocab, length), (ids for ids in batches if peak.forget() is None))
  print(json.dumps(dict(mb=peak.used_mb() - imported, versions={"torch": torch.__version__})))


def plain_loop(compiled: bool, model=None, batches=None):
  model = (model or make_model()).train()
  run = torch.compile(model) if compiled else model
  optimizer = torch.optim.AdamW(model.parameters(), lr=s.LEARNING_RATE, betas=(s.B1, s.B2),
                                weight_decay=s.WEIGHT_DECAY, fused=True)
  generator = torch.Generator().manual_seed(1)
  if batches is None:
    batches = torch.randint(len(s.SPECIAL), s.VOCAB, (s.WARMUP + s.STEPS, s.BATCH, s.SEQ), generator=generator)
  marks, losses = [time.perf_counter()], []
  for ids in batches:
    optimizer.zero_grad(set_to_none=True)
    loss = run(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), s.CLIP)
    optimizer.step()
    losses.append(loss.item())
    marks.append(time.perf_counter())
  return model, marks, losses


def generate():
  model = make_model().eval()
  generator, rows = torch.Generator().manual_seed(1), s.PROMPTS * s.GROUP
  marks = [time.perf_counter()]
  for _ in range(s.WARMUP + s.STEPS):
    ids = torch.randint(len(s.SPECIAL), s.VOCAB, (rows, s.PROMPT_LEN), generator=generator)
    with torch.inference_mode():
      out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                           max_new_tokens=s.NEW, min_new_tokens=s.NEW)
    assert out.shape == (rows, s.PROMPT_LEN + s.NEW)
    marks.append(time.perf_counter())
  return model, marks, []


def rollouts():
  """As many rows at a time as Weft has, group by group of completions; a batch goes on until its last one has ended."""
  model = make_model().eval()
  generator, stops = torch.Generator().manual_seed(1), list(range(s.VOCAB - s.ROLL_STOPS, s.VOCAB))
  at_once = s.ROLL_ROWS // s.ROLL_GROUP
  marks, tokens = [time.perf_counter()], []
  for _ in range(s.WARMUP + s.ROLL_STEPS):
    ids, drawn = torch.randint(len(s.SPECIAL), s.VOCAB, (s.ROLL_PROMPTS, s.PROMPT_LEN), generator=generator), 0
    for some in ids.split(at_once):
      with torch.inference_mode():
        out = model.generate(input_ids=some, attention_mask=torch.ones_like(some), do_sample=True, temperature=1.0,
                             top_k=0, max_new_tokens=s.ROLL_NEW, num_return_sequences=s.ROLL_GROUP, eos_token_id=stops,
                             pad_token_id=0)
      new = out[:, s.PROMPT_LEN:]
      before = (new >= s.VOCAB - s.ROLL_STOPS).long().cumsum(1)
      drawn += int(((before == 0) | ((before == 1) & (new >= s.VOCAB - s.ROLL_STOPS))).sum())
    marks.append(time.perf_counter())
    tokens.append(drawn)
  return model, marks, tokens


class Clock(transformers.TrainerCallback):
  """Notes when each optimizer step was done."""

  def __init__(self):
    self.marks, self.losses = [], []

  def on_train_begin(self, *_, **__):
    self.marks.append(time.perf_counter())

  def on_step_end(self, *_, **__):
    self.marks.append(time.perf_counter())

  def on_log(self, args, state, control, logs=None, **__):
    if logs and "loss" in logs:
      self.losses.append(float(logs["loss"]))


def train(make, folder: str, rows_per_step: int, **more):
  """Runs a trainer of TRL; `make(arguments, clock)` gives it."""
  clock = Clock()
  trainer = make(dict(
      output_dir=folder, max_steps=s.WARMUP + s.STEPS, learning_rate=s.LEARNING_RATE, lr_scheduler_type="constant",
      weight_decay=s.WEIGHT_DECAY, adam_beta2=s.B2, max_grad_norm=s.CLIP, optim="adamw_torch_fused",
      per_device_train_batch_size=rows_per_step, gradient_accumulation_steps=1, gradient_checkpointing=False,
      bf16=False, fp16=False, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
      seed=0, **more), clock)
  trainer.train()
  return trainer.model, clock.marks, clock.losses


def trl_sft(folder: str):
  from datasets import Dataset
  from trl import SFTConfig, SFTTrainer

  generator = torch.Generator().manual_seed(1)
  shape = ((s.WARMUP + s.STEPS) * s.BATCH, s.SEQ)
  rows = Dataset.from_dict({"input_ids": torch.randint(4, s.VOCAB, shape, generator=generator).tolist()})
  return train(lambda arguments, clock: SFTTrainer(
      model=make_model(), args=SFTConfig(**arguments), train_dataset=rows, processing_class=make_tokenizer(),
      callbacks=[clock]), folder, s.BATCH, max_length=s.SEQ)


def trl_dpo(folder: str):
  from datasets import Dataset
  from trl import DPOConfig, DPOTrainer

  rng, half, n = random.Random(1), s.PAIR_SEQ // 2, (s.WARMUP + s.STEPS) * s.PAIRS
  sides = {side: [" " + s.text(rng, half - 1) for _ in range(n)] for side in ("chosen", "rejected")}
  rows = Dataset.from_dict({"prompt": [s.text(rng, half) for _ in range(n)], **sides})
  return train(lambda arguments, clock: DPOTrainer(
      model=make_model(), ref_model=make_model(), args=DPOConfig(**arguments), train_dataset=rows,
      processing_class=make_tokenizer(), callbacks=[clock]), folder, s.PAIRS, max_length=s.PAIR_SEQ, beta=0.1)


def trl_grpo(folder: str):
  from datasets import Dataset
  from trl import GRPOConfig, GRPOTrainer

  rng, n = random.Random(1), (s.WARMUP + s.STEPS) * s.PROMPTS
  rows = Dataset.from_dict({"prompt": [s.text(rng, s.PROMPT_LEN) for _ in range(n)]})

  def reward(completions, completion_ids=None, **_):
    return [s.reward(tokens) for tokens in completion_ids]

  return train(lambda arguments, clock: GRPOTrainer(
      model=make_model(), reward_funcs=reward, args=GRPOConfig(**arguments), train_dataset=rows,
      processing_class=make_tokenizer(), callbacks=[clock]), folder, s.PROMPTS * s.GROUP, num_generations=s.GROUP,
      max_completion_length=s.NEW, generation_kwargs={"min_new_tokens": s.NEW}, temperature=1.0, beta=0.0)


def main() -> None:
  case = sys.argv[1]
  if case == "memory":
    return memory(*map(int, sys.argv[2:]))
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  more = {}
  with tempfile.TemporaryDirectory() as folder:
    if case.startswith("trl"):
      import trl

      versions["trl"] = trl.__version__
      model, marks, losses = {"trl_sft": trl_sft, "trl_dpo": trl_dpo, "trl_grpo": trl_grpo}[case](folder)
    elif case == "hf_generate":
      model, marks, losses = generate()
    elif case == "hf_rollouts":
      model, marks, tokens = rollouts()
      more, losses = dict(tokens=tokens), []
    else:
      model, marks, losses = plain_loop(case == "hf_compile")
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=losses, versions=versions, **more,
      parameters=sum(p.numel() for p in model.parameters()),
      peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
  main()
