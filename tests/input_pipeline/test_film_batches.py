"""From rows with films to batches: where they stand in texts, their tokens, their frames, whole, beside images."""

import json
import shutil

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.examples.prompts import Prompter
from input_pipeline.examples.registry import make_encoder
from input_pipeline.images.film_file import Film
from input_pipeline.sources.made import png
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from tests import native
from trainer import program as program_lib
from trainer.config import defaults, source
from trainer.errors import DataError
from trainer.generate import image_tokens
from trainer.strategies import learns

# 16 × 24 pixels, which are 2 × 3 tiles: 4 frames, 4 a second; and an image of 2 × 2 tiles.
FRAMES = native.film(4, (16, 24))
FILM = {"frames": [png(frame) for frame in FRAMES], "fps": 4}
PICTURE = native.film(1, (16, 16), seed=5)[0]
IMAGE = png(PICTURE)
SAID = {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  return {name: native.folder(tmp_path_factory.mktemp(name), name) for name in ("qwen2_5_vl", "qwen3_vl")}


def configured(folder, rows=None, **changed):
  config = defaults()
  config.strategy.name, config.model.hf = "sft", str(folder)
  config.input.sources.rows = source(type="jsonl", path=str(rows or "none.jsonl"))
  config.update(seq_len=96, batch_size=2, total_steps=2)
  config.update_from_flattened_dict(changed)
  return program_lib.resolve(config)[0]


def encode(row, folder, **changed):
  tokenizer, config = load_tokenizer(folder), configured(folder, **changed)
  document, = make_encoder(config, tokenizer, learns=learns(config)).encode([Record("a", "a.jsonl:1", row)])
  return document, tokenizer


def text(row, folder, **changed) -> str:
  """What transformers' processor is given and makes of it, for these sizes."""
  document, tokenizer = encode(row, folder, **changed)
  return document if isinstance(document, str) else tokenizer.decode(document.ids.tolist(), skip_special=False)


def said(*parts, **columns):
  return {"messages": [{"role": "user", "content": [*parts]}, SAID], **columns}


PADS, PICTURED = "<|video_pad|>" * 6, f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
# Of Qwen3-VL two frames a second are taken, 0 and 3.
SHOWN = {"qwen2_5_vl": f"<|vision_start|>{PADS * 2}<|vision_end|>",
         "qwen3_vl": f"<|vision_start|><0.4 seconds><|vision_start|>{PADS}<|vision_end|><|vision_end|>"}
WORDS = {"type": "text", "text": "a"}


@pytest.mark.parametrize("name", SHOWN)
def test_where_films_and_images_stand(folders, name):
  """In parts that have them, or take those of columns of their kind, at markers, or before what the user says first."""
  film, head, tail = SHOWN[name], "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
  both = dict(video=FILM, image=IMAGE)
  for row, expected in (
      (said({"type": "video", "video": FILM["frames"], "fps": 4}, WORDS), f"{film}a"),
      (said(WORDS, {"type": "image", "image": IMAGE}, {"type": "video", **FILM}), f"a{PICTURED}{film}"),
      (said({"type": "video"}, WORDS, {"type": "image"}, **both), f"{film}a{PICTURED}"),
      (said(WORDS, {"type": "video"}, {"type": "video", **FILM}, videos=[FILM]), f"a{film}{film}"),
      ({"messages": [{"role": "user", "content": "b<video>c<image>d"}, SAID], **both}, f"b{film}c{PICTURED}d"),
      ({"messages": [{"role": "user", "content": "bc"}, SAID], **both}, f"{PICTURED}{film}bc")):
    assert text(row, folders[name]) == f"{head}{expected}{tail}"


def test_where_they_stand_without_a_template(folders):
  """The order of markers is that of what they stand for, whatever the columns'."""
  film, folder = SHOWN["qwen2_5_vl"], folders["qwen2_5_vl"]
  both = dict(videos=[FILM], images=[IMAGE], completion="yes")
  for prompt, expected in (("a<video>b<image>c", f"a{film}b{PICTURED}c"), ("a<image>b<video>", f"a{PICTURED}b{film}"),
                           ("a<video>", f"{PICTURED}a{film}"), ("a", f"{PICTURED}{film}a")):
    document, tokenizer = encode({"prompt": prompt, **both}, folder)
    assert tokenizer.decode(document.ids.tolist(), skip_special=False).startswith(expected)
    kinds = [image.seconds is not None for image in document.images]
    held = [document.ids[place] == native.VIDEO for place in document.places]
    assert kinds == held and sorted(kinds) == [False, True]


def test_no_token_of_a_film_is_trained_and_what_a_user_types_is_text(folders):
  document, tokenizer = encode(said({"type": "text", "text": "<|video_pad|>"}, {"type": "video", **FILM}),
                               folders["qwen3_vl"], **{"chat.train_on": "all"})
  held = document.ids == native.VIDEO
  assert held.sum() == 6 and not document.weights[held].any()
  times = document.ids[document.places[0]:document.places[0] + 4]
  assert tokenizer.decode(times.tolist()) == "<0.4" and document.weights[document.places[0]:][:4].all()


@pytest.mark.parametrize("row, message", [
    (said({"type": "video"}), r"columns have 0 film\(s\), for 1 parts of messages"),
    (said(WORDS, videos=[FILM], video=FILM), "'video' and 'videos'"),
    ({"messages": [{"role": "user", "content": "<video><video>"}, SAID], "videos": [FILM]},
     r"1 film\(s\), for 2 × '<video>'"),
    ({"prompt": "<video><video>", "completion": "b", "videos": [FILM]}, r"1 film\(s\), but 2 × '<video>' in the text"),
    (said({"type": "video", "video": "a.mp4", "nframes": 8}), r"content\[0\] is a film with 'nframes', which is not"),
    (said({"type": "video", "video": FILM["frames"][:1]}), r"has 1 frame\(s\); a film has 2 or more"),
    (said({"type": "video", "video": "no.gif"}), r"content\[0\]: '.*no.gif' cannot be read"),
])
def test_rows_that_do_not_fit_are_refused(folders, row, message):
  with pytest.raises(DataError, match=f"a.jsonl:1: .*{message}"):
    encode(row, folders["qwen2_5_vl"])


def test_a_film_that_cannot_be_read_drops_its_row_where_that_is_said(folders):
  row = said({"type": "video", "video": FILM["frames"][:1]})
  assert text(row, folders["qwen2_5_vl"], **{"input.images.on_error": "drop"}) == "a bad image"


def test_a_model_without_the_token_of_films_refuses_them(folders, tmp_path):
  shutil.copytree(folders["qwen2_5_vl"], tmp_path / "hf")
  content = json.loads((tmp_path / "hf" / "config.json").read_text())
  (tmp_path / "hf" / "config.json").write_text(json.dumps({k: v for k, v in content.items() if k != "video_token_id"}))
  with pytest.raises(DataError, match=r"content\[0\] is a film.*model.vision.video.token is not set"):
    encode(said({"type": "video", **FILM}), tmp_path / "hf")


@pytest.mark.parametrize("name", SHOWN)
def test_a_batch_has_every_film_at_its_own_tokens(folders, name, tmp_path):
  """Two texts in a row, a film behind an image: each tile has both frames, an image's the same twice."""
  film = {"type": "video", "frames": [f"{i}.png" for i in range(4)], "fps": 4}
  rows = [said({"type": "image", "path": "a.png"}, film), said(WORDS, film)]
  for i, frame in enumerate(FRAMES):
    (tmp_path / f"{i}.png").write_bytes(png(frame))
  (tmp_path / "a.png").write_bytes(IMAGE)
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = configured(folders[name], tmp_path / "rows.jsonl", seq_len=256, batch_size=1)
  data = loader.make_train_data(config, load_tokenizer(folders[name]), learns=learns(config), workdir=tmp_path / "w")
  batch = {key: part[0] for key, part in data.batch(0).items() if len(part) == 1}
  taken = [0, 1, 2, 3] if name == "qwen2_5_vl" else [0, 3]
  pairs = [np.concatenate([FRAMES[a], FRAMES[b]], axis=-1) for a, b in zip(taken[::2], taken[1::2], strict=True)]
  found, at, numbers = {1: [], 2: []}, np.flatnonzero(batch["image_index"]), set()
  for t in at:
    tile, entry = batch["images"][batch["image_index"][t] - 1], batch["image_grid"][batch["image_index"][t] - 1]
    number, row, column, down, across, time = entry.tolist()
    here = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
    numbers.add(number)
    if batch["tokens"][t] == native.IMAGE:
      np.testing.assert_array_equal(tile, np.tile(PICTURE[here], 2))
      assert (down, across, time) == (2, 2, 0)
    else:
      places = found[int(batch["segment_ids"][t])]
      # Half a second for a place, of 4 positions a second.
      assert (down, across, time) == (2, 3, 2 * (len(places) // 6))
      np.testing.assert_array_equal(tile, pairs[len(places) // 6][here])
      places.append((row, column))
  assert all(len(places) == 6 * len(pairs) for places in found.values()) and len(numbers) == 3
  assert data.stats()[0]["films"] == 2 and data.stats()[0]["images"] == 1


def test_rows_without_films_have_one_frame_a_tile(folders, tmp_path):
  (tmp_path / "a.png").write_bytes(IMAGE)
  (tmp_path / "rows.jsonl").write_text(json.dumps(said({"type": "image", "path": "a.png"})) + "\n")
  config = configured(folders["qwen2_5_vl"], tmp_path / "rows.jsonl")
  data = loader.make_train_data(config, load_tokenizer(folders["qwen2_5_vl"]), learns=learns(config),
                                workdir=tmp_path / "w")
  assert data.batch(0)["images"].shape[-1] == 3 and "films" not in data.stats()[0]


@pytest.mark.parametrize("kept, films", [(96, 2), (30, 1), (16, 0)])
def test_no_film_is_cut(folders, kept, films):
  """A row that is shorter is cut before a film that does not fit."""
  folder = folders["qwen2_5_vl"]
  config = configured(folder, seq_len=kept, **{"input.over_long": "truncate_end"})
  assert config.seq_len == kept
  document, _ = encode(said({"type": "video", **FILM}, WORDS, {"type": "video", **FILM}), folder)
  ends = [place + image.tokens for place, image in zip(document.places, document.images, strict=True)]
  assert sum(end <= kept for end in ends) == films


def test_prompts_hold_films_and_their_order(folders):
  """As rows do; what a sampler is given fits the ids, and another order of kinds does not."""
  folder = folders["qwen2_5_vl"]
  prompter = Prompter(configured(folder), load_tokenizer(folder))
  shown = [{"type": "video", **FILM}, {"type": "image", "image": IMAGE}]
  prompt = prompter.messages([{"role": "user", "content": shown}])
  assert isinstance(prompt.images[0], Film) and prompt.images[0].times.tolist() == [0, 2]
  again = prompter.messages([{"role": "user", "content": "<video><image>"}], images=prompt.images.encoded)
  np.testing.assert_array_equal(again.ids, prompt.ids)
  assert again.images == prompt.images
  layout = image_tokens.Layout(native.IMAGE, 1, 8, "causal", True, native.VIDEO, 2)
  part = image_tokens.of_text(layout, prompt.ids, list(prompt.images), len(prompt.ids), "it")
  assert part.frames == 2 and part.image_grid[:, 5].tolist() == [0] * 6 + [2] * 6 + [0] * 4
  with pytest.raises(Exception, match="not in the order of its images and films: its tile 0 is of the other"):
    image_tokens.of_text(layout, prompt.ids, list(prompt.images)[::-1], len(prompt.ids), "it")
  with pytest.raises(Exception, match="needs 12 tokens of the id 262 or 263"):
    image_tokens.of_text(layout, prompt.ids, list(prompt.images)[:1], len(prompt.ids), "it")


def test_a_template_that_hides_films_is_refused(folders, tmp_path):
  (tmp_path / "t.jinja").write_text(native.TEMPLATE.replace("part.type == 'video'", "false"))
  with pytest.raises(DataError, match="shows 0 of the conversation's 1 films|cannot"):
    encode(said({"type": "video", **FILM}, WORDS), folders["qwen2_5_vl"],
           **{"chat.template": str(tmp_path / "t.jinja")})
