"""The inspection shows each token with its own numbers, and trains nothing."""

import html
import json
import re

import jax
import jax.numpy as jnp
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
from trainer.distributed import mesh as mesh_lib
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


def token(number, weight=0.0, segment=1, **more):
  return inspect.Token(f"t{number}", 100 + number, weight, segment, 10 * number, **more)


def test_the_table_has_the_first_places_and_those_around_each_change():
  """16; then two before and two after a change of weight at 20, and of segment at 30; and the rest as a number."""
  tokens = [token(n, 0.5 * (n >= 20), 1 + (n >= 30)) for n in range(40)]
  lines = inspect.token_table(tokens).splitlines()
  assert lines[0].split() == ["place", "segment", "position", "weight", "id", "token"]
  places = [line.split()[0] for line in lines[1:]]
  assert places == [*map(str, range(16)), "…", "18", "19", "20", "21", "…", "28", "29", "30", "31", "…"]
  assert lines[-1].split(maxsplit=1)[1] == "8 more in this row; all of them are on the page."
  assert lines[21].split() == ["21", "1", "210", "0.5", "121", "'t21'"] and lines[25].split()[1] == "2"
  assert [line.split()[0] for line in inspect.token_table(tokens, limit=3).splitlines()[1:]] == ["0", "1", "2", "…"]
  whole = inspect.token_table(tokens[:16]).splitlines()
  assert len(whole) == 17 and "more in this row" not in whole[-1]
  assert len(inspect.token_table([token(0)]).splitlines()) == 2


@pytest.mark.devices(2)
def test_the_table_of_parameters_says_where_each_is_and_how_large():
  """On two devices: 6 × 40,000 numbers of 4 bytes split over both, and 50,000 of 2 bytes that are not."""
  abstract = {"unembed": {"kernel": jax.ShapeDtypeStruct((6, 40000), jnp.float32)},
              "final_norm": {"scale": jax.ShapeDtypeStruct((50000,), jnp.bfloat16)}}
  mesh = mesh_lib.make_mesh(dict(fsdp=2), jax.devices()[:2])
  lines = [line.split() for line in inspect.parameter_table(abstract, mesh, ()).splitlines()]
  assert lines[0] == ["parameter", "shape", "dtype", "sharded", "over", "MB", "a", "device"]
  assert sorted(lines[1:3]) == [["final_norm/scale", "50000", "bfloat16", "·", "0.100"],
                                ["unembed/kernel", "6×40000", "float32", "fsdp,", "·", "0.480"]]
  assert " ".join(lines[3]).startswith("290,000 parameters, 0.580 MB on each of 2 device(s) (slice=1, data=1, fsdp=2, ")
  assert len(lines) == 4


def test_the_histogram_has_the_quantiles_and_a_bar_for_each_bin():
  text = inspect.histogram_text(np.array([20] * 4 + [1] * 2 + [10]), 19).splitlines()
  assert text[0] == ("document lengths in tokens: min 1, quartiles 6, 20, 20, 95% 20, max 20; longer than seq_len=19: "
                     "57.1%")
  assert [line.split() for line in text[1:3]] == [["0", "to", "1", "0"], ["1", "to", "2", "2", "█" * 20]]
  assert text[11].split() == ["10", "to", "11", "1", "█" * 10] and text[20].split() == ["19", "to", "20", "4", "█" * 40]
  assert len(text) == 21


def test_the_page_has_the_numbers_of_each_token_of_its_row():
  rows = [[token(0, role="query"), token(1, 1.0, role="query"), *[token(2)._replace(segment=2)] * inspect.RUN],
          [token(3, 0.25, 4)]]
  picture = np.full((2, 2, 3), 9, np.uint8)
  shown = inspect.InspectedRows(rows, ["said of 0 <b>", ""], [{2: [picture]}, {}], "The lead.", "the stats",
                                np.array([4, 8]))
  text = inspect.html_page(shown, "the parameters")
  assert parts(text) == [
      {"values": {"weights": [0.0, 1.0]}, "where": "segment 1", "ids": [100, 101], "positions": [0, 10]},
      {"values": {"weights": [0.0]}, "where": "segment 2", "ids": [102], "positions": [20]},
      {"values": {"weights": [0.25]}, "where": "segment 4", "ids": [103], "positions": [30]}]
  heads = re.findall("<h3>(.*?)</h3>", text)
  assert heads == ["row 0, segment 1, query: 2 tokens, 1 trained", f"row 0, segment 2: {inspect.RUN} tokens, 0 trained",
                   "row 1, segment 4: 1 tokens, 1 trained"]
  assert text.count("said of 0 &lt;b&gt;") == 1 and "The lead. Point at a token for its numbers." in text
  assert "the stats" in text and "the parameters" in text and len(pictures(text)) == 1
  assert text.index(heads[1]) < text.index("<img") < text.index(heads[2])
  cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)]
  cells = [[html.unescape(cell) for cell in row] for row in cells if row]
  assert ["1", "1", "10", "1", "101", "'t1'"] in cells and ["0", "4", "30", "0.25", "103", "'t3'"] in cells
  assert len([row for row in cells if len(row) == 6]) == 3 + inspect.RUN


def test_a_token_s_text_is_found_however_far_on_it_stands():
  """By what it adds to those before it; with a tokenizer that writes a space before all but the first of a text."""
  class Spaced:
    def decode(self, ids, skip_special):
      assert not skip_special and len(ids) <= inspect.CONTEXT + 1
      return " ".join(f"w{i}" for i in ids)

  ids = list(range(30))
  assert inspect.token_texts(ids, Spaced()) == ["w0", *[f" w{i}" for i in ids[1:]]]
  assert inspect.token_texts([], Spaced()) == []


def test_images_of_a_row_are_those_of_their_segments(monkeypatch):
  numbers = np.array([2, 2, 0, 1, 3, 3, 0])
  monkeypatch.setattr(inspect.image_tokens, "images_of", lambda layout, batch, row: (
      [f"{layout} {row} {n}" for n in (1, 2, 3)], numbers))
  batch = {"segment_ids": np.array([[0] * 7, [1, 1, 1, 2, 2, 2, 2]])}
  assert inspect.row_images(batch, 1, "layout") == {1: ["layout 1 2"], 2: ["layout 1 1", "layout 1 3"]}


@pytest.mark.parametrize("users, said", [
    ((), ""), ((3, 1, 3, 1), "the prompt of segments 1, 3"), ((4,), "the prompt of segments 4")])
def test_whose_prompt_a_segment_is(users, said):
  assert inspect.prompt_of(users) == said
  tokens = [token(0, segment=9), *(token(1, segment=user, prompt=9) for user in users)]
  assert inspect._called(9, tokens) == "segment 9" + (", " + said if said else "")
