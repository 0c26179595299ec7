"""Makes the folders of tests/models/hf/score_references: tiny random models with a head that scores sequences, as
transformers saves them, and what it computes.

    python tests/models/hf/make_score_references.py [CASE …]

needs torch and transformers 5; the tests need neither. A case has config.json, safetensors and reference.npz:

    tokens [R, T]        texts of LENGTHS tokens, padded on the right
    scores [R, labels]
    gradient_names, gradient_0, …    of the sum of scores² over all, by tensor
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_references import GPT2, like, llama, randomise
from transformers import AutoConfig, AutoModelForSequenceClassification

FOLDER = Path(__file__).parent / "score_references"
LENGTHS = (11, 5, 9)

CASES = {
    "llama": llama(head_dim=6, num_labels=1),
    "llama_two": llama(num_labels=2, tie_word_embeddings=True),  # config.json has no id2label
    "qwen3_moe": like("qwen3_moe", num_labels=1, num_experts_per_tok=2, num_experts=5, moe_intermediate_size=12,
                      head_dim=6),
    "gemma2": like("gemma2", num_labels=3, head_dim=6, query_pre_attn_scalar=7, sliding_window=4,
                   final_logit_softcapping=2.0, attn_logit_softcapping=5.0),
    "gemma3": like("gemma3_text", num_labels=1, head_dim=6, sliding_window=4, layer_types=[
        "sliding_attention", "full_attention"]),
    "gpt2": GPT2 | dict(num_labels=1, pad_token_id=0),
}


def main(names: list[str]) -> None:
  for name in names or CASES:
    config = dict(CASES[name])
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForSequenceClassification.from_config(made, attn_implementation="eager").eval()
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(3, made.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(tokens.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    tokens = torch.where(mask, tokens, 0)
    scores = model(tokens, attention_mask=mask.long(), use_cache=False).logits
    scores.square().sum().backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters()
             if n == "score.weight" or ".0." in n and ("q_proj.weight" in n or "c_attn.weight" in n)}
    np.savez(FOLDER / name / "reference.npz", tokens=tokens.numpy().astype(np.int32), scores=scores.detach().numpy(),
             gradient_names=list(grads), versions=[f"{m.__name__} {m.__version__}" for m in (torch, transformers)],
             **{f"gradient_{i}": grad for i, grad in enumerate(grads.values())})


if __name__ == "__main__":
  main(sys.argv[1:])
