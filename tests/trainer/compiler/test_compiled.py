"""Programs of the step: which are compiled, where, and that it is they that run."""

import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from tests.trainer import rollout_runs
from tests.trainer.strategies import test_dpo_runs as test_dpo
from tests.trainer.test_main import assert_same_state
from trainer.callbacks import Callback
from trainer.compiler import compiled
from trainer.main import train

HERE, BESIDE = "MainThread", compiled.THREAD


@pytest.fixture
def who(monkeypatch):
  """Names of the threads that compile a step, as they do."""
  names, timed = [], compiled._timed
  monkeypatch.setattr(compiled, "_timed",
                      lambda work: names.append(threading.current_thread().name.split("_")[0]) or timed(work))
  return names


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("compiled") / "texts")


def batch(rows, **more):
  return {"tokens": jnp.ones((rows, 4))} | {name: jnp.ones(shape) for name, shape in more.items()}


def programs():
  def update(state, batch):
    return state + 1, {"rows": jnp.sum(batch["tokens"]) / 4}

  return compiled.Step(jax.jit(update, donate_argnums=0))


def test_each_shape_has_a_program_and_what_was_begun_is_one_of_them(who):
  steps, state = programs(), jnp.float32(0)
  steps.begin(jax.ShapeDtypeStruct((), jnp.float32), batch(8))
  assert batch(8) not in steps and not steps  # nobody has waited for it
  for rows, thread in ((2, HERE), (8, None), (4, HERE)):
    before = len(who)
    assert steps.compile(state, batch(rows)) > 0
    assert who[before:] == ([thread] if thread else [])
    assert batch(rows) in steps
    state, metrics = steps(state, batch(rows))
    assert metrics["rows"] == rows
  assert state == 3 and len(steps) == 3 and sorted(who) == [HERE, HERE, BESIDE]


def test_nothing_is_begun_on_gpus(who, monkeypatch):
  steps = programs()
  with monkeypatch.context() as patch:
    patch.setattr(jax, "default_backend", lambda: "gpu")
    steps.begin(jnp.float32(0), batch(2))
  steps.compile(jnp.float32(0), batch(2))
  assert who == [HERE]


def test_the_order_of_a_batch_s_parts_does_not_matter(who):
  steps = programs()
  steps.begin(jnp.float32(0), batch(2, ids=(3,)))
  steps.compile(jnp.float32(0), dict(reversed(batch(2, ids=(3,)).items())))
  assert who == [BESIDE]


def test_what_changed_is_named_and_nothing_else():
  steps, before = programs(), batch(8, images=(2, 4), positions=(8, 32))
  steps.compile(jnp.float32(0), before)
  steps(jnp.float32(0), before)
  assert steps.changed(before) == ""
  now = batch(16, positions=(8, 32), ids=(1,))
  assert steps.changed(now) == "tokens (8, 4) → (16, 4), images (2, 4) → absent, ids absent → (1,)"


def test_what_the_compiler_says_in_its_thread_is_raised_where_it_is_waited_for(monkeypatch):
  def full(self, *args, **options):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  steps = programs()
  with monkeypatch.context() as patch:
    patch.setattr(jax.stages.Lowered, "compile", full)
    steps.begin(jnp.float32(0), batch(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
      steps.compile(jnp.float32(0), batch(2))
  steps.compile(jnp.float32(0), batch(2))  # when asked for again it is made anew
  assert batch(2) in steps


@pytest.mark.devices(2)
def test_a_run_compiles_its_step_beside_what_else_it_does(corpus, tmp_path, who):
  """What is begun, for a state and batches that are not there yet, is what then runs: of a mesh with micro-batches and
  averages."""
  train(tiny.config(corpus, total_steps=2, grad_accum_steps=2, mesh=dict(tensor=2),
                    optimizer=dict(ema_decay=0.9)), tmp_path / "mesh")
  assert who == [BESIDE]


def test_it_does_so_with_a_reference_and_where_it_goes_on_with_larger_batches(corpus, tmp_path, who):
  """A reference is computed ahead; and of a run that goes on where batches are larger than at first, the second size
  alone is compiled; in the run that was not interrupted both."""
  train(test_dpo.config(test_dpo.write_pairs(tmp_path / "pairs.jsonl"), total_steps=2, strategy=dict(precompute=True)),
        tmp_path / "pairs")
  assert who == [BESIDE]

  def grows():
    config = tiny.config(corpus, total_steps=6, ckpt_steps=2, evals={})
    config.input.batch_size_stages = ((2, 16),)
    return config

  del who[:]
  straight = train(grows(), tmp_path / "straight")
  assert who == [BESIDE, HERE]
  crashing = grows()
  crashing.callbacks.crash = dict(type="tests.trainer.test_main.Crash", after=5)
  with pytest.raises(KeyboardInterrupt):
    train(crashing, tmp_path / "parts")
  del who[:]
  assert_same_state(train(grows(), tmp_path / "parts").state, straight.state)
  assert who == [BESIDE]


def test_nothing_is_compiled_where_nothing_is_left_to_do_or_the_shapes_are_not_known(corpus, tmp_path, who):
  config = tiny.config(corpus, total_steps=1, evals={})
  train(config, tmp_path / "w")
  del who[:]
  assert train(config, tmp_path / "w").step == 1 and who == []

  train(rollout_runs.config(rollout_runs.write_prompts(tmp_path), total_steps=1), tmp_path / "rollouts")
  assert who == [HERE]


class Fails(Callback):
  """Where evaluations before the first step are, too."""

  def on_train_begin(self, run):
    FAILED.set()
    raise OSError("no room")


FAILED = threading.Event()


def test_an_error_of_the_loop_waits_for_the_compiler(corpus, tmp_path, monkeypatch):
  """So that the program ends as usual then, and loggers, which have begun by now, send what they have."""
  timed = compiled._timed

  def slow(work):
    assert FAILED.wait(60)
    time.sleep(0.5)
    return timed(work)

  monkeypatch.setattr(compiled, "_timed", slow)
  config = tiny.config(corpus, evals={})
  config.callbacks.fails = dict(type="tests.trainer.compiler.test_compiled.Fails")
  with pytest.raises(OSError, match="no room"):
    train(config, tmp_path)
  assert not compiled.in_progress()


LEAVES = """
import threading
from concurrent import futures

from trainer import __main__ as program
from trainer import bases
from trainer.compiler import compiled
never = threading.Event()

def interrupted(*_):
  futures.ThreadPoolExecutor(1, thread_name_prefix=compiled.THREAD).submit(never.wait)
  assert compiled.in_progress()
  raise KeyboardInterrupt

bases.make = interrupted
program.flags.FLAGS(["trainer", "--config=configs/quickstart.py", "--workdir=w"])
program.main(["trainer"])
"""


def test_a_message_ends_the_program_though_the_compiler_is_at_work():
  """The thread never ends: Python would wait for it for ever. Of Ctrl-C the code is that of a shell."""
  done = tiny.run([sys.executable, "-c", LEAVES])
  assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (
      130, "Interrupted while setting up: no step was taken, nothing is lost.")


def test_work_is_timed_from_before_it_to_behind_it(monkeypatch):
  now = [3.0]

  def work():
    now[0] += 2.5
    return "done"

  monkeypatch.setattr(compiled, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
  assert compiled._timed(work) == ("done", 2.5)
