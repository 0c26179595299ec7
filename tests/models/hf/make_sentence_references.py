"""Makes the folders of tests/models/hf/sentence_references: tiny random models of embeddings as sentence-transformers
saves them, and what it computes.

    python tests/models/hf/make_sentence_references.py

needs torch, transformers 5 and sentence-transformers 6; the tests need none of them. A case has what the library wrote
and reference.npz: `texts`, of which the last is longer than the longest allowed, and `plain`, `query` [N, D], their
embeddings without a prompt and with that of queries. `last` ends texts with EOS and has a prompt, as Qwen3-Embedding
does; `mean` begins them with BOS.
"""

import tempfile
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from make_references import like, llama, randomise
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "sentence_references"
TEXTS = ["a cat", "two dogs, and a cat", "x", "this text is longer than all that is allowed here"]
PROMPT = "query: "


def tokenizer(single: str) -> PreTrainedTokenizerFast:
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:94]
  names = ["<s>", "</s>", "<pad>"]
  made = Tokenizer(models.BPE({token: i for i, token in enumerate([*names, *letters, "Ġ"])}, []))
  made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  made.post_processor = processors.TemplateProcessing(single=single, pair=single + " $B", special_tokens=[
      (name, i) for i, name in enumerate(names[:2])])
  return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


CASES = {
    "last": (like("qwen3", head_dim=6, vocab_size=100, tie_word_embeddings=True), "$A </s>", "lasttoken", PROMPT),
    "mean": (llama(vocab_size=100), "<s> $A", "mean", ""),
}


def main() -> None:
  for name, (given, single, pooling, prompt) in CASES.items():
    config = dict(given)
    body = AutoModel.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    randomise(body, torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as at:
      body.save_pretrained(at)
      tokenizer(single).save_pretrained(at)
      inner = Transformer(at, max_seq_length=24)
      made = SentenceTransformer(modules=[inner, Pooling(16, pooling_mode=pooling), Normalize()], device="cpu",
                                 prompts={"query": prompt, "document": ""})
      made.save(str(FOLDER / name), create_model_card=False)
    np.savez(FOLDER / name / "reference.npz", texts=TEXTS, plain=made.encode(TEXTS), query=made.encode(
        TEXTS, prompt=prompt), versions=[f"{m.__name__} {m.__version__}" for m in (
            torch, transformers, sentence_transformers)])


if __name__ == "__main__":
  main()
