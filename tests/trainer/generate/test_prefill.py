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
from trainer.generate.kept import Kept, KeptText
from trainer.generate.sampler import Sampler

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
    "llama", "gemma3n", "gpt2", "llama4", "qwen3_next", "nemotron_h"))])
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
    "llama", "gemma3n", "llama4", "moe", "qwen3_next", "nemotron_h"))])
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
    "gemma", "qwen3_next", "nemotron_h", "moe"))])
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


def text(*ids, shown=b""):
  return KeptText(np.array(ids, np.int32), shown, None, 0)


def test_the_longest_text_that_a_prompt_begins_with_is_found():
  kept = Kept(9)
  one, two, other = text(1, 2), text(1, 2, 3), text(1, 2, 3, shown=b"an image")
  for some in (one, two, other, text(9, 2, 3)):
    kept.add(some)
  assert kept.find(np.array([1, 2, 3, 4]), b"") is two
  assert kept.find(np.array([1, 2, 3]), b"") is one  # at least one token is to be run
  assert kept.find(np.array([1, 2, 3, 4]), b"an image") is other
  assert kept.find(np.array([1, 2, 3, 4]), b"another") is None
  assert kept.find(np.array([1, 3, 3, 4]), b"") is None and kept.find(np.array([1]), b"") is None
  kept.clear()
  assert kept.find(np.array([1, 2, 3, 4]), b"") is None


def beginning(*ids, **more):
  return KeptText(np.array(ids, np.int32), b"", "cache", 8, beginnings=True, **more)


def test_the_longest_beginning_that_a_prompt_has_in_common_with_a_text_is_found():
  kept = Kept(9, least=2)
  one, two = beginning(1, 2, 3, 4, experts=np.arange(4)), beginning(1, 2)
  for some in (one, two, text(1, 2, 3, 5, 6)):
    kept.add(some)

  def find(*ids, shown=b""):
    return kept.find(np.array(ids), shown, lambda cache, n: (cache, n))

  found = find(1, 2, 3, 9)
  assert found.ids.tolist() == [1, 2, 3] and found.cache == ("cache", 3) and found.of is one and kept.shared == 3
  assert found.experts.tolist() == [0, 1, 2] and found.slots == 8
  assert find(1, 2, 9) is two and kept.shared == 3  # as long as a beginning, and whole
  assert find(1, 9) is None  # too little
  assert find(1, 2, 3, 9, shown=b"an image") is None
  assert find(1, 2, 3).of is one or find(1, 2, 3) is two  # one token is left to be run
  assert find(1, 2, 3, 5, 9).ids.tolist() == [1, 2, 3]  # of which the third text has no beginnings
  whole_only = Kept(9)
  whole_only.add(one)
  assert whole_only.find(np.array([1, 2, 3, 9]), b"") is None


def test_a_text_that_a_beginning_is_of_keeps_its_place_while_that_waits():
  kept = Kept(1, once=True, least=1)
  kept.add(beginning(1, 2, 3))
  found = kept.find(np.array([1, 2, 5]), b"", lambda cache, n: cache)
  again = kept.find(np.array([1, 2, 6]), b"", lambda cache, n: cache)  # though `once`: it may still go on
  assert found.of is again.of and not kept.takes("stop") and kept.given_up == 2
  kept.release(found)
  assert not kept.takes("stop")
  kept.release(again)
  assert kept.takes("stop")


def test_the_text_used_longest_ago_is_given_up():
  kept = Kept(2)
  kept.add(text(1))
  kept.add(text(2))
  kept.release(kept.find(np.array([1, 5]), b""))
  assert kept.given_up == 0 and kept.takes("stop") and kept.given_up == 1
  kept.add(text(3))
  assert kept.find(np.array([2, 5]), b"") is None
  one, other = kept.find(np.array([1, 5]), b""), kept.find(np.array([3, 5]), b"")
  assert not kept.takes("stop") and kept.given_up == 4  # both are still to be gone on from, and take their places
  kept.release(one)
  assert kept.takes("stop") and other is not None
  kept.begin()  # what another waits for was left off
  kept.add(text(4))
  assert kept.takes("stop") and kept.given_up == 4


def test_of_once_what_was_found_is_not_kept():
  kept = Kept(1, once=True)
  assert not kept.takes("length") and Kept(1, cut=True).takes("length")
  kept.add(text(1))
  found = kept.find(np.array([1, 5]), b"")
  assert kept.find(np.array([1, 5]), b"") is None and not kept.takes("stop")
  kept.release(found)
  assert kept.takes("stop") and kept.given_up == 1
