"""Whose completion is mismatched with whose prompt: never its own prompt's, each once, the same in every run."""

import json
from collections import Counter

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.roles import MISMATCHED
from input_pipeline.partners import Partners
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import source
from trainer.config.checks import resolve
from trainer.strategies import learns


def partners(prompts, most=1024):
  """The number of each document's partner, of documents with these prompts."""
  documents = [Encoded(np.array([i, ord(prompt)])) for i, prompt in enumerate(prompts)]
  found = Partners(lambda document: int(document.ids[1]), most)
  pairs = [pair for document in documents for pair in found.add(document)] + found.close()
  assert [int(document.ids[0]) for document, _ in pairs] == list(range(len(prompts)))
  return [None if other is None else int(other.ids[0]) for _, other in pairs]


@pytest.mark.parametrize("prompts, expected", [
    ("abcd", [1, 2, 3, 0]),  # the next one, and after the last the first
    ("aabbcc", [2, 3, 4, 5, 0, 1]),  # side by side: not the other answer, and not every first answer twice
    ("abcabc", [1, 2, 3, 4, 5, 0]),  # the same prompts far apart
    ("abacad", [1, 2, 3, 4, 5, 0]), ("abba", [1, 3, 0, 2]),
    ("aaab", [3, 3, 3, 0]),  # b is the only one that can be taken
    ("a", [None]), ("aaa", [None] * 3), ("", [])])
def test_by_hand(prompts, expected):
  assert partners(prompts) == expected


@pytest.mark.parametrize("most", [3, 1024])
def test_never_of_the_same_prompt_and_each_once(most):
  rng = np.random.default_rng(0)
  for _ in range(200):
    groups = rng.integers(1, 5, 12)  # answers of each of 12 prompts
    prompts = "".join(chr(97 + i) * n for i, n in enumerate(groups))
    if rng.random() < 0.3:
      prompts = "".join(rng.permutation(list(prompts)))
    found = partners(prompts, most)
    assert all(prompts[i] != prompts[other] for i, other in enumerate(found))
    if most > len(prompts):  # but for the end
      assert sum(n - 1 for n in Counter(found).values()) <= 4


def answers(folder, **sources):
  """The config of a run on sources of these rows."""
  for name, rows in sources.items():
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  made = {name: source(type="jsonl", path=str(folder / f"{name}.jsonl"), split="all") for name in sources}
  return resolve({"strategy": {"name": "kto"}, "seq_len": 64, "batch_size": 4, "input": {"sources": made}})


def mismatched(config, folder):
  """{(prompt, mismatched completion): how often} in an epoch, as batches have them."""
  data, found = loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=folder), Counter()
  for step in range(-(-data.rows_per_epoch // config.batch_size)):
    batch = data.batch(step)
    for r in range(config.batch_size):
      for s in np.flatnonzero(batch["segment_roles"][r] == MISMATCHED):
        here = batch["segment_ids"][r] == s + 1
        text = bytes(i for i in batch["tokens"][r][here].tolist() if i < 256).decode()
        found[tuple(text.split("?"))] += 1
  return found


@pytest.mark.parametrize("strings", [True, False])
def test_of_files_that_keep_the_answers_to_a_prompt_together(strings, tmp_path):
  def row(i, good):
    ask, say = f"q{i}?", f"{'good' if good else 'bad'}{i}"
    if not strings:
      ask, say = [{"role": "user", "content": ask}], [{"role": "assistant", "content": say}]
    return {"prompt": ask, "completion": say, "label": good}
  rows = [row(i, good) for i in range(6) for good in (True, False)]
  config = answers(tmp_path, d=rows)
  if not strings:
    config.chat.template = "plain"
  found = mismatched(config, tmp_path / "work")
  numbers = [(prompt[-1], completion.strip()[-1]) for prompt, completion in found]
  assert sum(found.values()) == 12 and all(a != b for a, b in numbers)
  kinds = Counter("good" if "good" in completion else "bad" for _, completion in found.elements())
  assert kinds == {"good": 6, "bad": 6}  # as in the data
  config.batch_size = 2
  assert set(mismatched(config, tmp_path / "other")) <= set(found)


def test_a_single_prompt_is_told(tmp_path, caplog):
  def rows(prompt):
    return [{"prompt": prompt, "completion": word, "label": True} for word in ("one", "two", "three")]
  config = answers(tmp_path, d=rows("q?"))
  loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=tmp_path / "work")
  assert "source 'd': all its examples have the same prompt" in caplog.text and "z is 0 throughout" in caplog.text
  caplog.clear()
  config = answers(tmp_path, alone=rows("q?"), d=[*rows("p?"), *rows("r?")])
  loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=tmp_path / "work")
  assert "source 'alone': all its" in caplog.text and "of the other sources alone" in caplog.text
  assert "source 'd'" not in caplog.text
  caplog.clear()
  config = answers(tmp_path, d=rows("q?"))
  config.strategy.loss = "apo_zero_unpaired"
  loader.make_train_data(config, BytesTokenizer(), learns=learns(config), workdir=tmp_path / "work")
  assert "same prompt" not in caplog.text
