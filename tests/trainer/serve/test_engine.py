"""The thread that samples for those who ask: who is sampled together, with which seeds and parameters, and what each is
told; by a sampler that says the parameters and what it was asked."""

import threading

import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.serve import engine as engine_lib
from trainer.serve.engine import Engine, How, Job


class Sampler:
  """Each completion is one token, that of its prompt's; waits before it begins while `hold` is set."""

  def __init__(self):
    self.runs, self.hold, self.started = [], threading.Event(), threading.Event()
    self.hold.set()
    self.error, self.meanwhile = None, lambda: None

  def stream(self, params, prompts, request):
    self.started.set()
    self.hold.wait(10)
    if self.error:
      raise self.error
    asked = [(int(ids[0]), limit, samples) for ids, limit, samples in zip(
        prompts, request.max_new_tokens, request.samples, strict=True)]
    run = dict(params=params, asked=asked, seed=request.seed, temperature=request.temperature, kept=request.kept)
    self.runs.append(run)
    self.meanwhile()
    more = request.more(False)
    asked += [(int(ids[0]), limit, samples) for ids, limit, samples in zip(
        more.prompts, more.options.get("max_new_tokens", ()), more.options.get("samples", ()), strict=True)]
    for number, (token, _, samples) in enumerate(asked):
      for sample in samples:
        yield Completion(number, sample, np.array([token]), np.zeros(1), np.zeros(1), "stop")

  def check(self, prompts, max_new_tokens):
    if len(prompts[0]) + max_new_tokens > 5:
      raise ConfigError("too long")


@pytest.fixture
def made():
  sampler = Sampler()
  engine = Engine(sampler, "first", None)
  yield sampler, engine
  sampler.hold.set()
  engine.close()


def how(seed=None, temperature=1.0):
  return How(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, stop_ids=(), stop=(), seed=seed)


class Asked:
  """A job and what it was told."""

  def __init__(self, token, given=None, samples=1, limit=3):
    self.told, self.done, self._left = [], threading.Event(), samples
    self.job = Job(np.array([token]), limit, samples, given or how(), self.report)

  def report(self, part):
    self.told.append(part)
    self._left -= 1
    if isinstance(part, BaseException) or not self._left:
      self.done.set()

  def answer(self):
    assert self.done.wait(10)
    return [(part.sample, part.ids.tolist()) for part in self.told]


def held(sampler, engine):
  """A job that is being sampled and waits; what is submitted meanwhile waits for it."""
  sampler.hold.clear()
  first = Asked(1)
  engine.submit(first.job)
  assert sampler.started.wait(10)
  return first


def test_each_is_told_its_own_samples_counted_from_0(made):
  sampler, engine = made
  one, other = held(sampler, engine), Asked(2, samples=3, limit=7)
  engine.submit(other.job)
  sampler.hold.set()
  assert one.answer() == [(0, [1])] and other.answer() == [(0, [2]), (1, [2]), (2, [2])]
  assert engine.batches == [2]  # it joined the run that was under way
  (token, limit, samples), (_, other_limit, others) = sampler.runs[0]["asked"]
  assert (token, limit, other_limit) == (1, 3, 7) and len(samples) == 1 and len(others) == 3
  assert samples.start != others.start  # of nobody else


def test_with_a_seed_samples_are_those_of_the_seed_and_without_nobody_s(made):
  sampler, engine = made
  for given in (how(seed=5), how(seed=5), how(), how()):
    asked = Asked(3, given, samples=2)
    engine.submit(asked.job)
    asked.answer()
  assert [run["seed"] for run in sampler.runs[:2]] == [5, 5]
  assert [run["asked"][0][2] for run in sampler.runs[:2]] == [range(2), range(2)]
  (one, first), (other, second) = ((run["seed"], run["asked"][0][2]) for run in sampler.runs[2:])
  assert one == other != 5 and first != second


def test_those_that_are_drawn_alike_are_sampled_together_and_the_others_after_them_in_their_order(made):
  sampler, engine = made
  first = held(sampler, engine)
  cold, alike, hot = Asked(2, how(temperature=0.0)), Asked(3), Asked(4, how(temperature=0.0))
  for asked in (cold, alike, hot):
    engine.submit(asked.job)
  sampler.hold.set()
  for asked in (first, cold, alike, hot):
    asked.answer()
  assert [[token for token, _, _ in run["asked"]] for run in sampler.runs] == [[1], [2, 4], [3]]
  assert [run["temperature"] for run in sampler.runs] == [1.0, 0.0, 1.0]


def test_no_more_are_sampled_together_than_the_most(made, monkeypatch):
  monkeypatch.setattr(engine_lib, "MOST", 2)
  sampler, engine = made
  cold = held(sampler, engine)
  waiting = [Asked(token, how(temperature=0.0)) for token in (2, 3, 4)]
  for asked in waiting:
    engine.submit(asked.job)
  sampler.hold.set()
  for asked in (cold, *waiting):
    asked.answer()
  assert [[token for token, _, _ in run["asked"]] for run in sampler.runs] == [[1], [2, 3], [4]]


def test_other_parameters_are_those_of_what_was_asked_for_after_them(made):
  """What stood before the swap is sampled by the first ones, also where what stands behind it is drawn alike."""
  sampler, engine = made
  held(sampler, engine)
  before, after = Asked(2, how(temperature=0.0)), Asked(3, how(temperature=0.0))
  engine.submit(before.job)
  swapped = engine.swap("second")
  engine.submit(after.job)
  assert not swapped.is_set()
  sampler.hold.set()
  before.answer(), after.answer()
  assert swapped.wait(10)
  assert [(run["params"], [token for token, _, _ in run["asked"]]) for run in sampler.runs] == [
      ("first", [1]), ("first", [2]), ("second", [3])]


def test_texts_that_are_kept_are_of_the_parameters_that_there_are():
  sampler = Sampler()
  engine = Engine(sampler, "first", None, kept_texts=3)
  cleared, clear = [], engine.kept.clear
  engine.kept.clear = lambda: (cleared.append(1), clear())
  asked = Asked(1)
  engine.submit(asked.job)
  asked.answer()
  assert sampler.runs[0]["kept"] is engine.kept and not cleared
  assert engine.swap("second").wait(10)
  assert cleared == [1]
  engine.close()


def test_an_error_is_told_to_all_who_wait_and_the_next_run_does(made):
  sampler, engine = made
  first = held(sampler, engine)
  sampler.error = ValueError("no room")
  sampler.hold.set()
  assert first.done.wait(10) and first.told == [sampler.error]
  sampler.error = None
  again = Asked(2)
  engine.submit(again.job)
  assert again.answer() == [(0, [2])]


def test_what_nobody_waits_for_is_not_sampled(made):
  sampler, engine = made
  first = held(sampler, engine)
  gone, other = Asked(2, how(temperature=0.0)), Asked(3, how(temperature=0.0))
  gone.job.cancelled = True
  for asked in (gone, other):
    engine.submit(asked.job)
  sampler.hold.set()
  first.answer(), other.answer()
  assert [[token for token, _, _ in run["asked"]] for run in sampler.runs] == [[1], [3]] and not gone.told
  with pytest.raises(ConfigError, match="too long"):
    engine.check(np.zeros(3, np.int32), 3)
