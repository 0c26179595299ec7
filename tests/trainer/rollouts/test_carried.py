"""Completions that go on in the next rollout: which, by whom, as if not left off; whole runs, stopped and replayed."""

import itertools
import json
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.models.initial import initial
from tests.trainer import rollout_runs
from tests.trainer.rollout_runs import STOP, assert_same_state, rows_of, table, write_prompts
from tests.trainer.rollouts.test_ahead import schedule_of
from trainer import train
from trainer.errors import ConfigError
from trainer.generate import sampler as sampler_lib
from trainer.generate import slots
from trainer.generate.completion import Completion, Request, collect
from trainer.generate.kept import Held
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import StopStrings
from trainer.rollouts import carried
from trainer.rollouts.carried import Ages, Group, fresh
from trainer.rollouts.producer import Producer
from trainer.rollouts.schedule import NAME

pytestmark = pytest.mark.host_patches

# ----------------------------------------------------------------------------------------------
# Which groups go on, with a sampler that takes no time.


def stream_of(lengths, rows, chunk, now, versions):
  """A sampler whose completions have the given lengths; a token is its place in its completion, its log-prob minus the
  version of its policy. `versions`: of chunks."""
  def stream(prompts, places, *, samples, begun, seed, until, **_):
    waiting = [(n, sample) for n, of in enumerate(samples) for sample in of]
    texts = {unit: begun[unit[0]] for unit in waiting}
    running = []
    while (waiting or running) and not until():
      while waiting and len(running) < rows:
        running.append(waiting.pop(0))
      version = next(versions)
      for unit in list(running):
        total = lengths[now[places[unit[0]]].number, unit[1]]
        ids = np.arange(texts[unit], min(texts[unit] + chunk, total), dtype=np.int32)
        texts[unit] += len(ids)
        if texts[unit] == total:
          running.remove(unit)
        logprobs = np.full(len(ids), -version, np.float32)
        yield Completion(*unit, ids, logprobs, logprobs, "stop" if texts[unit] == total else ""), version
  return stream


def test_metrics_are_of_the_tokens_that_are_trained_on():
  """Five tokens, by policies of 3, 5 and 6 updates, trained on after 7; policy 6 sampled first."""
  def text(*versions):
    return carried.NO_TEXT._replace(versions=np.array(versions, np.int32))

  ages = Ages(6, 7, 2, 1, 9)
  groups = [Group(0, "s", [text(3, 5), text(6)]), Group(1, "s", [text(6, 6), text()])]
  assert carried.metrics(groups, [fresh(2, "s", 1)] * 3, ages) == {
      "rollout/carried_groups": 3.0, "rollout/carried_ratio": 2 / 5, "rollout/token_staleness": (4 + 2 + 1 + 1 + 1) / 5,
      "rollout/max_token_staleness": 4.0}
  assert carried.metrics([], [], ages) == {"rollout/carried_groups": 0.0}
  part = text(3)._replace(ids=np.array([7], np.int32), logprobs=np.array([-1.0], np.float32)).more(
      Completion(0, 1, np.array([8, 9], np.int32), np.zeros(2), np.array([-2.0, -3.0]), "stop", "x"), 5)
  made = part.completion(4)
  assert (made.sample, made.ids.tolist(), made.logprobs.tolist()) == (4, [7, 8, 9], [-1.0, -2.0, -3.0])
  assert made.full_logprobs is made.logprobs and (made.finish_reason, made.stop_reason) == ("stop", "x")
  assert part.versions.tolist() == [3, 5, 5]


@pytest.mark.parametrize("seed", range(12))
def test_no_group_is_lost_or_older_than_allowed_and_each_rollout_is_full(seed):
  """Lengths with a heavy tail, sizes at random; each prompt is trained on once, and its tokens are in order."""
  rng = random.Random(seed)
  size, members, rows = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 24)
  steps, most = rng.randint(1, 3), rng.randint(0, 9)
  lengths = {(n, s): 1 + int(20 * rng.lognormvariate(0, 1.2)) for n in range(2000) for s in range(members)}
  going, drawn, seen, now, version = [], 0, [], [], 0

  def of_chunks(newest):
    """Of every second seed the policy changes now and then, up to the one whose update it is for."""
    nonlocal version
    while True:
      yield version
      version = min(version + rng.randint(0, seed % 2), newest)

  for number in range(40):
    first = number * steps
    version = max(first - rng.randint(0, 1) * rng.randint(0, most), version)
    ages = Ages(version, first, steps, size, most)
    assert ages.begun_anew(going, "anew") == going  # whatever went on can still be trained on in time
    new = max(ages.most(size, rows) - len(going), 0)
    now = [*going, *(fresh(n, f"0/{number}", members) for n in range(drawn, drawn + new))]
    before = [list(group.texts) for group in now]
    whole, rest = carried.go_on(now, size, ages, [np.zeros(2, np.int32)] * len(now), [9999] * len(now),
                                stream_of(lengths, rows, 7, now, of_chunks(first)), lambda: False)
    assert [list(group.texts) for group in now] == before and len(whole) == size
    drawn += new - sum(group.oldest is None for group in rest)
    going = [group for group in rest if group.oldest is not None]
    seen += [group.number for group in whole]
    for group in whole:
      assert first - group.oldest <= most
      for sample, text in enumerate(group.texts):
        assert text.ids.tolist() == list(range(lengths[group.number, sample])) and text.finish_reason == "stop"
        assert (np.diff(text.versions) >= 0).all() and text.versions[-1] <= first
        assert (text.versions == -text.logprobs).all()
    assert sorted(seen + [group.number for group in going]) == list(range(drawn))
  again = carried.restored(*carried.saved(going, "x_"), "x_")
  assert [(group.number, group.seed) for group in again] == [(group.number, group.seed) for group in going]
  for one, two in zip(again, going, strict=True):
    for x, y in zip(one.texts, two.texts, strict=True):
      assert x[3:] == y[3:] and all(np.array_equal(p, q) for p, q in zip(x[:3], y[:3], strict=True))


def test_what_can_no_longer_be_trained_on_in_time_begins_again():
  begun = carried.Text(np.array([3]), np.array([-0.5]), np.array([4]))
  groups = [Group(n, "s", [begun, carried.NO_TEXT]) for n in range(4)]
  assert Ages(6, 6, 1, 2, 3).begun_anew(groups, "anew") == groups
  found = Ages(6, 6, 1, 2, 2).begun_anew(groups, "anew")  # two of them now, two one update later
  assert found[:2] == groups[:2] and [(g.number, g.seed, g.oldest) for g in found[2:]] == [
      (2, "anew", None), (3, "anew", None)]


# ----------------------------------------------------------------------------------------------
# The sampler.


@pytest.mark.parametrize("pages", [False, True])
def test_a_completion_that_was_left_off_goes_on_as_it_would_have(pages, monkeypatch):
  """Wherever that was, with other prompts beside it and in other rows, and where a stop string has just begun."""
  if pages:
    monkeypatch.setattr(sampler_lib, "MIN_PAGED_BYTES", 0)
    monkeypatch.setattr(slots, "MIN_PAGED", 0)
  model = tiny.model(vocab_size=264)
  params = initial(model, 3)
  prompts = [np.arange(5, 9), np.arange(40, 43), np.arange(90, 91)]
  how = dict(max_new_tokens=12, stop_ids=(7, 90, 200))
  samplers = [Sampler(model, rows=rows, chunk=chunk) for rows, chunk in ((8, 32), (3, 5))]
  for sampler in samplers:
    sampler.paged = pages
  drawn = samplers[0].generate(params, prompts, seed="s", num_samples=3, **how)
  # Two places, and of each a string that is drawn across it.
  across = {1: bytes(drawn[0].ids[:2].tolist()).decode(), 6: bytes(drawn[1].ids[5:7].tolist()).decode()}
  how["stop"] = StopStrings(BytesTokenizer(), (*across.values(), "zz"), False, "stop")
  whole = samplers[0].generate(params, prompts, seed="s", num_samples=3, **how)
  assert {c.finish_reason for c in whole} == {"stop", "length"}
  for left in across:
    going = [c for c in whole if len(c.ids) > left]
    assert any(len(c.ids) == left + 1 and c.stop_reason == across[left] for c in going)
    texts = [np.concatenate([prompts[c.prompt], c.ids[:left]]) for c in going]
    parts = samplers[1].stream(params, texts, Request(samples=[[c.sample] for c in going], begun=[left] * len(going),
                                                      seed=["s"] * len(going), in_order=True, **how))
    for rest, c in zip(collect(parts), going, strict=True):
      np.testing.assert_array_equal(rest.ids, c.ids[left:])
      np.testing.assert_allclose(rest.logprobs, c.logprobs[left:], atol=2e-5)
      assert (rest.finish_reason, rest.stop_reason) == (c.finish_reason, c.stop_reason)


@pytest.mark.parametrize("pages", [False, True])
def test_rows_that_are_held_go_on_as_where_the_policy_changes_within_a_request(pages, monkeypatch):
  """Left off after two chunks, four texts go on by another policy, to the bit as they do in one request in which it
  takes over then, and only what is new is run; one that nobody asks for leaves its row to a text that waits."""
  if pages:
    monkeypatch.setattr(sampler_lib, "MIN_PAGED_BYTES", 0)
    monkeypatch.setattr(slots, "MIN_PAGED", 0)
  model = tiny.model(vocab_size=264)
  first, then = initial(model, 3), initial(model, 4)
  prompts = [np.arange(5, 9), np.arange(40, 43), np.arange(90, 91), np.arange(7, 30)]
  how = dict(max_new_tokens=40, seed="s", in_order=True)
  sampler = Sampler(model, rows=4, chunk=4)
  sampler.paged = pages
  looks = iter([None, None, then])
  whole = collect(sampler.stream(first, prompts, Request(newer=lambda: next(looks, None), **how)))
  run = []
  program = sampler._program
  monkeypatch.setattr(sampler, "_program", lambda name, *of, **sizes: run.append(name) or program(name, *of, **sizes))
  held, looks = Held(), iter([False, False, True])
  left = collect(sampler.stream(first, prompts, Request(held=held, until=lambda: next(looks), **how)))
  texts = [np.concatenate([prompts[c.prompt], c.ids]) for c in left]
  assert [len(c.ids) for c in left] == [8] * 4 == [name[1] for name in held.names] and run.count("prefill") == 1
  fresh_one, run[:] = np.arange(100, 110), []
  asked = [*texts[1:], fresh_one]
  rest = collect(sampler.stream(then, asked, Request(held=held, begun=[8, 8, 8, 0], **how)))
  assert run.count("prefill") == 1 and "extend" not in run and held.rows is None and not held.names
  for before, after, expected in zip(left[1:], rest, whole[1:], strict=False):
    np.testing.assert_array_equal(np.concatenate([before.ids, after.ids]), expected.ids)
    np.testing.assert_array_equal(np.concatenate([before.logprobs, after.logprobs]), expected.logprobs)
  # Where none waits for it, the row of the one that nobody asks for is without a text, and without pages.
  looks = iter([False, False, True])
  left = collect(sampler.stream(first, prompts, Request(held=held, until=lambda: next(looks), **how)))
  texts, looks = [np.concatenate([prompts[c.prompt], c.ids]) for c in left], iter([False, True])
  again = Request(held=held, begun=[8] * 3, until=lambda: next(looks), **how)
  assert {len(c.ids) for c in collect(sampler.stream(then, texts[1:], again))} == {4}
  assert held.state.done_B.tolist() == [True, False, False, False] and held.rows.busy() == [1, 2, 3]
  assert not pages or set(held.rows.table.owners_Q.tolist()) - {4} == {1, 2, 3}
  alone = sampler.generate(then, [fresh_one], **how)[0]
  np.testing.assert_array_equal(rest[3].ids, alone.ids)
  np.testing.assert_allclose(rest[3].logprobs, alone.logprobs, atol=2e-5)


@pytest.mark.parametrize("change", [dict(begun=7), dict(seed="t"), dict(max_new_tokens=39)])
def test_another_text_does_not_go_on_in_a_row_that_is_held(change):
  """One that is a token shorter, of another seed, or has another limit, is run from its beginning."""
  model = tiny.model(vocab_size=264)
  params, prompt = initial(model, 3), np.arange(5, 9)
  how = dict(max_new_tokens=40, seed="s")
  sampler, held, looks = Sampler(model, rows=4, chunk=4), Held(), iter([False, False, True])
  left = collect(sampler.stream(params, [prompt], Request(held=held, until=lambda: next(looks), **how)))[0]
  how |= dict(begun=8) | change
  text = np.concatenate([prompt, left.ids[:how["begun"]]])
  how["begun"] = [how["begun"]]
  found = collect(sampler.stream(params, [text], Request(held=held, **how)))[0]
  expected = collect(sampler.stream(params, [text], Request(**how)))[0]
  np.testing.assert_array_equal(found.ids, expected.ids)
  np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_a_stop_string_that_has_begun_ends_what_goes_on():
  """Left off anywhere within it, the state is that of the whole text."""
  automaton = StopStrings(BytesTokenizer(), ("abcd", "bca"), False, "stop").automaton
  ids = np.frombuffer(b"xabcab", np.uint8).astype(np.int32)
  states = [automaton.after(ids[:n]) for n in range(6)]
  assert states[:2] == [0, 0] and len(set(states[1:4])) == 3  # a and ab are each another beginning
  kinds = automaton.classes_V[np.frombuffer(b"d", np.uint8)]
  assert automaton.moves_SxC[automaton.after(ids[:4]), kinds[0]] == automaton.found  # abc + d
  assert automaton.after(ids[:5]) == automaton.found + 1  # bca


# ----------------------------------------------------------------------------------------------
# Whole runs.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
  """The host looks after every other token; every fifth token ends a completion."""
  monkeypatch.setitem(Sampler.__init__.__kwdefaults__, "chunk", 2)
  with rollout_runs.stops_often():
    yield


def config(prompts, stop=None, **rollout):
  """Rollouts of one update each; completions go on for two updates."""
  c = rollout_runs.config(prompts, total_steps=6, strategy=dict(correction="token_truncate"),
                          rollout=dict(max_staleness=2, carry_over=True, updates=1, max_new_tokens=16) | rollout)
  if stop is not None:
    c.callbacks.stop = dict(type=STOP, step=stop)
  return c


def test_each_token_has_the_log_prob_of_the_policy_that_sampled_it(prompts, tmp_path, monkeypatch):
  """By one pass of that policy over the whole text; then stopped twice on its way, it becomes the same run."""
  sampled, policies = [], {}
  real, roll = carried.go_on, Producer.roll

  def go_on(groups, need, ages, ids, *rest):
    found = real(groups, need, ages, ids, *rest)
    of = {group.number: prompt for group, prompt in zip(groups, ids, strict=True)}
    sampled.extend((of[group.number], text, ages) for group in found[0] for text in group.texts)
    return found

  def noting(self, of, *args):
    policies[of.version] = jax.tree.map(jnp.copy, of.params)
    return roll(self, of, *args)

  with monkeypatch.context() as patch:
    patch.setattr(carried, "go_on", go_on)
    patch.setattr(Producer, "roll", noting)
    run = train(config(prompts), tmp_path / "straight")
  assert len(sampled) == 6 * 16 and sorted(policies) == list(range(6))
  logits = jax.jit(lambda params, batch: run.model.apply(params, batch).hidden @ run.model.unembedding(params))
  for prompt, text, ages in sampled:
    T = len(prompt) + len(text.ids)
    ids = np.zeros((1, 64), np.int32)
    ids[0, :T] = np.concatenate([prompt, text.ids])
    batch = dict(tokens=ids, positions=np.arange(64)[None], segment_ids=(np.arange(64) < T).astype(np.int32)[None])
    for version in set(text.versions.tolist()):
      z = np.asarray(logits(policies[version], batch), np.float64)[0, len(prompt) - 1:T - 1, :run.model.num_real_vocab]
      z /= 0.7
      expected = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
      expected = expected[np.arange(len(text.ids)), text.ids]
      mine = text.versions == version
      np.testing.assert_allclose(text.logprobs[mine], expected[mine], atol=2e-5)
    assert ages.first_step - text.versions[0] <= 2
  ages = np.concatenate([[ages.first_step - v for v in text.versions] for _, text, ages in sampled])
  rows = rows_of(tmp_path / "straight")
  assert set(ages) >= {0, 1} and rows[1]["rollout/carried_ratio"] == 0
  assert [row["rollout/carried_groups"] > 0 for row in rows.values()] == [True] * 6
  first = 0
  for step, row in rows.items():
    count = sum(len(text.ids) for _, text, of in sampled if of.first_step == step - 1)
    now = ages[first:first + count]
    assert row["rollout/carried_ratio"] == pytest.approx((now > 0).mean())
    assert row["rollout/token_staleness"] == pytest.approx(now.mean())
    assert row["rollout/max_token_staleness"] == now.max()
    first += count
  for step in (2, 3):
    assert train(config(prompts, stop=step), tmp_path / "w").step == step
  again = train(config(prompts), tmp_path / "w")
  assert_same_state(again.state, run.state)
  assert _without_clock(tmp_path / "w") == _without_clock(tmp_path / "straight")
  for step in range(1, 7):
    assert table(tmp_path / "w", step) == table(tmp_path / "straight", step)


def _without_clock(workdir):
  return {step: {key: value for key, value in row.items() if not key.startswith("rollout/idle_")}
          for step, row in rows_of(workdir).items()}


def test_a_run_at_once_is_had_again_from_its_schedule(prompts, tmp_path):
  run = train(config(prompts, concurrent=True), tmp_path / "w")
  again = train(config(prompts, schedule=str(tmp_path / "w" / NAME)), tmp_path / "again")
  assert_same_state(run.state, again.state)
  assert _without_clock(tmp_path / "w") == _without_clock(tmp_path / "again")
  assert schedule_of(tmp_path / "w") == schedule_of(tmp_path / "again")
  assert any(row["rollout/carried_groups"] for row in rows_of(tmp_path / "w").values())


def test_in_flight_what_goes_on_is_not_run_again_but_after_a_stop(prompts, tmp_path):
  """Its rows are held between rollouts; a run that was stopped has none, and says so in its schedule, from which it is
  had again to the bit. One that follows a schedule cannot go on with rows that its own stop has taken."""
  how = dict(in_flight=True)
  train(config(prompts, stop=3, concurrent=True, **how), tmp_path / "w")
  run = train(config(prompts, concurrent=True, **how), tmp_path / "w")
  lines = {line["rollout"]: line for line in map(json.loads, (tmp_path / "w" / NAME).read_text().splitlines())}
  kept = [lines[number].get("kept", 0) for number in range(6)]
  assert kept[0] == 0 and 0 in kept[1:] and sum(map(bool, kept)) >= 2
  rows = rows_of(tmp_path / "w")
  assert [rows[lines[number]["update"]]["rollout/rows_held"] for number in range(6)] == kept
  follows = dict(schedule=str(tmp_path / "w" / NAME), **how)
  again = train(config(prompts, **follows), tmp_path / "again")
  assert_same_state(run.state, again.state)
  assert _without_clock(tmp_path / "w") == _without_clock(tmp_path / "again")


def test_in_flight_rows_are_held_between_rollouts_and_their_number_is_in_the_schedule(prompts, tmp_path):
  c = config(prompts, concurrent=True, in_flight=True)
  c.total_steps = 2
  train(c, tmp_path)
  lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
  assert "kept" not in lines[0] and lines[1]["kept"] > 0
  rows = rows_of(tmp_path)
  assert [rows[step]["rollout/rows_held"] for step in (1, 2)] == [0, lines[1]["kept"]]


def test_a_schedule_decides_whether_rows_go_on():
  """As many as it says; none where it says so; others cannot be had again."""
  def held():
    rows = Held()
    rows.put("state", "rows", {(b"a", 1, 9): 0, (b"b", 2, 9): 1})
    return SimpleNamespace(_held=rows)

  assert Producer._hold(held(), None) == Producer._hold(held(), 2) == 2
  of = held()
  assert Producer._hold(of, 0) == 0 and of._held.state is None and not of._held.names
  assert Producer._hold(SimpleNamespace(_held=None), None) == Producer._hold(SimpleNamespace(_held=None), 0) == 0
  for of, count in ((held(), 2), (SimpleNamespace(_held=Held()), 0), (SimpleNamespace(_held=None), 0)):
    with pytest.raises(ConfigError, match=f"says that 3 completions go on in their rows, and {count} are there"):
      Producer._hold(of, 3)


def test_where_prompts_end_all_that_has_begun_is_trained_on(prompts, tmp_path):
  """One pass over 7 prompts: two rollouts, and each prompt once."""
  c = config(prompts[1:])
  c.input.stop = "all"
  train(c, tmp_path / "w")
  seen = [line["where"] for step in (1, 2) for line in table(tmp_path / "w", step)[::4]]
  assert len(seen) == len(set(seen)) == 7 and list(rows_of(tmp_path / "w")) == [1, 2]


def test_turned_off_what_has_begun_is_still_trained_on(prompts, tmp_path, caplog):
  """Allowed older completions, as it was; not allowed any, from the first token on, which is said."""
  for options, said in ((dict(carry_over=False), False), (dict(carry_over=False, max_staleness=0), True)):
    work = tmp_path / str(said)
    train(config(prompts[:1], stop=2), work)
    c = config(prompts[:1], **options)
    c.allow_config_changes = True
    train(c, work)
    rows = [table(work, step) for step in range(1, 7)]
    where = list(itertools.chain(*([line["where"] for line in lines[::4]] for lines in rows)))
    assert len(where) == len(set(where)) == 24
    assert ("begin again" in caplog.text) == said
