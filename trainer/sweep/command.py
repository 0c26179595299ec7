"""Many runs of one config: python -m trainer.sweep --config=FILE --workdir=ROOT [--set='key=value,value'] …

The runs are those of `get_sweep()` in the config file (or in --sweep=FILE), or of --set, which may be repeated: each
value with each, or with --zip the first with the first. `--config.key=value` overrides a key in all of them. Each run
has the folder ROOT/NAME and is a `python -m trainer` like any other; one that is finished is left alone, one that was
stopped continues. At the end there is a table, ROOT/sweep.json, and ROOT/comparison.html.

    --dry_run       show the runs and check their configs, start none
    --jobs=2        as many at a time (with --gpus_per_run=1, each on GPUs of its own)
    --slurm         as an array of a Slurm cluster; --sbatch=--time=4:00:00 …: options for sbatch
    --gather        start none: the table of what there is
    --metric=eval/val/loss --best=min   what the table is sorted by
"""

import json
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from trainer import startup
from trainer.config import typed as config_typed
from trainer.errors import ConfigError
from trainer.sweep import runs as sweep_runs
from trainer.sweep import slurm as sweep_slurm
from trainer.sweep.combinations import Combination, argument, chain, fixed, name_of, parsed, product, sweep, zipped
from trainer.sweep.runs import Planned

__all__ = ["Combination", "chain", "fixed", "product", "sweep", "zipped"]

# So many runs are compared on one page, and so many problems are told.
COMPARED, SHOWN = 32, 8


def combinations(config_file: str, sweep_file: str | None, texts: Sequence[str], zip_them: bool) -> list[Combination]:
  """What a sweep is made of: --set, --sweep or the config file's get_sweep().

  Raises:
    ConfigError: none or two of them, or a get_sweep() that gives no sweep.
  """
  if texts:
    if sweep_file:
      raise ConfigError("--set and --sweep both say what the runs are; give one of them.")
    return (zipped if zip_them else product)(*map(parsed, texts))
  if zip_them:
    raise ConfigError("--zip puts the values of several --set together, and there is none.")
  file, _, _ = (sweep_file or config_file).partition(":")
  try:
    get_sweep = runpy.run_path(file).get("get_sweep")
  except ConfigError:
    raise
  except Exception as e:
    raise ConfigError(f"{file} cannot be read: {type(e).__name__}: {e}") from e
  if get_sweep is None:
    raise ConfigError(f"{file} has no get_sweep(). Add one that returns a sweep (docs/configuration.md), or name the "
                      "values: --set='optimizer.learning_rate=1e-3,3e-3'.")
  found = chain(get_sweep())  # checks its form
  if not found:
    raise ConfigError(f"get_sweep() of {file} has no combination.")
  return found


def config_of(config_file: str, overrides: Sequence[str]) -> ConfigDict:
  """The config as `python -m trainer` would see it with these arguments, resolved and checked; no device is touched.

  Raises:
    ConfigError: an unknown key, a value of a wrong type, or one that cannot be.
  """
  from trainer import program  # imports JAX
  values = flags.FlagValues()
  argv = ["sweep", f"--config={config_file}", *overrides]
  config_flags.DEFINE_config_file("config", None, "", flag_values=values, lock_config=True)
  before, sys.argv = sys.argv, argv  # where ml_collections looks for overrides
  try:
    values(argv)
    config, _ = config_typed.of_flag(values["config"])
  except (AttributeError, KeyError) as e:
    raise ConfigError(config_typed.explain_override(argv, e)) from e
  except (flags.Error, OSError, ImportError, SyntaxError) as e:
    raise ConfigError(str(e)) from e
  finally:
    sys.argv = before
  return program.resolve(config)[0]


def plan(config_file: str, root: Path, found: Sequence[Combination], common: Sequence[str]) -> list[Planned]:
  """The runs, each with its folder and its checked config.

  Raises:
    ConfigError: everything that is wrong with any of them, or two that would train the same.
  """
  runs, problems, known = [], [], {}
  for combination in found:
    name = name_of(combination)
    try:
      overrides = [argument(key, value) for key, value in combination.items()]
      if twice := {key for key in combination if any(c.startswith(f"--config.{key}=") for c in common)}:
        raise ConfigError(f"{min(twice)} is set for all runs and by the sweep.")
      config = config_of(config_file, [*common, *overrides])
    except ValueError as e:
      problems.append(f"{name}: {e}")
      continue
    exact = json.dumps(config.to_dict(), default=list, sort_keys=True)
    if exact in known:
      problems.append(f"{name} would train what {known[exact]} does: the same config. Leave one out.")
    known.setdefault(exact, name)
    workdir = root / name
    arguments = [f"--config={config_file}", f"--workdir={workdir}", *common, *overrides]
    runs.append(Planned(name, dict(combination), workdir, arguments, config))
  if problems:
    more = [f"  … and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise ConfigError("\n".join([f"{len(problems)} of {len(found)} runs cannot be; nothing was started:",
                                 *(f"  - {problem}" for problem in problems[:SHOWN]), *more]))
  for run in runs:
    run.status = sweep_runs.status_of(run)
  return runs


def conclude(root: Path, runs: Sequence[Planned], about: dict[str, Any], best: str) -> None:
  """Prints the table, and writes it and the comparison."""
  metric = about["metric"]
  ordered = sweep_runs.in_order(runs, metric, best == "max")
  sweep_runs.write(root / "sweep.json", ordered, about)
  print(f"\n{sweep_runs.table(ordered, metric)}\n")
  print(f"  {root / 'sweep.json'}")
  compared = [run.workdir for run, values in ordered if values][:COMPARED]
  if len(compared) < 2:
    return
  try:
    from trainer.report import compare
    print(f"  {compare.write(compared, root / 'comparison.html')}")
  except (ConfigError, OSError) as e:
    logging.warning("The comparison was not written: %s", e)


def _define_flags() -> None:
  flags.DEFINE_string("config", None, "Config file, as of the trainer.")
  flags.DEFINE_string("workdir", None, "Folder of the sweep; each run has one in it.")
  flags.DEFINE_string("sweep", None, "A file with get_sweep(), in place of the config file's.")
  flags.DEFINE_multi_string("set", [], "A key and its values: key=value,value. May be repeated.")
  flags.DEFINE_bool("zip", False, "The values of several --set belong together: the first with the first, and so on.")
  flags.DEFINE_bool("dry_run", False, "Show the runs and check their configs; start none.")
  flags.DEFINE_integer("jobs", None, "Runs at a time. Default: 1; with --slurm as many as Slurm allows.", lower_bound=1)
  flags.DEFINE_integer("gpus_per_run", 0, "GPUs that each of the runs at a time sees, its own; 0: all.", lower_bound=0)
  flags.DEFINE_string("metric", None, "What the table is sorted by. Default: an evaluator's loss, or loss.")
  flags.DEFINE_enum("best", "min", ["min", "max"], "Whether the smallest or the largest value comes first.")
  flags.DEFINE_bool("gather", False, "Start no run: the table of what there is.")
  flags.DEFINE_bool("slurm", False, "Hand the runs to Slurm, as an array of tasks.")
  flags.DEFINE_multi_string("sbatch", [], "With --slurm, an option of sbatch. May be repeated.")


def _run(given: Any, rest: Sequence[str]) -> int:
  """Returns the exit code."""
  if invalid := [text for text in rest if not text.startswith("--config.") or "=" not in text]:
    raise ConfigError(f"unexpected argument {invalid[0]!r}; overrides for all runs are written --config.key=value.")
  if given.config is None or given.workdir is None:
    raise ConfigError("give --config (a config file) and --workdir (a folder for the sweep).")
  if given.slurm + given.gather + given.dry_run > 1 and (given.gather or not given.slurm):
    raise ConfigError("--gather starts no run; leave out --slurm and --dry_run.")
  root = Path(given.workdir).expanduser().absolute()
  if (root / "config.json").exists():
    raise ConfigError(f"--workdir {root} is the workdir of a run; a sweep needs a folder of its own.")
  runs = plan(given.config, root, combinations(given.config, given.sweep, given.set, given.zip), list(rest))
  finished = sum(run.status == "finished" for run in runs)
  print(f"{len(runs)} runs in {root}, {finished} of them finished")
  if given.dry_run:
    for run in runs:
      print(f"  {run.status:<9}{run.name}\n           python -m trainer {shlex.join(run.arguments)}")
    if not given.slurm:
      return 0
  root.mkdir(parents=True, exist_ok=True)
  about = dict(config=given.config, common=list(rest), best=given.best, metric=given.metric or next(
      (f"eval/{name}/loss" for name, eval in runs[0].config.evals.items() if eval.type == "loss"), "loss"))
  if given.slurm and finished == len(runs):
    print("All runs are finished; nothing to hand to Slurm.")
    return 0
  if given.slurm:
    script = sweep_slurm.write_script(root, runs, given.sbatch, given.jobs)
    print(f"  {script}")
    if not given.dry_run:
      sweep_slurm.submit(script)
      print("When its tasks have ended, the same command with --gather in place of --slurm makes the table.")
    return 0
  received = None
  if not given.gather:
    received = sweep_runs.run_here(runs, given.jobs or 1, lambda text: print(text, flush=True), given.gpus_per_run)
  conclude(root, runs, about, given.best)
  open_ones = [run for run in runs if run.status != "finished"]
  if open_ones and not given.gather:
    print(f"{len(open_ones)} of {len(runs)} are not finished; the same command goes on with them.")
  return 0 if given.gather or not open_ones else 128 + received if received else 1


def main(argv: list[str]) -> None:
  with startup.one_message(ConfigError, OSError):
    sys.exit(_run(flags.FLAGS, argv[1:]))
