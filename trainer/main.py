"""The whole of a training run, in the order it happens. Read it top to bottom.

    data ─ batch ─┐
    state ────────┴─ step ─ (state, metrics)          every update
                               └─ evaluate, save      where the horizon says so

What one step computes, loss, gradients and optimizer, is trainer/update.py; how it is laid out over devices,
trainer/program.py.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from evaluators import common as evaluators_lib
from input_pipeline import once
from input_pipeline.steps import Past
from trainer import bases, position, report, strategies
from trainer import callbacks as cb
from trainer import program as program_lib
from trainer import state as state_lib
from trainer import workdir as workdir_lib
from trainer.checkpoints import init_from
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.compiler import repeatable
from trainer.compiler.compiled import Step
from trainer.config import checks as config_checks
from trainer.data import Batches, make_data
from trainer.distributed import liveness, processes
from trainer.distributed import mesh as mesh_lib
from trainer.distributed.processes import say
from trainer.distributed.watchdog import Watchdog
from trainer.export import hugging_face
from trainer.export.command import export_at_end
from trainer.horizon import Horizon, make_horizon
from trainer.rollouts import options as rollout_options
from trainer.run import Run
from trainer.strategies import cached_teachers
from trainer.strategies import reference as reference_lib
from trainer.telemetry import diagnostics, events, loggers, spikes, terminal, throughput, writers
from trainer.update import gradient_paths


@liveness.reports_failure
def train(config: Mapping, workdir: str | Path, past: Past | None = None) -> Run:
  """Trains what `config` says in `workdir`, or continues what was begun there.

  Args:
    config: a ConfigDict or dict; keys left out have the defaults of trainer/config/keys.py.
    workdir: folder for checkpoints, metrics, samples, the tokenizer and the token cache; made if missing.
    past: which rows the run's steps have taken, where another than its newest checkpoint knows
      (trainer/modes/replay.py).

  Returns:
    The finished run: `run.state`, `run.step`, `run.last_row`, `run.last_eval`.

  Raises:
    ConfigError, DataError, CheckpointError: what was found, what is allowed, what to do.
  """
  began = time.monotonic()
  once.forget()

  # ------------------------------------------------------------------ config, processes, devices
  resolved, model_notes = program_lib.resolve(config)
  config = config_checks.View(resolved)  # remembers what is read, so that keys nobody reads can be refused below
  workdir = Path(workdir).expanduser().absolute()
  bases.check(config, workdir)
  processes.join(config.processes)
  mesh = mesh_lib.start(config)
  rollout_options.check_devices(config)
  say(*program_lib.settle(resolved, jax.default_backend()), *repeatable.notes(config, jax.default_backend()))
  workdir_lib.prepare(config, workdir)
  found = past or position.find(workdir, config.resume)
  init_from.look(config, found)

  # ------------------------------------------------------------------ tokenizer, model, data; no array yet
  # The first process trains the tokenizer and fills the caches; the others then find them.
  with processes.first_goes_first("tokenizer and token caches"):
    tokenizer, model, data = make_data(config, mesh, workdir, found)
  processes.check_same("the data", data.fingerprint)
  say(terminal.stats(data.stats()), *model_notes, *model.reasons)
  export_to = hugging_face.export_folder(config, model, workdir)

  # ------------------------------------------------------------------ durations, optimizer, the step; no array yet
  horizon = make_horizon(config, data, say)
  optimizer = program_lib.make_optimizer(config, model, horizon.total_steps, horizon.to_steps)
  program = program_lib.make_program(config, model, optimizer, mesh, data.source_names)
  say(*optimizer.notes, *program.notes)
  step = Step(program.update_fn, repeatable.of(config, jax.default_backend()))

  with mesh_lib.activation_rules(mesh, config.activation_rules):
    first = found.step if found else 0
    example = program.seen(data.example(first, program))
    jax.eval_shape(program.update_fn, program.abstract_state, example)  # finds mistakes before anything is allocated

    # ---------------------------------------------------------------- evaluators, callbacks, checkpoints
    # Its writer is opened below, once it is known from which step on.
    setup = evaluators_lib.Setup(config, model, tokenizer, mesh, workdir, writers.MultiWriter(), datasets=[data])
    with processes.first_goes_first("evaluation data"):
      evaluators = evaluators_lib.make_all(setup)
    callbacks = _make_callbacks(config, horizon, workdir, gradient_paths(optimizer, program.abstract_state["params"]))
    checkpoints = _make_checkpoints(config, horizon, program, workdir)
    more_writers, origin = loggers.find(config.loggers, workdir), init_from.origin_of(config)
    config_checks.audit(config)

    # ---------------------------------------------------------------- state; meanwhile the step is compiled
    if data.shapes_known and first < horizon.total_steps:
      step.begin(program.abstract_state, example)
    del example
    taught = cached_teachers.precompute(config, program, setup.datasets, workdir)  # where the state will be
    start = state_lib.initialise(config, origin, program, checkpoints)
    position.go_on(config, data, start, found_here=past is None)
    start = reference_lib.precompute(config, start, program, setup.datasets, workdir, taught)
    state_lib.describe(start)

    # ---------------------------------------------------------------- the run
    workdir_lib.save_config(resolved, workdir, tokenizer)
    setup.writer.writers = (*writers.make_writers(workdir, resume_step=start.step if start.meta else -1),
                            *loggers.start(more_writers, workdir, resolved))
    chrono = throughput.make_chrono(config, program.flops_per_token(config.seq_len, data.images_per_row), start.meta,
                                    workdir_lib.first_start(workdir))
    run = Run(config=config, workdir=workdir, program=program, tokenizer=tokenizer, data=data, horizon=horizon,
              evaluators=evaluators, callbacks=callbacks, checkpoints=checkpoints, writer=setup.writer, chrono=chrono,
              state=start.state, step=start.step, pinned=start.pinned, remembered=start.meta.get("remembered", {}))
    del start  # run.state is donated step by step: another name for it would be a trap

    with _reporting_errors(run, step):
      _loop(run, step, data.batches(run))

  # ------------------------------------------------------------------ clean exit
  run.close()
  export_at_end(run, export_to, dtype=config.export.dtype, mtp=config.export.mtp, overwrite=True, progress=True)
  processes.sync("end of training")
  workdir_lib.say_where_everything_is(run, time.monotonic() - began, export_to)
  return run


def _loop(run: Run, step: Step, batches: Batches) -> None:
  """Steps until the last one, or until a stop is asked for; then saves, unless `ckpt` is never."""
  callbacks, epoch = run.callbacks, None
  with batches:
    callbacks.built_in("on_train_begin", run)
    if run.step == 0 and (names := run.horizon.evaluates(0)):
      run.evaluate(names)
    callbacks.own("on_train_begin", run)

    while run.step < run.total_steps and not run.stops:
      if run.go_back is not None:
        spikes.go_back(run, batches)
        continue
      epoch, before = int(run.data.epoch(run.step)), epoch
      if epoch != before:
        callbacks("on_epoch_begin", run, epoch)
      callbacks("on_step_begin", run)
      batch = run.next_batch(batches)
      if batch is None:
        break  # a stop was asked for while it was sampled
      if batch not in step:  # batches may grow in stages, or with their completions
        _compile(run, step, batch)

      with jax.profiler.StepTraceAnnotation("train", step_num=run.step):
        run.state, metrics = step(run.state, batch)
      run.step += 1
      run.chrono.ends.dispatched(run.step, metrics)
      run.defer(run.step, metrics | batches.metrics, batch)  # fetches those of the step before, while this one runs

      callbacks.built_in("on_optimizer_step", run)
      if names := run.horizon.evaluates(run.step):
        run.evaluate(names)
      if run.horizon.saves(run.step):
        run.save()
      callbacks.own("on_optimizer_step", run)
      if int(run.data.epoch(run.step)) != epoch:
        callbacks("on_epoch_end", run, epoch)

    run.settle()
    if run.go_back is not None:  # a stop was asked for when a spike had just been found
      spikes.go_back(run, batches)
  if run.saves_last:
    run.save()
  with liveness.phase("checkpoint"):
    run.checkpoints.wait()
  callbacks("on_train_end", run)


def _compile(run: Run, step: Step, batch: dict[str, Any]) -> None:
  """Has the step ready for batches of these shapes; says so where it is not the first time."""
  run.settle()
  if step:
    # Eight sizes are what buckets come to; many more are something that should have been padded.
    run.note("info" if len(step) < 8 else "health", "recompiled", f"step {run.step + 1}: update_fn compiles again, for "
             f"{step.changed(batch)}")
  with run.chrono.pause("compile"):
    run.writer.write_scalars(run.step, {"time/compile": step.compile(run.state, batch)})


@contextlib.contextmanager
def _reporting_errors(run: Run, step: Step) -> Iterator[None]:
  """Reports an error in the loop to the callbacks, and ends the threads beside it."""
  try:
    yield
  except BaseException as error:
    run.callbacks("on_error", run, error)
    run.checkpoints.abandon()
    step.wait()  # else the program might end at once, and loggers not send what they have
    raise
  finally:
    run.chrono.ends.close()


def _make_checkpoints(config: Any, horizon: Horizon, program: program_lib.Program, workdir: Path) -> Checkpoints:
  workdir_lib.check_saves(config, horizon.saves_last or horizon.keep_steps > 0)
  return Checkpoints(workdir / "checkpoints", keep_last=config.keep_last, keep_steps=horizon.keep_steps,
                     keep_best=config.keep_best, best_mode=config.keep_best_mode,
                     leave_out=state_lib.left_out(program, config.strategy))


def _make_callbacks(config: Any, horizon: Horizon, workdir: Path, trained: list[str]) -> cb.Callbacks:
  """The built-in callbacks in the order they are called, then the config's own, and the report of it all.

  `trained`: paths of the parameters that are trained.
  """
  return cb.Callbacks([
      report.Record(trained),
      events.Notes(),
      cb.Alive() if jax.process_count() > 1 else Watchdog(),
      cb.Preemption(),
      cb.Health(config.optimizer.max_nonfinite_steps, trained),
      *([spikes.Spikes(config.spikes)] if config.spikes.action != "none" else []),
      cb.MetricsLog(horizon.log_steps),
      diagnostics.Diagnostics(config.health_silent),
      cb.Progress(strategies.of(config).shown),
      cb.Profiler(workdir / "profile", config.profile.start_step, config.profile.num_steps),
  ], own=[*cb.make_custom(config.callbacks), *([report.Page()] if config.report else [])])
