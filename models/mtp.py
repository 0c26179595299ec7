"""Multi-token prediction: modules behind the decoder, of which the k-th predicts the token after the next k.

DeepSeek-V3 (arXiv 2412.19437), section 2.2. The k-th module gets what the module before it gave of token i (the first:
the decoder), and the embedding of token i + k; both are normalised, projected to one hidden state, and pass one block
of the form of the decoder's last layer of attention. Embedding and unembedding are the decoder's own. Each module is
given hidden states behind the norm before the unembedding, as programs that draft with published modules do (SGLang,
vLLM), and Megatron, which trains them.

B batch, T length, D hidden size, k modules.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention.context import LayerContext
from models.attention.mask import TokenIds
from models.blocks import stack_blocks, unstack
from models.layers import Linear, Scope
from models.residual import make_norm
from models.sharding.logical_axes import constrain
from models.spec import Spec
from models.spec_mtp import model_layer


def modules_spec(spec: Spec) -> Spec:
  """Of the modules' blocks: as many layers as there are modules, each like the model's last of attention."""
  last = model_layer(spec.layer_pattern, spec.num_layers)
  assert last is not None  # `make_mtp_layers`
  return dataclasses.replace(
      spec, num_layers=spec.mtp_layers, mtp_layers=0, layer_pattern=(spec.layer_type(last),),
      moe=None if spec.moe is None or not spec.moe.in_layer(last) else
      dataclasses.replace(spec.moe, dense_layers=0, layer_step=1),
      latent=None if spec.latent is None else dataclasses.replace(spec.latent, index_shared_layers=()),
      activation_sparsity=(spec.sparsity_of(last),) * spec.mtp_layers)


class Mtp(nnx.Module):
  """The modules; their arrays have a leading k."""

  def __init__(self, spec: Spec, scope: Scope):
    D = spec.hidden_size

    def of_each(make: Callable, name: str) -> Any:
      return jax.vmap(lambda k: make(dataclasses.replace(scope, layer=k) / name))(jnp.arange(spec.mtp_layers))

    norm = functools.partial(make_norm, spec)
    self.enorm, self.hnorm = of_each(norm, "enorm"), of_each(norm, "hnorm")
    self.eh_proj = of_each(functools.partial(Linear, d_in=2 * D, d_out=D, std=spec.init_std, bias=False,
                                             names=(None, None)), "eh_proj")
    self.blocks = stack_blocks(modules_spec(spec), scope / "blocks")
    self.final_norm = of_each(functools.partial(norm, gain=spec.logit_scale), "final_norm")
    self.spec = modules_spec(spec)

  def __call__(self, hidden_BxTxD: jax.Array, batch: dict, embed: Callable, ropes: dict, remat: Callable,
               key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(hidden states [k, B, T, D], each after its module's final norm; statistics of the modules' experts, stacked).

    A token whose segment ends before the token that is read is padding to the module.

    Args:
      hidden_BxTxD: of the decoder, after its final norm.
      batch: its `tokens` and `segment_ids` are read.
      embed: from token ids to what would enter the first layer.
      ropes: rotations by the type of layer, at the tokens' own positions.
      remat: a `remat_policy`.
      key: for dropout; None: none.
    """
    s, given, stats = self.spec, [], []
    parts = [unstack(s, part) for part in (self.enorm, self.hnorm, self.eh_proj, self.blocks, self.final_norm)]
    for k, (enorm, hnorm, eh_proj, block, final_norm) in enumerate(zip(*parts, strict=True)):
      read_BxT, segments_BxT = ahead(batch["tokens"], batch["segment_ids"], k + 1)
      layer_key = None if key is None else jax.random.fold_in(key, k)

      def module(hidden_BxTxD, modules, read_BxT=read_BxT, segments_BxT=segments_BxT, layer_key=layer_key):
        enorm, hnorm, eh_proj, block, final_norm = modules
        both_BxTx2D = jnp.concatenate([enorm(embed(read_BxT)), hnorm(hidden_BxTxD)], axis=-1)
        x_BxTxD = constrain(eh_proj(both_BxTx2D, layer_key), "batch", "stream", "embed")
        kind = s.layer_type(0)
        context = LayerContext(TokenIds(segments_BxT), ropes.get(kind), s.window_of(0), layer_key)
        x_BxTxD, stats, _, _ = block(x_BxTxD, context, parts=s.parts_of(0), sparsity=s.sparsity_of(0))
        return final_norm(x_BxTxD), stats

      hidden_BxTxD, of_experts = remat(module, False)(hidden_BxTxD, (enorm, hnorm, eh_proj, block, final_norm))
      given.append(hidden_BxTxD)
      stats.append(of_experts)
    return jnp.stack(given), {name: jnp.stack([found[name] for found in stats]) for name in stats[0]}


def ahead(tokens_BxT: jax.Array, segment_ids_BxT: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """(The token k places behind each, its segment; 0 where that token is of another segment, or beyond the row)."""
  behind_T = jnp.arange(tokens_BxT.shape[1]) < tokens_BxT.shape[1] - k
  same_BxT = behind_T & (jnp.roll(segment_ids_BxT, -k, axis=1) == segment_ids_BxT)
  return jnp.roll(tokens_BxT, -k, axis=1), jnp.where(same_BxT, segment_ids_BxT, 0)
