"""Makes frames/: a tiny SmolVLM and a tiny Gemma 4, and what transformers makes of conversations about videos.

    python tests/input_pipeline/references/make_frame_references.py [smolvlm] [gemma4]

Needs `pip install transformers torch torchvision pillow num2words`; it was run with transformers 5.24, torchvision
0.29 and num2words 0.5.14. The tests read the folders alone. Each is a Hugging Face folder (random weights, a BPE that
merges across what stands around a video), and in reference.npz there is, of each conversation i of `cases` (JSON: what
the user says, a list of texts, of "image" and of frames a second of a video; and the answer):

    shown{i}_{j}   uint8 [H, W, 3] of an image, [frames, H, W, 3] of a video
    ids{i}         of the processor
    taken{i}_{j}   which frames of a video are taken
    values{i}_{j}  uint8 [frames, H, W, 3]: their pixels that the tower is given, before they are normalised
    weights{i}     1: the answer with what ends it
    logits{i}      in float64, where the answer is predicted, [m, V]
    loss, gradient:…  of the mean cross-entropy over the answers of all conversations, in float64
    sampled        greedy tokens behind the first conversation's prompt, whose length is prompt
    taken_FRAMES_FPS  which of so many frames are taken, of which there are so many a second
    words          of SmolVLM: numbers as num2words has them, from 0 on
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_split_references import CORPUS, SPECIALS, checkpoint
from make_split_references import TEMPLATE as SMOLVLM_TEMPLATE
from num2words import num2words
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.gemma4 import (
  feature_extraction_gemma4,
  image_processing_pil_gemma4,
  processing_gemma4,
  video_processing_gemma4,
)
from transformers.models.smolvlm import image_processing_pil_smolvlm, processing_smolvlm, video_processing_smolvlm
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "hf"))
from make_native_references import POOLED, gemma, save

FOLDER = Path(__file__).parent / "frames"
processing_smolvlm.num2words = num2words  # which make_split_references.py does without
GEMMA4_SPECIALS = ("<pad>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>",
                   "<audio|>", "<|audio|>")
GEMMA4_TEMPLATE = """{% for message in messages %}<|turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|image|>{% elif part.type == 'video' %}<|video|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>assistant
{% endif %}"""
SQUARES = dict(size=dict(longest_edge=40), max_image_size=dict(longest_edge=16))
SAMPLING = dict(fps=1, max_frames=6, video_size=dict(longest_edge=40))
# What the user says, with frames a second of videos; the answer; and frames, height and width of what is shown. Of
# SmolVLM: some of a short video, one of a shorter one, those of a long one without its ends, those of minutes.
CASES = {
    "smolvlm": (
        ([4.0, "What is this?"], "a red square.", [(12, 20, 30)]),
        (["which is it, ", 4.0, "\nwhich color is it?"], "blue", [(3, 30, 13)]),
        (["What is", 4.0, "\n\n"], "it is blue", [(80, 7, 10)]),
        ([0.05, "What is this?"], "a square.", [(10, 16, 16)]),
        (["What is this?"], "it is blue", []),
    ),
    "gemma4": (
        ([12.5, "What is this?"], "a red square.", [(9, 20, 30)]),
        (["Look at", 0.04, " this and ", "image", "then", 2.0], "it is blue", [(7, 30, 13), (24, 40, 3), (3, 9, 40)]),
        (["What is this?"], "it is blue", []),
    ),
}


def smolvlm(folder: Path):
  """(model, processor, what is passed beside texts and videos, as `apply_chat_template` does it)."""
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  told = "User: You are provided the following series of three frames from a 0:00:03 [H:MM:SS] video.\n\nFrame from 00:"
  tokens = trained(bpe, (*CORPUS, told * 20), SPECIALS, 420, eos_token="<end_of_utterance>", bos_token="<|im_start|>")
  model = checkpoint(len(tokens), tokens.convert_tokens_to_ids("<image>"))
  model.save_pretrained(folder)
  made = dict(do_image_splitting=True, video_sampling=SAMPLING, **SQUARES)
  processor = processing_smolvlm.SmolVLMProcessor(
      image_processing_pil_smolvlm.SmolVLMImageProcessorPil(**made), tokens,
      video_processing_smolvlm.SmolVLMVideoProcessor(**json.loads(json.dumps(made))), image_seq_len=4,
      chat_template=SMOLVLM_TEMPLATE)
  content = dict(image_processor_type="SmolVLMImageProcessor", **made)
  (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=1) + "\n")
  return model, processor, dict(fps=1, num_frames=6, do_sample_frames=True)


def gemma4(folder: Path):
  bpe = Tokenizer(models.BPE())
  bpe.normalizer = normalizers.Replace(" ", "▁")
  bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
  said = " 00:01 Look at00:00 What is this?\nassistant\na red square. it is blue user\n this and then00:00 0123456789"
  tokens = trained(bpe, [said] * 20, GEMMA4_SPECIALS, 90, eos_token="<turn|>", extra_special_tokens=dict(
      image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>", audio_token="<|audio|>",
      boa_token="<|audio>", eoa_token="<audio|>"))
  ids = {name: tokens.convert_tokens_to_ids(token) for name, token in dict(
      image_token_id="<|image|>", video_token_id="<|video|>", boi_token_id="<|image>", eoi_token_id="<image|>",
      audio_token_id="<|audio|>", boa_token_id="<|audio>", eoa_token_index="<audio|>").items()}
  case = dict(model_type="gemma4", **ids, vision_config=dict(**POOLED), text_config=gemma(
      "sf", vocab_size=len(tokens), vocab_size_per_layer_input=len(tokens), hidden_size_per_layer_input=6,
      sliding_window=12, use_bidirectional_attention="vision"))
  save(case, folder)
  sizes = dict(patch_size=4, pooling_kernel_size=2)
  processor = processing_gemma4.Gemma4Processor(
      feature_extraction_gemma4.Gemma4AudioFeatureExtractor(),
      image_processing_pil_gemma4.Gemma4ImageProcessorPil(max_soft_tokens=140, **sizes), tokens,
      video_processing_gemma4.Gemma4VideoProcessor(num_frames=3, **sizes), chat_template=GEMMA4_TEMPLATE)
  processor.save_pretrained(folder)
  (folder / "chat_template.jinja").unlink()
  content = json.loads((folder / "processor_config.json").read_text())
  content = {key: value for key, value in content.items() if key.endswith(("image_processor", "video_processor"))}
  (folder / "processor_config.json").write_text(json.dumps(content, indent=1) + "\n")
  model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
  with torch.no_grad():
    model.model.language_model.norm.weight.mul_(0.3)  # for logits of some 6, where float32 has gradients to 1e-5
  model.save_pretrained(folder)
  return model, processor, dict(num_frames=3, do_sample_frames=True)


def trained(bpe: Tokenizer, corpus, specials, size: int, **named) -> PreTrainedTokenizerFast:
  alphabet = pre_tokenizers.ByteLevel.alphabet() if bpe.pre_tokenizer else []
  bpe.train_from_iterator(corpus, trainers.BpeTrainer(
      vocab_size=size, initial_alphabet=alphabet, show_progress=False,
      special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials]))
  return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=specials[0], **named)


def values_of(name: str, made: dict) -> list[np.ndarray]:
  """Pixels of each video's frames, uint8."""
  if name == "smolvlm":
    pixels = (made["pixel_values"][0].numpy().transpose(0, 2, 3, 1) + 1) * 127.5
  else:
    patches, places, pixels = made["pixel_values_videos"].numpy() * 255, made["video_position_ids"].numpy(), []
    for frame, at in zip(patches, places, strict=True):
      columns, rows = at.max(0) + 1
      frame = frame[:columns * rows].reshape(rows, columns, 4, 4, 3).swapaxes(1, 2)
      pixels.append(frame.reshape(rows * 4, columns * 4, 3))
  found, start = [], 0
  for count in made.get("num_frames_per_video", [len(pixels)]):
    video = np.stack(pixels[start:start + int(count)])
    assert np.abs(video - np.rint(video)).max() < 1e-3
    found.append(np.rint(video).astype(np.uint8))
    start += int(count)
  return found


def loss_of(model: torch.nn.Module, examples: list[dict]) -> tuple[torch.Tensor, list[np.ndarray]]:
  """The mean over all answers' tokens, and logits of each conversation."""
  total, count, logits = 0.0, 0, []
  for example in examples:
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in
             example["given"].items()}
    found = model(**given, use_cache=False).logits[0]
    weights = torch.tensor(example["weights"])[1:].to(model.dtype)
    log_probs = torch.log_softmax(found[:-1], -1).gather(-1, given["input_ids"][0, 1:, None])[:, 0]
    total, count = total - (log_probs * weights).sum(), count + weights.sum()
    logits.append(found[:-1][weights > 0].detach().numpy())
  return total / count, logits


def main(name: str) -> None:
  folder = FOLDER / name
  folder.mkdir(parents=True, exist_ok=True)
  model, processor, options = {"smolvlm": smolvlm, "gemma4": gemma4}[name](folder)
  tokens, end = processor.tokenizer, dict(smolvlm="<end_of_utterance>\n", gemma4="<turn|>\n")[name]
  if name == "smolvlm":  # what `apply_chat_template` takes in place of the folder's
    processor.chat_template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
  asked_of = {key: value for key, value in options.items() if key != "do_sample_frames"}
  rng, arrays, examples = np.random.default_rng(0), {}, []
  for i, (asked, answer, shapes) in enumerate(CASES[name]):
    shown = []
    for t, h, w in shapes:
      coarse = np.repeat(np.repeat(rng.integers(0, 256, (t, -(-h // 5), -(-w // 5), 3)), 5, axis=1), 5, axis=2)
      shown.append(coarse[:, :h, :w].astype(np.uint8))
    rates = [part for part in asked if part != "image" and not isinstance(part, str)]
    kinds = [part for part in asked if part == "image" or not isinstance(part, str)]
    shown = [part[0] if kind == "image" else part for kind, part in zip(kinds, shown, strict=True)]
    videos = [part for part in shown if part.ndim == 4]
    user = [dict(type="image") if part == "image" else dict(type="text", text=part) if isinstance(part, str) else
            dict(type="video") for part in asked]
    messages = [dict(role="user", content=user), dict(role="assistant", content=[dict(type="text", text=answer)])]
    text = processor.apply_chat_template(messages, tokenize=False)
    told = [VideoMetadata(total_num_frames=len(video), fps=fps, duration=len(video) / fps)
            for video, fps in zip(videos, rates, strict=True)]
    given = dict(videos=videos, video_metadata=told, **options) if videos else {}
    given |= dict(images=[[part for part in shown if part.ndim == 3]]) if "image" in kinds else {}
    made = processor(text=[text], return_tensors="pt", **given)
    ids = made["input_ids"][0].numpy()
    said = tokens.convert_tokens_to_string(tokens.convert_ids_to_tokens(ids))
    begin = said.rindex(f"{answer}{end}")
    before = next(n for n in range(len(ids)) if len(
        tokens.convert_tokens_to_string(tokens.convert_ids_to_tokens(ids[:n + 1]))) > begin)
    weights = np.zeros(len(ids), np.float32)
    weights[before:-1] = 1
    kept = {key: made[key] for key in ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask",
                                       "pixel_values_videos", "video_position_ids", "image_position_ids",
                                       "num_frames_per_video", "mm_token_type_ids") if key in made}
    examples.append(dict(given=kept, weights=weights))
    arrays |= {f"shown{i}_{j}": part for j, part in enumerate(shown)} | {f"ids{i}": ids, f"weights{i}": weights}
    places = [j for j, part in enumerate(shown) if part.ndim == 4]
    taken = [processor.video_processor.sample_frames(own, **asked_of) for own in told]
    for j, values, own in zip(places, values_of(name, made) if videos else (), taken, strict=True):
      arrays |= {f"values{i}_{j}": values, f"taken{i}_{j}": np.asarray(own)}
    print(name, i, repr(said[:200]))
  for frames in (2, 3, 8, 30, 61, 500, 3001):
    for fps in (1.0, 12.5, 24.0, 29.97):
      told = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
      try:
        found = np.array(processor.video_processor.sample_frames(told, **asked_of))
      except ValueError:  # of too few
        found = np.zeros(0, int)
      arrays[f"taken_{frames}_{fps}"] = found
  if name == "smolvlm":
    arrays["words"] = np.array([num2words(n) for n in (*range(130), 200, 999, 1000, 1001, 1100, 1234, 20002, 999999)])
  loss_of(model, examples)[0].backward()
  single = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
  model.zero_grad()
  double = model.double()
  loss, logits = loss_of(double, examples)
  loss.backward()
  errors = {n: np.abs(single[n] - p.grad.numpy()).max() / np.abs(p.grad.numpy()).max()
            for n, p in double.named_parameters() if n in single and not n.endswith("k_proj.bias")}
  print(name, "float32 of transformers is off by", sorted(errors.items(), key=lambda item: item[1])[-3:],
        "logits up to", max(np.abs(part).max() for part in logits))
  arrays |= {f"logits{i}": values.astype(np.float32) for i, values in enumerate(logits)}
  arrays |= {f"gradient:{n}": p.grad.numpy().astype(np.float32) for n, p in double.named_parameters()
             if p.grad is not None}
  arrays["loss"], first = float(loss.detach()), examples[0]
  arrays["prompt"] = cut = int(np.argmax(first["weights"]))
  given = {key: value[:, :cut] if key in ("input_ids", "attention_mask", "mm_token_type_ids") else
           value.double() if value.is_floating_point() else value for key, value in first["given"].items()}
  with torch.no_grad():
    sampled = double.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
  arrays["sampled"] = sampled[0, cut:].numpy()
  tokens.save_pretrained(folder)
  for file in ("generation_config.json", "chat_template.jinja"):
    (folder / file).unlink(missing_ok=True)
  template = dict(smolvlm=SMOLVLM_TEMPLATE, gemma4=GEMMA4_TEMPLATE)[name]
  content = json.loads((folder / "tokenizer_config.json").read_text()) | dict(chat_template=template)
  (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=1) + "\n")
  arrays["cases"] = np.array(json.dumps([(asked, answer) for asked, answer, _ in CASES[name]]))
  np.savez_compressed(folder / "reference.npz", **arrays)
  print(name, "loss", arrays["loss"], "sampled", arrays["sampled"], {key: arrays[key].shape for key in arrays if
                                                                   key.startswith("values")})


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  for which in sys.argv[1:] or CASES:
    main(which)
