"""What tests/models/cpu/test_bfloat16.py runs in a process of its own: gradients, and a further token, in bfloat16."""

import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.common import BATCH, GEMMA, LLAMA, OLMO, TOKENS, make, random_params
from trainer.strategies import logprobs

# Name: (remat, chunk of the vocabulary, of the model). Embeddings are tied but for OLMo's.
CASES = {
    "llama": ("attention_mlp", 16, LLAMA),
    "gemma": ("full", 1024, GEMMA),
    "olmo": ("dots", 1024, dict(OLMO, scan_layers=False)),
    "tiles": ("none", 1024, dict(attention_block=1, window=3, layer_pattern=("local", "global"))),
    # All of them: in bfloat16 tokens may choose others.
    "experts": ("attention_mlp", 1024, dict(moe=dict(num_experts=4, experts_per_token=4, expert_size=8))),
    "adapters": ("attention", 1024, dict(lora=dict(rank=2))),
}
# The norm of what differs, as a share of that of what it should be.
ERROR = 0.15


def results(name: str, dtype) -> dict[str, jax.Array]:
  """Gradients of a loss, and hidden states of one more token."""
  remat, chunk, spec = CASES[name]
  model = make(remat, dtype, num_layers=2, **spec)
  params = random_params(model)

  def loss(params):
    stats = logprobs.token_stats(model.apply(params, BATCH).hidden, model.unembedding(params), TOKENS, chunk=chunk)
    return -stats.logprob.mean() + 0.1 * stats.entropy.mean()

  leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
  hidden, _ = jax.jit(model.decode)(model.decoding_params(params), np.arange(3, dtype=np.int32), np.ones(3, bool),
                                    model.empty_cache(3, 8))
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves} | {"hidden": hidden}


def compare(name: str) -> str:
  """What differs most, and by how much."""
  expected, found = results(name, jnp.float32), results(name, jnp.bfloat16)
  norms = {key: float(jnp.linalg.norm(x)) for key, x in expected.items()}
  # Some gradients are next to nothing.
  least = 0.01 * max(norms.values())
  worst = {key: float(jnp.linalg.norm(found[key].astype(jnp.float32) - x)) / max(norms[key], least)
           for key, x in expected.items()}
  key = max(worst, key=worst.__getitem__)
  assert worst[key] < ERROR, (name, key, worst[key])
  return f"{name}: {key} {worst[key]:.3f}"


if __name__ == "__main__":
  for case in sys.argv[1:]:
    try:
      print(compare(case), flush=True)
    except Exception:  # what is wrong with one says nothing of the others
      traceback.print_exc()
