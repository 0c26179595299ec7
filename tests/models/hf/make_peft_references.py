"""Writes tests/models/hf/peft_references: tiny random models with adapters, and their logits as PEFT computes them.

Needs torch, transformers and peft, which nothing else here does:

    python tests/models/hf/make_peft_references.py [CASE …]
"""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

OUT = Path(__file__).resolve().parent / "peft_references"
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (2, 9)))

LLAMA = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=32)
TIED = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
LLAMA_SCORE = LlamaConfig(**{**LLAMA.to_dict(), "num_labels": 1, "pad_token_id": 0})
GPT2 = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
GEMMA4 = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
              head_dim=4, global_head_dim=8, sliding_window=5, rms_norm_eps=0.05, hidden_size_per_layer_input=0,
              max_position_embeddings=32, final_logit_softcapping=10.0)


def gemma4(kinds: str, **changes) -> Gemma4TextConfig:
  """`kinds`: a letter a layer, s for one with a window."""
  types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
  return Gemma4TextConfig(**GEMMA4 | dict(num_hidden_layers=len(kinds), layer_types=types) | changes)


GEMMA4_MOE = gemma4("sfsf", attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=4,
                    top_k_experts=2, moe_intermediate_size=8)
GEMMA4_SHARED = gemma4("sfsf", num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=6,
                       vocab_size_per_layer_input=40)

GEMMA3N = Gemma3nTextConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    sliding_window=5, rms_norm_eps=0.05, max_position_embeddings=32, num_hidden_layers=4, num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=32, laurel_rank=5, activation_sparsity_pattern=[0.6, 0.6, 0.0, 0.0], altup_num_inputs=3)
EXPERTS = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
               head_dim=8, num_experts_per_tok=2, max_position_embeddings=32, tie_word_embeddings=False)
QWEN3_MOE = Qwen3MoeConfig(**EXPERTS, num_experts=3, moe_intermediate_size=8, intermediate_size=8)
GLM_MOE_DSA = GlmMoeDsaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
    first_k_dense_replace=1, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, index_topk=3,
    index_n_heads=8, index_head_dim=6, max_position_embeddings=32)
GPT_OSS = GptOssConfig(**EXPERTS, num_local_experts=3, intermediate_size=8, sliding_window=5)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES = {
    "llama": (LLAMA, LlamaForCausalLM, dict(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])),
    "llama_rslora": (LLAMA, LlamaForCausalLM, dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["o_proj"])),
    "gpt2": (GPT2, GPT2LMHeadModel, dict(r=3, lora_alpha=6, fan_in_fan_out=True,
                                         target_modules=["c_attn", "mlp.c_proj"])),
    # The embedding is the unembedding, and both are saved, with equal values; of the norms one kind and the last.
    "llama_modules": (TIED, LlamaForCausalLM, dict(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=[
        "embed_tokens", "lm_head", "input_layernorm", "model.norm"])),
    # With values of their own: the two are no longer tied.
    "llama_apart": (TIED, LlamaForCausalLM, dict(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=[
        "embed_tokens", "lm_head"])),
    "llama_dora": (LLAMA, LlamaForCausalLM, dict(r=3, lora_alpha=8, use_dora=True,
                                                 target_modules=["q_proj", "down_proj"])),
    "gpt2_dora": (GPT2, GPT2LMHeadModel, dict(r=2, lora_alpha=6, use_dora=True, fan_in_fan_out=True,
                                              target_modules=["c_attn"])),
    "llama_score": (LLAMA_SCORE, LlamaForSequenceClassification, dict(
        r=2, lora_alpha=4, task_type="SEQ_CLS", target_modules=["v_proj"], modules_to_save=["score"])),
    # Of global layers, values are keys; routers and experts have no adapters.
    "gemma4_moe": (GEMMA4_MOE, Gemma4ForCausalLM, dict(r=2, lora_alpha=4, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    "gemma4_shared": (GEMMA4_SHARED, Gemma4ForCausalLM, dict(r=2, lora_alpha=4, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate",
        "per_layer_projection", "per_layer_model_projection"])),
    # Its low-rank matrices are linear layers, too.
    "gemma3n": (GEMMA3N, Gemma3nForCausalLM, dict(r=2, lora_alpha=4, target_modules=[
        "q_proj", "v_proj", "o_proj", "gate_proj", "linear_left", "linear_right", "per_layer_input_gate"])),
    # Indexers have none, and see what attention's queries are made of, whose matrix has some.
    "glm_moe_dsa": (GLM_MOE_DSA, GlmMoeDsaForCausalLM, dict(r=2, lora_alpha=4, target_modules=[
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])),
    # Layers of one kind alone: those with a window and keys of their own, and those with the wider MLP.
    "gemma4_some_layers": (GEMMA4_SHARED, Gemma4ForCausalLM, dict(r=2, lora_alpha=4, target_modules=(
        r"(.*\.)?((0)\.self_attn\.q_proj|(2|3)\.mlp\.down_proj)"))),
    # One matrix, whose adapter moves what is read and what predicts; and two, of which what is read alone moves.
    "llama_embed": (TIED, LlamaForCausalLM, dict(r=3, lora_alpha=8, ensure_weight_tying=True, target_modules=[
        "q_proj", "embed_tokens"])),
    "llama_embed_apart": (TIED, LlamaForCausalLM, dict(r=3, lora_alpha=8, target_modules=["q_proj", "embed_tokens"])),
    "llama_head": (LLAMA, LlamaForCausalLM, dict(r=3, lora_alpha=8, target_modules=["embed_tokens", "lm_head"])),
    # Its embeddings are multiplied by a number, and those of each layer by another.
    "gemma4_embed": (GEMMA4_SHARED, Gemma4ForCausalLM, dict(
        r=2, lora_alpha=4, ensure_weight_tying=True, target_modules=["embed_tokens", "embed_tokens_per_layer"])),
    # Some rows of the embedding, which is the unembedding, or not.
    "llama_tokens": (TIED, LlamaForCausalLM, dict(r=3, lora_alpha=8, target_modules=["q_proj"],
                                                  trainable_token_indices=[17, 3, 39])),
    "llama_tokens_apart": (LLAMA, LlamaForCausalLM, dict(r=3, lora_alpha=8, target_modules=["q_proj"],
                           trainable_token_indices={"embed_tokens": [17, 3, 39], "lm_head": [17, 3, 39]})),
    # All experts of a layer in one parameter, with their outputs first or last.
    "qwen3_moe": (QWEN3_MOE, Qwen3MoeForCausalLM, dict(r=2, lora_alpha=6, target_modules=["q_proj"],
                                                       target_parameters=BOTH)),
    "qwen3_moe_down": (QWEN3_MOE, Qwen3MoeForCausalLM, dict(r=2, lora_alpha=6, use_rslora=True, target_modules=[],
                                                            target_parameters=BOTH[1:])),
    "gpt_oss": (GPT_OSS, GptOssForCausalLM, dict(r=2, lora_alpha=6, target_modules=[], target_parameters=BOTH)),
}
# Those of which the gradients of the sum of the logits' squares are kept.
WITH_GRADIENTS = ("llama_dora", "llama_embed", "llama_tokens", "llama_tokens_apart", "qwen3_moe", "gpt_oss")


def randomise(parameters, generator: torch.Generator) -> None:
  """Nothing stays 0 or 1, so that no part can be forgotten."""
  with torch.no_grad():
    for parameter in parameters:
      parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def main() -> None:
  for name in sys.argv[1:] or CASES:
    config, architecture, adapters = CASES[name]
    shutil.rmtree(OUT / name, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = architecture(config).eval()
    randomise(model.parameters(), generator)
    model.save_pretrained(OUT / name / "base")
    base = model(TOKENS).logits.detach().numpy()
    dropout = 0.0 if "target_parameters" in adapters else 0.1
    model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "lora_dropout": dropout, **adapters})).eval()
    randomise((p for key, p in model.named_parameters() if p.requires_grad), generator)
    if name == "llama_modules":
      copies = [p for key, p in model.named_parameters() if "modules_to_save" in key and p.shape == (40, 16)]
      copies[0].data.copy_(copies[1].data)
    model.save_pretrained(OUT / name / "adapters")
    (OUT / name / "adapters" / "README.md").unlink(missing_ok=True)
    (OUT / name / "base" / "generation_config.json").unlink(missing_ok=True)
    reloaded = architecture.from_pretrained(OUT / name / "base")
    loaded = PeftModel.from_pretrained(reloaded, OUT / name / "adapters", is_trainable=True).eval()
    logits = loaded(TOKENS).logits
    if name in WITH_GRADIENTS:
      logits.square().sum().backward()
      np.savez(OUT / name / "gradients.npz", tokens=TOKENS.numpy(), **{
          re.sub(r"^base_model\.model\.(model\.)?(.*)\.default(\.weight)?$", r"\2", key): p.grad.numpy()
          for key, p in loaded.named_parameters() if p.grad is not None})
    logits = logits.detach().numpy()
    assert np.abs(logits - base).max() > 0.05, "the adapters must matter"
    np.savez(OUT / name / "logits.npz", tokens=TOKENS.numpy(), base=base, adapted=logits)
    print(name, float(np.abs(logits - base).max()))


if __name__ == "__main__":
  main()
