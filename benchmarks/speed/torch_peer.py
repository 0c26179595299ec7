"""The peers of PyTorch, in an environment of their own: prints one line of JSON.

    pip install torch transformers trl datasets
    python benchmarks/speed/torch_peer.py CASE

hf, hf_compile: transformers in a plain loop with AdamW and clipping, as it is or with torch.compile. trl_sft, trl_dpo,
trl_grpo: TRL's trainers, from one optimizer step's end to the next one's. hf_generate: `generate` of transformers, one
batch a step; hf_rollouts: for groups of completions that end by themselves, several batches a step. memory LENGTH
VOCAB: two steps of the plain loop with one row, and how far memory rose. What a GPU's memory does not hold trains in as
few micro-batches as it does.
"""

import gc
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

size = s.CHOSEN
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(vocab: int = size.vocab, length: int = max(size.seq, size.pair_seq), generates: bool = False):
  """Fresh, in float32 unless `size.precision` is bfloat16, or a model that is to generate has its products in it."""
  torch.manual_seed(0)
  half = size.precision == "bfloat16" or generates and size.precision == "mixed"
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
  with torch.device(DEVICE):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=size.hidden, intermediate_size=size.ffn, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        max_position_embeddings=length, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))
  torch.set_default_dtype(before)
  if size.precision == "bfloat16" and not generates:
    model.gradient_checkpointing_enable()
  return model


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


def plain_loop(compiled: bool, model=None, batches=None, parts: int = 1):
  """With each batch in so many micro-batches."""
  model = (model or make_model()).train()
  run = torch.compile(model) if compiled else model
  optimizer = torch.optim.AdamW(model.parameters(), lr=s.LEARNING_RATE, betas=(s.B1, s.B2),
                                weight_decay=s.WEIGHT_DECAY, fused=True)
  generator = torch.Generator().manual_seed(1)
  if batches is None:
    batches = torch.randint(len(s.SPECIAL), size.vocab, (s.WARMUP + s.STEPS, size.batch, size.seq), generator=generator)
  marks, losses = [time.perf_counter()], []
  for ids in batches:
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for some in ids.to(DEVICE).chunk(parts):
      with torch.autocast(DEVICE, torch.bfloat16, enabled=size.precision == "mixed"):
        loss = run(input_ids=some, labels=some, use_cache=False).loss / parts
      loss.backward()
      total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), s.CLIP)
    optimizer.step()
    losses.append(total.item())
    marks.append(time.perf_counter())
  return model, marks, losses


def fitting(run, most: int):
  """`run(parts)` with as few micro-batches, of at most `most`, as the memory holds: (what it gives, parts)."""
  parts = 1
  while True:
    try:
      return run(parts), parts
    except torch.OutOfMemoryError:
      if 2 * parts > most:
        raise
    # Outside of `except`, whose traceback holds the tensors.
    parts *= 2
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def generate():
  model = make_model(generates=True, length=size.prompt_len + size.new).eval()
  generator, rows = torch.Generator().manual_seed(1), size.prompts * size.group
  marks = [time.perf_counter()]
  for _ in range(s.WARMUP + s.STEPS):
    ids = torch.randint(len(s.SPECIAL), size.vocab, (rows, size.prompt_len), generator=generator).to(DEVICE)
    with torch.inference_mode():
      out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                           max_new_tokens=size.new, min_new_tokens=size.new)
    assert out.shape == (rows, size.prompt_len + size.new)
    out.cpu()  # waits for it
    marks.append(time.perf_counter())
  return model, marks, []


def rollouts():
  """As many rows at a time as Weft has, group by group of completions; a batch goes on until its last one has ended."""
  model = make_model(generates=True, length=size.prompt_len + size.roll_new).eval()
  generator, stops = torch.Generator().manual_seed(1), list(range(size.vocab - size.roll_stops, size.vocab))
  at_once = size.roll_rows // size.roll_group
  marks, tokens = [time.perf_counter()], []
  for _ in range(s.WARMUP + s.ROLL_STEPS):
    ids, drawn = torch.randint(len(s.SPECIAL), size.vocab, (size.roll_prompts, size.prompt_len), generator=generator), 0
    for some in ids.to(DEVICE).split(at_once):
      with torch.inference_mode():
        out = model.generate(input_ids=some, attention_mask=torch.ones_like(some), do_sample=True, temperature=1.0,
                             top_k=0, max_new_tokens=size.roll_new, num_return_sequences=size.roll_group,
                             eos_token_id=stops, pad_token_id=0)
      new = out[:, size.prompt_len:]
      before = (new >= size.vocab - size.roll_stops).long().cumsum(1)
      drawn += int(((before == 0) | ((before == 1) & (new >= size.vocab - size.roll_stops))).sum())
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


def train(make, folder: str, rows_per_step: int, parts: int, **more):
  """Runs a trainer of TRL, with so many micro-batches a step; `make(arguments, clock)` gives it."""
  clock = Clock()
  trainer = make(dict(
      output_dir=folder, max_steps=s.WARMUP + s.STEPS, learning_rate=s.LEARNING_RATE, lr_scheduler_type="constant",
      weight_decay=s.WEIGHT_DECAY, adam_beta2=s.B2, max_grad_norm=s.CLIP, optim="adamw_torch_fused",
      per_device_train_batch_size=rows_per_step // parts, gradient_accumulation_steps=parts,
      gradient_checkpointing=size.precision == "bfloat16", bf16=size.precision == "mixed", fp16=False,
      use_cpu=DEVICE == "cpu", report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
      seed=0, **more), clock)
  trainer.train()
  return trainer.model, clock.marks, clock.losses


def trl_sft(folder: str, parts: int):
  from datasets import Dataset
  from trl import SFTConfig, SFTTrainer

  generator = torch.Generator().manual_seed(1)
  shape = ((s.WARMUP + s.STEPS) * size.batch, size.seq)
  rows = Dataset.from_dict({"input_ids": torch.randint(4, size.vocab, shape, generator=generator).tolist()})
  return train(lambda arguments, clock: SFTTrainer(
      model=make_model(), args=SFTConfig(**arguments), train_dataset=rows, processing_class=make_tokenizer(),
      callbacks=[clock]), folder, size.batch, parts, max_length=size.seq)


def trl_dpo(folder: str, parts: int):
  from datasets import Dataset
  from trl import DPOConfig, DPOTrainer

  rng, half, n = random.Random(1), size.pair_seq // 2, (s.WARMUP + s.STEPS) * size.pairs
  sides = {side: [" " + s.text(rng, half - 1) for _ in range(n)] for side in ("chosen", "rejected")}
  rows = Dataset.from_dict({"prompt": [s.text(rng, half) for _ in range(n)], **sides})
  return train(lambda arguments, clock: DPOTrainer(
      model=make_model(), ref_model=make_model(), args=DPOConfig(**arguments), train_dataset=rows,
      processing_class=make_tokenizer(), callbacks=[clock]), folder, size.pairs, parts,
      max_length=size.pair_seq, beta=0.1)


def trl_grpo(folder: str, parts: int):
  from datasets import Dataset
  from trl import GRPOConfig, GRPOTrainer

  rng, n = random.Random(1), (s.WARMUP + s.STEPS) * size.prompts
  rows = Dataset.from_dict({"prompt": [s.text(rng, size.prompt_len) for _ in range(n)]})

  def reward(completions, completion_ids=None, **_):
    return [s.reward(tokens) for tokens in completion_ids]

  return train(lambda arguments, clock: GRPOTrainer(
      model=make_model(), reward_funcs=reward, args=GRPOConfig(**arguments), train_dataset=rows,
      processing_class=make_tokenizer(), callbacks=[clock]), folder, size.prompts * size.group, parts,
      num_generations=size.group,
      max_completion_length=size.new, generation_kwargs={"min_new_tokens": size.new}, temperature=1.0, beta=0.0)


def main() -> None:
  case = sys.argv[1]
  if case == "memory":
    return memory(*map(int, sys.argv[2:]))
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  more, parts = {}, 1
  with tempfile.TemporaryDirectory() as folder:
    if case.startswith("trl"):
      import trl

      versions["trl"] = trl.__version__
      start, most = {"trl_sft": (trl_sft, size.batch), "trl_dpo": (trl_dpo, size.pairs),
                     "trl_grpo": (trl_grpo, size.prompts)}[case]
      (model, marks, losses), parts = fitting(lambda parts: start(folder, parts), most)
    elif case == "hf_generate":
      model, marks, losses = generate()
    elif case == "hf_rollouts":
      model, marks, tokens = rollouts()
      more, losses = dict(tokens=tokens), []
    else:
      (model, marks, losses), parts = fitting(lambda parts: plain_loop(case == "hf_compile", parts=parts), size.batch)
  peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
  if DEVICE == "cuda":
    peak_mb = torch.cuda.max_memory_allocated() // 2**20
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=losses, versions=versions,
      micro_batches=parts, parameters=sum(p.numel() for p in model.parameters()), peak_mb=peak_mb, **more)))


if __name__ == "__main__":
  main()
