"""Stop strings: they are found where transformers finds them, texts are cut or kept there, and nothing else changes."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from tests.trainer import rollout_runs
from tests.trainer.generate.test_sampler import case, prompts
from trainer import train
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import command as generate
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import StopStrings, ending
from trainer.rollouts import rollout as rollout_lib

FOLDER = ROOT / "tests" / "input_pipeline" / "references" / "stop_strings"
REFERENCES = json.loads((FOLDER / "stops.json").read_text(encoding="utf-8"))
KINDS = {name: load_tokenizer(FOLDER / name) for name in REFERENCES}


def first(stop, ids):
  """(after how many ids the automaton of the device finds a string, which), as it reads them; (0, None): never."""
  classes, moves, found = stop.automaton
  state = 0
  for n, number in enumerate(ids, 1):
    state = moves[state, classes[min(number, len(classes) - 1)]]
    if state >= found:
      return n, stop.strings[state - found]
  return 0, None


def completed(stop, ids):
  """The completion of which these ids would be the beginning."""
  n, string = first(stop, ids)
  zeros = np.zeros(n or len(ids), np.float32)
  return Completion(0, 0, np.array(ids[:n or len(ids)], np.int32), zeros, zeros, "stop" if n else "length", string)


@pytest.mark.parametrize("kind", REFERENCES)
def test_strings_are_found_where_transformers_finds_them(kind):
  ends = set()
  for stops, ids, expected in REFERENCES[kind]:
    assert first(StopStrings(KINDS[kind], stops), ids)[0] == expected, (stops, ids)
    ends.add(expected > 0)
  assert ends == {True, False}


@pytest.mark.parametrize("kind", REFERENCES)
def test_texts_end_before_the_string_or_with_it(kind):
  """By `str.find` in the text of all tokens: what is complete first counts, of several that end there the longest."""
  tokenizer = KINDS[kind]
  eos, checked = tokenizer.eos_id, 0
  for stops, ids, expected in REFERENCES[kind]:
    if not expected or any("</s>" in stop for stop in stops):
      continue
    ids = ids[:expected]
    text = tokenizer.decode(ids, skip_special=False)
    places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not places:  # the space that its first token begins with is left out of a text
      continue
    end, _, string = min(places)
    c = completed(StopStrings(tokenizer, stops), ids)
    assert c.stop_reason == string and c.text_ids.tolist() == ids
    cut, kept = StopStrings(tokenizer, stops), StopStrings(tokenizer, stops, keep=True)
    assert cut.text(c, skip_special=False) == text[:end - len(string)]
    assert kept.text(c, skip_special=False) == text[:end]
    if kind == "bytes_as_letters":  # others leave out one space more where the first token is left out
      without = tokenizer.decode([i for i in ids if i != eos])
      beyond = len(text) - end
      assert kept.text(c) == without[:len(without) - beyond]
      assert cut.text(c) == without[:len(without) - beyond - len(string)]
    checked += 1
  assert checked > 30


def test_a_special_token_is_found_by_its_name_and_shown_by_none():
  tokenizer = KINDS["bytes_as_letters"]
  a, eos = tokenizer.encode_batch(["a"])[0].tolist(), tokenizer.eos_id
  stop = StopStrings(tokenizer, ("</s>a",), keep=True)
  c = completed(stop, [*a, eos, *a, *a])
  assert c.ids.tolist() == [*a, eos, *a] and stop.text(c) == "aa" and stop.text(c, skip_special=False) == "a</s>a"
  assert StopStrings(tokenizer, ("</s>a",)).text(c) == "a"
  half = StopStrings(tokenizer, ("s>a",))
  assert half.text(completed(half, c.ids)) == "a" and half.text(c, skip_special=False) == "a"


def test_of_several_the_one_that_is_complete_first_counts_wherever_tokens_end():
  tokenizer = KINDS["bytes_as_letters"]
  of = {tokenizer.decode([i]): i for i in range(tokenizer.vocab_size)}
  for ids in ([of["a"], of["b"], of["b"]], [of["ab"], of["b"]], [of["abb"]]):
    stop = StopStrings(tokenizer, ("abb", "b", "ab"))
    c = completed(stop, ids)
    assert c.stop_reason == "ab" and stop.text(c) == "" and StopStrings(tokenizer, stop.strings, True).text(c) == "ab"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", REFERENCES)
def test_what_is_printed_as_it_comes_is_the_text_and_nothing_is_taken_back(kind, keep):
  tokenizer = KINDS[kind]
  for (stops, ids, _), size in zip(REFERENCES[kind], itertools.cycle((1, 2, 3, 7))):
    stop = StopStrings(tokenizer, stops, keep)
    c = completed(stop, ids)
    if kind == "with_bytes" and "\ufffd" in tokenizer.decode(c.ids):  # what it says of broken ones changes later
      continue
    begins = range(0, len(c.ids), size)
    parts = [Completion(0, 0, c.ids[i:i + size], c.logprobs[i:i + size], c.logprobs[i:i + size], "") for i in begins]
    parts[-1] = Completion(0, 0, *(getattr(parts[-1], k) for k in ("ids", "logprobs", "full_logprobs")),
                           c.finish_reason, c.stop_reason)
    shown = list(generate.printed(tokenizer, iter(parts), stop))
    assert len(shown) == len(parts) and "".join(shown) == stop.text(c), (stops, ids)
    if keep:  # nothing waits
      assert stop.certain(c.ids[:-1]) == tokenizer.decode(c.ids[:-1])


# (Rows of stop strings on a mesh: the same loop as without them, test_sampler.py.)
@pytest.mark.parametrize("sizes", [None, pytest.param(
    dict(data=2, fsdp=2, tensor=2), marks=(pytest.mark.devices(8), pytest.mark.slow))], ids=["rows", "mesh"])
def test_the_sampler_draws_the_same_tokens_and_ends_with_the_string_on_any_mesh(sizes):
  """Whatever the rows, the chunk and the mesh: what it draws without strings, up to the token that completes one."""
  model, params = case("llama")
  tokenizer = SimpleNamespace(token_bytes=tuple(bytes([97 + i % 5, 97 + i % 3][:1 + i % 2]) for i in range(19)))
  stop = StopStrings(tokenizer, ("ab", "ba", "dd", "ec", "ca"))
  given, options = prompts(), dict(num_samples=2, max_new_tokens=12, seed=3, stop_ids=(3,))
  whole = Sampler(model, rows=4, chunk=4).generate(params, given, **options)
  sampler = Sampler(model, mesh_lib.make_mesh(sizes), rows=32, chunk=5) if sizes else Sampler(model, rows=2, chunk=1)
  reasons = set()
  found = sampler.generate(params, given, stop=stop, **options)
  for c, base in zip(found, whole, strict=True):
    texts = [b"".join(tokenizer.token_bytes[i] if i < 19 else b"" for i in base.ids[:n])
             for n in range(1, len(base.ids) + 1)]
    hits = [n for n, text in enumerate(texts, 1) if any(s.encode() in text for s in stop.strings)]
    n = hits[0] if hits else len(base.ids)
    assert c.ids.tolist() == base.ids[:n].tolist() and len(c.logprobs) == len(c.full_logprobs) == n
    if hits and base.ids[n - 1] != 3:
      assert c.finish_reason == "stop" and texts[n - 1].endswith((c.stop_reason.encode(), *(
          c.stop_reason.encode() + bytes([b]) for b in range(97, 103))))
    else:
      assert (c.finish_reason, c.stop_reason) == (base.finish_reason, None)
    reasons.add((c.finish_reason, c.stop_reason))
  assert ("length", None) in reasons and len(reasons) >= 4, reasons


@pytest.mark.parametrize("strings, message", [
    (("a", ""), "allowed: several strings of at least one"), ("abc", "allowed: several strings"), ((7,), "allowed"),
    (("\ud800",), "half a character")])
def test_what_can_end_no_text_is_refused(strings, message):
  with pytest.raises(ConfigError, match=f"rollout.stop: .*{message}"):
    StopStrings(BytesTokenizer(), strings, where="rollout.stop")


def test_the_end_is_told():
  assert ending({"finish_reason": "length"}) == "length"
  assert ending({"finish_reason": "stop", "stop_reason": "\n"}) == r"stop at '\n'"


# ---------------------------------------------------------------------------------------------- runs


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize("keep", [False, True])
def test_a_rollout_is_trained_as_it_was_sampled(tmp_path, keep):
  """Completions that end with a string are no longer, are not cut off, and are trained with the token that completes
  it; what is told has it or not."""
  config = rollout_runs.config(rollout_runs.write_prompts(tmp_path), total_steps=2, rollout=dict(
      stop=LETTERS, keep_stop=keep, max_new_tokens=12, mask_truncated=True))
  experiences = []
  with pytest.MonkeyPatch.context() as patch:
    collect = rollout_lib.experience_lib.collect
    patch.setattr(rollout_lib.experience_lib, "collect", lambda units: experiences.append(collect(units)) or
                  experiences[-1])
    train(config, tmp_path / "w")
  rows = rollout_runs.table(tmp_path / "w", 1)
  metrics = rollout_runs.rows_of(tmp_path / "w")[1]
  ended = [row for row in rows if "stop_reason" in row]
  assert len(ended) > 3 and {row["finish_reason"] for row in rows} == {"stop", "length"}
  assert metrics["completions/stop_string_ratio"] == pytest.approx(len(ended) / len(rows))
  cut = sum(row["finish_reason"] == "length" for row in rows)
  assert metrics["completions/clipped_ratio"] == pytest.approx(cut / len(rows))
  assert metrics["completions/masked"] == cut
  for row in ended:
    letters = [c for c in row["completion"] if c in LETTERS]
    assert letters == ([row["stop_reason"]] if keep else []) and row["completion"].endswith("".join(letters))
  assert not any(c in LETTERS for row in rows if row not in ended for c in row["completion"])
  e = next(e for e in experiences if len(e.lengths))
  kept = [row for row in rows if row["finish_reason"] == "stop"]
  ends = np.cumsum(e.lengths)
  for row, end, length in zip(kept, ends, e.lengths, strict=True):
    sampled = e.tokens[end - length:end][e.weights[end - length:end] > 0]
    assert len(sampled) == row["tokens"] and sampled[-1] == (ord(row["stop_reason"]) if row in ended else 257)
  text = (tmp_path / "w" / "samples" / "rollout-00000001.html").read_text()
  assert any(f"stop at &#x27;{c}&#x27;" in text or f"stop at &#39;{c}&#39;" in text or f"stop at '{c}'" in text
             for c in LETTERS)
