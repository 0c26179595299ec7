"""Weft's side of benchmarks/parity: `python -m trainer --config=benchmarks/parity/weft_config.py:FOLDER[,FILE]`.

FOLDER holds settings.json; FILE (rows.jsonl) is trained. Writes, for the peer, what each step trains.
"""

import json
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from benchmarks.parity import rows
from input_pipeline.examples.roles import MISMATCHED
from trainer.callbacks import Callback
from trainer.config import defaults, source, strategy


def get_config(arg: str) -> ConfigDict:
  """`arg`: the folder, and maybe another file in it."""
  folder, _, file = arg.partition(",")
  s = json.loads((Path(folder) / "settings.json").read_text())
  c = defaults()
  c.seed = s["seed"]
  c.model.hf = s["model"]
  c.strategy = strategy("sft" if s["part"] in ("lora", "bf16") else s["part"])
  if s["part"] == "lora":
    c.model.lora.peft, c.model.lora.rank, c.model.lora.alpha = f"{folder}/adapter", rows.RANK, float(rows.ALPHA)
    c.model.lora.targets = ("blocks/attn/[qkvo]/kernel", "blocks/mlp/.*/kernel")
  if s["part"] == "grpo":
    c.strategy.kl_coef = 0.0
  if "beta" in s:
    c.strategy.beta = s["beta"]
  if "center" in s:
    c.strategy.center_rewards_coefficient = s["center"]
  c.input.sources.main = source(type="jsonl", path=f"{folder}/{file or 'rows.jsonl'}")
  if s["part"] != "seq":  # one example a row, as TRL has them without packing; nothing is cut
    c.input.packing, c.input.over_long = "none", "error"
  c.batch_size, c.seq_len, c.total_steps, c.log_steps = s["batch_size"], s["seq_len"], s["steps"], 1
  o = c.optimizer
  o.learning_rate, o.b1, o.b2, o.eps, o.clip_norm = s["learning_rate"], s["b1"], s["b2"], s["eps"], s["clip_norm"]
  # transformers decays embeddings, too.
  o.weight_decay, o.wd_mults = s["weight_decay"], ((r".*(scale|bias)$", 0.0),)
  c.schedule = dict(name="cosine", warmup_percent=0.0, floor=0.0)
  c.precision.params, c.precision.compute = "float32", s["compute"]
  c.ckpt_percent = 0.0
  c.report = False
  if not file:
    c.callbacks.order = dict(type="benchmarks.parity.weft_config.Order", folder=folder)
  return c


class Order(Callback):
  """Writes what each step trains.

  For grpo advantages.json: those of the first step by the text of prompt and response. For others order.json: of each
  step the rows of rows.jsonl, and for kto whose completions stand beside theirs. And for sft tokens.jsonl: each row as
  token ids, with labels as TRL has them: for what Weft trains, and for what the template writes behind it.
  """

  def __init__(self, folder: str):
    self._folder = Path(folder)

  def on_train_begin(self, run):
    if run.config.strategy.name == "grpo":
      batch = run.data.batch(0)
      (self._folder / "advantages.json").write_text(json.dumps({
          run.tokenizer.decode(tokens[segments > 0].tolist()): float(advantages[0]) for tokens, segments, advantages in
          zip(batch["tokens"], batch["segment_ids"], batch["advantages"], strict=True)}))
      return
    asked = [json.loads(line) for line in (self._folder / "rows.jsonl").read_text("utf-8").splitlines()]
    order, tokens = [], {}
    for step in range(run.total_steps):
      batch = run.data.batch(step)
      order.append([])
      for at in range(len(batch["tokens"])):
        row = {name: batch[name][at] for name in ("tokens", "segment_ids", "loss_weights")}
        text = run.tokenizer.decode(row["tokens"][row["segment_ids"] > 0].tolist())
        (number,) = (i for i, one in enumerate(asked) if one["prompt"][-1]["content"] in text)
        order[-1].append({"row": number})
        if run.config.strategy.name == "kto":
          segment = 1 + batch["segment_roles"][at].tolist().index(MISMATCHED)
          text = run.tokenizer.decode(row["tokens"][row["segment_ids"] == segment].tolist())
          said = {i: one["completion"][-1]["content"] for i, one in enumerate(asked)}
          order[-1][-1]["other"] = max((i for i in said if said[i] in text), key=lambda i: len(said[i]))
        tokens[number] = with_labels(row)
    (self._folder / "order.json").write_text(json.dumps(order))
    if run.config.strategy.name == "sft":
      (self._folder / "tokens.jsonl").write_text("".join(json.dumps(tokens[i]) + "\n" for i in sorted(tokens)))


def with_labels(row: dict) -> dict[str, list[int]]:
  """A row as token ids with labels, -100 where nothing is trained; what follows the last trained token is, too."""
  there = row["segment_ids"] > 0
  ids, weights = row["tokens"][there], row["loss_weights"][there]
  trained = (weights > 0) | (np.arange(len(ids)) > weights.nonzero()[0].max(initial=-1))
  return {"input_ids": ids.tolist(), "labels": np.where(trained, ids, -100).tolist()}
