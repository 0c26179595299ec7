"""Prompts in chunks, and behind what is kept of them: the same completions, in fewer programs and of fewer tokens."""

import jax
import numpy as np
import pytest

from models.attention import cache as cache_lib
from tests.trainer.generate.test_sampler import STOPS, case, prompts, teacher_forced
from trainer.distributed import mesh as mesh_lib
from trainer.generate import sampler as sampler_lib
from trainer.generate import slots as sampler_rows
from trainer.generate.completion import More, Request, joined
from trainer.generate.image_tokens import PromptImages
from trainer.generate.kept import Kept, KeptText
from trainer.generate.prefill import Prefill
from trainer.generate.sampler import Sampler
from trainer.generate.slots import Texts, Waiting

LENGTHS = (1, 5, 13, 3, 9)
OPTIONS = dict(max_new_tokens=9, stop_ids=STOPS, seed=1)


def assert_same(found, expected):
  for a, b in zip(found, expected, strict=True):
    assert (a.prompt, a.sample, a.finish_reason) == (b.prompt, b.sample, b.finish_reason)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    if b.experts is not None:
      np.testing.assert_array_equal(a.experts, b.experts)


@pytest.mark.parametrize("name", ["gemma", "moe", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "llama", "gemma3n", "gpt2", "llama4", "qwen3_next", "nemotron_3"))])
def test_in_chunks_prompts_have_the_completions_they_have_at_once(name):
  """Chunks of four tokens, of prompts shorter, longer and several times as long, two samples of each in two rows."""
  model, params = case(name)
  given = prompts(LENGTHS)
  found, expected = (Sampler(model, rows=2, chunk=4, prefill_chunk=chunk, record=True).generate(
      params, given, num_samples=2, **OPTIONS) for chunk in (4, 0))
  assert_same(found, expected)
  for c, (forced, _) in zip(found, teacher_forced(model, params, given, found), strict=True):
    np.testing.assert_allclose(c.logprobs, forced, rtol=1e-5, atol=1e-5)


def test_long_prompts_need_no_programs_of_their_lengths():
  """Six lengths up to 60 have four sizes: with chunks of 16, two programs run them all."""
  model, params = case("llama")
  counts = {}
  for chunk in (0, 16):
    sampler = Sampler(model, rows=1, chunk=4, prefill_chunk=chunk)
    for length in range(5, 61, 11):
      sampler.generate(params, prompts([length]), max_new_tokens=2)
    names = [key[0] for key in sampler._programs]
    counts[chunk] = names.count("prefill") + names.count("extend")
  assert counts == {0: 4, 16: 2}


def test_rows_do_not_wait_for_a_long_prompt():
  """A chunk of the prompt, then one of decoding steps, in turns; without steps between where no row has a text. The
  shorter of two prompts waits for the other's last chunk."""
  model, params = case("llama")
  sampler, real, called = Sampler(model, rows=2, chunk=4, prefill_chunk=4), Sampler._program, []

  def program(name, *args, **sizes):
    called.append(name)
    return real(sampler, name, *args, **sizes)

  sampler._program = program
  given = prompts([10, 20, 14])
  found = sampler.generate(params, given, max_new_tokens=[24, 24, 4], in_order=True)
  assert_same(found, Sampler(model, rows=2, chunk=4).generate(params, given, max_new_tokens=[24, 24, 4], in_order=True))
  in_order = [name for name in called if name in ("extend", "decode")]
  assert in_order[:6] == ["extend"] * 5 + ["decode"]  # two prompts, 20 tokens
  assert in_order[5:] == ["decode"] * 6 + ["extend"] * 4 + ["decode"]  # both rows end together
  called.clear()
  later = sampler.generate(params, given, max_new_tokens=[24, 2, 4], in_order=True)
  again = [name for name in called if name in ("extend", "decode")][5:]
  assert again[:8] == ["decode", *["extend", "decode"] * 3, "extend"]
  assert_same([c for c in later if c.prompt != 1], [c for c in found if c.prompt != 1])


def conversation(sampler, params, first, kept, turns=3, **options):
  """[completions of each turn]: what was said is followed by three tokens of an answer."""
  given, found = list(first), []
  for turn in range(turns):
    found.append(sampler.generate(params, given, **OPTIONS, kept=kept, keep=[turn + 1 < turns] * len(given), **options))
    ended = [c for c in found[-1] if c.finish_reason == "stop"]
    given = [np.concatenate([given[c.prompt], c.ids, np.array([7, 8, 9 + c.prompt % 2], np.int32)]) for c in ended]
  return found


@pytest.mark.parametrize("name", ["gemma", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "llama", "gemma3n", "llama4", "moe", "qwen3_next", "nemotron_3"))])
@pytest.mark.parametrize("chunk", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_that_are_kept_go_on_as_those_that_are_run_again(name, chunk):
  """Conversations of three turns; the tokens that were not run again are all but those that an answer adds, and the one
  that ended what was said."""
  model, params = case(name)
  first, kept = prompts([5, 9, 3, 13] * 3), Kept(100, once=True)
  sampler = Sampler(model, rows=3, chunk=4, prefill_chunk=chunk, record=True)
  found, expected = (conversation(sampler, params, first, some) for some in (kept, None))
  assert len(found[1]) >= 3 and len(found[2])
  for a, b in zip(found, expected, strict=True):
    assert_same(a, b)
  later = sum(len(turn) for turn in found[1:])
  asked = sum(len(ids) for ids in first)
  assert kept.run == asked + 4 * later and kept.reused > asked / 2 and kept.given_up == 0


def test_what_is_kept_gives_its_place_to_others():
  """Two places for some ten conversations: what goes on is the same, and most of it is run again."""
  model, params = case("gemma")
  sampler, kept = Sampler(model, rows=3, chunk=4), Kept(2, once=True)
  first = prompts([5, 9, 3, 13] * 3)
  for a, b in zip(conversation(sampler, params, first, kept), conversation(sampler, params, first, None), strict=True):
    assert_same(a, b)
  ended = sum(c.finish_reason == "stop" for c in sampler.generate(params, first, **OPTIONS))
  assert kept.given_up >= ended - 2 and 0 < kept.reused


@pytest.mark.parametrize("chunk", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, all_seen", [("llama", True), ("gemma", False), *(
    pytest.param(*of, marks=pytest.mark.slow) for of in (("moe", False), ("llama4", False), ("qwen3_next", False)))])
def test_prompts_with_a_common_beginning_go_on_from_there(name, all_seen, chunk):
  """Beginnings of what was asked and of what was said, of several lengths and from two texts, while others that have
  none in common come with them; and nothing where a window was left or a state stands for all."""
  model, params = case(name)
  examples, other, one, two = prompts([11, 6, 4, 3])
  sampler, kept = Sampler(model, rows=3, chunk=4, prefill_chunk=chunk, record=True), Kept(9, cut=True, least=4)
  begun = [np.concatenate([examples, one]), other]
  said = sampler.generate(params, begun, **OPTIONS, kept=kept)
  whole = [np.concatenate([ids, c.ids[:-1]]) for ids, c in zip(begun, said, strict=True)]
  given = [np.concatenate(parts).astype(np.int32) for parts in (
      (examples, two), (examples[:5], two), (whole[0][:-1], [(whole[0][-1] + 1) % 24], two), (two, examples),
      (other, two), (whole[1], two), (examples[:3], two), (examples,))]
  found, expected = (sampler.generate(params, given, **OPTIONS, kept=some) for some in (kept, None))
  assert_same(found, expected)

  def in_common(ids):
    return max(n for text in whole for n in range(min(len(text), len(ids) - 1) + 1) if (text[:n] == ids[:n]).all())

  longest = [in_common(ids) for ids in given]
  beginnings = [n if n >= 4 and n not in map(len, whole) else 0 for n in longest]
  assert sum(map(bool, beginnings)) >= 5
  if all_seen:
    assert kept.shared == sum(beginnings) and kept.reused == sum(n for n in longest if n >= 4)
    assert [c.reused for c in found] == [n if n >= 4 else 0 for n in longest]
  else:
    assert kept.shared == 0 < kept.reused
  for c, (forced, _) in zip(found, teacher_forced(model, params, given, found), strict=True):
    np.testing.assert_allclose(c.logprobs, forced, rtol=1e-5, atol=1e-5)


def test_a_text_that_has_not_left_its_windows_has_beginnings():
  model, params = case("moe")  # a window of four tokens
  sampler, kept = Sampler(model, rows=2, chunk=4), Kept(9, cut=True, least=1)
  first, options = np.array([7, 8, 9], np.int32), dict(max_new_tokens=2, stop_ids=STOPS, seed=1)
  sampler.generate(params, [first], **options, kept=kept)
  for ids in ([7, 1], [7, 8, 1, 2, 3, 4, 5]):
    given = [np.array(ids, np.int32)]
    assert_same(*(sampler.generate(params, given, **options, kept=some) for some in (kept, None)))
  assert kept.shared == 1 + 2


@pytest.mark.devices(8)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "gemma", "qwen3_next", "nemotron_3", "moe"))])
def test_on_a_mesh_chunks_and_kept_texts_are_what_they_are_on_one_device(name):
  model, params = case(name)
  mesh = mesh_lib.make_mesh(dict(data=1, expert=2, context=2, tensor=2))
  sharded = jax.device_put(params, mesh_lib.param_shardings(params, mesh)[0])
  first, kept = prompts([5, 9, 3, 13, 6]), Kept(9)
  found = conversation(Sampler(model, mesh, rows=4, chunk=4, prefill_chunk=4), sharded, first, kept)
  for a, b in zip(found, conversation(Sampler(model, rows=4, chunk=4), params, first, None), strict=True):
    assert_same(a, b)
  assert kept.reused


def test_kept_texts_from_pages_and_while_others_are_decoded(monkeypatch):
  """Prompts that come later, some of which go on from what a row of pages left."""
  for module, key, value in ((sampler_rows, "PAGE", 4), (cache_lib, "PAGE", 4), (sampler_rows, "MIN_PAGED", 1),
                             (sampler_lib, "MIN_PAGED_BYTES", 0)):
    monkeypatch.setattr(module, key, value)
  model, params = case("gemma")
  sampler, first = Sampler(model, rows=3, chunk=4), prompts([5, 9, 3, 13])

  def talk(kept):
    """Each completion that has ended is answered before the next chunk, up to eight times."""
    given, parts, found, ended = list(first), {}, [], []

    def more(_idle):
      new = [np.concatenate([given[p], ids, [7, 8]]).astype(np.int32) for p, ids in ended[:8 + len(first) - len(given)]]
      ended.clear()
      given.extend(new)
      return More(new)

    for part in sampler.stream(params, first, Request(**OPTIONS, more=more, kept=kept)):
      parts.setdefault(part.prompt, []).append(part)
      if part.finish_reason:
        found.append(joined(parts[part.prompt]))
        ended += [(part.prompt, found[-1].ids)] if part.finish_reason == "stop" else []
    return {tuple(given[c.prompt]): c for c in found}

  kept = Kept(9)
  found, expected = talk(kept), talk(None)
  assert found.keys() == expected.keys() and len(found) > 6 and kept.reused > 30
  assert {key[3] is None for key in sampler._programs if key[0] == "keep"} == {False}
  for text, a in found.items():
    np.testing.assert_array_equal(a.ids, expected[text].ids)
    np.testing.assert_allclose(a.logprobs, expected[text].logprobs, atol=1e-5)


# ----------------------------------------------------------------------------------------------
# What is run, in which sizes: programs that only note what they are given.


class Programs:
  """Notes (name, sizes, tokens, lengths) of what is run; experts of a token are the token."""

  def __init__(self, record=False):
    self.run, self._record = [], record

  def __call__(self, name, sizes=None):
    def program(*args):
      if name == "room":
        return "last", "cache"
      if name == "join":
        self.run.append((name, sizes, args[1], args[2].tolist(), args[3].tolist()))
        return "joined"
      tokens, lengths = (args[1], args[2]) if name == "prefill" else (args[3], args[4])
      self.run.append((name, sizes, [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]))
      return ["last", "cache", *([tokens[..., None, None].astype(np.int16)] if self._record else [])]

    return program


def waiting_for(lengths, chunk=0, kept=None, samples=1):
  """Prompt n has the ids 10 n, 10 n + 1, …"""
  prompts = [10 * n + np.arange(length, dtype=np.int32) for n, length in enumerate(lengths)]
  count = len(lengths)
  return Waiting(Texts(prompts, [PromptImages()] * count, [range(samples)] * count, [9] * count, [0] * count,
                       [0] * count, list(kept or [None] * count), [False] * count), in_order=True, chunk=chunk)


def prefill_of(waiting, programs, most_tokens=1000, unit=1, kept=None):
  return Prefill(programs, None, "params", waiting, most_tokens, unit, kept)


def test_prompts_are_run_together_up_to_so_many_tokens_with_padding():
  """Three of up to 40 tokens, 48 with padding: two at a time are within 100, in rows that are a multiple of 2."""
  waiting, programs, kept = waiting_for((3, 40, 5)), Programs(record=True), Kept(9)
  prefill = prefill_of(waiting, programs, 100, 2, kept)
  assert prefill.ready(8) and waiting.prefilled.prompts == [0, 1] and waiting.prefilled.sizes == (2, 48)
  (name, sizes, tokens), = programs.run
  assert (name, sizes) == ("prefill", (2, 48, waiting.most_images))
  assert tokens == [[0, 1, 2], list(range(10, 50))]
  assert [part.ravel().tolist() for part in waiting.prefilled.experts] == tokens
  assert prefill.ready(8) and len(programs.run) == 1  # nothing more until these have rows
  waiting.take(8)
  assert prefill.ready(8) and programs.run[1:] == [("prefill", (2, 16, 0), [[20, 21, 22, 23, 24], [0]])]
  assert (kept.run, kept.reused) == (48, 0)


def test_a_long_prompt_is_run_in_chunks_between_which_others_go_on():
  waiting, programs, kept = waiting_for((9, 11), chunk=4), Programs(record=True), Kept(9)
  prefill = prefill_of(waiting, programs, kept=kept)
  assert [prefill.ready(8) for _ in range(3)] == [False, False, True]
  assert [(name, sizes, tokens) for name, sizes, tokens in programs.run] == [
      ("extend", (2, 4, 128), [[0, 1, 2, 3], [10, 11, 12, 13]]),
      ("extend", (2, 4, 128), [[4, 5, 6, 7], [14, 15, 16, 17]]), ("extend", (2, 4, 128), [[8], [18, 19, 20]])]
  assert waiting.prefilled.prompts == [0, 1] and waiting.prefilled.sizes == (2, 128)
  assert [part.ravel().tolist() for part in waiting.prefilled.experts] == [list(range(9)), list(range(10, 21))]
  assert (kept.run, kept.reused) == (20, 0)


def test_behind_a_text_that_was_kept_only_the_rest_is_run():
  """Seven of nine tokens; the text has its place until it was taken over."""
  released = []

  class Noting(Kept):
    def release(self, text):
      released.append(text)

  seven = np.arange(7, dtype=np.int32)
  text = KeptText(seven, b"", "its cache", 256, experts=seven.astype(np.int16)[:, None, None])
  waiting, programs, kept = waiting_for((9,), kept=[text]), Programs(record=True), Noting(9)
  assert prefill_of(waiting, programs, kept=kept).ready(8)
  assert programs.run == [("join", (1, 128, 256), "its cache", [0], [0]), ("extend", (1, 16, 128), [[7, 8]])]
  assert released == [text] and waiting.kept == [None] and (kept.run, kept.reused) == (2, 7)
  assert waiting.prefilled.experts[0].ravel().tolist() == list(range(9))


def test_prompts_whose_caches_are_long_are_fewer_though_little_of_them_is_run():
  """Two texts of 300 tokens of which 299 were kept: 500 have room for one at a time."""
  kept = [KeptText(10 * n + np.arange(299, dtype=np.int32), b"", "cache", 512) for n in range(2)]
  waiting, programs = waiting_for((300, 300), kept=kept), Programs()
  assert prefill_of(waiting, programs, 500).ready(8) and waiting.prefilled.prompts == [0]
  assert programs.run[-1] == ("extend", (1, 16, 512), [[299]])
