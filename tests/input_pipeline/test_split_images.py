"""Images that are cut into squares: references/split is what transformers makes of them (make_split_references.py)."""

import json

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.examples.prompts import Prompter
from input_pipeline.images.images import Images, Preprocess, to_pixels
from input_pipeline.images.tiles import split_grid
from input_pipeline.sources.made import png
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests import split
from trainer.errors import ConfigError
from trainer.program import resolve
from trainer.strategies import learns

CASES = range(len(split.GRIDS))


@pytest.fixture(scope="module")
def reference():
  return split.reference()


def packed(path, **changed):
  config, _ = resolve(split.config(path, **changed))
  return loader.make_train_data(config, load_tokenizer(split.FOLDER), learns=learns(config), workdir=path)


def pieces(batch):
  """(ids, weights, squares of its images, those that its tokens are features of) of each segment of a batch."""
  for r in range(len(batch["tokens"])):
    for s in range(1, batch["segment_ids"][r].max() + 1):
      here = batch["segment_ids"][r] == s
      index = batch["image_index"][r][here]
      held = batch["tokens"][r][here] == split.IMAGE
      assert np.array_equal(index > 0, held) and np.array_equal(np.diff(index[held]), np.ones(held.sum() - 1))
      assert not batch["loss_weights"][r][here][held].any()
      first = (index[held][0] - 1) // 4 if held.any() else 0
      yield batch["tokens"][r][here], batch["loss_weights"][r][here], batch["images"][r, first:first + held.sum() // 4]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_tokens_weights_and_squares_are_those_of_transformers_processor(packing, tmp_path, reference):
  """Several texts a row, each with all of its squares, in every epoch; BPE, in which two line breaks are one token."""
  data = packed(tmp_path, input=dict(packing=packing))
  texts = {reference[f"ids{i}"].tobytes(): i for i in CASES}
  seen = set()
  for step in range(3):
    for ids, weights, squares in pieces(data.batch(step)):
      i = texts[ids.astype(np.int64).tobytes()]
      np.testing.assert_array_equal(weights, reference[f"weights{i}"])
      np.testing.assert_array_equal(squares, reference[f"squares{i}"])
      seen.add(i)
  assert seen == set(CASES)


@pytest.mark.parametrize("i", CASES)
def test_prompts_have_the_tokens_and_squares_of_the_processor(i, tmp_path, reference):
  """Also with more squares than the tokenizer has tokens for: their places are texts."""
  rows = [json.loads(line) for line in split.rows(tmp_path).read_text().splitlines()]
  for key, side in (("ids", 40), ("wide", 80)):
    config, _ = resolve(split.config(tmp_path, model=dict(vision=dict(longest_side=side))))
    prompter = Prompter(config, load_tokenizer(split.FOLDER))
    message = rows[i]["messages"][0]
    content = [{**part, "image": tmp_path / part["image"]} if "image" in part else part for part in message["content"]]
    prompt = prompter.messages([{**message, "content": content}])
    assert isinstance(prompt.images, Images)
    # The template writes no space behind the generation prompt, so what comes before the answer is the same to ":".
    np.testing.assert_array_equal(prompt.ids, reference[f"{key}{i}"][:len(prompt.ids)])
    grids = [image.grid for image in prompt.images.files]
    assert grids == [split_grid(*reference[f"image{i}_{j}"].shape[1::-1], side, 16) for j in range(len(grids))]
    squares = np.concatenate(prompt.images[:])
    assert len(squares) == sum(image.squares for image in prompt.images.files) == (prompt.ids == split.IMAGE).sum() / 4
    if side == 40:
      assert grids == split.GRIDS[i]
      np.testing.assert_array_equal(squares, reference[f"squares{i}"])


def test_an_image_that_fits_into_one_square_is_not_cut():
  how = Preprocess(16, "split", "lanczos", longest_side=16)
  picture = np.random.default_rng(0).integers(0, 256, (9, 12, 3)).astype(np.uint8)
  assert split_grid(12, 9, 16, 16) == (0, 0) and to_pixels(png(picture), how).shape == (1, 16, 16, 3)
  assert split_grid(12, 9, 17, 16) == (2, 2) and split_grid(30, 2, 17, 16) == (1, 2)


@pytest.mark.parametrize("over_long", ["truncate_end", "truncate_start"])
def test_an_image_is_kept_with_all_of_its_squares_or_not_at_all(over_long, tmp_path, reference):
  """Two images, of 7 and 10 squares; what is cut off is counted."""
  whole, squares = reference["ids1"], reference["squares1"]
  places = np.flatnonzero(whole == split.IMAGE)
  # From the place of the first square on, which is a token, to the last token of the last one.
  runs = [(places[0] - 1, places[27] + 1), (places[28] - 1, places[-1] + 1)]
  kept = set()
  for seq_len in range(9, len(whole) + 1, 9):
    data = packed(tmp_path / str(seq_len), seq_len=seq_len, only=1, chat=dict(train_on="all"),
                  input=dict(over_long=over_long, max_over_long=1.0))
    batch = data.batch(0, slice(0, 1))
    ids = batch["tokens"][0][batch["segment_ids"][0] > 0]
    end = over_long == "truncate_end"
    cut = seq_len if end else len(whole) - seq_len
    cut = next(((first if end else last) for first, last in runs if first < cut < last), cut)
    np.testing.assert_array_equal(ids, whole[:cut] if end else whole[cut:])
    assert data.stats()[0].get("tokens lost", 0) == len(whole) - len(ids)
    count = sum(last <= cut if end else first >= cut for first, last in runs)
    held = batch["images"][0, :(ids == split.IMAGE).sum() // 4] if count else squares[:0]
    np.testing.assert_array_equal(held, {0: squares[:0], 1: squares[:7] if end else squares[7:], 2: squares}[count])
    kept.add(count)
  assert kept >= {0, 1}


def test_texts_between_squares_have_the_weight_of_their_place(tmp_path, reference):
  """Where all is trained, what stands before a square is, as what stands around an image; its tokens never are."""
  data = packed(tmp_path, chat=dict(train_on="all"))
  for ids, weights, _ in pieces(data.batch(0)):
    np.testing.assert_array_equal(weights[1:], ids[1:] != split.IMAGE)


@pytest.mark.parametrize(("changed", "message"), [
    (dict(input=dict(images=dict(augment=dict(flip=0.5)))), "augment and model.vision.split exclude each other"),
    (dict(input=dict(images=dict(resize="squash"))), "resize is 'squash', but images are cut"),
    (dict(chat=dict(image_before="x")), "chat.image_before and chat.image_after stand around an image that is whole"),
])
def test_what_does_not_go_with_squares_is_refused(changed, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    packed(tmp_path, **changed)


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path):
  config, _ = resolve(split.config(tmp_path))
  with pytest.raises(ConfigError, match="no special token <fake_token_around_image>"):
    loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=tmp_path)


def test_without_squares_it_is_one(tmp_path):
  """model.vision.split=False is what the processor does with do_image_splitting=False."""
  data = packed(tmp_path, model=dict(vision=dict(split=False)))
  for ids, _, squares in pieces(data.batch(0)):
    assert len(squares) == (ids == split.WHOLE).sum() == (ids == split.IMAGE).sum() / 4


