"""Videos whose frames are seen as images are, of SmolVLM and Gemma 4: references/frames is what transformers makes of
them (make_frame_references.py)."""

import json
import shutil

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.chat import image_placeholders
from input_pipeline.chat.video_texts import words
from input_pipeline.examples.embedded import TextReader, text_tokens
from input_pipeline.examples.prompts import Prompter
from input_pipeline.examples.registry import make_encoder
from input_pipeline.images import video_file
from input_pipeline.images.images import ImageRef
from input_pipeline.sources.made import png
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from models import spec_video
from tests import frames
from trainer.config import strategy
from trainer.errors import ConfigError, DataError
from trainer.program import resolve
from trainer.strategies import learns


def configured(name, path, **changed):
  return resolve(frames.config(name, path, **changed))[0]


def encoded(config, row, folder):
  encoder = make_encoder(config, load_tokenizer(folder), learns=learns(config))
  return encoder.encode([Record("a", "a.jsonl:1", row)])[0]


@pytest.mark.parametrize("name", frames.NAMES)
def test_tokens_weights_frames_and_pixels_are_those_of_transformers_processor(name, tmp_path):
  """Of short videos and long ones, before and behind texts whose tokens reach over where a video begins and ends."""
  held, config = frames.reference(name), configured(name, tmp_path)
  for i, talk in enumerate(frames.conversations(name)):
    document = encoded(config, {"messages": talk}, frames.FOLDER / name)
    np.testing.assert_array_equal(document.ids, held[f"ids{i}"])
    np.testing.assert_array_equal(document.weights, held[f"weights{i}"])
    for j, image in enumerate(document.images):
      if image.seconds is not None:
        video, expected = video_file.unpacked(image.data), held[f"values{i}_{j}"]
        # torchvision rounds a few otherwise, by 1 in each of two steps, across and down; of SmolVLM there are four.
        difference = np.abs(video.pixels.astype(int) - expected)
        assert video.times is None and difference.max() <= 2 and (difference > 0).mean() <= 0.01
        rate = [part for part in talk[0]["content"] if part["type"] != "text"][j]["fps"]
        assert image.seconds == pytest.approx(held[f"taken{i}_{j}"] / rate)


@pytest.mark.parametrize("name", frames.NAMES)
def test_which_frames_are_taken(name, tmp_path):
  how = image_placeholders.sampling_of(configured(name, tmp_path))
  for key, expected in frames.reference(name).items():
    if key.startswith("taken_"):
      count, fps = key.split("_")[1:]
      if len(expected):
        np.testing.assert_array_equal(how.indices(int(count), float(fps)), expected, key)
      else:
        with pytest.raises(ValueError, match=f"has {count} frames, fewer than the 3 that model.vision.video asks for"):
          how.indices(int(count), float(fps))
  assert how._replace(fps=None, num_frames=None).indices(4, None).tolist() == [0, 1, 2, 3]
  some = how._replace(fps=2.0, num_frames=None)  # so many a second, of a video of four seconds
  assert len(some.indices(40, 10.0)) == (6 if name == "smolvlm" else 8)


def test_numbers_in_words():
  numbers = (*range(130), 200, 999, 1000, 1001, 1100, 1234, 20002, 999999)
  assert [words(number) for number in numbers] == frames.reference("smolvlm")["words"].tolist()


@pytest.mark.parametrize("name", frames.NAMES)
def test_prompts_have_the_tokens_of_the_processor(name, tmp_path):
  """And people see markers; what is added behind an answer has the same tokens behind it."""
  held, talk = frames.reference(name), frames.conversations(name)[1]
  prompter = Prompter(configured(name, tmp_path), load_tokenizer(frames.FOLDER / name))
  prompt = prompter.messages(talk[:1])
  # The template writes no space behind the generation prompt, and Gemma 4's tokens may reach over its end.
  kept = len(prompt.ids) - 2
  np.testing.assert_array_equal(prompt.ids[:kept], held["ids1"][:kept])
  assert "<video>" in prompt.text and (name == "smolvlm" or prompt.text.count("<image>") == 1)
  ids, begin = prompter.answered(prompt, " yes")
  np.testing.assert_array_equal(ids[:kept], held["ids1"][:kept])
  assert begin > kept
  more, shown = prompter.added_messages([{"role": "user", "content": "a"}], "yes", talk[:1])
  head = int(np.flatnonzero(prompt.ids == prompt.ids[0])[0]) + 8
  assert len(shown) == len(prompt.images) and prompt.ids[head:kept].tobytes() in more.tobytes()


def test_a_template_that_writes_videos_gives_the_same(tmp_path):
  """As the one that transformers takes in place of the folder's, which passes over them."""
  held = frames.reference("smolvlm")
  shutil.copytree(frames.FOLDER / "smolvlm", tmp_path / "hf")
  file = tmp_path / "hf" / "tokenizer_config.json"
  content = json.loads(file.read_text())
  template = content["chat_template"].replace("{% endif %}{% endfor %}<", (
      "{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}<"))
  file.write_text(json.dumps(content | {"chat_template": template}))
  config = configured("smolvlm", tmp_path)
  for i, talk in enumerate(frames.conversations("smolvlm")):
    np.testing.assert_array_equal(encoded(config, {"messages": talk}, tmp_path / "hf").ids, held[f"ids{i}"])


def picture(seed: int = 3) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 256, (20, 30, 3)).astype(np.uint8)


def test_images_and_videos_stand_in_one_row(tmp_path):
  """Each as it is alone: an image in squares, and frames whole."""
  config, folder = configured("smolvlm", tmp_path), frames.FOLDER / "smolvlm"
  video = next(part for part in frames.conversations("smolvlm")[0][0]["content"] if part["type"] == "video")
  tokenizer, said = load_tokenizer(folder), {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
  one, two, both = (encoded(config, {"messages": [{"role": "user", "content": [
      {"type": "text", "text": "a"}, *parts]}, said]}, folder).ids.tolist() for parts in (
          [video], [{"type": "image", "image": png(picture())}],
          [{"type": "image", "image": png(picture())}, video]))
  texts = [tokenizer.decode(ids, skip_special=False) for ids in (one, two, both)]
  head = "<|im_start|>User: a"
  end = texts[0][-len("<end_of_utterance>\nAssistant: yes<end_of_utterance>\n"):]
  assert texts[2] == texts[1].removesuffix(end) + texts[0].removeprefix(head)
  # Without a template, too, and by a marker.
  plain = {"prompt": "a<video>b", "completion": "yes", "video": {"frames": video["frames"], "fps": 4.0}}
  whole = tokenizer.decode(encoded(config, plain, folder).ids.tolist(), skip_special=False)
  shown = texts[0].removeprefix(head).removesuffix(end)
  assert whole == f"a{shown}byes<end_of_utterance>"


def test_frames_of_one_square_where_images_are_not_cut(tmp_path):
  """What is around a frame is around an image then, its place with it."""
  config = configured("smolvlm", tmp_path, model=dict(vision=dict(split=False)))
  for i, talk in enumerate(frames.conversations("smolvlm")):
    ids = encoded(config, {"messages": talk}, frames.FOLDER / "smolvlm").ids
    np.testing.assert_array_equal(ids, frames.reference("smolvlm")[f"ids{i}"])


@pytest.mark.parametrize("name", frames.NAMES)
def test_a_batch_has_every_frame_at_its_own_tokens(name, tmp_path):
  """All texts in one row; tokens of a frame see one another, and not those of others (Gemma 4)."""
  config = configured(name, tmp_path, batch_size=1)
  data = loader.make_train_data(config, load_tokenizer(frames.FOLDER / name), learns=learns(config), workdir=tmp_path)
  batch = {key: part[0] for key, part in data.batch(0).items() if len(part) == 1}
  held, segments = frames.reference(name), batch["segment_ids"]
  documents = {held[f"ids{i}"].tobytes(): i for i in range(len(frames.conversations(name)))}
  numbers: list[int] = []
  for s in range(1, segments.max() + 1):
    i = documents.pop(batch["tokens"][segments == s].astype(np.int64).tobytes())
    index = batch["image_index"][segments == s]
    keys = [f"values{i}_{j}" for j in range(4) if f"shown{i}_{j}" in held]  # an image has none
    if name == "smolvlm":
      for key in keys:
        found = batch["images"][np.unique((index[index > 0] - 1) // 4)]
        assert np.abs(found.astype(int) - held[key]).max() <= 2
    else:
      entries, own = batch["image_grid"][index[index > 0] - 1], batch["block_ids"][segments == s][index > 0]
      np.testing.assert_array_equal(own, entries[:, 0])
      blocks = list(dict.fromkeys(own.tolist()))
      frames_of = [held[key].shape[1:3] if key in held else None for key in keys for _ in held.get(key, [0])]
      for number, shape in zip(blocks, frames_of, strict=True):
        rows, columns = entries[own == number][0, 3:5].tolist()
        assert (own == number).sum() == rows * columns and shape in (None, (8 * rows, 8 * columns))
      numbers += blocks
  assert not documents and len(numbers) == len({*numbers})
  assert data.stats()[0]["videos"] == (4 if name == "smolvlm" else 3)


def test_texts_that_are_embedded_have_videos(tmp_path):
  """A string with markers, of which a video stands behind an image, and a conversation."""
  config = frames.config("smolvlm", tmp_path)
  config.strategy = strategy("contrastive", max_length=400, text_ends="none", generation_prompt=False)
  config, tokenizer = resolve(config)[0], load_tokenizer(frames.FOLDER / "smolvlm")
  talk = frames.conversations("smolvlm")[0][:1]
  video = {"frames": talk[0]["content"][0]["frames"], "fps": 4.0}
  reader = TextReader(image_placeholders.image_format(config, tokenizer))
  texts = reader.read(Record("r", "file:1", {}), [
      ("a", {"text": "a<video>b", "video": video}), ("b", {"text": "a<image>b<video>", "image": png(picture()),
                                                          "video": video}), ("c", talk)], [])
  one, two, three = (found.ids.tolist() for found in text_tokens(config, tokenizer).encode(texts))
  held = frames.reference("smolvlm")["ids0"].tolist()
  assert three == held[:len(three)] and len(three) > 70
  shown = tokenizer.decode(one, skip_special=False)
  begin = "aYou are provided the following series of three frames from a 0:00:03 [H:MM:SS] video.\n\nFrame from 00:00:<"
  assert begin in shown and shown.endswith("<fake_token_around_image>\n\nb")
  assert tokenizer.decode(two, skip_special=False).endswith(f"b{shown.split('a', 1)[1].removesuffix('b')}")


def test_both_sides_of_a_preference_have_videos(tmp_path):
  config, talk = frames.config("smolvlm", tmp_path), frames.conversations("smolvlm")[1]
  config.strategy = strategy("dpo")
  other = [{"role": "assistant", "content": [{"type": "text", "text": "it is blue"}]}]
  row = {"prompt": talk[:1], "chosen": talk[1:], "rejected": other}
  ids, held = encoded(resolve(config)[0], row, frames.FOLDER / "smolvlm").ids, frames.reference("smolvlm")["ids1"]
  np.testing.assert_array_equal(ids[:len(held)], held)
  behind = len(held) - 5  # the answers
  np.testing.assert_array_equal(ids[len(held):len(held) + behind], held[:behind])


def test_what_a_model_needs_for_videos(tmp_path):
  config = configured("gemma4", tmp_path)
  with pytest.raises(ConfigError, match=r"video.token: the tokenizer has no special token <\|image>, which stands aro"):
    image_placeholders.ImageFormat(config, BytesTokenizer())
  config.model.vision.video.token = None
  with pytest.raises(DataError, match="a: it is a video|model.vision.video.token is not set"):
    image_placeholders.ImageFormat(config, None).read([ImageRef([], "a", video=True)])


def test_both_sides_know_the_same_models_and_kinds_of_videos():
  """What reads rows does not import what computes."""
  assert dict(spec_video.VIDEOS) == image_placeholders.VIDEOS
