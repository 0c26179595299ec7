"""Weft's side of benchmarks/speed: `python -m trainer --config=benchmarks/speed/weft_config.py:CASE,FOLDER`.

    python -m benchmarks.speed.weft_config FOLDER

writes the data that it reads.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

from ml_collections import ConfigDict

from benchmarks.speed import sizes as s
from benchmarks.speed.sizes import CHOSEN as size
from trainer.callbacks import Callback
from trainer.config import keys as config_lib


def get_config(arg: str) -> ConfigDict:
  """`arg`: the case, and the folder that `write_data` has filled."""
  case, folder = arg.split(",")
  c = config_lib.defaults()
  c.tokenizer.type, c.tokenizer.path, c.tokenizer.add_bos, c.tokenizer.add_eos = "hf", folder, False, case == "dpo"
  c.input.sources.main = config_lib.source(type="jsonl", path=f"{folder}/{case}.jsonl")
  if case in ("seq", "sft"):
    c.input.packing = "none"
  m = c.model
  m.num_layers, m.hidden_size, m.intermediate_size, m.tie_embeddings = size.layers, size.hidden, size.ffn, False
  m.num_heads, m.num_kv_heads, m.head_dim = size.heads, size.kv_heads, size.head_dim
  p = c.precision
  if size.precision != "float32":
    p.compute = "bfloat16"
  if size.precision == "bfloat16":
    p.params, p.stochastic_rounding, p.moments, c.remat = "bfloat16", True, "bfloat16", "full"
  o = c.optimizer
  o.learning_rate, o.b1, o.b2, o.weight_decay, o.clip_norm = s.LEARNING_RATE, s.B1, s.B2, s.WEIGHT_DECAY, s.CLIP
  c.schedule = dict(name="constant", warmup_percent=0.0)
  c.batch_size, c.seq_len, c.total_steps, c.log_steps = size.batch, size.seq, s.WARMUP + s.STEPS, 1
  if case == "sft":
    c.strategy = config_lib.strategy("sft")
  if case == "dpo":
    c.strategy = config_lib.strategy("dpo", loss={"sigmoid": 1.0}, beta=0.1)
    # A row holds a pair, whose sides share the prompt, which is half of each.
    c.batch_size, c.seq_len = size.pairs, 2 * size.pair_seq - (size.pair_seq // 2 - 1)
  if case == "grpo":
    c.strategy = config_lib.strategy("grpo")
    # A row holds the completions of a prompt, which share it.
    c.batch_size, c.seq_len = size.prompts, size.prompt_len + size.group * (size.new + 1)
    r = c.rollout
    r.num_prompts, r.group_size, r.max_new_tokens = size.prompts, size.group, size.new
    r.batch_size = size.prompts * size.group
    r.rewards.different = config_lib.reward(type="benchmarks.speed.weft_config.different")
  c.ckpt_percent = 0.0
  c.callbacks.clock = dict(type="benchmarks.speed.weft_config.Clock", path=f"{folder}/clock.json")
  return c


def write_data(folder: Path) -> None:
  """A tokenizer whose tokens are words, and rows of random words for every case."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(s.words())}, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(list(s.SPECIAL))
  tokenizer.save(str(folder / "tokenizer.json"))
  names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  rng, steps = random.Random(1), s.WARMUP + s.STEPS + 1
  half = size.pair_seq // 2
  rows = {
      "seq": [dict(text=s.text(rng, size.seq)) for _ in range(steps * size.batch)],
      "dpo": [dict(prompt=s.text(rng, half), chosen=" " + s.text(rng, half - 1), rejected=" " + s.text(rng, half - 1))
              for _ in range(steps * size.pairs)],
      "grpo": [dict(prompt=s.text(rng, size.prompt_len)) for _ in range(steps * size.prompts)],
  }
  rows["sft"] = rows["seq"]
  for case, records in rows.items():
    (folder / f"{case}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def different(completion_ids: list[list[int]]) -> list[float]:
  """The reward of benchmarks/speed/sizes.py."""
  return [s.reward(tokens) for tokens in completion_ids]


class Clock(Callback):
  """Writes when each step was there, as the peers do."""

  def __init__(self, path: str):
    self._path, self._marks, self._losses, self._other = Path(path), [], [], {}

  def on_train_begin(self, run):
    self._marks.append(time.perf_counter())

  def on_step_end(self, run, step, metrics):
    self._marks.append(run.chrono.ends.of(step).result())
    self._losses.append(float(metrics["loss"]))
    self._other = {k: metrics[k] for k in ("completions/mean_length", "trained_tokens") if k in metrics}

  def on_train_end(self, run):
    import jax

    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.state["params"]))
    flops = run.model.flops_per_token(size.seq) * size.batch * size.seq
    seconds = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
    self._path.write_text(json.dumps(dict(
        first_step_at=time.time() - time.perf_counter() + self._marks[1], step_seconds=seconds, losses=self._losses,
        parameters=parameters, versions={"jax": jax.__version__}, device=jax.devices()[0].device_kind,
        limit_seconds=flops / run.chrono.peak, peak_mb=peak_mb(), **self._other)))


def peak_mb() -> int:
  """Of the GPU's memory, the most that was in use; on CPU, of the process's."""
  import jax

  stats = jax.local_devices()[0].memory_stats()
  if stats:
    return stats["peak_bytes_in_use"] // 2**20
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
  write_data(Path(sys.argv[1]))
