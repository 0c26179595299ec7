"""The model section of a config: what is refused, with which words, and what is derived."""

import re

import pytest

from models import api
from tests.models.common import T, config, make
from trainer.errors import ConfigError

BAD = [
    (dict(num_kv_heads=3), r"num_kv_heads: found 3.*Allowed: \[1, 2, 4\]"),
    (dict(hidden_size=18), "head_dim is not set and hidden_size=18"),
    (dict(head_dim=5), "RoPE rotates pairs, but head_dim=5"),
    (dict(rope_fraction=0.25), "rotates 1 dimensions"),
    (dict(rope_fraction=0.0), "rope_fraction: found 0.0"),
    (dict(norm="rms"), "norm: found 'rms', allowed: rmsnorm, layernorm. Did you mean 'rmsnorm'"),
    (dict(norm_position="before"), "norm_position: found 'before', allowed: pre, post, sandwich"),
    (dict(norm_position="post", parallel_blocks=True), "found norm_position='post', allowed: 'pre'"),
    (dict(qk_norm_over="heads"), "qk_norm_over: found 'heads', allowed: head, each_head, all, unscaled"),
    (dict(activation="mish"), "activation: found 'mish', allowed: swiglu"),
    (dict(positions="alibi"), "positions: found 'alibi', allowed: rope, learned, none"),
    (dict(positions="learned"), "needs model.max_positions"),
    (dict(max_positions=8), "seq_len is 12, but model.max_positions is 8"),
    (dict(layer_pattern=("local",)), "need model.window"),
    (dict(layer_pattern=("sliding",)), "layer_pattern: found 'sliding', allowed: global, local, nope, chunked, delta"),
    (dict(layer_pattern=("chunked",)), "chunked layers need model.attention_chunk: how many tokens a chunk has"),
    (dict(layer_pattern=("chunked",), attention_chunk=0), "attention_chunk: found 0"),
    (dict(query_temperature=dict(scale=-0.1)), "query_temperature.scale: found -0.1 with positions='rope'"),
    (dict(query_temperature=dict(scale=0.1), positions="none"), "query_temperature.scale: found 0.1 with"),
    (dict(nope_temperature=dict(scale=0.1)), r"nope_temperature.scale: found 0.1 with layer_pattern=\('global',\)"),
    (dict(nope_temperature=dict(scale=-0.1), layer_pattern=("nope",)), "nope_temperature.scale: found -0.1"),
    (dict(nope_temperature=dict(scale=0.1, floor=0), layer_pattern=("nope",)), "nope_temperature.floor: found 0"),
    (dict(layer_pattern=("delta",), delta=dict(num_key_heads=3)), "3, which does not divide num_value_heads=4"),
    (dict(layer_pattern=("delta",), delta=dict(conv_width=0)), "delta.conv_width: found 0"),
    (dict(layer_pattern=()), "layer_pattern is empty"),
    (dict(layer_pattern=("local",), window=0), "window: found 0"),
    (dict(num_layers=0), "num_layers: found 0"),
    (dict(neftune_alpha=-0.1), "neftune_alpha: found -0.1, allowed: 0 or more"),
    (dict(lora=dict(rank=-1)), "lora.rank: found -1"),
    (dict(lora=dict(rank=2, dropout=1.0)), "model.lora: found dropout=1.0, alpha=.*; allowed: 0 <= dropout < 1, alpha"),
    (dict(lora=dict(rank=2, alpha=0.0)), "model.lora: found dropout=0.0, alpha=0.0"),
    (dict(lora=dict(trainable_token_indices=(1,))), "trainable_token_indices is set, but model.lora.rank is 0"),
    (dict(layer_pattern=("mamba",), mamba=dict(min_step=-0.1)), "mamba.min_step: found -0.1, allowed: 0 .there is no"),
    (dict(layer_pattern=("mamba",), mamba=dict(num_heads=4, num_groups=3)), "num_groups: found 3, which does not divi"),
    (dict(layer_pattern=("mamba",), mamba=dict(conv_width=0)), "mamba.conv_width: found 0"),
    (dict(rope_scaling=dict(type="yarn", factor=4.0, original_positions=8, attention_factor=-1.0)), "attention_factor"),
    (dict(attention="flash"), "attention: found 'flash', allowed: auto, blocked"),
    (dict(attention_block=0), "attention_block: found 0"),
    (dict(vocab_chunk=0), "vocab_chunk: found 0"),
    (dict(final_logit_cap=0.0), "final_logit_cap: found 0.0"),
    (dict(dropout=1.0), "dropout: found 1.0"),
    (dict(rope_scaling=dict(type="linear", factor=0.5)), "rope_scaling.factor: found 0.5, allowed: 1 or more"),
    (dict(rope_scaling=dict(type="llama3", factor=8.0, original_positions=8, low_frequency_factor=5.0)),
     "allowed: 0 < low_frequency_factor <= high_frequency_factor"),
    (dict(rope_scaling=dict(type="longrope", original_positions=8, short_factors=(1.0,), long_factors=(2.0,))),
     r"short_factors: found \(1.0,\), allowed: numbers above 0, one for each of the 2 pairs"),
    (dict(rope_scaling=dict(type="longrope", factor=4.0, original_positions=1, short_factors=(1.0,) * 2,
                            long_factors=(2.0,) * 2)), "original_positions: found 1, allowed: 2 or more"),
    (dict(rope_scaling=dict(type="yarn", factor=4.0, original_positions=8, beta_fast=1.0, beta_slow=2.0)),
     "attention_factor above 0, beta_fast above beta_slow"),
    (dict(moe=dict(num_experts=-1)), "moe.num_experts: found -1"),
    (dict(moe=dict(num_experts=2, experts_per_token=3)), "experts_per_token: found 3, allowed: 1 to num_experts=2"),
    (dict(moe=dict(num_experts=2, expert_size=0)), "moe.expert_size: found 0"),
    (dict(moe=dict(num_experts=2), activation="xielu"), "found activation='xielu', which experts cannot have"),
    (dict(layer_pattern=("global", "moe")), r"moe.num_experts: found 0 .* allowed: 1 or more, for its layers of type"),
    (dict(layer_pattern=("global", "mlp"), moe=dict(num_experts=2)), "found 2 .* allowed: 0, or layers of type 'moe'"),
    (dict(layer_pattern=("global", "moe"), moe=dict(num_experts=2, layer_step=2)), "moe.layer_step: found 2 .*: 1"),
    (dict(layer_pattern=("global", "mlp"), parallel_blocks=True), "parallel_blocks: found True .*: False"),
    (dict(moe=dict(num_experts=2, shared_gate=True)), "set model.moe.shared_size"),
    (dict(moe=dict(num_experts=2, balance_loss=-0.1)), "moe.balance_loss: found -0.1"),
    (dict(moe=dict(num_experts=4, dense_layers=3)), "dense_layers: found 3, allowed: 0 to 2"),
    (dict(moe=dict(num_experts=4, layer_step=0)), "layer_step: found 0"),
    (dict(moe=dict(num_experts=4, layer_step=4)), "layer_step: found 4, by which no layer of the 3 after the first 0"),
    (dict(moe=dict(num_experts=4, layer_step=2, dense_layers=2)), "no layer of the 3 after the first 2 "),
    (dict(moe=dict(num_experts=6, groups=4)), "groups: found 4, of 6 experts"),
    (dict(moe=dict(num_experts=8, groups=4, groups_used=5)), "groups_used: found 5 of 4 groups"),
    (dict(moe=dict(num_experts=8, experts_per_token=3, groups=4)), "at least experts_per_token=3 experts"),
    (dict(moe=dict(num_experts=4, scores="sigmoid", softmax="after_topk")), "'after_topk' with scores='sigmoid'"),
    (dict(moe=dict(num_experts=4, choice_bias_rate=0.1)), "choice_bias_rate: found 0.1, allowed: 0, or above it with"),
    (dict(latent=dict(kv_rank=8, q_rank=-1)), "latent.q_rank: found -1"),
    (dict(latent=dict(kv_rank=8, value_dim=0)), "latent.value_dim: found 0"),
    (dict(global_attention=dict(head_dim=8)), "attention_scale is not set, and heads of global layers"),
    (dict(moe=dict(num_experts=4, beside_mlp=True)), "beside_mlp: .* found norm_position='pre'"),
    (dict(moe=dict(num_experts=4, beside_mlp=True, dense_layers=1), norm_position="sandwich"), "dense_layers=1"),
    (dict(kv_shared_layers=3), "kv_shared_layers: found 3, allowed: 0, .* up to 2"),
    (dict(kv_shared_layers=1, layer_pattern=("local", "local", "global"), window=3), "one of type 'global', for which"),
    (dict(latent=dict(kv_rank=8, index_topk=4)), "q_rank: found 0 with model.latent.index_topk=4"),
    (dict(latent=dict(kv_rank=8, q_rank=4, index_topk=-1)), "index_topk: found -1"),
    (dict(latent=dict(kv_rank=8, q_rank=4, index_topk=4, index_heads=0)), "index_heads: found 0"),
    (dict(latent=dict(kv_rank=8, q_rank=4, index_topk=4, index_head_dim=8)), "found 8, of which rope_dim=16"),
    (dict(latent=dict(kv_rank=8, q_rank=4, index_topk=4, index_shared_layers=(0,))), "from 1 to 2: the first layer"),
    (dict(latent=dict(kv_rank=8, q_rank=4, index_topk=4, index_shared_layers=(1, 1))), "each once, from 1 to 2"),
    (dict(kv_shared_layers=1, latent=dict(kv_rank=8)), "without latent.kv_rank"),
    (dict(double_wide_mlp=True), "double_wide_mlp is set, but kv_shared_layers"),
    (dict(per_layer_size=-1), "per_layer_size: found -1"),
    (dict(per_layer_vocab=8), "per_layer_vocab: found 8, allowed: unset, or, where per_layer_size is above 0"),
    (dict(per_layer_vocab=8, per_layer_size=4, vocab_size=7), "per_layer_vocab: found 8, .*vocab_size=7"),
    (dict(altup=dict(num_inputs=1)), r"altup: found num_inputs=1, coef_clip=None; allowed: 0 .* or 2 or more"),
    (dict(altup=dict(num_inputs=2, coef_clip=0.0)), "coef_clip=0.0; allowed: .* a number above 0"),
    (dict(altup=dict(num_inputs=2), layer_scale=True), "num_inputs is 2, which goes with neither layer_scale nor"),
    (dict(altup=dict(num_inputs=2), parallel_blocks=True), "altup.num_inputs: found 2; allowed: 0, or above it where"),
    (dict(laurel_rank=4, layer_pattern=("global", "mlp")), r"laurel_rank: found 4; .*\('global', 'mlp'\)"),
    (dict(laurel_rank=-1), "laurel_rank: found -1; allowed: 0"),
    (dict(activation_sparsity=(0.5, 0.5)), r"found \(0.5, 0.5\), allowed: \(\), or for each of the 3 layers"),
    (dict(activation_sparsity=(1.0, 0, 0)), "a number from 0 to below 1"),
    (dict(activation_sparsity=(0.5, 0, 0), activation="gelu"), "needs a gated activation .* found activation='gelu'"),
    (dict(activation_sparsity=(0.5, 0, 0), moe=dict(num_experts=2)), "no experts; found .*num_experts=2"),
    (dict(per_layer_size=4, activation="gelu"), "with a gated activation .* found 'gelu'"),
    (dict(global_attention=dict(head_dim=0)), "global_attention.head_dim: found 0"),
    (dict(global_attention=dict(head_dim=4, num_kv_heads=3)), "num_kv_heads: found 3, which does not divide"),
    (dict(global_attention=dict(head_dim=4, rope_fraction=0.25)), "rope_fraction=0.25 turns: 0"),
    (dict(global_attention=dict(head_dim=5), attention_scale=1.0), "found head_dim=5, .* Allowed: an even head_dim"),
    (dict(global_attention=dict(head_dim=4), rope_interleaved=True), "allowed with it: .*rope_interleaved=False"),
    (dict(latent=dict(kv_rank=8), num_kv_heads=2), r"num_kv_heads: found 2 with latent attention .*allowed: 4"),
    (dict(latent=dict(kv_rank=8), layer_pattern=("local",), window=3), r"found \('local',\) with latent attention"),
    (dict(moe=dict(num_experts=2, softmax="none")), "moe.softmax: found 'none', allowed: before_topk, after_topk"),
]


@pytest.mark.parametrize("changed,message", BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_configs_are_refused_with_what_is_allowed(changed, message):
  with pytest.raises(ConfigError, match=message):
    api.validate(config(**changed), T)


def test_bad_vocabulary_and_remat():
  with pytest.raises(ConfigError, match="vocab_size: found 40, but the tokenizer has 50"):
    make(vocab_size=40)
  with pytest.raises(ConfigError, match="remat: found 'some', allowed: auto, none, full, attention, .*dots"):
    make(remat="some")


def test_derived_values_come_with_their_reason():
  reasons = "\n".join(make().reasons)
  for expected in (r"num_kv_heads = 4: ", r"head_dim = 4: ", r"attention_scale = 0\.5: ", r"vocab_size = 56: .* 50"):
    assert re.search(expected, reasons)
  assert not make(num_kv_heads=4, head_dim=4, attention_scale=0.5, vocab_size=50).reasons
