"""What may differ between two runs that have not taken a step, each thing by its name; see every_key.py beside."""

import shutil
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline import image_batches
from models.hf import HFError
from tests.trainer import rollout_runs
from tests.trainer.every_key import Made, digest, rows
from tests.trainer.every_key_bases import begin
from trainer import bases
from trainer.compiler import repeatable
from trainer.config import durations
from trainer.distributed import liveness, processes
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate.sampler import Sampler
from trainer.planning import page as plan_page
from trainer.planning import plan
from trainer.planning import search as plan_search
from trainer.planning.estimate import Planner
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.engine import make_sampler

# Steps at which checkpoints are saved to see which stay, with the value of a metric.
SAVED = ((3, 0.5), (6, 0.1), (9, 0.9), (12, 0.5))


def _hook(m: Made, name: str) -> Any:
  """The built-in callback of that name, as the run was given it."""
  return next(made for made in m.begun.run.callbacks.all if type(made).__name__ == name)


def _then(m: Made, see: Callable[[Any], Any]) -> Any:
  """`see(run)` of a run in a new workdir, in place of its loop."""
  found = []
  begin(m.given, m.files.workdir(), then=lambda run: found.append(see(run)))
  return found[0]


def in_steps(prefix: str) -> Callable[[Made], int | None]:
  """What sees how many steps that duration is. (Whether the run asks for it is seen of one unit, by what follows.)"""
  def steps_of(m: Made) -> int | None:
    c, data = m.config, m.data
    section = c.evals.val if prefix == "eval" else c
    return durations.steps(section, prefix, durations.RunLengths(
        None if prefix == "total" else 1000, lambda step: data.batch_range(step)[0], c.seq_len, data.rows_per_epoch))

  steps_of.__name__ = f"{prefix} in steps"
  return steps_of


def length(m: Made) -> int:
  """The run's steps."""
  return m.begun.run.total_steps


def no_length(m: Made) -> str:
  """Why the run has no length; "" if it has one."""
  try:
    _ = m.begun
  except ConfigError as error:
    return str(error)
  return ""


def logging_steps(m: Made) -> list:
  """Every how many steps metrics are written."""
  return [m.begun.run.log_steps, _hook(m, "MetricsLog")._every]


def saving_steps(m: Made) -> list:
  """The steps of the run that save a checkpoint."""
  return [step for step in range(1, m.begun.run.total_steps + 1) if m.begun.run.horizon.saves(step)]


def kept(m: Made) -> list[int]:
  """Which of the checkpoints SAVED are there after the last one."""
  def save(run: Any) -> list[int]:
    for step, value in SAVED:
      run.step, run.last_eval = step, (step, {"eval/val/loss": value})
      run.save()
      run.checkpoints.wait()
    return run.checkpoints.steps()

  return _then(m, save)


def evaluating_steps(m: Made) -> list:
  """(every how many steps, at the start, at the end, what an error does) of each evaluator."""
  return digest(m.begun.run.horizon.evaluations)


def callbacks(m: Made) -> list[str]:
  """The classes of the run's callbacks, in order."""
  return [type(made).__name__ for made in m.begun.run.callbacks.all]


def profiled_steps(m: Made) -> list[int]:
  """The first step that is profiled, and the one after the last."""
  return [_hook(m, "Profiler")._start, _hook(m, "Profiler")._stop]


def tolerated_steps(m: Made) -> int:
  """How many steps in a row may not be finite before the run ends."""
  hook, number = _hook(m, "Health"), 0
  with pytest.raises(FloatingPointError):
    while number < 100:
      number += 1
      metrics = dict(nonfinite_in_a_row=number, nonfinite=number, nonfinite_leaf=-1)
      hook.on_step_end(SimpleNamespace(batch=None), number, metrics)
  return number


def first_parameters(m: Made) -> dict:
  """What the run begins with."""
  return digest(m.begun.run.state["params"])


def unknown_entry(m: Made) -> str:
  """Why a folder cannot be read; "" if it can."""
  try:
    _ = m.begun
  except ConfigError as error:
    assert "odd = 2" in str(error)
    return str(error)
  return ""


def first_reference(m: Made) -> dict:
  """The reference policy that the run begins with."""
  return digest(m.begun.run.state["reference"])


def continued(m: Made) -> str:
  """What is said where a workdir was begun with another config."""
  workdir = m.files.workdir()
  shutil.copytree(m.files.run, workdir)
  try:
    return next(line for line in begin(m.given, workdir).said.splitlines() if line.startswith("continuing"))[:10]
  except ConfigError as error:
    assert "was begun with another config" in str(error)
    return "refused"


def trained_first(m: Made) -> bool:
  """Whether another run is trained before it."""
  return bases.pending(m.given, m.workdir) is not None


def exported(m: Made) -> list:
  """The folders of the workdir that hold a model, and the dtypes of their tensors."""
  _ = m.begun
  return [(path.parent.name, sorted({str(tensor.dtype) for tensor in load_file(path).values()}))
          for path in sorted(m.workdir.glob("*/model*.safetensors"))]


def exported_if_can_be(m: Made) -> list | str:
  """As `exported`, of a run whose export may be refused."""
  try:
    return exported(m)
  except HFError:
    return "refused"


def own_cache(m: Made) -> bool:
  """Whether tokenised sources are kept in the workdir."""
  m.seen(rows)
  return (m.workdir / "cache").exists()


def prepared(m: Made) -> int:
  """Batches that are computed ahead of the first step."""
  return m.begun.batches["prepared"]


def preparing_threads(m: Made) -> int:
  """The most threads that compute batches."""
  return m.begun.batches["pool"]._max_workers


def decoding_processes(m: Made) -> list[int]:
  """Processes that images are decoded by; none is started."""
  found, decode = [], image_batches.decode
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(image_batches, "decode", lambda tasks, workers: (found.append(workers), decode(tasks, 0))[1])
    m.data.batch(0)
  return found


# ----------------------------------------------------------------------------------------------
# Rollouts.


def sampled(m: Made) -> list:
  """The first batch of a rollout, and its metrics without what depends on the clock."""
  metrics = {key: value for key, value in m.begun.run.data.metrics.items()
             if not key.startswith(("time/", "sampling/tokens_per"))}
  return [digest(m.begun.first), digest(metrics)]


def turns_taken(m: Made) -> list:
  """As `sampled`, where completions end early enough for an environment to answer them."""
  with rollout_runs.stops_often():
    return sampled(m)


def calls_at_a_time(m: Made) -> int:
  """Environments that are called at the same time."""
  return m.begun.run.data.producer.episodes._workers


def runs_of_the_sampler(m: Made) -> int:
  """In the first rollout, whose completions end early enough for an environment to answer them."""
  with rollout_runs.stops_often(), pytest.MonkeyPatch.context() as patch:
    runs, stream = [], Sampler.stream
    patch.setattr(Sampler, "stream", lambda *args: runs.append(args) or stream(*args))
    assert m.begun.first is not None
  return len(runs)


def beginnings_shared(m: Made) -> bool:
  """Whether the first rollout tells what its prompts had in common."""
  assert m.begun.first is not None
  return "rollout/prompt_tokens_shared" in m.begun.run.data.metrics


def texts_kept(m: Made) -> int:
  """How many are kept; 0 too where the first rollout does not tell what of its prompts was not run again."""
  assert m.begun.first is not None
  data = m.begun.run.data
  return data.producer._kept_texts if "rollout/prompt_tokens_reused" in data.metrics else 0


def prompts_in_chunks(m: Made) -> int:
  return m.begun.run.data.producer.sampler.prefill_chunk


def calls_found(m: Made) -> str:
  """The format in which calls of tools are looked for."""
  return m.begun.run.data.producer.episodes._make.args[1].__name__


def shared_out(m: Made) -> list:
  """The prompts that each step counts as its own."""
  return [m.begun.run.data.batch_range(step) for step in range(8)]


def decoded_rows(m: Made) -> int:
  """Texts that are decoded at a time."""
  return m.begun.run.data.producer.sampler.rows


def rollouts_without_signal(m: Made) -> int:
  """After so many rollouts that teach nothing the run ends."""
  return m.begun.run.data._max_without_signal


def sampled_ahead(m: Made) -> list:
  """How rollouts come before their training: in turns or at once, how old they may be, by which policy each is, and
  where newer ones come from meanwhile."""
  ahead = m.begun.run.data._ahead
  return [type(ahead).__name__, ahead._max_staleness, ahead._versions, ahead._newer and ahead._newer.__name__]


def sampling_devices(m: Made) -> tuple:
  """The numbers of the devices that sample, each row of which shares a text, and of those that train."""
  run = m.begun.run
  meshes = run.data.producer.sampler.mesh, run.mesh
  return tuple([[device.id for device in row] for row in mesh.devices.reshape(-1, mesh.shape["tensor"])]
               for mesh in meshes)


def goes_on(m: Made) -> list:
  """How far rollouts are ahead, and whether what has begun goes on in the next one."""
  data = m.begun.run.data
  return [data._ahead._lead, data.producer._carries]


def trained_again(m: Made) -> list:
  """How many groups each rollout trains on again, and of how many rollouts before it."""
  replay = m.begun.run.data.producer._replay
  return [replay.count, replay.window]


def scoring_processes(m: Made) -> int:
  """Processes that compute rewards, once the first rollout is scored."""
  return _then(m, lambda run: len(run.data.producer.scorer._workers))


def engine(m: Made) -> tuple:
  """What samples: this program, or which server, how it is told of new parameters and how long it may take."""
  sampler = make_sampler(m.config, m.model, mesh_lib.make_mesh({}, jax.devices()[:1]), m.workdir)
  return tuple(getattr(sampler, name, None) for name in ("_url", "_handover", "_timeout"))


def chosen(m: Made) -> list:
  """The prompts that are taken where one half of them was passed and the other was not, and what passes."""
  curriculum = Curriculum(m.config, m.data)
  rates_N, _ = curriculum.after(curriculum.unmeasured(), [
      SimpleNamespace(item=m.data.item(k), rewards=np.array([0.7, k % 2])) for k in range(m.data.num_prompts)], 0)
  return [[item.number for item in curriculum.choose(0, 12, rates_N)[0]], None if rates_N is None else rates_N.tolist()]


def scoring_seconds(m: Made) -> float:
  """What a call of a reward function may take."""
  return m.begun.run.data.producer.scorer._seconds


# ----------------------------------------------------------------------------------------------
# Several processes, and plans.


def limits(m: Made) -> list[float]:
  """Seconds that a watch over two processes waits: for a word, for a move, for the end of a phase."""
  watch = liveness.Watch(None, 0, 2, m.config.processes, threading.Event(), "")
  return [watch._heartbeat, watch._limits[liveness.TRAINING], watch._other_limit]


def joining_seconds(m: Made) -> list[int]:
  """How long JAX is told to look for the other processes."""
  found = []

  def initialize(*place: Any, **options: Any) -> None:
    found.append(options["initialization_timeout"])

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("jax.distributed.initialize", initialize)
    patch.setattr("jax.config.update", lambda *setting: None)
    processes._connect(processes.Place("a test", 2, 0, "localhost:1"), m.config.processes)
  return found


# Programs that were traced for plans, by all that is not asked of a plan.
_TRACED: dict[str, dict] = {}


def planned(m: Made) -> str:
  """The estimate of memory and time on the topology."""
  topology = plan.find_topology(m.config.plan)
  planner = Planner(m.resolved, 258, topology, ["main"])
  same = {key: value for key, value in m.resolved.items() if key != "plan"}
  if m.config.model.vision.tower == "none":
    planner._programs = _TRACED.setdefault(f"{topology.devices} {same}", {})
  return repr((topology.describe(), planner.estimate(m.resolved.mesh)))


def promised(m: Made) -> bool:
  """Whether a step on a GPU is held to give the same bits each time."""
  return repeatable.of(m.config, "gpu") is repeatable.compile_in_order

def spikes_watched(m: Made) -> list:
  """The callback that finds spikes, with its arguments; none if nothing is watched."""
  return [digest(vars(made)) for made in m.begun.run.callbacks.all if type(made).__name__ == "Spikes"]


def writers(m: Made) -> list[str]:
  """What metrics are written by; of a logger, what its guard guards."""
  return [type(getattr(made, "writer", made)).__name__ for made in m.begun.run.writer.writers]


def health_told(m: Made) -> list:
  """What the callback that knows signs of trouble keeps to itself."""
  return [made._silent for made in m.begun.run.callbacks.all if type(made).__name__ == "Diagnostics"]


def plan_text(m: Made) -> str:
  """The whole plan in words, without the meshes and policies that it compares with."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plan_search, "meshes", lambda planner: [])
    patch.setattr(plan_search, "remats", lambda planner, sizes: [])
    return plan_page.text(plan.make_plan(m.given, m.workdir))
