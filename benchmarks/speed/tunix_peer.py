"""Tunix's SFT step, in an environment of its own: prints one line of JSON.

    pip install google-tunix
    python benchmarks/speed/tunix_peer.py

Its trainer's own jitted step, in a loop that waits for each: what its loop adds is left out. In float32 alone.
"""

import json
import os
import resource
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import importlib.metadata

import jax
import numpy as np
import optax
import sizes as s
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer, utils

size = s.CHOSEN


def model_inputs(x):
  """As the SFT examples of Tunix have it."""
  real = x.input_tokens != 0
  return dict(input_tokens=x.input_tokens, input_mask=x.input_mask,
              positions=utils.build_positions_from_mask(real), attention_mask=utils.make_causal_attn_mask(real))


def main() -> None:
  config = llama.ModelConfig(
      num_layers=size.layers, vocab_size=size.vocab, embed_dim=size.hidden, hidden_dim=size.ffn, num_heads=size.heads,
      head_dim=size.head_dim, num_kv_heads=size.kv_heads, rope_theta=10_000, norm_eps=1e-6, weight_tying=False)
  model = llama.Llama3(config, rngs=nnx.Rngs(params=0))
  optimizer = optax.chain(optax.clip_by_global_norm(s.CLIP),
                          optax.adamw(s.LEARNING_RATE, b1=s.B1, b2=s.B2, weight_decay=s.WEIGHT_DECAY))
  steps = s.WARMUP + s.STEPS
  trainer = peft_trainer.PeftTrainer(model, optimizer, peft_trainer.TrainingConfig(
      eval_every_n_steps=10**9, max_steps=steps)).with_gen_model_input_fn(model_inputs)
  train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
  rng = np.random.default_rng(1)
  marks, losses = [time.perf_counter()], []
  for _ in range(steps):
    tokens = rng.integers(len(s.SPECIAL), size.vocab, (size.batch, size.seq), dtype=np.int32)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))
    out = train_step(batch)
    jax.block_until_ready((out, nnx.state(model)))
    losses.append(float(np.asarray(out[0])))
    marks.append(time.perf_counter())
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=losses,
      versions={"tunix": importlib.metadata.version("google-tunix")},
      parameters=sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
      peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
  main()
