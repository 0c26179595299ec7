"""Makes the folders of tests/models/hf/sentence_references: tiny random models of embeddings as sentence-transformers
saves them, and what it computes.

    python tests/models/hf/make_sentence_references.py

needs torch, torchvision, transformers 5 and sentence-transformers 6; the tests need none of them. A case has what the
library wrote and reference.npz: `texts`, of which the last is longer than the longest allowed, and `plain`, `query`
[N, D], their embeddings without a prompt and with that of queries. `last` ends texts with EOS and has a prompt, as
Qwen3-Embedding does; `mean` begins them with BOS. `images`, a Qwen2.5-VL, has the texts of TALK in
rows.jsonl, which the library makes messages, with images in small.png and wide.png of sizes that no processor changes.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from make_references import like, llama, randomise
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
  AutoConfig,
  AutoModel,
  PreTrainedTokenizerFast,
  Qwen2_5_VLProcessor,
  Qwen2VLImageProcessor,
  Qwen2VLVideoProcessor,
)

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


# Of `images`; as rows of ours, and as the library takes them.
TALK = [{"text": "a cat"}, {"image": "small.png"}, {"image": "wide.png", "text": "what is it"},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "this"}, {"type": "image", "image": "wide.png"}, {"type": "text", "text": "and"},
            {"type": "image", "image": "small.png"}]}]}]
SEEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_images(folder: Path) -> None:
  rng, pixels = np.random.default_rng(0), {}
  folder.mkdir(parents=True, exist_ok=True)
  for name, size in (("small.png", (16, 16)), ("wide.png", (8, 40))):
    pixels[name] = Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8))
    pixels[name].save(folder / name)
  words = tokenizer("$A")
  words.add_special_tokens(dict(additional_special_tokens=list(SEEN)))
  ids = dict(zip(SEEN, words.convert_tokens_to_ids(list(SEEN)), strict=True))
  sizes = dict(patch_size=4, merge_size=2, temporal_patch_size=2)
  processor = Qwen2_5_VLProcessor(
      Qwen2VLImageProcessor(**sizes, min_pixels=3 * 64, max_pixels=12 * 64), words,
      Qwen2VLVideoProcessor(**sizes), chat_template=TEMPLATE)
  config = AutoConfig.for_model(
      "qwen2_5_vl", image_token_id=ids[SEEN[4]], video_token_id=ids[SEEN[5]], vision_start_token_id=ids[SEEN[2]],
      vision_end_token_id=ids[SEEN[3]],
      text_config=dict(vocab_size=104, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=1e4, bos_token_id=0, eos_token_id=1,
                       rope_scaling=dict(type="mrope", mrope_section=[1, 2, 1])),
      vision_config=dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=16, window_size=16,
                         fullatt_block_indexes=[1], num_heads=2, patch_size=4, spatial_merge_size=2,
                         temporal_patch_size=2, in_channels=3))
  body = AutoModel.from_config(config).eval()
  randomise(body, torch.Generator().manual_seed(0))
  with tempfile.TemporaryDirectory() as at:
    body.save_pretrained(at)
    processor.save_pretrained(at)
    inner = Transformer(at, processing_kwargs=dict(chat_template=dict(add_generation_prompt=True)))
    made = SentenceTransformer(modules=[inner, Pooling(16, pooling_mode="lasttoken"), Normalize()], device="cpu",
                               prompts={"query": "Find it.", "document": ""})
    made.save(str(folder), create_model_card=False)
  (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row} if "text" not in row or "image" in row else row)
                                             + "\n" for row in TALK))
  given = json.loads(json.dumps(TALK), object_hook=lambda part: part.get("messages") or {
      key: pixels.get(value, value) if isinstance(value, str) else value for key, value in part.items()})
  given = [row["text"] if isinstance(row, dict) and row.keys() == {"text"} else row for row in given]
  # Each alone: in a batch, the library's vector of the last, which has two images, is another.
  plain, query = (np.stack([made.encode([text], **prompt)[0] for text in given])
                  for prompt in ({}, {"prompt": "Find it."}))
  np.savez(folder / "reference.npz", plain=plain, query=query, versions=[
      f"{m.__name__} {m.__version__}" for m in (torch, transformers, sentence_transformers)])


def main() -> None:
  with_images(FOLDER / "images")
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
