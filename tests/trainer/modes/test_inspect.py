"""The inspection shows each token with its own numbers, and trains nothing."""

import html
import json
import re

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.prompt_data import make_prompt_data
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests import tiny
from tests.evaluators import digits
from tests.trainer.report.test_pages import pictures
from trainer.config import checks as config_checks
from trainer.config import reward, strategy
from trainer.errors import ConfigError, DataError
from trainer.modes import inspect


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  """(config, workdir, page) of a conversation set with a weight of its own."""
  folder = tmp_path_factory.mktemp("inspect")
  rows = [{"messages": [
      {"role": "user", "content": f"What is {n} + {n}?\n<b>"},
      {"role": "assistant", "content": f"It is {2 * n} — naturally.", "weight": 0.5 if n == 3 else 1},
  ]} for n in range(6)]
  (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = tiny.config(folder, seq_len=256)
  config.strategy = dict(name="sft")
  config.input.sources.main.update(type="jsonl", path=str(folder / "chat.jsonl"), split="all")
  config.chat.template = "plain"
  config.evals = {}
  return config, folder / "w", inspect.inspect(config, folder / "w", rows=2)


def parts(page):
  """What the page knows of the tokens of each segment."""
  return [json.loads(html.unescape(found)) for found in re.findall(r'data-tokens="([^"]*)"', page)]


def test_token_texts_join_to_the_text_with_special_tokens_and_split_characters():
  tokenizer = BytesTokenizer()
  text = "a—b ü\n"
  ids = [tokenizer.bos_id, *tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id]
  texts = inspect.token_texts(ids, tokenizer)
  assert "".join(texts) == f"<|bos|>{text}<|eos|>" and len(texts) == len(ids)
  assert texts[1:6] == ["a", "", "", "—", "b"]


def test_rows_show_their_own_weights_segments_and_positions(page, tmp_path):
  config, workdir, path = page
  tokenizer = load_tokenizer(workdir / "tokenizer.json")
  batch = {"tokens": np.array([[*b"ab", 257, *b"c", 0]]), "loss_weights": np.array([[0, 1, 0.5, 0, 0]]),
           "segment_ids": np.array([[1, 1, 1, 2, 0]]), "positions": np.array([[0, 1, 2, 0, 0]])}
  tokens = inspect.row_tokens(batch, 0, tokenizer)
  assert tokens == [("a", 97, 0, 1, 0, 0, ""), ("b", 98, 1, 1, 1, 0, ""), ("<|eos|>", 257, 0.5, 1, 2, 0, ""),
                    ("c", 99, 0, 2, 0, 0, "")]
  shown = inspect.row_text(tokens, 7)
  called = inspect.row_text(inspect.row_tokens(batch | {"segment_roles": np.array([[7, 9]])}, 0, tokenizer), 7)
  assert "row 7, segment 1, query: 3 tokens" in called and "row 7, segment 2, negative: 1 tokens" in called
  assert "row 7, segment 1: 3 tokens, 2 trained" in shown and "row 7, segment 2: 1 tokens, 0 trained" in shown
  assert f"{inspect.DIM}a{inspect.OFF}{inspect.TRAINED}b{inspect.OFF}{inspect.PARTLY}<|eos|>" in shown


def test_a_terminal_shows_the_first_of_a_rows_many_segments():
  tokens = [inspect.Token(f"t{segment}", segment, 1.0, segment, 0) for segment in range(1, 100)]
  shown = inspect.row_text(tokens, 2)
  assert "row 2, segment 6: 1 tokens" in shown and "segment 7" not in shown and "t7" not in shown
  assert shown.endswith("\n… 93 more segments of row 2 are on the page.")
  assert "more segments" not in inspect.row_text(tokens[:6], 2)


def test_a_prompt_that_sides_share_says_whose_it_is(tmp_path, capsys):
  pairs = [dict(prompt=f"{word}:", chosen=f" {word.upper()}", rejected=" no") for word in tiny.WORDS * 2]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
  config = tiny.config(tmp_path, seq_len=64, evals={})
  config.strategy = strategy("dpo")
  config.input.sources.main.update(type="jsonl", path=str(tmp_path / "a.jsonl"), split="all")
  text = inspect.inspect(config, tmp_path / "w", rows=1).read_text(encoding="utf-8")
  printed = capsys.readouterr().out
  for shown in (text, printed):
    assert re.search(r"row 0, segment \d+, the prompt of segments 1, 2: \d+ tokens, 0 trained", shown)
    assert "row 0, segment 1, chosen:" in shown and "row 0, segment 2, rejected:" in shown
  assert re.search(r"prompt tokens shared", printed)


def test_a_file_gets_no_escape_codes(page, capsys):
  config, workdir, _ = page
  inspect.inspect(config, workdir, rows=1)
  printed = capsys.readouterr().out
  assert "\x1b" not in printed and "⟦" in printed and "row 0, segment 1:" in printed and "⟦trained⟧" in printed


def test_nothing_in_the_data_reaches_the_terminal_as_a_command():
  token = inspect.Token("\x1b[2J\r", 1, 1.0, 1, 0)
  shown = inspect.row_text([token], 0).replace(inspect.TRAINED, "").replace(inspect.OFF, "").replace(inspect.BOLD, "")
  assert "\x1b" not in shown and "\r" not in shown and "\\x1b[2J\\r" in shown


def test_the_page_holds_every_token_and_escapes_the_data(page):
  _, workdir, path = page
  text = path.read_text(encoding="utf-8")
  assert "&lt;" in text and "<b>" not in text
  weights = [weight for part in parts(text) for weight in part["values"]["weights"]]
  assert set(weights) == {0.0, 0.5, 1.0} and text.count('class="trained"') == sum(weight > 0 for weight in weights)
  assert "tokens in a document" in text and "blocks/attn/q/kernel" in text and " src=" not in text
  assert not (workdir / "checkpoints").exists() and not (workdir / "metrics.jsonl").exists()


def test_the_histogram_counts_every_document():
  lengths = np.array([3, 3, 700, 12])
  counts, edges = inspect.histogram_bins(lengths)
  assert counts.sum() == 4 and edges[0] == 0 and edges[-1] == 700
  assert inspect.histogram_bins(lengths[[0, 1, 3]])[1][-1] == 12  # not the length of a row, of which they are little
  text = inspect.histogram_text(lengths, 512)
  assert "min 3" in text and "max 700" in text and "longer than seq_len=512: 25.0%" in text
  assert "longer than seq_len=12: 25.0%" in inspect.histogram_text(lengths, 12)


def test_where_completions_are_sampled_prompts_are_shown_as_they_are_asked(tmp_path, capsys):
  rows = [{"question": f"{n} < {n + 1}?", "right": f"yes {n}"} for n in range(5)]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = tiny.config(tmp_path, seq_len=256)
  config.strategy = strategy("grpo", preset="dapo")
  config.input.sources.main.update(type="jsonl", path=str(tmp_path / "a.jsonl"), split="all")
  config.chat.template = "plain"
  config.evals = {}
  config.rollout.update(dict(num_prompts=2, group_size=3, max_new_tokens=16, prompt_key="question", updates=2))
  config.rollout.rewards.right = reward(type="exact_match", answer_key="right")
  page = inspect.inspect(config, tmp_path / "w", rows=2).read_text(encoding="utf-8")
  printed = capsys.readouterr().out
  prompts = make_prompt_data(config, BytesTokenizer())
  for number in range(2):
    item = prompts.item(number)
    assert f'{item.prompt.where}, columns for rewards: {json.dumps(item.columns)}' in printed
    assert f"row {number}, segment 1: {len(item.prompt.ids)} tokens, 0 trained" in printed
    assert json.dumps(item.columns) in html.unescape(page)
    part = parts(page)[number]
    assert part["ids"] == item.prompt.ids.tolist() and set(part["values"]["weights"]) == {0.0}
  for said in ("takes 2 and samples 3 completions of each, of at most 16 tokens, at temperature 1", "judged by right",
               "serve 2 step(s)"):
    assert said in printed and said in page
  assert "blocks/attn/q/kernel" in page and "strategy.preset dapo" in printed
  assert not (tmp_path / "w" / "checkpoints").exists()
  config.rollout.rewards.right.answer_key = "wrong"
  with pytest.raises(DataError, match=r"a.jsonl:\d.*'wrong'"):
    inspect.inspect(config, tmp_path / "x")


def test_images_stand_with_their_segment_and_their_tokens_are_one_in_short(tmp_path):
  shown = [digits.picture(n) for n in range(3)]
  rows = [dict(image=digits.encoded(part), prefix="what?", suffix=f"it is {n}") for n, part in enumerate(shown)]
  config = digits.config(tmp_path, rows)
  config.input.sources.main.split = "all"
  config.input.images.augment.color = 0.5
  html = inspect.inspect(config, tmp_path / "w", rows=2).read_text(encoding="utf-8")
  pieces = html.split("<h3>")[1:]
  tokenizer = load_tokenizer(tmp_path / "w" / "tokenizer.json")
  data = loader.make_train_data(config_checks.resolve(config), tokenizer, learns="conversations",
                                workdir=tmp_path / "w")
  batch = data.batch(0, slice(0, 2))
  # What the page shows is what is trained, changed as in training.
  expected = [pixels for row in range(2) for pixels in batch["images"][row] if pixels.any()]
  for picture, pixels in zip(pictures(html), expected, strict=True):
    np.testing.assert_array_equal(picture, pixels)
    assert not any(np.array_equal(pixels, part) for part in shown)
  assert len(pieces) == len(expected) >= 3
  assert all(part.count("<img") == 1 and "it is" in re.sub("<[^>]*>", "", part) for part in pieces)


def test_long_runs_of_one_token_are_shown_once():
  tokens = [inspect.Token("x", 1, 0.0, 1, n) for n in range(inspect.RUN)] + [inspect.Token("", 9, 0.0, 1, 8)] * 20
  few = [inspect.Token("y", 2, 1.0, 1, n) for n in range(inspect.RUN - 1)]
  assert [t.text for t in inspect.in_short(tokens + few)] == [f"⟨x × {inspect.RUN}⟩", "⟨9 × 20⟩", *["y"] * len(few)]
  assert [t.text for t in inspect.in_short([*few, few[0]._replace(weight=0.0)])] == ["y"] * inspect.RUN


def test_options_that_cannot_work_are_refused_as_training_would(tmp_path):
  config = tiny.config(tiny.write_corpus(tmp_path / "c"))
  config.model.head = "score"
  with pytest.raises(ConfigError, match=r"^model.head is 'score', but strategy 'seq'"):
    inspect.inspect(config, tmp_path / "w")
