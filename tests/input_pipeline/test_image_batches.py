"""From rows with images to batches: every image with its own tokens, whole, the same in every run."""

import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.cache import TokenizedSource
from input_pipeline.fitting import fit, keep_images_whole
from input_pipeline.images.cache import SourceImages
from input_pipeline.images.images import Preprocess, to_pixels
from input_pipeline.packing import make_plan
from input_pipeline.prompt_data import make_prompt_data
from input_pipeline.sources.made import png
from input_pipeline.sources.sources import open_source
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests import native
from trainer import program as program_lib
from trainer.config import defaults, source
from trainer.config.checks import resolve
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns
from trainer.telemetry import terminal

TOKENIZER, TOKEN, EACH, SIZE = BytesTokenizer(), 300, 4, 4


def configured(rows=None, folder=None, strategy="sft", images=(), attention="causal", **given):
  sources = {"d": dict(type="digits", max_documents=60)}
  if rows is not None:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = {"d": dict(type="jsonl", path=str(folder / "a.jsonl"))}
  vision = dict(tower="siglip", image_size=SIZE, patch_size=2, image_token=TOKEN, attention=attention)
  given = {"input": {"sources": sources, "images": dict(images), **given.pop("input", {})}, **given}
  model = {"vision": vision, "head": "embedding" if strategy == "contrastive" else "lm"}
  return resolve({"strategy": {"name": strategy}, "model": model, "seq_len": 64, "batch_size": 8, **given})


def train(config, folder):
  return loader.make_train_data(config, TOKENIZER, learns=learns(config), workdir=folder / "work")


def colored(number):
  """A picture that says which it is, and its value as it is in a batch."""
  return png(np.full((3, 3), number, np.uint8))


def write_rows(folder, counts, text="x"):
  """Rows with so many images each, all different, whose completions say which."""
  rows, n = [], 0
  for count in counts:
    names = []
    for _ in range(count):
      (folder / f"{n}.png").write_bytes(colored(n))
      names.append(f"{n}.png")
      n += 1
    rows.append({"images": names, "prompt": text, "completion": " ".join(name[:-4] for name in names) or "none"})
  return rows


def segments(batch):
  """Of each segment of a batch: its ids without images, and the value of each of its images, in order of its tokens."""
  for r in range(len(batch["tokens"])):
    for s in range(1, batch["segment_ids"][r].max() + 1):
      here = batch["segment_ids"][r] == s
      index = batch["image_index"][r][here]
      features = index[index > 0] - 1
      assert (batch["tokens"][r][here][index > 0] == TOKEN).all()
      assert (batch["loss_weights"][r][here][index > 0] == 0).all()
      assert features.reshape(-1, EACH).tolist() == [
          [k * EACH + i for i in range(EACH)] for k in dict.fromkeys(features // EACH)]
      values = [np.unique(batch["images"][r, k]) for k in dict.fromkeys(features // EACH)]
      yield batch["tokens"][r][here][index == 0], [int(v[0]) for v in values if len(v) == 1]


@pytest.mark.parametrize("attention", ["prefix", "image"])
def test_a_text_that_is_embedded_sees_all_of_itself_and_its_images_have_names(attention, tmp_path):
  """Of a prefix all is one, images or not; names are those of the files' contents, at the tokens of images alone."""
  for number in (1, 2):
    (tmp_path / f"{number}.png").write_bytes(colored(number))
  rows = [dict(query={"text": "x", "image": f"{1 + n % 2}.png"}, positive=f"{n % 2}") for n in range(6)]
  config = configured(rows, tmp_path, strategy="contrastive", attention=attention)
  batch = train(config, tmp_path).batch(0)
  seen, held = batch["block_ids"] > 0, batch["image_index"] > 0
  np.testing.assert_array_equal(seen, batch["segment_ids"] > 0 if attention == "prefix" else held)
  assert batch["image_names"].dtype == np.uint32 and not batch["image_names"][~held].any()
  names = {}
  for row, place in np.argwhere(held):
    shade = batch["images"][row, (batch["image_index"][row, place] - 1) // EACH, 0, 0, 0]
    names.setdefault(int(shade), set()).add(tuple(batch["image_names"][row, place].tolist()))
  assert names.keys() == {1, 2} and all(len(found) == 1 for found in names.values()) and names[1] != names[2]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_image_is_with_its_own_text_in_every_epoch(packing, tmp_path):
  rows = write_rows(tmp_path, [1, 2, 0, 3, 1, 1, 2, 0, 1, 4])
  config = configured(rows, tmp_path, input=dict(packing=packing))
  data = train(config, tmp_path)
  for step in range(5):
    seen = 0
    for ids, values in segments(data.batch(step)):
      text = TOKENIZER.decode(ids).removeprefix("x")
      assert text == (" ".join(map(str, values)) or "none")
      seen += 1
    assert seen
  batch = data.batch(0)
  unused = np.arange(data.image_layout.most) >= batch["image_index"].max(axis=1)[:, None] / EACH
  assert batch["images"].dtype == np.uint8 and not batch["images"][unused].any()
  assert batch["images"].shape == (8, data.image_layout.most, SIZE, SIZE, 3) and "block_ids" not in batch


@pytest.mark.parametrize("strategy, answers", [
    ("sft", dict(completion="c")), ("dpo", dict(chosen="c", rejected="r"))])
def test_a_row_has_room_for_all_tiles_of_its_images(strategy, answers, tmp_path):
  """Pictures of 4 by 4, 8 and 12 pixels are 1, 2 and 3 tiles, each of one token and of the value of its picture; the
  tiles of a picture see one another, if any do."""
  names = [f"{n}.png" for n in range(6)]
  for n, name in enumerate(names):
    (tmp_path / name).write_bytes(png(np.full((4, 4 * (1 + n % 3)), n + 1, np.uint8)))
  config = configured([dict(images=names, prompt="x", **answers)], tmp_path, strategy=strategy)
  config.model.vision.update(
      tower="qwen2_5_vl", projector="merge", activation="swiglu", window=None, min_pixels=16, max_pixels=64,
      attention="local_image")
  data = train(config, tmp_path)
  expected = [1, 2, 2, 3, 3, 3, 4, 5, 5, 6, 6, 6] * len(answers)
  assert data.image_layout.most == len(expected)
  batch = data.batch(0)
  for row in range(config.batch_size):
    assert batch["images"][row, :, 0, 0, 0].tolist() == expected
    places = batch["tokens"][row] == TOKEN
    assert batch["image_index"][row][places].tolist() == list(range(1, len(expected) + 1))
    assert batch["block_ids"][row][places].tolist() == [number + n // 12 * 6 for n, number in enumerate(expected)]
    assert not batch["block_ids"][row][~places].any()


def test_a_row_of_an_images_tiles_ends_in_a_token_of_its_own(tmp_path):
  """In Mistral 3, and no tile stands behind it: three texts in a row, one with two images, as their template says."""
  config = defaults()
  config.strategy.name, config.model.hf = "sft", str(native.mistral3(tmp_path / "hf"))
  config.input.sources.rows = source(type="jsonl", path=str(native.rows(tmp_path / "data", 3)))
  config.update(seq_len=512, batch_size=1, total_steps=1)
  config, _ = program_lib.resolve(config)
  data = loader.make_train_data(config, load_tokenizer(tmp_path / "hf"), learns=learns(config), workdir=tmp_path)
  batch, grid = data.batch(0), data.batch(0)["image_grid"][0]
  tokens, index = batch["tokens"][0], batch["image_index"][0]
  assert data.image_layout.most == (grid[:, 0] > 0).sum() == index.max() and grid[:, 0].max() == 4
  np.testing.assert_array_equal(index > 0, tokens == 260)  # [IMG], and behind it [IMG_BREAK], [IMG_END]
  for at in np.flatnonzero(index):
    _, row, column, rows, columns, _ = grid[index[at] - 1]
    assert tokens[at + 1] == (260 if column + 1 < columns else 261 if row + 1 < rows else 262)
  assert (tokens == 262).sum() == 4 and not batch["loss_weights"][0][(tokens > 259) & (tokens < 263)].any()


def test_batches_are_pure_functions_of_seed_and_step(tmp_path):
  config = configured(images=dict(augment=dict(crop=0.5, flip=0.5, color=0.1)))
  first, again = train(config, tmp_path), train(config, tmp_path)
  wanted = first.batch(3)
  for key, value in again.batch(3).items():
    assert (value == wanted[key]).all()
  rows = np.array([5, 2])
  assert (again.batch(3, rows)["images"] == wanted["images"][rows]).all()
  parallel = train(configured(images=dict(augment=dict(crop=0.5, flip=0.5, color=0.1), workers=2)), tmp_path)
  assert (parallel.batch(3)["images"] == wanted["images"]).all()
  other = train(resolve({**config.to_dict(), "seed": 1}), tmp_path)
  assert other.fingerprint != first.fingerprint == again.fingerprint == parallel.fingerprint
  plain = train(configured(), tmp_path)
  assert plain.fingerprint != first.fingerprint and (plain.batch(3)["tokens"] == wanted["tokens"]).all()


def test_augmentation_changes_with_the_epoch_and_not_in_evaluation(tmp_path):
  rows = [{"image": "0.png", "prompt": "a", "completion": "b"}]
  (tmp_path / "0.png").write_bytes(png(np.random.default_rng(0).integers(0, 255, (20, 20, 3), np.uint8)))
  config = configured(rows, tmp_path, images=dict(augment=dict(crop=0.3)))
  images = train(config, tmp_path).batch(0)["images"][:, 0]
  assert len({image.tobytes() for image in images}) == 8  # 8 epochs of one row
  data = loader.make_eval_data(config, TOKENIZER, learns=learns(config), workdir=tmp_path / "work")
  shown = data.batch(0, 1)["images"]
  plain = configured(rows, tmp_path)
  assert (shown[0, 0] == train(plain, tmp_path).batch(0)["images"][0, 0]).all()


def test_evaluation_has_every_example_once_with_its_images(tmp_path):
  rows = write_rows(tmp_path, [1, 2, 0, 3])
  config = configured(rows, tmp_path)
  data = loader.make_eval_data(config, TOKENIZER, learns=learns(config), workdir=tmp_path / "work")
  found = [values for i in range(data.num_batches(2)) for _, values in segments(data.batch(i, 2))]
  assert sorted(found) == [[], [0], [1, 2], [3, 4, 5]]


@pytest.mark.parametrize("attention", ["causal", "image", "prefix"])
def test_who_sees_whom_in_both_directions(attention, tmp_path):
  rows = write_rows(tmp_path, [1, 2, 0])
  batch = train(configured(rows, tmp_path, attention=attention), tmp_path).batch(0)
  if attention == "causal":
    assert "block_ids" not in batch
    return
  for r in range(len(batch["tokens"])):
    blocks, index, segment = (batch[key][r] for key in ("block_ids", "image_index", "segment_ids"))
    if attention == "image":
      assert (blocks == np.where(index > 0, (index - 1) // EACH + 1, 0)).all()
      continue
    for s in range(1, segment.max() + 1):
      first = np.flatnonzero((segment == s) & (batch["loss_weights"][r] > 0))[0]
      assert (blocks[(segment == s) & (np.arange(64) < first)] == 1).all()
      assert (blocks[(segment == s) & (np.arange(64) >= first)] == 0).all()
    assert (blocks[segment == 0] == 0).all()


def test_equal_images_are_kept_once(tmp_path):
  for name in "ab":
    (tmp_path / f"{name}.png").write_bytes(colored(7))
  rows = [{"image": f"{name}.png", "prompt": "x", "completion": "7"} for name in "abab"]
  data = train(configured(rows, tmp_path), tmp_path)
  images = data._packed[0].tokens.images
  assert images.data.tobytes() == colored(7) and images.ids.tolist() == [0] * 4
  assert "images" in terminal.stats(data.stats()) and data.stats()[0]["images"] == 4


def test_a_picture_that_changed_is_read_again_and_one_that_is_gone_is_kept(tmp_path, caplog):
  rows = write_rows(tmp_path, [1, 1])
  config = configured(rows, tmp_path)
  before = train(config, tmp_path)
  (tmp_path / "1.png").unlink()
  assert train(config, tmp_path).fingerprint == before.fingerprint
  (tmp_path / "1.png").write_bytes(colored(99) + b" ")
  after = train(config, tmp_path)
  assert "1.png has changed" in caplog.text and after.fingerprint != before.fingerprint
  assert 99 in after.batch(0)["images"] and 1 not in after.batch(0)["images"]


def test_a_damaged_cache_of_images_is_built_again(tmp_path, caplog):
  config = configured(write_rows(tmp_path, [1, 1]), tmp_path)
  wanted = train(config, tmp_path).batch(0)["images"]
  (file,) = (tmp_path / "work").glob("cache/*/image_bytes.bin")
  file.write_bytes(file.read_bytes()[:-1] + b"!")
  assert (train(config, tmp_path).batch(0)["images"] == wanted).all() and "image_bytes.bin" in caplog.text


@pytest.mark.parametrize("over_long", ["truncate_end", "truncate_start", "drop"])
def test_no_image_is_cut(over_long, tmp_path):
  """Against every length: a row holds whole images only, and what is left out is counted."""
  rows = [{"images": ["0.png", "1.png"], "prompt": "ab<image>cd<image>ef", "completion": "ghij"}]
  write_rows(tmp_path, [2])
  full = [256, *b"ab", *[TOKEN] * EACH, *b"cd", *[TOKEN] * EACH, *b"ef", *b"ghij", 257]
  kept = set()
  for seq_len in range(EACH + 1, len(full) + 1):
    config = configured(rows, tmp_path, seq_len=seq_len, input=dict(over_long=over_long, max_over_long=1.0))
    try:
      data = train(config, tmp_path)
    except DataError as e:
      assert "nothing is left" in str(e)
      continue
    batch = data.batch(0, slice(0, 1))
    ids = batch["tokens"][0][batch["segment_ids"][0] > 0].tolist()
    at = len(full) - len(ids) if over_long == "truncate_start" else 0
    assert ids == full[at:at + len(ids)] and ids.count(TOKEN) in (0, EACH, 2 * EACH)
    values = [value for _, values in segments(batch) for value in values] if "images" in batch else []
    assert values == ([0, 1] if over_long != "truncate_start" else [0, 1][2 - len(values):])
    assert data.stats()[0].get("tokens lost", 0) == len(full) - len(ids)
    kept.add((len(values), len(ids)))
  assert max(kept) == (2, len(full))
  if over_long == "truncate_start":
    assert {count for count, _ in kept} == {0, 1, 2}


def test_splitting_would_cut_images_and_a_row_needs_room_for_one(tmp_path):
  with pytest.raises(ConfigError, match="'split', which would cut the images of source 'd'"):
    train(configured(input=dict(over_long="split")), tmp_path)
  with pytest.raises(ConfigError, match="seq_len=4 has no room for an image, which takes 4 tokens"):
    train(configured(seq_len=4), tmp_path)


def test_cuts_are_moved_out_of_images_by_hand():
  tokens = np.zeros(20, np.uint16)
  images = SourceImages(np.zeros(0, np.uint8), np.zeros(2, int), np.array([2, 12]), np.array([0, 0]), np.array([4, 4]),
                        np.ones(2, int))
  where = TokenizedSource("s", tokens, np.array([0, 10, 20]), np.array([1, 1]), "", {}, images=images)
  assert images.outside(np.arange(8), after=False).tolist() == [0, 1, 2, 2, 2, 2, 6, 7]
  assert images.outside(np.arange(8), after=True).tolist() == [0, 1, 2, 6, 6, 6, 6, 7]
  for policy, lengths, begin, lost in (("truncate_end", [2, 2], None, 16), ("truncate_start", [4, 4], [6, 6], 12)):
    spans = keep_images_whole(fit(np.array([10, 10]), 5, policy, 1.0, "s"), where)
    assert spans.lengths.tolist() == lengths and spans.lost == lost
    assert begin is None or spans.begin.tolist() == begin


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_the_most_of_any_row_is_reached_in_some_epoch_and_never_passed(packing):
  rng = np.random.default_rng(0)
  for _ in range(20):
    lengths = rng.integers(1, 6, 8)
    counts = rng.integers(0, 4, 8)
    plan = make_plan(packing, lengths, 8, seed=0, name="s")
    most = plan.most(lambda doc, begin, end, counts=counts: counts[doc])
    found = []
    for epoch in range(150):
      pieces = plan.pieces(epoch, np.arange(plan.num_rows))
      found.append(np.bincount(pieces.row, counts[pieces.doc]).max())
    assert max(found) == most


def test_preferences_keep_their_images(tmp_path):
  write_rows(tmp_path, [3])
  rows = [{"image": f"{n}.png", "prompt": "p", "chosen": f"{n}", "rejected": f"not {n}"} for n in range(3)]
  config = configured(rows, tmp_path, strategy="dpo")
  data = train(config, tmp_path)
  for step in range(3):
    for ids, values in segments(data.batch(step)):
      assert TOKENIZER.decode(ids).removeprefix("p").removeprefix("not ") == str(values[0]) and len(values) == 1
  arrays = data.reference("r", tmp_path).batch(0, 4).arrays
  assert [values for _, values in segments(arrays)] and arrays["images"].shape[1] == data.image_layout.most
  augmented = train(configured(rows, tmp_path, strategy="dpo", images=dict(augment=dict(flip=1.0))), tmp_path)
  with pytest.raises(ConfigError, match="exclude each other"):
    augmented.reference("r", tmp_path)


def test_a_cut_preference_keeps_whole_images(tmp_path):
  write_rows(tmp_path, [1])
  rows = [{"image": "0.png", "prompt": "p", "chosen": "c" * n, "rejected": "r" * n} for n in (3, 40)]
  config = configured(rows, tmp_path, strategy="dpo", input=dict(max_over_long=1.0))
  batch = train(config, tmp_path).batch(0)
  assert all(values == [0] for _, values in segments(batch))
  short = configured(rows, tmp_path, strategy="dpo", seq_len=20, input=dict(max_over_long=1.0))
  assert {len(ids) for ids, _ in segments(train(short, tmp_path).batch(0))} == {1 + 1 + 3 + 1, 10 - EACH}


def test_texts_need_no_arrays_of_images(tmp_path):
  rows = [{"prompt": "a", "completion": "b"}]
  for attention, keys in (("causal", set()), ("image", set()), ("prefix", {"block_ids"})):
    batch = train(configured(rows, tmp_path, attention=attention), tmp_path).batch(0)
    assert batch.keys() & {"images", "image_index", "block_ids"} == keys


def test_prompts_to_sample_for_differ_by_their_images(tmp_path):
  write_rows(tmp_path, [2])
  (tmp_path / "bad.png").write_bytes(colored(0)[:40])
  rows = [{"image": f"{name}.png", "prefix": "what", "answer": "a"} for name in ("0", "1", "0", "bad")]
  rollout = dict(num_prompts=2, max_new_tokens=4)
  data = make_prompt_data(configured(rows, tmp_path, "grpo", dict(on_error="drop"), rollout=rollout), TOKENIZER)
  assert data.num_prompts == 2 and {int(data.item(i).prompt.images[0].max()) for i in range(2)} == {0, 1}
  row = data.stats()[0]
  assert row["dropped: duplicate"] == 1 and row["dropped: a bad image"] == 1
  assert data.item(0).columns == {"answer": "a"} and data.item(0).content == "what\n"
  with pytest.raises(DataError, match="a.jsonl:4: image"):
    make_prompt_data(configured(rows, tmp_path, "grpo", rollout=rollout), TOKENIZER)


def test_examples_of_the_documentation_are_what_they_say():
  text = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
  blocks = "\n".join(re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
  said = []
  test = doctest.DocTestParser().get_doctest(blocks, {}, "docs/images.md", None, 0)
  doctest.DocTestRunner().run(test, out=said.append)
  assert test.examples and not said, "".join(said)


def test_digits_say_what_is_in_their_pixels(tmp_path):
  both = {split: list(open_source(source(type="digits", split=split), "d").records())
          for split in ("train", "validation")}
  names = {split: {record.name for record in records} for split, records in both.items()}
  assert sum(map(len, both.values())) == 2 * 1797 and not names["train"] & names["validation"]
  assert 50 < len(names["validation"]) < 130
  for record in both["validation"]:
    pixels = to_pixels(record.fields["image"], Preprocess(8, interpolation="nearest"))[..., 0].astype(int)
    words = record.fields["suffix"].split()
    assert record.fields["prefix"] == ("name" if len(words) == 2 else "describe")
    if len(words) == 4:
      assert (words[1] == "bold,") == (np.ceil(pixels * 16 / 255).sum() >= 313)
      assert (words[2] == "wide") == ((pixels >= 60).any(axis=0).sum() >= 6)
  only = open_source(source(type="digits", dataset="name"), "d")
  said = {record.fields["suffix"] for record in only.records()}
  assert len(said) == 10 and {"an eight", "a seven"} <= said
  with pytest.raises(ConfigError, match="dataset is 'color'; for type 'digits' it is one of name, description"):
    open_source(source(type="digits", dataset="color"), "d")
