"""The sampler: its log-probs are the model's, its draws follow the distribution, and nothing else changes either."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import cache as cache_lib
from models.sharding import logical_axes
from models.transformer import Transformer
from tests.models.common import FAMILIES, GEMMA3N, LLAMA4_MOE, NEMOTRON_3, QWEN3_NEXT, VOCAB, make, random_params
from tests.trainer.generate.test_decoding import Chain
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import decoding
from trainer.generate import sampler as sampler_lib
from trainer.generate import slots as sampler_rows
from trainer.generate.beginnings import Beginnings
from trainer.generate.completion import More, Request, collect
from trainer.generate.kept import Held, Kept
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import Automaton
from trainer.strategies import logprobs

CASES = {
    **{name: dict(options, num_layers=2) for name, options in FAMILIES.items()},  # of each kind one
    "gpt2": dict(FAMILIES["gpt2"], num_layers=2, max_positions=32),
    "moe": dict(moe=dict(num_experts=4, experts_per_token=2, expert_size=8), num_layers=1, window=4,
                layer_pattern=("local",)),
    "qwen3_next": dict(QWEN3_NEXT, num_layers=3, moe=dict(num_experts=4, experts_per_token=2, expert_size=8)),
    "nemotron_3": NEMOTRON_3,
    "llama4": LLAMA4_MOE,
    "gemma3n": GEMMA3N,
}
LENGTHS = (1, 5, 9, 3, 13)
# Samplers have two rows and look every four tokens where these do not matter: they then share their programs.
STOPS = (3, 4, 5, 6)
# Twenty texts of which most end early.
MANY = dict(num_samples=4, max_new_tokens=[45, 3, 3, 40, 9], stop_ids=STOPS[:1], seed=2)


@functools.cache
def case(name):
  model = make(**CASES[name])
  return model, random_params(model)


def prompts(lengths=LENGTHS):
  rng = np.random.default_rng(0)
  return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


def teacher_forced(model, params, given, completions, temperature=1.0):
  """The log-probs of each completion's ids after its prompt, from one `apply` of all of them, padded on the right."""
  texts = [np.concatenate([given[c.prompt], c.ids]) for c in completions]
  width = max(map(len, texts))
  tokens = np.stack([np.pad(text, (0, width - len(text))) for text in texts])
  segments = np.stack([np.arange(width) < len(text) for text in texts]).astype(np.int32)

  @jax.jit
  def stats(params, tokens, segments):
    hidden = model.apply(params, dict(tokens=tokens, segment_ids=segments)).hidden
    return logprobs.token_stats(
        hidden[:, :-1], model.unembedding(params), tokens[:, 1:], chunk=16, logit_cap=model.final_logit_cap,
        num_real_vocab=model.num_real_vocab, temperature=temperature, want=("logprob", "is_top"))

  found = stats(params, tokens, segments)
  return [(np.asarray(found.logprob)[row, n:n + len(c.ids)], np.asarray(found.is_top)[row, n:n + len(c.ids)])
          for row, (c, n) in enumerate((c, len(given[c.prompt]) - 1) for c in completions)]


@pytest.mark.parametrize("name", CASES)
def test_logprobs_equal_teacher_forced_ones(name):
  """I9: KV cache, ragged prompts, rows given to others, a stop set, windows, experts."""
  model, params = case(name)
  given = prompts()
  options = dict(num_samples=2, max_new_tokens=9, temperature=0.8, stop_ids=STOPS, seed=1)
  completions = Sampler(model, rows=2, chunk=4).generate(params, given, **options)
  assert [(c.prompt, c.sample) for c in completions] == [(p, s) for p in range(5) for s in range(2)]
  assert {c.finish_reason for c in completions} == {"stop", "length"}
  for c, (expected, _) in zip(completions, teacher_forced(model, params, given, completions, 0.8), strict=True):
    np.testing.assert_allclose(c.logprobs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(c.logprobs, c.full_logprobs)
    assert c.ids.dtype == np.int32 and c.logprobs.dtype == np.float32 and c.ids.max() < VOCAB
    ends = np.isin(c.ids, STOPS)
    assert not ends[:-1].any() and ends[-1] == (c.finish_reason == "stop")
    assert len(c.ids) == 9 or c.finish_reason == "stop"
    assert len(c.text_ids) == len(c.ids) - (c.finish_reason == "stop")


def test_greedy_takes_the_teacher_forced_argmax():
  model, params = case("llama")
  given = prompts()
  completions = Sampler(model, rows=2, chunk=4).generate(params, given, max_new_tokens=8, temperature=0)
  for c, (expected, is_top) in zip(completions, teacher_forced(model, params, given, completions), strict=True):
    assert is_top.all() and c.finish_reason == "length"
    np.testing.assert_allclose(c.logprobs, expected, atol=1e-5)


def by_prompt(completions, order=None):
  order = order if order is not None else range(len(completions))
  return {(order[c.prompt], c.sample): c for c in completions}


@pytest.mark.devices(8)
def test_draws_depend_on_nothing_but_seed_prompt_sample_and_place():
  """Not on the other prompts, their order, the rows, the chunk, the bucket or the mesh."""
  model, params = case("llama")
  given = prompts()
  options = dict(max_new_tokens=6, stop_ids=STOPS, seed=7)
  base = by_prompt(Sampler(model, rows=2, chunk=4).generate(params, given, num_samples=2, **options))
  order = [4, 2, 0, 1, 3]
  mesh = mesh_lib.make_mesh(dict(data=1, expert=2, context=2, tensor=2))
  sharded = jax.device_put(params, mesh_lib.param_shardings(params, mesh)[0])
  on_mesh = Sampler(model, mesh, rows=4)
  split = on_mesh._sharding(jax.ShapeDtypeStruct((3, 4, 2, 32, 4), jnp.float32))
  assert split.spec == jax.P(None, ("expert", "context"), "tensor", None, None)
  others = {
      "one row, another order": (Sampler(model, rows=1, chunk=3).generate(params, [given[i] for i in order], **options),
                                 order),
      "alone": (Sampler(model).generate(params, given[1:2], num_samples=3, **options), [1]),
      "mesh": (on_mesh.generate(sharded, given, num_samples=2, **options), None)}
  for what, (completions, order) in others.items():
    shared = by_prompt(completions, order)
    assert len(shared.keys() & base.keys()) >= 2
    for key in shared.keys() & base.keys():
      np.testing.assert_array_equal(shared[key].ids, base[key].ids, err_msg=f"{what} {key}")
      np.testing.assert_allclose(shared[key].logprobs, base[key].logprobs, atol=1e-5)
  ids = [tuple(base[key].ids) for key in base]
  assert len(set(ids)) == len(ids)  # samples and prompts differ
  other = by_prompt(Sampler(model, rows=2, chunk=4).generate(params, given, num_samples=2, **{**options, "seed": 8}))
  assert all(tuple(other[key].ids) != tuple(base[key].ids) for key in base)


def test_parts_of_a_stream_make_the_completions():
  model, params = case("llama")
  sampler = Sampler(model, rows=2, chunk=4)
  options = dict(max_new_tokens=7, stop_ids=STOPS, seed=3)
  parts = list(sampler.stream(params, prompts(), Request(**options)))
  whole = sampler.generate(params, prompts(), **options)
  for c in whole:
    mine = [part for part in parts if part.prompt == c.prompt]
    assert [bool(part.finish_reason) for part in mine] == [False] * (len(mine) - 1) + [True]
    assert all(1 <= len(part.ids) <= 4 for part in mine)
    np.testing.assert_array_equal(np.concatenate([part.ids for part in mine]), c.ids)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.host_patches
def test_prompts_that_come_later_are_completed_as_if_they_had_been_there(pages, monkeypatch):
  """While others go on, and when all have ended; longer ones, in rows that were kept for them, or come with them."""
  if pages:
    monkeypatch.setattr(sampler_lib, "MIN_PAGED_BYTES", 0)
    monkeypatch.setattr(sampler_rows, "MIN_PAGED", 0)
  monkeypatch.setattr(sampler_rows, "MIN_ROWS", 1)
  monkeypatch.setattr(sampler_rows, "MIN_SLOTS", 16)
  model, params = case("llama")
  given, limits, options = prompts([3, 4, 9, 90, 2]), [30, 4, 6, 8, 5], dict(stop_ids=STOPS, seed=3)
  expected = Sampler(model, rows=8).generate(params, given, max_new_tokens=limits, num_samples=2, **options)
  calls = []

  def more(idle):
    calls.append(idle)
    if len(calls) == 3:
      return More(given[2:4], dict(max_new_tokens=limits[2:4], samples=[range(2)] * 2), 1)
    if idle and calls.count(True) == 3:  # asked twice before, in vain
      return More(given[4:], dict(max_new_tokens=limits[4:], samples=[range(2)]))
    return More(coming=2 if calls.count(True) < 3 else 0)

  sampler = Sampler(model, rows=8 if pages else 4, chunk=4)
  sampler.paged = pages
  request = Request(max_new_tokens=limits[:2], samples=[range(2)] * 2, more=more, **options)
  found = sampler_lib.collect(sampler.stream(params, given[:2], request))
  assert {4, sampler.rows} <= {key[1] for key in sampler._programs if key[0] == "begin"}
  assert calls[:4] == [False] * 4 and calls[-2:] == [False, True] and calls.count(True) == 4
  assert [(c.prompt, c.sample) for c in found] == [(n, i) for n in range(5) for i in range(2)]
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert a.finish_reason == b.finish_reason


def test_samples_of_any_number_and_limits_of_their_own():
  """What is drawn follows from the sample's number; a limit cuts what a larger one goes on with."""
  model, params = case("llama")
  sampler, options = Sampler(model, rows=2, chunk=4), dict(stop_ids=STOPS, seed=5)
  whole = {(c.prompt, c.sample): c for c in
           sampler.generate(params, prompts(), num_samples=3, max_new_tokens=8, **options)}
  samples, limits = [[2], [], [1, 0], [0], [2, 1]], [2, 1, 8, 3, 5]
  found = sampler.generate(params, prompts(), samples=samples, max_new_tokens=limits, **options)
  assert [(c.prompt, c.sample) for c in found] == [(0, 2), (2, 0), (2, 1), (3, 0), (4, 1), (4, 2)]
  for c in found:
    of = whole[c.prompt, c.sample]
    np.testing.assert_array_equal(c.ids, of.ids[:limits[c.prompt]])
    np.testing.assert_allclose(c.logprobs, of.logprobs[:limits[c.prompt]], atol=1e-5)
    assert c.finish_reason == (of.finish_reason if len(of.ids) <= limits[c.prompt] else "length")
  assert any(c.finish_reason == "length" and len(c.ids) < len(whole[c.prompt, c.sample].ids) for c in found)


@pytest.mark.host_patches
def test_a_prompt_is_run_once_for_all_of_its_samples(monkeypatch):
  """However late its rows become free."""
  ran, real = [], sampler_rows.Waiting.to_prefill

  def to_prefill(*args):
    chosen = real(*args)
    ran.extend(chosen)
    return chosen

  monkeypatch.setattr(sampler_rows.Waiting, "to_prefill", to_prefill)
  model, params = case("llama")
  sampler = Sampler(model, rows=2, chunk=4)
  samples = [[0, 1, 2], [3], [], [0], [1, 2, 3, 4, 5]]
  found = sampler.generate(params, prompts(), samples=samples, max_new_tokens=6, stop_ids=STOPS)
  assert [(c.prompt, c.sample) for c in found] == [(p, s) for p in range(5) for s in samples[p]]
  assert ran == [4, 1, 3, 0]  # the longest first


def test_shapes_come_from_few_sizes():
  model, params = case("llama")
  sampler = Sampler(model, rows=2, chunk=4)

  def run(*lengths, **options):
    sampler.generate(params, prompts(lengths), max_new_tokens=8, stop_ids=STOPS, **options)
    return sampler.compilations

  # The parameters apart, a cache of 32 tokens, prompts of up to 16, one or two at a time, run and put into it (of two
  # that were run also one by one), and the decoding.
  assert run(16, 12, 9) == 7
  for lengths in ((9, 2, 3, 1, 12, 16, 7), (13, 10), (16, 16, 16, 11)):
    assert run(*lengths, seed=1, temperature=0.5) <= 8
  assert run(20, 10) == 10  # a longer prompt, in the same cache
  assert sum(program._cache_size() for program in sampler._programs.values()) == 10


@functools.cache
def of_rows_that_stay(name):
  """The same texts without a change of sizes."""
  sampler = Sampler(case(name)[0], rows=32)
  sampler.paged = False
  return sampler.generate(case(name)[1], prompts(), **MANY)


# In every run of the tests fewer rows than texts, of the quicker model.
@pytest.mark.parametrize("name, rows", [("llama", 6), *(
    pytest.param(name, rows, marks=pytest.mark.slow)
    for name, rows in (("llama", 20), ("llama", 32), ("gemma", 6), ("gemma", 32), ("gemma", 20)))])
@pytest.mark.host_patches
def test_rows_become_fewer_and_the_cache_longer_and_nothing_else_changes(name, rows, monkeypatch):
  model, params = case(name)
  whole = of_rows_that_stay(name)
  monkeypatch.setattr(sampler_rows, "MIN_SLOTS", 4)
  monkeypatch.setattr(sampler_rows, "MIN_ROWS", 2)
  sampler = Sampler(model, rows=rows, chunk=5)
  found = sampler.generate(params, prompts(), **MANY)
  sizes = {key[1:3] for key in sampler._programs if key[0] == "decode"}
  assert len({count for count, _ in sizes}) >= 3 and len({length for _, length in sizes}) >= 2, sizes
  for a, b in zip(found, whole, strict=True):
    assert (a.prompt, a.sample, a.finish_reason) == (b.prompt, b.sample, b.finish_reason)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("name, rows", [("llama", 6), *(
    pytest.param(name, rows, marks=pytest.mark.slow)
    for name, rows in (("gemma", 6), ("llama", 20), ("qwen3_next", 6)))])
def test_texts_in_pages_are_those_in_rows(name, rows, monkeypatch):
  """With pages given to other rows, more of them, and fewer: the same tokens, whatever the rows."""
  for module, key, value in ((sampler_rows, "PAGE", 4), (cache_lib, "PAGE", 4), (sampler_rows, "MIN_PAGED", 1),
                             (sampler_lib, "MIN_PAGED_BYTES", 0),
                             (sampler_rows, "MIN_SLOTS", 4), (sampler_rows, "MIN_ROWS", 2)):
    monkeypatch.setattr(module, key, value)
  model, params = case(name)
  sampler = Sampler(model, rows=rows, chunk=5)
  assert sampler.paged  # on one CPU device
  found = sampler.generate(params, prompts(), **MANY)
  sizes = {key[1:4] for key in sampler._programs if key[0] == "decode"}
  assert len({count for count, *_ in sizes}) >= 2 and len({pages for *_, pages in sizes}) >= 3, sizes
  for a, b in zip(found, of_rows_that_stay(name), strict=True):
    assert (a.prompt, a.sample, a.finish_reason) == (b.prompt, b.sample, b.finish_reason)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_state_begins_with_the_rows_and_pages_that_it_is_asked_for():
  """One sampler makes states of many sizes."""
  sampler = Sampler(case("llama")[0], rows=4, chunk=4)

  def entries(*sizes):
    return sum(leaf.size for leaf in jax.tree.leaves(sampler._program("empty", sampler_rows.Sizes(*sizes))()))

  few, more, most = (entries(2, 64, pages) for pages in (4, 8, 12))
  assert 0 < more - few == most - more
  assert entries(4, 64, 4) > few


@pytest.mark.host_patches
def test_the_host_looks_as_soon_as_enough_rows_have_ended(monkeypatch):
  """Of eight rows one text goes on: it is not decoded in a row of eight; nor does a text wait for a chunk's end."""
  monkeypatch.setattr(sampler_rows, "MIN_ROWS", 1)
  model, params = case("llama")
  drawn = []
  sampler, given = Sampler(model, rows=8, chunk=32), prompts([4] * 8)
  for part in sampler.stream(params, given, Request(max_new_tokens=[32, 2, 2, 2, 2, 2, 2, 2], seed=1)):
    drawn.append((part.prompt, len(part.ids)))
  assert drawn == [(0, 2), *((i, 2) for i in range(1, 8)), (0, 30)]
  assert {key[1] for key in sampler._programs if key[0] == "decode"} == {8, 1}
  two = Sampler(model, rows=2, chunk=32)
  request = Request(max_new_tokens=[20, 5, 7], seed=1)
  parts = [(part.prompt, len(part.ids)) for part in two.stream(params, given[:3], request)]
  assert parts == [(0, 5), (1, 5), (0, 7), (2, 7), (0, 8)]


def test_parameters_that_decoding_reads_as_they_are_are_not_copied(monkeypatch):
  monkeypatch.setattr(Transformer, "_one_by_one", False)
  jax.clear_caches()  # the same model may have been traced as it is without the change
  model, params = case("llama")
  params = jax.device_put(params)
  read = Sampler(model)._program("prepare")(params)
  same = jax.tree.map(lambda a, b: a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer(), params, read)
  assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_cache_is_changed_where_it_lies(one_by_one, monkeypatch):
  """Decoding needs room for a layer's keys and values beside the cache, not for another cache."""
  monkeypatch.setattr(Transformer, "_one_by_one", one_by_one)
  model = make(num_layers=8, num_kv_heads=2)
  state = jax.eval_shape(functools.partial(decoding.empty, model, 4, 1024))
  given = (np.full(8, -1, np.int32), np.ones(3, np.float32), np.int32(0), np.int32(4))
  decode = jax.jit(functools.partial(decoding.decode, model, decoding.DecodeOptions(8, False, False)), donate_argnums=1)
  read = jax.eval_shape(model.decoding_params, model.abstract_params())
  memory = decode.lower(read, state, given).compile().memory_analysis()
  cache = sum(4 * part.size for part in (*state.cache.keys, *state.cache.values))
  assert memory.temp_size_in_bytes < 0.5 * cache


@pytest.mark.devices(8)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_row_needs_another_devices(one_by_one, monkeypatch):
  """All that devices tell one another in decoding is how many rows have ended."""
  monkeypatch.setattr(Transformer, "_one_by_one", one_by_one)
  model, mesh = make(num_layers=2, num_kv_heads=2), mesh_lib.make_mesh(dict(data=8))
  sampler = Sampler(model, mesh, rows=8)
  state = jax.eval_shape(functools.partial(decoding.empty, model, 8, 32))
  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sampler._sharding(x)), state)
  given = (np.full(8, -1, np.int32), np.ones(3, np.float32), np.int32(0), np.int32(4))
  # Without the places of results, of which those that the host reads are gathered at the end of a chunk.
  decode = jax.jit(functools.partial(decoding.decode, model, decoding.DecodeOptions(4, False, False)))
  with logical_axes.placed(sampler._placement):
    read = jax.eval_shape(model.decoding_params, model.abstract_params())
    text = decode.lower(read, state, given).compile().as_text()
  collectives = re.findall(r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute)\(", text)
  assert collectives == [("s32[]", "all-reduce")]


def test_truncated_completions_have_both_logprobs():
  model, params = case("llama")
  given = prompts()
  options = dict(max_new_tokens=8, temperature=0.9, top_k=4, seed=2)
  completions = Sampler(model, rows=2, chunk=4).generate(params, given, **options)
  for c, (full, _) in zip(completions, teacher_forced(model, params, given, completions, 0.9), strict=True):
    np.testing.assert_allclose(c.full_logprobs, full, atol=1e-5)
    assert (c.logprobs >= c.full_logprobs).all() and (c.logprobs > c.full_logprobs + 0.1).any()


@pytest.mark.parametrize("given, options, message", [
    ([[]], {}, "prompt 0 has no tokens"),
    ([[1], [2, 999]], {}, "prompt 1 has ids from 2 to 999; the model's vocabulary ends at 55"),
    ([[1] * 30], dict(max_new_tokens=8), "max_new_tokens is 8, and the longest prompt has 30 tokens: together more "
     "than the 32 .* Use at most 2"),
    ([[1]], dict(top_p=0.0), "top_p: found 0.0, allowed: above 0"),
    ([[1]], dict(temperature=-1), "temperature: found -1.0, allowed: 0"),
    ([[1]], dict(num_samples=0), "num_samples=0"),
])
def test_what_cannot_be_generated_is_refused(given, options, message):
  model, params = case("gpt2")
  with pytest.raises(ConfigError, match=message):
    Sampler(model, rows=1).generate(params, given, **{"max_new_tokens": 2, **options})


def test_no_prompts_give_no_completions():
  model, params = case("llama")
  assert Sampler(model).generate(params, [], max_new_tokens=2) == []


def test_a_model_without_a_cache_is_refused():
  with pytest.raises(ConfigError, match="object cannot generate texts: it has no extend"):
    Sampler(object())


# ---------------------------------------------------------------------------------------------- with a model that is a
# table (test_decoding.py): after 0 it says 3, 1, 4, 2, 2, …; nothing has to be computed for what is to be expected.

GREEDY = dict(temperature=0.0, stop_ids=(2,))


def of_table(rows=2, chunk=2, **options):
  return Sampler(Chain(), rows=rows, chunk=chunk, **options)


def runs(sampler):
  """(Names of the programs that it runs from now on, their sizes), in their order."""
  names, program = [], sampler._program

  def noting(name, *args, **kwargs):
    made = program(name, *args, **kwargs)
    return lambda *given: (names.append((name, kwargs.get("sizes"))), made(*given))[1]

  sampler._program = noting
  return names


def test_experts_of_prompt_and_completion_come_once_and_of_each_its_own():
  """Each token goes through the expert of its number; the last one through none. Prompts of 3 and 1 tokens, 2 each."""
  completions = of_table(record=True).generate({}, [[4, 1, 0], [3]], num_samples=2, max_new_tokens=9, **GREEDY)
  assert [(c.prompt, c.ids.tolist(), c.finish_reason) for c in completions] == [
      (0, [3, 1, 4, 2], "stop")] * 2 + [(1, [1, 4, 2], "stop")] * 2
  for c in completions:
    assert c.experts.ravel().tolist() == [[4, 1, 0], [3]][c.prompt] + c.ids.tolist()[:-1] + [-1]


def test_what_was_kept_is_told_of_the_prompt_that_goes_on_from_it_alone():
  """And it goes on with the experts that it had: the text without the token that ended it, which was not run."""
  sampler, kept = of_table(record=True), Kept(4)
  first, = sampler.generate({}, [[1, 0]], max_new_tokens=9, kept=kept, **GREEDY)
  text, = kept._texts
  assert text.ids.tolist() == [1, 0, 3, 1, 4] and text.experts.ravel().tolist() == [1, 0, 3, 1, 4]
  asked = [[4, 4], [*text.ids.tolist(), 2, 0]]
  other, on = sampler.generate({}, asked, max_new_tokens=3, kept=kept, **GREEDY)
  assert (other.reused, on.reused) == (0, 5) and (kept.reused, kept.run) == (5, 2 + 2 + 2)
  assert on.ids.tolist() == [3, 1, 4] and on.finish_reason == "length"
  assert on.experts.ravel().tolist() == [1, 0, 3, 1, 4, 2, 0, 3, 1, -1]
  assert [part.ids.tolist() for part in kept._texts] == [[1, 0, 3, 1, 4], [4, 4]]  # the cut one is not kept


def test_newer_parameters_run_what_comes_later_and_decode_what_goes_on():
  """By the newer ones each token is taken for the next one, from 4 for 0: 3 is followed by what follows 4, 2. One row;
  the second prompt is run when the first one has ended."""
  newer = iter([None, {"shift": jnp.int32(1)}])
  request = Request(max_new_tokens=3, in_order=True, newer=lambda: next(newer, None), temperature=0.0)
  parts = list(of_table(rows=1).stream({"shift": jnp.int32(0)}, [[0], [3]], request))
  assert [(c.prompt, c.ids.tolist()) for c in parts] == [(0, [3, 1]), (0, [4]), (1, [2, 1]), (1, [2])]


def test_rows_that_are_held_go_on_without_their_texts_being_run_again():
  sampler, held, looks = of_table(), Held(), iter([False, True])
  request = Request(max_new_tokens=4, stop_ids=(2,), temperature=0.0, until=lambda: next(looks), held=held)
  parts = list(sampler.stream({}, [[0], [4, 0]], request))
  assert [part.ids.tolist() for part in parts] == [[3, 1], [3, 1]] and len(held.names) == 2
  names = runs(sampler)
  request = Request(max_new_tokens=4, stop_ids=(2,), temperature=0.0, begun=[2, 0], held=held)
  on, fresh = collect(sampler.stream({}, [[0, 3, 1], [1]], request))
  assert on.ids.tolist() == [4, 2] and fresh.ids.tolist() == [4, 2]
  assert [sizes[0] for name, sizes in names if name == "prefill"] == [1]  # of the prompt that is new
  assert held.rows is None and held.names == {}


def test_a_text_may_be_as_long_as_the_model_can_and_what_was_begun_counts_once():
  """Of ten places: six of a prompt with two of its completion, and up to six of the latter in all."""
  sampler = of_table()
  sampler.model.max_length = 10
  completion, = sampler.generate({}, [[0] * 4 + [3, 1]], max_new_tokens=6, begun=[2], temperature=0.0)
  assert completion.ids.tolist() == [4, 2, 2, 2]
  with pytest.raises(ConfigError, match="max_new_tokens is 5, and the longest prompt has 6 tokens: .* the 10 that"):
    sampler.generate({}, [[0] * 4 + [3, 1]], max_new_tokens=7, begun=[2], temperature=0.0)
  for wrong in (-1, 5):
    with pytest.raises(ConfigError, match=f"prompt 1 has ids from {min(wrong, 4)} to {max(wrong, 4)}; .* ends at 4"):
      sampler.generate({}, [[0], [4, wrong]], max_new_tokens=2)


def test_what_prompts_have_in_common_is_run_once_and_counted():
  """Three with 4 tokens in common, one with none: of 4 · 3 tokens 8 need not be run."""
  sampler, kept, shared = of_table(rows=4), Kept(9), Beginnings(least=3)
  prompts = [[1, 2, 3, 4, 0], [1, 2, 3, 4, 3], [2, 0], [1, 2, 3, 4, 1, 1]]
  found = sampler.generate({}, prompts, max_new_tokens=2, kept=kept, beginnings=shared, temperature=0.0)
  assert [c.ids.tolist() for c in found] == [[3, 1], [1, 4], [3, 1], [4, 2]]
  assert shared.saved == 8 and (kept.run, kept.reused) == (4 + 1 + 1 + 2 + 2, 8)


def test_a_stop_string_may_have_begun_in_what_a_text_goes_on_with():
  """The string "31", of which the 3 was drawn before."""
  class Strings:
    automaton = Automaton(np.array([0, 2, 0, 1, 0, 0], np.int32),
                          np.array([[0, 1, 0], [0, 1, 2], [0, 1, 0]], np.int32), 2)
    strings = ("31",)

  for prompt, begun, ids in (([0, 3], 1, [1]), ([0, 3], 0, [1, 4]), ([0], 0, [3, 1])):
    completion, = of_table().generate({}, [prompt], max_new_tokens=2 + begun, begun=[begun], stop=Strings(),
                                      temperature=0.0)
    assert completion.ids.tolist() == ids
    assert (completion.finish_reason, completion.stop_reason) == (("length", None) if ids[-1] == 4 else ("stop", "31"))
