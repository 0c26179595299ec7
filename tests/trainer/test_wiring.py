"""Which state, step, epoch and file a run uses: whole runs of a model whose every number is computed here, in float64.

The model has one parameter w [V] and gives every position the logits w. So the loss of counts n of predicted tokens is
-Σ n log softmax(w) / Σ n, with the gradient softmax(w) - n / Σ n. Periods and lengths are such that no two things fall
on the same step that are to be told apart: 14 steps of 4 rows in 2 micro-batches, 10 documents, evaluations every 3
steps, checkpoints every 4, rows of metrics every 5.
"""

import dataclasses
import json
import shutil
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import Output
from trainer import train
from trainer import workdir as workdir_lib
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint
from trainer.config import defaults, evaluator, source
from trainer.distributed import mesh as mesh_lib
from trainer.telemetry import spikes
from trainer.telemetry.writers import read_rows

V, BOS = 258, 256  # bytes, and two special tokens
TOTAL, ROWS, DOCUMENTS = 14, 4, 10
PEAK, WARMUP, MOMENTUM, DECAY = 0.5, 3, 0.5, 0.75
# Document i is the i-th letter, once to three times.
TEXTS = [letter * (1 + i % 3) for i, letter in enumerate(string.ascii_lowercase[:DOCUMENTS])]
HELD_OUT = ["ab", "j", "cz"]
FIRST = (np.arange(V) * 7 % 11) / 10.0  # w before the first step


class Unigram:
  """The seam of models/api.py around w, which is at `head/w`."""

  num_layers, final_logit_cap, trained_only = 1, None, None

  def __init__(self, cfg_model, *, vocab_size, params_dtype, compute_dtype, remat):
    self.vocab_size = self.num_real_vocab = vocab_size
    self.vocab_chunk, self.reasons = cfg_model.vocab_chunk, []

  def abstract_params(self):
    return {"head": {"w": jax.ShapeDtypeStruct((V,), jnp.float32)}}

  def init(self, rng):
    return {"head": {"w": jnp.asarray(FIRST, jnp.float32)}}

  def apply(self, params, batch, *, rng=None, train=False):
    return Output(jnp.ones((*batch["tokens"].shape, 1), jnp.float32))

  def unembedding(self, params):
    return params["head"]["w"][None]

  def flops_per_token(self, seq_len, document_length=None):
    return 6.0 * V


@dataclasses.dataclass
class Log:
  """What a run's callback saw: by step the counts of the batch's predicted tokens [V], metrics, w, moving averages;
  the arrays of the state before that are still there; metrics by the step of their evaluation, steps of checkpoints."""

  counts: dict = dataclasses.field(default_factory=dict)
  metrics: dict = dataclasses.field(default_factory=dict)
  w: dict = dataclasses.field(default_factory=dict)
  ema: dict = dataclasses.field(default_factory=dict)
  left: dict = dataclasses.field(default_factory=dict)
  evaluated: dict = dataclasses.field(default_factory=dict)
  saved: list = dataclasses.field(default_factory=list)


class Watch(Callback):
  """Keeps a `Log`, and asks the run to stop after step `stop`, or to go back as after a `Spike(*back)`. It has waited
  100 s for the batch of step 4."""

  log = Log()

  def __init__(self, stop=0, back=None):
    self._stop, self._back = stop, back

  def on_step_begin(self, run):
    self._before = jax.tree.leaves(run.state)
    if run.step == 3:
      run.chrono.waited(100.0)

  def on_step_end(self, run, step, metrics):
    tokens = np.asarray(run.batch["tokens"])
    self.log.counts[step] = np.bincount(tokens[np.asarray(run.batch["loss_weights"]) > 0], minlength=V)
    self.log.metrics[step] = metrics

  def on_optimizer_step(self, run):
    run.remembered["watched"] = run.remembered.get("watched", 0) + 1
    self.log.left[run.step] = sum(not leaf.is_deleted() for leaf in self._before)
    self.log.w[run.step] = np.array(run.state["params"]["head"]["w"])
    if "ema" in run.state:
      self.log.ema[run.step] = np.array(run.state["ema"]["head"]["w"])
    if run.step == self._stop:
      run.stop_requested = "a test"
    if self._back and run.step == self._back[0] and "spikes" not in run.remembered:
      run.checkpoints.wait()
      run.go_back = spikes.Spike(*self._back)

  def on_eval(self, run, name, metrics):
    self.log.evaluated[run.step] = metrics

  def on_checkpoint(self, run, step):
    self.log.saved.append(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wiring")
  for name, texts in (("texts", TEXTS), ("held_out", HELD_OUT)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
  return folder


def trained(folder, workdir, stop=0, back=None, **changed):
  """(the run, its Log, its workdir)."""
  c = defaults()
  c.update(batch_size=ROWS, grad_accum_steps=2, seq_len=4, total_steps=TOTAL, log_steps=5, ckpt_steps=4,
           ckpt_percent=-1.0, keep_last=1, keep_best="eval/val/loss", keep_best_mode="max", report=False)
  c.model.name = "tests.trainer.test_wiring.Unigram"
  c.tokenizer.update(type="bytes", add_eos=False)
  c.input.packing = "none"
  c.input.sources = dict(main=source(type="jsonl", path=str(folder / "texts.jsonl")))
  c.optimizer.update(name="sgd", learning_rate=PEAK, momentum=MOMENTUM, nesterov=False, weight_decay=0.0, clip_norm=0.0,
                     ema_decay=DECAY)
  c.schedule.update(name="linear", warmup_percent=-1.0, warmup_steps=WARMUP, floor=0.0)
  c.evals.val = evaluator(type="loss", eval_steps=3, batch_size=2, sources=dict(
      held_out=source(type="jsonl", path=str(folder / "held_out.jsonl"))))
  c.callbacks.watch = dict(type="tests.trainer.test_wiring.Watch", stop=stop, back=back)
  c.update(changed)
  Watch.log = Log()
  return train(c, workdir), Watch.log, workdir


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
  return trained(folder, tmp_path_factory.mktemp("straight") / "w")


@pytest.fixture(scope="module")
def stopped(folder, tmp_path_factory):
  """Asked to stop after step 6, at which nothing else is due."""
  return trained(folder, tmp_path_factory.mktemp("stopped") / "w", stop=6)


# ----------------------------------------------------------------------------------------------
# What must be, in float64.


def softmax(w):
  e = np.exp(w - w.max())
  return e / e.sum()


def loss_of(w, counts):
  return -(counts * np.log(softmax(w))).sum() / counts.sum()


def rate(update):
  """The learning rate of an update, from 0 on: warm-up to the peak at update 2, then down to 0 at update 14."""
  return PEAK * min((update + 1) / WARMUP, 1.0) * (1.0 if update < WARMUP else (TOTAL - update) / (TOTAL - WARMUP + 1))


@dataclasses.dataclass
class Expected:
  w: np.ndarray
  ema: np.ndarray
  trace: np.ndarray
  loss: float = 0.0
  grad_norm: float = 0.0


def expected(counts, begin=None, first=0):
  """{step: Expected}, from `begin` after step `first`, on these counts of tokens by step."""
  now = begin or Expected(FIRST, FIRST, np.zeros(V))
  found = {first: now}
  for step in range(first + 1, max(counts) + 1):
    n = counts[step]
    g = softmax(now.w) - n / n.sum()
    trace = g + MOMENTUM * now.trace
    w = now.w - rate(step - 1) * trace
    now = Expected(w, DECAY * now.ema + (1 - DECAY) * w, trace, loss_of(now.w, n), np.linalg.norm(g))
    found[step] = now
  return found


def counts_of(texts):
  return np.bincount(np.frombuffer("".join(texts).encode(), np.uint8), minlength=V)


def close(found, wanted, tolerance=2e-6):
  np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=tolerance)


def check_steps(log, wanted, steps):
  """The parameters, averages, losses and norms of gradients of these steps, and that there were no others."""
  assert sorted(log.w) == sorted(log.counts) == list(steps)
  for step in steps:
    close(log.w[step], wanted[step].w)
    close(log.ema[step], wanted[step].ema)
    close(log.metrics[step]["loss"], wanted[step].loss, 1e-5)
    close(log.metrics[step]["grad_norm"], wanted[step].grad_norm)


def documents(counts):
  """How often each document is in a batch of these counts."""
  return np.array([counts[ord("a") + i] // (1 + i % 3) for i in range(DOCUMENTS)])


def check_rows(counts):
  """Of 14 steps of 4 rows the first five have each of the 10 documents twice, so have the next five; in each epoch of
  two and a half steps none comes twice."""
  for steps in (range(1, 6), range(6, 11)):
    np.testing.assert_array_equal(sum(documents(counts[step]) for step in steps), 2)
  for steps in ((1, 2), (4, 5), (6, 7), (9, 10), (11, 12), (14,)):
    assert sum(documents(counts[step]) for step in steps).max() == 1, steps
  assert all(documents(counts[step]).sum() == ROWS for step in counts)


# ----------------------------------------------------------------------------------------------


def test_parameters_averages_losses_and_rows_of_every_step(straight):
  _, log, _ = straight
  check_rows(log.counts)
  check_steps(log, expected(log.counts), range(1, TOTAL + 1))
  assert np.abs(log.w[TOTAL] - FIRST).max() > 0.1  # there is something to tell apart
  orders = {tuple(np.flatnonzero(log.counts[step])) for step in (1, 6, 11)}
  assert len(orders) > 1  # not each pair of epochs in the same order


def test_rows_of_metrics_say_the_learning_rate_and_the_rows_of_their_step(straight):
  _, log, workdir = straight
  rows = {row["step"]: row for row in read_rows(workdir / "metrics.jsonl") if "learning_rate" in row}
  wanted = expected(log.counts)
  assert list(rows) == [1, 5, 10, 14]
  for step, row in rows.items():
    close(row["learning_rate"], rate(step - 1), 1e-7)
    close(row["loss"], wanted[step].loss, 1e-5)
    close(row["trained_tokens"], log.counts[step].sum())
    assert (row["tokens_seen"], row["epoch"]) == (step * ROWS * 4, pytest.approx(step * ROWS / DOCUMENTS))


def test_averages_are_what_is_evaluated_after_these_steps(straight):
  _, log, workdir = straight
  wanted, held_out = expected(log.counts), counts_of(HELD_OUT)
  values = {step: loss_of(now.ema, held_out) for step, now in wanted.items() if step in (0, 3, 6, 9, 12, 14)}
  assert {step: m["eval/val/loss"] for step, m in log.evaluated.items()} == pytest.approx(values, abs=1e-5)
  rows = [row for row in read_rows(workdir / "metrics.jsonl") if "eval/val/loss" in row]
  assert {row["step"]: row["eval/val/loss"] for row in rows} == pytest.approx(values, abs=1e-5)
  # The parameters' own would be told apart.
  assert min(abs(loss_of(wanted[s].w, held_out) - values[s]) for s in (3, 6, 9, 12)) > 1e-4


def test_the_best_checkpoint_is_that_of_its_own_evaluation(straight):
  """Saved after 4, 8, 12 and 14; evaluated after 0, 3, 6, 9, 12 and 14: 4 and 8 have no value. The losses sink, so that
  an older evaluation's would be larger, and the best by `max` is 12."""
  _, log, workdir = straight
  assert log.saved == [4, 8, 12, 14]
  assert checkpoint.listed(workdir / "checkpoints") == [12, 14]
  values = {step: log.evaluated[step]["eval/val/loss"] for step in (0, 3, 6, 12, 14)}
  assert values[0] > values[3] > values[6] > values[12] > values[14]
  metas = {step: checkpoint.read_meta(workdir / "checkpoints" / str(step)) for step in (12, 14)}
  for step, meta in metas.items():
    assert meta["metrics"]["eval/val/loss"] == pytest.approx(values[step], abs=1e-7)
    assert (meta["step"], meta["rows_seen"]) == (step, step * ROWS)
    # Counted by a callback of the config's own, after what is saved in the loop, before what is saved at the end.
    assert meta["remembered"]["watched"] == {12: 11, 14: 14}[step]
    assert meta["config"]["optimizer"]["momentum"] == MOMENTUM


def test_a_checkpoint_holds_the_state_after_its_step(straight):
  run, log, workdir = straight
  wanted = expected(log.counts)[12]
  state = checkpoint.restore_from(str(workdir / "checkpoints" / "12"), run.program.abstract_state).state
  assert int(state["step"]) == 12
  close(state["params"]["head"]["w"], wanted.w)
  close(state["ema"]["head"]["w"], wanted.ema)
  close(state["opt"]["sgd"]["trace"]["head"]["w"], wanted.trace)


def test_a_stopped_run_goes_on_where_it_was(stopped, folder, tmp_path):
  """In the same workdir: 6 steps, then the other 8, which together are the 14 of one run."""
  _, before, workdir = stopped
  assert list(before.w) == [1, 2, 3, 4, 5, 6] and before.saved == [4, 6]
  copied = tmp_path / "w"
  shutil.copytree(workdir, copied)
  run, after, _ = trained(folder, copied)
  counts = before.counts | after.counts
  check_rows(counts)
  check_steps(after, expected(counts), range(7, TOTAL + 1))
  assert sorted(after.evaluated) == [9, 12, 14] and after.saved == [8, 12, 14]
  assert run.step == run.remembered["watched"] == TOTAL
  # Its clock goes on as well, from the first start on: it has waited 100 s, once.
  assert 100 <= run.chrono.state()["data"] < 200
  assert run.chrono._first_start == workdir_lib.first_start(workdir)


def test_resume_takes_the_other_run_whole_and_its_own_checkpoint_afterwards(stopped, folder, tmp_path):
  """Another workdir goes on after step 6 of the first, is stopped after 9, and goes on after 9, not after 6 again."""
  _, before, other = stopped
  _, middle, workdir = trained(folder, tmp_path / "w", stop=9, resume=str(other))
  _, after, _ = trained(folder, workdir, resume=str(other))
  counts = before.counts | middle.counts | after.counts
  check_rows(counts)
  wanted = expected(counts)
  check_steps(middle, wanted, range(7, 10))
  check_steps(after, wanted, range(10, TOTAL + 1))
  assert middle.saved == [8, 9] and after.saved == [12, 14]


def test_init_from_takes_the_parameters_alone(stopped, folder, tmp_path):
  """Not the averages, the momentum, the step or the place in the data."""
  _, before, other = stopped
  _, log, _ = trained(folder, tmp_path / "w", stop=2, init_from=dict(path=str(other)))
  begin = expected(before.counts)[6]
  check_steps(log, expected(log.counts, Expected(begin.w, begin.w, np.zeros(V))), (1, 2))
  for step in (1, 2):
    np.testing.assert_array_equal(log.counts[step], before.counts[step])
  close(log.evaluated[0]["eval/val/loss"], loss_of(begin.w, counts_of(HELD_OUT)), 1e-5)


def test_without_averages_the_parameters_are_evaluated(folder, tmp_path):
  _, log, _ = trained(folder, tmp_path / "w", stop=3, optimizer=dict(ema_decay=0.0))
  wanted = expected(log.counts)
  assert not log.ema
  close(log.evaluated[3]["eval/val/loss"], loss_of(wanted[3].w, counts_of(HELD_OUT)), 1e-5)


def test_after_a_spike_the_older_state_goes_on_with_the_later_data_and_learning_rates(folder, tmp_path):
  """Found at 7: back to the checkpoint of 4, and on after 9. The steps are 1 to 7, and 10 to 14."""
  _, log, workdir = trained(folder, tmp_path / "w", back=(7, 4, 9), keep_last=9)
  assert list(log.w) == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14]
  first = {step: log.counts[step] for step in range(1, 8)}
  wanted = expected(first)
  wanted |= expected({step: log.counts[step] for step in range(10, 15)}, wanted[4], first=9)
  check_steps(log, wanted, log.w)
  # Saved once it has gone back, as what it is after step 9; evaluated as ever.
  assert log.saved == [4, 9, 12, 14] and sorted(log.evaluated) == [0, 3, 6, 12, 14]
  # The rows of steps 8 and 9 are in no step: of 4 to 7 and 10 each of two epochs', but for theirs.
  straight = {step: documents(n) for step, n in log.counts.items()}
  for steps in ((4, 5), (6, 7), (11, 12)):
    assert sum(straight[step] for step in steps).max() == 1, steps
  np.testing.assert_array_equal(sum(straight[step] for step in range(1, 6)), 2)


def test_the_end_of_every_step_is_known_and_nothing_waits_for_more(straight):
  """And what took time beside the steps is told apart."""
  run, _, _ = straight
  assert all(run.chrono.ends.of(step).result(timeout=99) > 0 for step in range(1, TOTAL + 1))
  assert run.chrono.ends.step == TOTAL and run.chrono.ends.of(TOTAL + 1) is None
  assert run.chrono.ends._thread is None
  assert set(run.chrono.longest) == {"compile", "eval", "checkpoint"}


def test_the_state_is_donated_to_every_step(straight):
  """Its old arrays are gone, so that no room is needed for two; the compiled step puts each where the old one was."""
  run, log, _ = straight
  assert log.left == dict.fromkeys(range(1, TOTAL + 1), 0)
  program = run.program
  with mesh_lib.activation_rules(program.mesh):
    compiled = program.update_fn.lower(program.abstract_state, run.data.example(0, program)).compile()
  aliases = compiled.as_text().partition("input_output_alias={")[2].partition("\n")[0].count("-alias)")
  assert aliases == len(jax.tree.leaves(program.abstract_state))
