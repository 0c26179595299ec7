"""Policies that change while a rollout is sampled: whose tokens are whose, at once and had again from the schedule."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.steps import steps_of_rollouts
from tests import tiny
from tests.trainer.rollout_runs import assert_same_state, table, write_prompts
from tests.trainer.rollouts.test_ahead import Fake, config, played, rows_of, run_of
from trainer import train
from trainer.errors import ConfigError
from trainer.generate.completion import Request, collect
from trainer.generate.sampler import Sampler
from trainer.rollouts.at_once import Concurrent, Followed
from trainer.rollouts.schedule import NAME, Policies, Sampled, read, write


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


def log_probs(model, params, ids):
  """[n - 1] of each token behind the first, in one pass over the text."""
  batch = {"tokens": ids[None], "positions": np.arange(len(ids), dtype=np.int32)[None],
           "segment_ids": np.ones((1, len(ids)), np.int32)}
  hidden = model.apply(params, batch).hidden[0]
  logits = (hidden @ model.unembedding(params)).astype(jnp.float32)[:, :model.num_real_vocab]
  return np.asarray(jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]])


def test_tokens_behind_a_change_are_of_the_newer_policy():
  """One that differs in what it makes of hidden states alone, so that keys and values are those of both: the first 8
  tokens have the log-probs of the older one, those behind of the newer. Of prompts that begin behind the change all
  have, also where it differs in all."""
  model = tiny.model(tie_embeddings=False)
  old, other = (jax.jit(model.init)(jax.random.key(seed)) for seed in (0, 1))
  near = old | {"unembed": other["unembed"]}
  texts = [np.array([3, 5, 7], np.int32), np.array([2, 4], np.int32), np.array([9, 1, 6, 8], np.int32)]
  sampler = Sampler(model, rows=2, chunk=4)
  for new, looked_at in ((near, (0, 1, 2)), (other, (2,))):
    looks = iter([None, None, new])
    request = Request(max_new_tokens=16, seed=1, in_order=True, newer=lambda looks=looks: next(looks, None))
    done = collect(sampler.stream(old, texts, request))
    for number in looked_at:
      ids = np.concatenate([texts[number], done[number].ids])
      first, then = (log_probs(model, params, ids)[-len(done[number].ids):] for params in (old, new))
      assert len(done[number].ids) == 16 and abs(first - then).max() > 0.1
      expected = np.where(np.arange(16) < (8 if number < 2 else 0), first, then)
      np.testing.assert_allclose(done[number].logprobs, expected, atol=2e-5)


def test_policies_and_what_they_sampled_are_counted():
  policies = Policies("first", 3, lambda look, version: ("second", 5) if (look, version) == (2, 3) else None)
  assert (policies.look(), policies.params) == (None, "first")
  policies.tokens[policies.version] += 30
  assert policies.look() == policies.params == "second" and policies.look() is None
  policies.tokens[policies.version] += 10
  assert policies.changes == [(2, 5)] and policies.staleness(6) == {
      "rollout/token_staleness": (30 * 3 + 10 * 1) / 40, "rollout/max_token_staleness": 3.0,
      "rollout/policy_changes": 1.0}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("late", ["sampler", "updates"])
def test_a_schedule_is_followed_chunk_by_chunk(late):
  """Rollouts of one update each, four updates ahead at most: each is sampled by the policies of its line, from the
  chunk on that it says, though the sampler is far ahead of updates, or they of it."""
  lines = {0: Sampled(0), 1: Sampled(0), 2: Sampled(0, [(2, 1), (4, 2)]), 3: Sampled(2, [(5, 3)]), 4: Sampled(3)}
  fake = Fake(lambda number: time.sleep(0.2 * (number == 2 and late == "sampler")))
  ahead = Followed(fake, steps_of_rollouts(4, 1, 1), None, 4, lines)
  fill = ahead.fill
  ahead.fill = lambda run, due: time.sleep(0.1 * (late == "updates")) or fill(run, due)
  played(ahead, run_of(5), 5)
  ahead.close()
  assert [asked[:2] for asked in fake.asked] == [(number, line.version) for number, line in lines.items()]
  assert fake.changes == [list(line.changes) for line in lines.values()]


def test_a_schedule_of_a_longer_run_keeps_nobody_waiting():
  """Policy 1 was taken by a rollout that this run, of three updates, has no use for."""
  lines = {0: Sampled(0), 1: Sampled(0), 2: Sampled(0), 3: Sampled(1)}
  ahead = Followed(Fake(), steps_of_rollouts(4, 1, 1), None, 4, lines)
  assert [rollout.number for rollout, _ in played(ahead, run_of(3), 3)] == [0, 1, 2]
  ahead.close()


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.host_patches
def test_a_run_whose_policies_change_within_rollouts_is_had_again(prompts, tmp_path, monkeypatch, carry):
  """Rollouts of two updates. The third is begun by the policy after 2 updates, and waits for a newer one before its
  second chunk, so that there is a change whatever the clock says; then parameters, samples and metrics are those of
  the schedule, followed."""
  newest, fill = Concurrent._newest, Concurrent.fill

  def waits(self, look, version):
    with self._changed:
      while self._next_number(0) == 2 and look == 2 and not self._closing and (
          self._given[1] <= version < self._first_step
          or not all(leaf.is_ready() for leaf in jax.tree.leaves(self._given[0]))):
        self._changed.wait(0.01)
    return newest(self, look, version)

  def fills(self, run, due):
    while run.step == 3 and self._next_number(0) == 2 and self._began is None and self._error is None:
      time.sleep(0.01)
    return fill(self, run, due)

  given = dict(in_flight=True, max_new_tokens=24, max_staleness=4 if carry else 2, carry_over=carry)
  with monkeypatch.context() as patch:
    patch.setattr(Concurrent, "_newest", waits)
    patch.setattr(Concurrent, "fill", fills)
    run = train(config(prompts, total_steps=8, concurrent=True, **given), tmp_path / "w")
  lines = [json.loads(line) for line in (tmp_path / "w" / NAME).read_text().splitlines()]
  assert lines[2]["policy"] == 2 and lines[2]["changes"][0][1] in (3, 4)
  rows = rows_of(tmp_path / "w")
  step = lines[2]["update"]
  assert rows[step]["rollout/policy_changes"] == len(lines[2]["changes"])
  assert 0 <= rows[step]["rollout/token_staleness"] < rows[step]["rollout/max_token_staleness"]
  again = train(config(prompts, total_steps=8, schedule=str(tmp_path / "w" / NAME), **given), tmp_path / "again")
  assert_same_state(run.state, again.state)
  assert rows_of(tmp_path / "again") == rows
  # Those that go on are not run again: each rollout but the first has rows of the one before.
  assert [bool(line.get("kept")) for line in lines] == [carry and line["rollout"] > 0 for line in lines]
  assert [line.get("kept", 0) for line in lines] == [
      rows[line["update"]].get("rollout/rows_held", 0) for line in lines]
  for line in lines:
    assert table(tmp_path / "w", line["update"]) == table(tmp_path / "again", line["update"])


def test_changes_that_cannot_be_are_refused(tmp_path):
  write(tmp_path, 0, Sampled(1, [(2, 2), (5, 3)]), 4)
  assert read(tmp_path / NAME, 3) == {0: Sampled(1, [(2, 2), (5, 3)])}
  write(tmp_path, 1, Sampled(2, kept=7), 4)
  assert read(tmp_path / NAME, 3)[1] == Sampled(2, [], 7)
  with pytest.raises(ConfigError, match=re.escape("Use --config.rollout.in_flight=True")):
    read(tmp_path / NAME, 3, in_flight=False)
  (tmp_path / NAME).unlink()
  write(tmp_path, 1, Sampled(2, kept=7), 4)
  with pytest.raises(ConfigError, match="texts go on in rows that were held. Use --config.rollout.in_flight=True"):
    read(tmp_path / NAME, 3, in_flight=False)
  for changes in ([(2, 1)], [(2, 2), (2, 3)], [(3, 3), (2, 4)], [(2, 5)]):
    (tmp_path / NAME).unlink()
    write(tmp_path, 0, Sampled(1, changes), 4)
    with pytest.raises(ConfigError, match="chunks and policies grow"):
      read(tmp_path / NAME, 3)
