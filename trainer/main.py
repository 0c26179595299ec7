"""The whole of a training run, in the order it happens. Read it top to bottom."""

import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview

from evaluators import common as evaluators_lib
from input_pipeline import loader, once, prompt_data
from input_pipeline.batches import check_ids
from input_pipeline.steps import Past
from input_pipeline.tokenizer import make_tokenizer
from trainer import (
  bases,
  compiled,
  config_checks,
  durations,
  hugging_face,
  liveness,
  loggers,
  notes,
  position,
  processes,
  report,
  rollout,
  signatures,
  spikes,
  strategies,
  throughput,
  writers,
)
from trainer import callbacks as cb
from trainer import mesh as mesh_lib
from trainer import program as program_lib
from trainer import reference as reference_lib
from trainer import state as state_lib
from trainer import update as update_lib
from trainer import workdir as workdir_lib
from trainer.checkpoint import Checkpoints
from trainer.errors import ConfigError
from trainer.export import export_at_end
from trainer.run import Run
from trainer.watchdog import Watchdog


@liveness.told
def train(config: Mapping, workdir: str | Path, past: Past | None = None) -> Run:
  """Trains what `config` says in `workdir`, or continues what was begun there.

  Args:
    config: a ConfigDict or dict; keys left out have the defaults of trainer/config.py.
    workdir: folder for checkpoints, metrics, samples, the tokenizer and the token cache; made if missing.
    past: which rows the run's steps have taken, where another than its newest checkpoint knows (trainer/replay.py).

  Returns:
    The finished run: `run.state`, `run.step`, `run.last_row`, `run.last_eval`.

  Raises:
    ConfigError, DataError, CheckpointError: what was found, what is allowed, what to do.
  """
  began = time.monotonic()
  once.forget()

  # ------------------------------------------------------------------ config
  resolved, model_notes = program_lib.resolve(config)
  config = config_checks.View(resolved)  # remembers what is read, so that keys nobody reads can be refused below
  workdir = Path(workdir).expanduser().absolute()
  bases.check(config, workdir)

  # ------------------------------------------------------------------ processes, devices, mesh
  processes.join(config.processes)
  say = print if jax.process_index() == 0 else lambda text: None
  mesh = mesh_lib.make_mesh(config.mesh)
  micro_batch_size = config.batch_size // config.grad_accum_steps
  mesh_lib.check_batch(mesh, micro_batch_size)
  say(f"{jax.device_count()} × {jax.devices()[0].device_kind} in {jax.process_count()} process(es), "
      f"mesh: {mesh_lib.describe(mesh)}")
  for note in program_lib.settle(resolved, jax.default_backend()):
    say(note)
  workdir_lib.prepare(resolved, workdir)
  looked_up = past is None
  past = position.find(workdir, config.resume) if looked_up else past

  # ------------------------------------------------------------------ tokenizer, model, data; no array yet
  # The first process trains the tokenizer and fills the caches; the others then find them.
  with processes.first_goes_first("tokenizer and token caches"):
    show = jax.process_index() == 0
    rolls_out = config.rollout.num_prompts > 0  # the data are prompts, and what is trained on is sampled
    learns = strategies.learns(config)
    texts = prompt_data.prompt_texts(config) if rolls_out else loader.train_texts(config, learns)
    tokenizer = make_tokenizer(config.tokenizer, texts, workdir / "tokenizer.json", show)
    model = program_lib.make_model(config, tokenizer.vocab_size)
    share_prompts = program_lib.shares_prompts(config, model, mesh)
    data: Any = prompt_data.make_prompt_data(config, tokenizer, show) if rolls_out else loader.make_train_data(
        config, tokenizer, learns=learns, workdir=workdir, share_prompts=share_prompts, progress=show, past=past)
  processes.check_same("the data", data.fingerprint)
  say(loader.format_stats(data.stats()))

  # ------------------------------------------------------------------ rollouts, durations, optimizer
  for note in (*model_notes, *model.reasons):
    say(note)
  export_to = hugging_face.export_folder(config, model, workdir)
  if rolls_out:
    data = rollout.Rollouts(config, data, model, tokenizer, mesh, micro_batch_size=micro_batch_size,
                            share_prompts=share_prompts, workdir=workdir, past=past)
  lengths: dict[str, Any] = dict(batch_size=lambda step: data.batch_range(step)[0], rows_per_epoch=data.rows_per_epoch,
                 seq_len=None if rolls_out else config.seq_len)
  total_steps = _total_steps(durations.resolve(config, "total", total_steps=None, **lengths), data.num_steps, say)
  to_steps = functools.partial(durations.steps, total_steps=total_steps, **lengths)
  for prefix in ("log", "ckpt", "keep"):
    every = durations.resolve(config, prefix, total_steps=total_steps, **lengths)
    say(f"{prefix}: {f'every {every}' if every.steps else workdir_lib.NEVER.get((prefix, every.steps), 'never')}")
  saves_last = to_steps(config, "ckpt") != 0
  optimizer = program_lib.make_optimizer(config, model, total_steps, to_steps)
  for note in optimizer.notes:
    say(note)

  # ------------------------------------------------------------------ shapes, shardings, update_fn; no array yet
  program = program_lib.make_program(config, model, optimizer, mesh, data.source_names)
  for note in program.notes:
    say(note)
  abstract_state, update_fn, precompute = program.abstract_state, program.update_fn, program.precompute

  def make_batch(step):
    _, size = data.batch_range(step)
    return mesh_lib.place_batch(lambda rows: check_ids(data.batch(step, rows), model.vocab_size), size,
                                program.batch_sharding)

  def example(step):
    batch = data.example() if rolls_out else make_batch(step)
    if precompute:
      batch["ref_logprobs"] = batch["loss_weights"]  # of the same shape as those that will be there
    if jax.process_count() > 1:
      batch["stop_requests"] = processes.stop_requests(mesh, False)
    return batch

  with mesh_lib.activation_rules(mesh, config.activation_rules):
    first = past.step if past else 0
    batch = example(first)
    jax.eval_shape(update_fn, abstract_state, batch)  # finds mistakes in shapes before anything is allocated

    # ---------------------------------------------------------------- evaluators, callbacks, checkpoints
    writer = writers.MultiWriter()  # opened below, once it is known from which step on
    with processes.first_goes_first("evaluation data"):
      setup = evaluators_lib.Setup(
          config, model, tokenizer, mesh, workdir, writer, datasets=[data],
          reference=(lambda: reference_lib.overlay(run.state["params"], run.state["reference"]))
          if "reference" in abstract_state else None)
      evaluators = {name: evaluators_lib.make(name, config.evals[name], setup) for name in config.evals}
    if config.keep_best and config.keep_best.split("/")[:2] not in [["eval", name] for name in evaluators]:
      raise ConfigError(f"keep_best is {config.keep_best!r}; it names a metric of an evaluator, as in "
                        f"eval/{next(iter(evaluators), 'NAME')}/loss.")
    keep_steps = to_steps(config, "keep") or 0
    workdir_lib.check_saves(config, saves_last or keep_steps > 0)
    callbacks = _make_callbacks(config, to_steps, total_steps, evaluators, keep_steps, workdir,
                                update_lib.gradient_paths(optimizer, abstract_state["params"]))
    more_writers = loggers.find(config.loggers, workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", keep_last=config.keep_last, keep_steps=keep_steps,
                              keep_best=config.keep_best, best_mode=config.keep_best_mode,
                              leave_out=state_lib.left_out(abstract_state, model, optimizer, config.strategy))

    # ---------------------------------------------------------------- state; meanwhile the step is compiled
    programs = compiled.Programs(update_fn)
    if not rolls_out and first < total_steps:  # nobody knows how long completions will be
      programs.begin(abstract_state, batch)
    del batch
    start = state_lib.initialise(config, model, optimizer, abstract_state, checkpoints)
    if looked_up:
      position.check(config, data.taken, start.meta)
    pinned = start.pinned
    if precompute:
      pinned = reference_lib.precompute(config, model, start, program.reference, program.params_sharding,
                                        setup.datasets, mesh, micro_batch_size,
                                        loader.default_cache_dir(config, workdir), say)
    workdir_lib.check_same_data(start.meta, data.past_fingerprint, config.allow_config_changes)
    if rolls_out and (rest := position.rest_of_rollout(start.meta)):  # else the run that is gone on with had none
      data.restore(int(start.state["step"]), rest, start.arrays)
    ahead = {} if rolls_out else dict(depth=config.input.prefetch, workers=config.input.workers)
    config_checks.audit(config)
    say(start.origin)
    workdir_lib.save_config(resolved, workdir, tokenizer)
    step = int(start.state["step"])
    if jax.process_index() == 0:
      say(parameter_overview.get_parameter_overview(start.state["params"], include_stats=False))
    writer.writers = (*writers.make_writers(workdir, resume_step=step if start.meta else -1),
                      *loggers.start(more_writers, workdir, resolved))
    images = {} if not data.images_per_row else dict(images_per_row=data.images_per_row, tower_frozen=not any(
        path.startswith(("vision/", "projector/")) for path in optimizer.trainable))
    run = Run(
        config=config, workdir=workdir, mesh=mesh, model=model, tokenizer=tokenizer, data=data,
        learning_rates=optimizer.learning_rates, total_steps=total_steps,
        log_steps=to_steps(config, "log") or 0, state=start.state, pinned=pinned, step=step, writer=writer,
        checkpoints=checkpoints, saves_last=saves_last, callbacks=callbacks, say=say,
        config_json=json.loads(config_checks.to_json(resolved)),
        last_eval=writers.last_evaluation(workdir, step), remembered=dict(start.meta.get("remembered", {})),
        chrono=throughput.Chrono(model.flops_per_token(config.seq_len, **images), start.meta.get("seconds"),
                                 workdir_lib.first_start(workdir), resolved.precision.compute))
    say(f"mfu: of {run.chrono.peak / 1e12:.3g} TFLOP/s a device ({run.chrono.peak_source})")
    del start  # run.state is donated step by step: another name for it would be a trap

    # ---------------------------------------------------------------- loop
    try:
      _loop(run, programs, data.batches(run, program) if rolls_out else loader.Prefetcher(
          make_batch, run.step, run.total_steps, **ahead))
    except BaseException as error:
      callbacks("on_error", run, error)
      checkpoints.abandon()
      programs.wait()  # else the program might end at once, and loggers not send what they have
      raise
    finally:
      run.chrono.ends.close()

  # ------------------------------------------------------------------ clean exit
  checkpoints.close()
  writer.close()
  if export_to is not None:
    export_at_end(run, export_to, dtype=config.export.dtype, overwrite=True, progress=True)
  processes.sync("end of training")
  workdir_lib.say_where_everything_is(run, time.monotonic() - began, export_to)
  return run


def _make_callbacks(config: Any, to_steps: Any, total_steps: int, evaluators: dict[str, Any], keep_steps: int,
                    workdir: Path, gradient_paths: list[str]) -> cb.Callbacks:
  """The built-in callbacks in the order they are called, then the config's own, and the report of it all."""
  plans = {}
  for name in evaluators:
    cfg = config.evals[name]
    every = to_steps(cfg, "eval", default=max(1, total_steps // 10), where=f"evals.{name}")
    plans[name] = (every, cfg.at_start, cfg.at_end, cfg.on_error)
  return cb.Callbacks([
      report.Record(gradient_paths),
      notes.Notes(),
      cb.Alive() if jax.process_count() > 1 else Watchdog(),
      cb.Preemption(),
      cb.Health(config.optimizer.max_nonfinite_steps, gradient_paths),
      *([spikes.Spikes(**config.spikes)] if config.spikes.action != "none" else []),
      cb.MetricsLog(to_steps(config, "log") or 0),
      signatures.Signatures(config.health_silent),
      cb.Progress(),
      cb.Profiler(workdir / "profile", config.profile.start_step, config.profile.num_steps),
      cb.Evaluate(evaluators, plans),
      cb.SaveCheckpoints(to_steps(config, "ckpt") or 0, keep_steps),
      *cb.make_custom(config.callbacks),
      *([report.Page()] if config.report else []),
  ])


def _loop(run: Run, programs: compiled.Programs, batches: Any) -> None:
  """Steps until the last one, or until a stop is asked for; then saves, unless `ckpt` is never."""
  callbacks, data = run.callbacks, run.data
  several = jax.process_count() > 1
  begun = None
  with batches:
    callbacks("on_train_begin", run)
    while run.step < run.total_steps and not _stops(run, several):
      if run.go_back is not None:
        spikes.go_back(run, batches)
        continue
      epoch = int(data.epoch(run.step))
      if epoch != begun:
        callbacks("on_epoch_begin", run, epoch)
        begun = epoch
      callbacks("on_step_begin", run)
      waited = batches.wait_seconds
      batch = next(batches, None)
      if batch is None:
        break  # a stop was asked for while it was sampled
      run.chrono.waited(batches.wait_seconds - waited)
      if several:
        batch["stop_requests"] = processes.stop_requests(run.mesh, bool(run.stop_requested))

      if batch not in programs:  # batches may grow in stages, or with their completions
        run.settle()
        if programs:
          # Eight sizes are what buckets come to; many more are something that should have been padded.
          run.note("info" if len(programs) < 8 else "health", "recompiled", f"step {run.step + 1}: update_fn compiles "
                   f"again, for {programs.changed(batch)}")
        with run.chrono.pause("compile"):
          run.writer.write_scalars(run.step, {"time/compile": programs.compile(run.state, batch)})

      with jax.profiler.StepTraceAnnotation("train", step_num=run.step):
        run.state, metrics = programs(run.state, batch)
      run.step += 1
      run.chrono.ends.dispatched(run.step, metrics)
      run.defer(run.step, metrics | batches.metrics, batch)  # fetches those of the step before, while this one runs
      callbacks("on_optimizer_step", run)
      if int(data.epoch(run.step)) != epoch:
        callbacks("on_epoch_end", run, epoch)
    run.settle()
    if run.go_back is not None:  # a stop was asked for when a spike had just been found
      spikes.go_back(run, batches)
  if run.saves_last:
    run.save()
  with liveness.phase("checkpoint"):
    run.checkpoints.wait()
  callbacks("on_train_end", run)


def _stops(run: Run, several: bool) -> bool:
  """Whether to stop before the next step. Several processes agree through the metrics, which they all see alike."""
  return bool(run.agreed_stop if several else run.stop_requested)


def _total_steps(asked: durations.Duration, available: int | None, say: Any) -> int:
  """The run's last step: what the config asks for, or the end of the data if that comes first."""
  if asked.steps is None and available is None:
    raise ConfigError("the run has no end: give one of total_{steps,examples,tokens,epochs}, or input.stop=first.")
  if asked.steps == 0:
    raise ConfigError("total_steps is 0: nothing would be trained. Use at least 1.")
  if available is not None and (asked.steps is None or available < asked.steps):
    say(f"total: {available:,} steps (the data end there, by input.stop; asked for: {asked})")
    return available
  say(f"total: {asked}")
  return asked.steps
