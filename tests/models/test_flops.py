"""Operations of models, counted by hand, by a loop, and by the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import flops
from models.attention import blocked
from tests.models.common import (
  DEEPSEEK_MOE,
  GEMMA3N,
  GEMMA4,
  GEMMA4_SHARED,
  GRANITE4,
  INDEXED,
  LLAMA,
  LLAMA4_MOE,
  QWEN3_NEXT,
  make,
)


def test_flops_against_a_hand_count():
  model = make(**LLAMA, num_layers=2, window=4, layer_pattern=("local", "global"))
  per_layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24  # q and o, k and v, gate, up and down
  visible = (1 + 2 + 3 + 4 * 5) / 8 + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / 8
  assert model.flops_per_token(8) == 6 * (2 * per_layer + 16 * 56) + 12 * 4 * 4 * visible
  assert model.flops_per_token(8, document_length=2) < model.flops_per_token(8)


def test_flops_of_modules_that_predict_further_ahead_against_a_hand_count():
  """Each is a layer more, a projection of two hidden states and the unembedding; the embedding is looked up."""
  model = make(**LLAMA, num_layers=2, mtp_layers=2)
  layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24
  assert model.flops_per_token(8) == 6 * (4 * layer + 2 * 32 * 16 + 3 * 16 * 56) + 12 * 4 * 4 * 4 * 4.5


def test_flops_of_chunks_and_of_experts_in_some_layers_against_a_hand_count():
  model = make(**LLAMA4_MOE)  # layers 0, 2, 4 see chunks and have an MLP; 1 and 3 see all and have experts
  attention = 2 * 16 * 16 + 2 * 16 * 8
  experts = 16 * 4 + 2 * 3 * 16 * 6  # the router, one of four experts and the shared one
  weights = 5 * attention + 3 * 3 * 16 * 24 + 2 * experts + 16 * 56
  visible = 3 * (2 * (1 + 2 + 3) + 1 + 2) / 8 + 2 * (8 + 1) / 2
  assert model.flops_per_token(8) == pytest.approx(6 * weights + 12 * 4 * 4 * visible)


def test_flops_of_heads_of_two_sizes_against_a_hand_count():
  model = make(**GEMMA4)  # layers 0, 1, 3, 4 local, 2 global
  local = 2 * 16 * 24 + 2 * 16 * 12  # q and o, k and v
  of_global = 2 * 16 * 32 + 16 * 8  # the key is the value
  weights = 4 * local + of_global + 5 * 3 * 16 * 24 + 16 * 56
  visible = 4 * 6 * (1 + 2 + 3 * 6) / 8 + 8 * (8 + 1) / 2
  assert model.flops_per_token(8) == pytest.approx(6 * weights + 12 * 4 * visible)


def test_flops_of_shared_keys_and_values_against_a_hand_count():
  """Their scores count all the same; the table of each layer's embeddings is looked up."""
  model = make(**GEMMA4_SHARED)  # local and global in turns, of which the last three are global, local, global
  local, of_global = (2 * 16 * 24, 2 * 16 * 12), (2 * 16 * 32, 16 * 8)  # q and o, then k and v
  weights = 4 * local[0] + 3 * local[1] + 4 * of_global[0] + 2 * of_global[1] + (5 + 3 * 2) * 3 * 16 * 24
  weights += 16 * 8 * 6 + 8 * (2 * 16 * 6) + 16 * 56  # of each layer's embeddings; logits
  visible = 4 * 6 * (1 + 2 + 3 * 6) / 8 + 4 * 8 * (8 + 1) / 2
  assert model.flops_per_token(8) == pytest.approx(6 * weights + 12 * 4 * visible)


def test_flops_of_streams_against_a_hand_count():
  """The router is passed twice; streams are mixed before each layer."""
  model = make(**GEMMA3N)
  weights = 7 * (2 * 16 * 24 + 3 * 16 * 24 + 2 * 16 * 5 + 2 * 16 * 6) + 5 * 2 * 16 * 12 + 16 * 56
  weights += 16 * 7 * 6 + 2 * 2 * 16 * 16  # of each layer's embeddings; of streams, at both ends
  mixing = 7 * (2 * 16 * 3 + 3 * 9 + 3 * 3 + 9 * 16)
  visible = 4 * 6 * (1 + 2 + 3 * 6) / 8 + 3 * 6 * (8 + 1) / 2
  assert model.flops_per_token(8) == pytest.approx(6 * (weights + mixing) + 12 * 4 * visible)


def test_flops_of_states_against_a_hand_count():
  """A state is read, added to, and read again; a backward pass is two forward ones. No token sees another's key."""
  model = make(**QWEN3_NEXT | dict(num_layers=3))  # two delta layers, one of attention
  projections = 2 * 16 * (12 + 12 + 16 + 16 + 4 + 4 + 16) + 16 * (2 * 24 + 12 + 12 + 24) + 3 * 3 * 16 * 24
  states = 2 * 3 * (3 * 2 * 4 * 6 * 4 + 2 * 3 * (12 + 12 + 16))
  assert model.flops_per_token(8) == 6 * (projections + 16 * 56) + states + 12 * 4 * 6 * 4.5


def test_flops_of_mamba_layers_against_a_hand_count():
  """A state is added to and read."""
  model = make(**GRANITE4 | dict(num_layers=3))  # two mamba layers, one of attention
  projections = 2 * 16 * (24 + 24 + 10 + 10 + 4 + 24) + 16 * (16 + 8 + 8 + 16) + 3 * 3 * 16 * 24
  states = 2 * 3 * (2 * 2 * 4 * 5 * 6 + 2 * 3 * (24 + 10 + 10))
  assert model.flops_per_token(8) == 6 * (projections + 16 * 56) + states + 12 * 4 * 4 * 4.5


def test_flops_of_latents_against_a_hand_count():
  """Scores are over 3 + 4 dimensions, values have 5; layer 0 is dense, others use 2 of 8 experts and a shared one."""
  model = make(**DEEPSEEK_MOE)
  attention = 16 * 7 + 7 * 4 * 7 + 16 * (10 + 4) + 10 * 4 * (3 + 5) + 4 * 5 * 16
  experts = 16 * 8 + 2 * 3 * 16 * 6 + 3 * 16 * 5
  weights = 3 * attention + 3 * 16 * 24 + 2 * experts + 16 * 56
  assert model.flops_per_token(8) == 6 * weights + 3 * 6 * 4 * (7 + 5) * 4.5


def test_flops_of_chosen_keys_against_a_hand_count():
  """Three of eight keys at most are seen; two of four layers have an indexer, of 3 heads, which runs forward alone."""
  model = make(**INDEXED)
  attention = 16 * 7 + 7 * 4 * 7 + 16 * (10 + 4) + 10 * 4 * (3 + 5) + 4 * 5 * 16
  weights = 4 * (attention + 3 * 16 * 24) + 16 * 56
  visible, indexer = (1 + 2 + 6 * 3) / 8, 7 * 18 + 16 * 6 + 16 * 3
  dense = 6 * weights + 4 * 6 * 4 * (7 + 5) * visible
  assert model.flops_per_token(8) == pytest.approx(dense + 2 * 2 * (indexer + 18 * 4.5))
  assert model.flops_per_token(3) == pytest.approx(6 * weights + 4 * 6 * 4 * (7 + 5) * 2)  # where all are seen
  assert model.flops_per_token(8, document_length=3) == pytest.approx(
      6 * weights + 4 * 6 * 4 * (7 + 5) * 2 + 2 * 2 * (indexer + 18 * 2))


def test_flops_against_the_compiler(monkeypatch):
  """Within 5% of what XLA counts for products in forward and backward of a plain model."""
  monkeypatch.setattr(blocked, "MAX_UNROLLED", 1000)  # what is in a loop it counts once
  model = make(num_layers=2, hidden_size=128, intermediate_size=384, scan_layers=False, attention_block=2,
               positions="none")  # fmt: skip
  tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)

  def loss(params, tokens):
    return jnp.square(model.apply(params, dict(tokens=tokens)).hidden @ model.unembedding(params)).sum()

  counted = jax.jit(jax.grad(loss)).lower(model.abstract_params(), tokens).compile().cost_analysis()["flops"]
  np.testing.assert_allclose(model.flops_per_token(32) * 4 * 32, counted, rtol=0.05)


def test_flops_of_adapters_against_a_hand_count():
  """The frozen base has no gradient of its own: 2 operations a weight forward, 2 backward; adapters 2, 2 and 2."""
  model = make(**LLAMA, num_layers=2, positions="none", lora=dict(rank=3, targets=("attn/q", "mlp/down")))
  base = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 16 * 56
  adapters = 2 * (3 * (16 + 16) + 3 * (24 + 16))
  attended = 12 * 4 * 4 * 2 * 4.5
  assert model.flops_per_token(8) == 4 * base + 6 * adapters + attended
  whole = make(**LLAMA, num_layers=2, positions="none", lora=dict(rank=3, targets=("attn/q", "mlp/down"),
                                                                  modules_to_save=("embed/", "attn/o/")))
  assert whole.flops_per_token(8) == 4 * base + 2 * (16 * 56 + 2 * 16 * 16) + 6 * adapters + attended


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("window, kind", [(None, "global"), (1, "local"), (4, "local"), (8, "local"), (4, "chunked"),
                                          (8, "chunked")])
def test_a_query_sees_as_many_keys_as_a_loop_counts(length, window, kind):
  """Itself and those before it; of a window of W the last W, of chunks those of its own."""
  seen = [q + 1 if window is None else q % window + 1 if kind == "chunked" else min(q + 1, window)
          for q in range(length)]
  assert flops._mean_visible(length, window, kind) == pytest.approx(sum(seen) / length)


def test_documents_are_no_longer_than_rows():
  model = make(**LLAMA)
  whole = model.flops_per_token(8)
  assert model.flops_per_token(8, document_length=50) == model.flops_per_token(8, document_length=8) == whole
  # Of four tokens a query sees 2.5 keys on average, and not 4.5.
  assert whole - model.flops_per_token(8, document_length=4) == pytest.approx(
      6 * model.spec.num_heads * 2 * model.spec.head_dim * 2.0 * model.spec.num_layers)
