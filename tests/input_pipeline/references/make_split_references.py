"""Makes split/: a tiny SmolVLM whose images are cut into squares, and what transformers makes of some conversations.

    python tests/input_pipeline/references/make_split_references.py

Needs `pip install transformers torch pillow`; it was run with transformers 5.24, whose image processor was the one of
Pillow. The tests read the folder alone. It is a Hugging Face folder (random weights, a byte-level BPE), and in
reference.npz there is of each conversation i, which has images image{i}_{j} and the answer answer{i}:

    ids{i}, squares{i}   of SmolVLMProcessor, [n] and uint8 [squares, S, S, 3], of which pixel_values are x / 127.5 - 1
                         to 1e-6; Idefics3Processor gives the same
    wide{i}              ids with a longest edge of 80, whose squares are more than the tokenizer has tokens for
    weights{i}           1: the answer with what ends it
    logits{i}            of SmolVLMForConditionalGeneration in float64, where the answer is predicted, [m, V]
    loss, gradient:…     of the mean cross-entropy over the answers of all conversations, in float64
    float32:…            how far transformers' own float32 is from those gradients, of the largest entry of each
    sampled              greedy tokens behind the first conversation's prompt, whose length is prompt
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.idefics3 import image_processing_pil_idefics3, processing_idefics3
from transformers.models.smolvlm import image_processing_pil_smolvlm, processing_smolvlm

processing_smolvlm.num2words = str  # of videos alone, as is what takes torchvision
processing_smolvlm.SmolVLMProcessor.check_argument_for_proper_class = lambda self, name, given: None
FOLDER = Path(__file__).parent / "split"
FAKE, WHOLE, IMAGE, END = "<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", END, FAKE, IMAGE, WHOLE,
            *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)))
CORPUS = ("User: What is this?\n\nAssistant: a red square.\n\n\nUser:\nwhich color is it? it is blue\n\n" * 20,)
# As the published folders have it.
TEMPLATE = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if \
message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}\
{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}\
<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
PROCESSOR = dict(do_image_splitting=True, size=dict(longest_edge=40), max_image_size=dict(longest_edge=16),
                 image_mean=[0.5] * 3, image_std=[0.5] * 3)
# Of each conversation: rows and columns of its images, and where they stand among what the user says.
CASES = ((((30, 50),), (".", "which color?")), (((70, 41), (16, 16)), ("first ", ".", " and\n", ".", "\n\nwhich?")),
         (((9, 90),), ("is ", ".", " red?")), (((90, 7),), (".", "what?")), (((33, 34),), ("\n", ".", "\nred")),
         (((41, 41),), (".",)))
ANSWERS = ("it is red", "blue,\nthen red", "a red square.", "no", "is this blue?", "square")


def tokenizer() -> PreTrainedTokenizerFast:
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(
      vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
      special_tokens=[AddedToken(token, special=True) for token in SPECIALS]))
  assert len(bpe.encode("\n\n", add_special_tokens=False).ids) == 1
  return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token="<|im_start|>", pad_token=SPECIALS[0])


def checkpoint(vocab_size: int, image_token: int) -> torch.nn.Module:
  text = AutoConfig.for_model("llama", vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                              bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)
  vision = AutoConfig.for_model("smolvlm_vision", hidden_size=12, intermediate_size=20, num_hidden_layers=2,
                                num_attention_heads=3, image_size=16, patch_size=4)
  config = type(AutoConfig.for_model("smolvlm"))(text_config=text, vision_config=vision, image_token_id=image_token,
                                                 scale_factor=2, tie_word_embeddings=False)
  config._attn_implementation = "eager"
  model, generator = AutoModelForImageTextToText.from_config(config), torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, p in model.named_parameters():
      noise = torch.randn(p.shape, generator=generator)
      if name.endswith("bias") or "norm" in name:
        p.copy_(p + 0.3 * noise)
      else:
        p.copy_(noise if "embed_tokens" in name else 1.2 * noise / p[0].numel() ** 0.5)
  return model.eval()


def loss_of(model: torch.nn.Module, examples: list[dict]) -> tuple[torch.Tensor, list[np.ndarray]]:
  """The mean over all answers' tokens, and logits of each conversation."""
  total, count, logits = 0.0, 0, []
  for example in examples:
    pixels = torch.tensor(example["pixels"]).to(model.dtype)
    found = model(input_ids=torch.tensor(example["ids"])[None], pixel_values=pixels[None], use_cache=False).logits[0]
    weights = torch.tensor(example["weights"])[1:].to(model.dtype)
    log_probs = torch.log_softmax(found[:-1], -1).gather(-1, torch.tensor(example["ids"])[1:, None])[:, 0]
    total, count = total - (log_probs * weights).sum(), count + weights.sum()
    logits.append(found[:-1][weights > 0].detach().numpy())
  return total / count, logits


def gradients(model: torch.nn.Module, examples: list[dict]) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
  loss, logits = loss_of(model, examples)
  loss.backward()
  found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
  model.zero_grad()
  return float(loss.detach()), logits, found


def main() -> None:
  tokens = tokenizer()
  model = checkpoint(len(tokens), tokens.convert_tokens_to_ids(IMAGE))
  images = image_processing_pil_smolvlm.SmolVLMImageProcessorPil(**PROCESSOR)
  processor = processing_smolvlm.SmolVLMProcessor(images, tokens, None, image_seq_len=4, chat_template=TEMPLATE)
  other = processing_idefics3.Idefics3Processor(
      image_processing_pil_idefics3.Idefics3ImageProcessorPil(**PROCESSOR), tokenizer(), image_seq_len=4,
      chat_template=TEMPLATE)
  rng, arrays, examples = np.random.default_rng(0), {}, []
  for i, ((shapes, asked), answer) in enumerate(zip(CASES, ANSWERS, strict=True)):
    pictures = [rng.integers(0, 256, (*shape, 3)).astype(np.uint8) for shape in shapes]
    arrays |= {f"image{i}_{j}": picture for j, picture in enumerate(pictures)}
    user = [dict(type="image") if part == "." else dict(type="text", text=part) for part in asked]
    messages = [dict(role="user", content=user), dict(role="assistant", content=[dict(type="text", text=answer)])]
    text = processor.tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    given = dict(text=[text], images=[[Image.fromarray(picture) for picture in pictures]], return_tensors="np")
    made, same = processor(**given), other(**given)
    assert np.array_equal(made["input_ids"], same["input_ids"])
    assert np.array_equal(made["pixel_values"], same["pixel_values"])
    wide = processor(**given, size=dict(longest_edge=80))
    ids = made["input_ids"][0]
    before = len(ids) - len(tokens(f" {answer}{END}\n", add_special_tokens=False).input_ids)
    assert tokens.decode(ids[before:]) == f" {answer}{END}\n", tokens.decode(ids[before:])
    weights = np.zeros(len(ids), np.float32)
    weights[before:-1] = 1
    example = dict(ids=ids, pixels=made["pixel_values"][0].astype(np.float32), weights=weights)
    examples.append(example)
    squares = np.rint((example["pixels"].transpose(0, 2, 3, 1) + 1) * 127.5).astype(np.uint8)
    assert np.abs(squares.transpose(0, 3, 1, 2) / 127.5 - 1 - example["pixels"]).max() < 1e-6
    arrays |= {f"ids{i}": ids, f"squares{i}": squares, f"weights{i}": weights}
    arrays |= {f"wide{i}": wide["input_ids"][0], f"answer{i}": np.array(answer)}
    arrays[f"asked{i}"] = np.array(json.dumps(user))
  _, _, single = gradients(model, examples)
  model.save_pretrained(FOLDER)
  double = model.double()
  arrays["loss"], logits, exact = gradients(double, examples)
  arrays |= {f"logits{i}": values.astype(np.float32) for i, values in enumerate(logits)}
  for name, values in exact.items():
    arrays[f"gradient:{name}"] = values.astype(np.float32)
    arrays[f"float32:{name}"] = np.float32(np.abs(single[name] - values).max() / np.abs(values).max())
  first = examples[0]
  arrays["prompt"] = int(np.argmax(first["weights"]))
  sampled = double.generate(
      input_ids=torch.tensor(first["ids"][:arrays["prompt"]])[None],
      pixel_values=torch.tensor(first["pixels"])[None].double(), max_new_tokens=8,
      do_sample=False, eos_token_id=None, pad_token_id=0)
  arrays["sampled"] = sampled[0, arrays["prompt"]:].numpy()
  tokens.save_pretrained(FOLDER)
  for name in ("generation_config.json", "chat_template.jinja"):
    (FOLDER / name).unlink(missing_ok=True)
  config = json.loads((FOLDER / "tokenizer_config.json").read_text()) | dict(chat_template=TEMPLATE)
  (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
  (FOLDER / "preprocessor_config.json").write_text(
      json.dumps(dict(image_processor_type="SmolVLMImageProcessor", **PROCESSOR), indent=1) + "\n")
  np.savez_compressed(FOLDER / "reference.npz", **arrays)
  for name in exact:
    print(f"{name}: largest {np.abs(exact[name]).max():.1e}, of it float32 is {arrays[f'float32:{name}']:.1e} off")


if __name__ == "__main__":
  main()
