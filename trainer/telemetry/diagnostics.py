"""What goes wrong in known ways is recognised in the metrics, and said once, in plain words, with what to do.

Each diagnostic is a function of the last values of some metrics; DIAGNOSTICS lists them, docs/observability.md
explains them. None of them changes the run. What was said is in the checkpoints, so that a run that goes on does not
say it again; the values are not: after a restart a diagnostic needs its whole window again.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from input_pipeline.examples.conversations import ChatEncoder
from trainer import strategies
from trainer.callbacks import Callback
from trainer.errors import ConfigError, DataError

Values = Mapping[str, Sequence[float]]


class Diagnostic(NamedTuple):
  """One known way in which runs go wrong.

  Attributes:
    metrics: which it needs, of one row of metrics: of a step, of a logged window, or of an evaluation.
    window: so many values of each, the last ones, are looked at.
    find: `(values, run) -> text or None`, with `values[metric]` the oldest first.
    advice: what to do.
    where: whether it applies to a run at all.
  """

  metrics: tuple[str, ...]
  window: int
  find: Callable[[Values, Any], str | None]
  advice: str
  where: Callable[[Any], bool] = lambda run: True


def _ends(values: Sequence[float], parts: int) -> tuple[float, float]:
  """The means of the first and of the last one of so many parts."""
  length = max(1, len(values) // parts)
  return fmean(values[:length]), fmean(values[-length:])


def _equal_rewards(values, run):
  share = fmean(values["frac_reward_zero_std"])
  return (f"in {share:.0%} of the groups of the last rollouts all completions got the same reward: such groups teach "
          "nothing.") if share >= 0.9 else None


def _rewards_missing(values, run):
  share = fmean(values["frac_without_reward"])
  if share < 0.5:
    return None
  metrics = run.data.metrics
  parts = [f"{key.split('/')[1]} {key.rpartition('/')[2]} for {value:.0%}" for key, value in sorted(metrics.items())
           if key.startswith("rewards/") and key.endswith(("/failed", "/abstained")) and value]
  return (f"{share:.0%} of the completions of the last rollouts have no reward, and are not trained on: "
          f"{', '.join(parts)}.")


def _chosen_falls(values, run):
  early, late = _ends(values["rewards/chosen"], 2)
  before, margin = _ends(values["rewards/margins"], 2)
  if late < 0 and early - late > 0.1 * max(margin, 1e-6) and margin > before:
    return (f"rewards/chosen fell from {early:.3g} to {late:.3g} while the margins grew: the chosen answers become "
            "less likely too, only more slowly than the rejected ones.")
  return None


def _ratio_one(values, run):
  off = max(abs(ratio - 1.0) for ratio in values["policy/ratio_mean"])
  if off < 1e-5 and not any(values["clip_ratio/region_mean"]):
    return ("the ratio to the policy that sampled was 1 in each of the last updates: they are on-policy, and clipping "
            "has no effect.")
  return None


def _updates_lost(values, run):
  changed = fmean(values["params_changed"])
  if changed < 0.1 and fmean(values["grad_norm"]) > 0:
    return (f"an update changes {changed:.1%} of the bfloat16 parameters: the rest of it is lost, being smaller than "
            "what rounding keeps.")
  return None


def _truncation_rises(values, run):
  early, late = _ends(values["completions/clipped_ratio"], 4)
  if late >= 0.5 or late - early >= 0.2:
    return f"{late:.0%} of the completions do not end within max_new_tokens ({early:.0%} before)."
  return None


def _input_bound(values, run):
  share = fmean(values["time/data"]) / max(fmean(values["time/step"]), 1e-9)
  return f"{share:.0%} of a step's time is waiting for data." if share > 0.1 else None


def _overhead(values, run):
  spent = run.chrono.state()
  aside, total = spent["eval"] + spent["checkpoint"], sum(spent.values()) - spent["data"]
  if total > 600 and aside > 0.3 * total:
    return (f"evaluations took {spent['eval'] / total:.0%} and checkpoints {spent['checkpoint'] / total:.0%} of the "
            f"{total:,.0f} s so far.")
  return None


def _always_clipped(values, run):
  norm, bound = median(values["grad_norm"]), run.config.optimizer.clip_norm
  if bound and min(values["grad_norm"]) > bound and norm > 10 * bound:
    return (f"every one of the last gradients was clipped, from a norm of {norm:.3g} (median) to {bound:g}: the size "
            "of a gradient has no say any more.")
  return None


def _flat_loss(values, run):
  loss = values["loss"]
  early, late = _ends(loss, 10)
  if run.step <= 2 * len(loss) and late > 0.99 * early:
    return f"the loss has not fallen in the first {run.step} steps: {early:.4g} at first, {late:.4g} now."
  return None


def _entropy_collapses(values, run):
  early, late = _ends(values["entropy"], 10)
  if late < 0.1 * early and late < 0.1:
    return (f"the policy's entropy fell from {early:.3g} to {late:.3g} nats a token: completions of a prompt are "
            "nearly the same, and leave little to compare.")
  return None


def _pairs_too_easy(values, run):
  if fmean(values["rewards/accuracies"]) > 0.995:
    return "nearly every pair is already told apart: little is left to learn from them."
  return None


def _nothing_trained(values, run):
  share = fmean(tokens == 0 for tokens in values["trained_tokens"])
  return f"{share:.0%} of the last steps had no token to train." if share > 0.1 else None


def _learns_to_generate(run: Any) -> bool:
  return run.config.rollout.num_prompts > 0


def _starts_afresh(run: Any) -> bool:
  config = run.config
  return strategies.of(config).data == "texts" and not (
      config.model.hf or config.init_from.path or config.init_from.hf or config.resume)


DIAGNOSTICS: dict[str, Diagnostic] = {
    "equal_rewards": Diagnostic(
        ("frac_reward_zero_std",), 10, _equal_rewards,
        "Use prompts that the model sometimes gets right, more completions a prompt (rollout.group_size), a reward "
        "with more than two values, or rollout.resample, which replaces such groups."),
    "rewards_missing": Diagnostic(
        ("frac_without_reward",), 3, _rewards_missing,
        "What a function raised stands in the warnings (notes.jsonl); a judge that is asked over a network may need "
        "more than rollout.reward_timeout_seconds."),
    "chosen_falls": Diagnostic(
        ("rewards/chosen", "rewards/margins"), 100, _chosen_falls,
        "That is common and may be harmless; if generations get worse, add the sft term to strategy.loss, raise "
        "strategy.beta or lower optimizer.learning_rate."),
    "ratio_one": Diagnostic(
        ("policy/ratio_mean", "clip_ratio/region_mean"), 20, _ratio_one,
        "That is right with rollout.updates=1 and rollout.epochs=1: clip_low and clip_high need not be tuned. More "
        "updates or epochs would use each completion more often."),
    "updates_lost": Diagnostic(
        ("params_changed", "grad_norm"), 10, _updates_lost,
        "Use precision.stochastic_rounding=True, precision.params=float32, or a higher optimizer.learning_rate."),
    "truncation_rises": Diagnostic(
        ("completions/clipped_ratio",), 20, _truncation_rises,
        "Raise rollout.max_new_tokens (and seq_len), punish length (a reward of type length), or leave such "
        "completions out with rollout.mask_truncated=True."),
    "input_bound": Diagnostic(
        ("time/data", "time/step"), 5, _input_bound,
        "Raise input.workers and input.prefetch, or put input.cache_dir on a faster disk."),
    "overhead": Diagnostic(
        ("tokens_per_second",), 1, _overhead,
        "Evaluate or save less often (eval_steps of the evaluator, ckpt_steps), or on fewer rows."),
    "always_clipped": Diagnostic(
        ("grad_norm",), 200, _always_clipped,
        "Raise optimizer.clip_norm to about the usual norm, so that it catches outliers alone, and see whether the "
        "learning rate is still right."),
    "flat_loss": Diagnostic(
        ("loss",), 500, _flat_loss,
        "Look at the rows (--mode=inspect), and try another optimizer.learning_rate, ten times lower or higher.",
        _starts_afresh),
    "entropy_collapses": Diagnostic(
        ("entropy", "policy/ratio_mean"), 50, _entropy_collapses,
        "Raise strategy.clip_high (DAPO uses 0.28) or strategy.entropy_coef, or lower optimizer.learning_rate.",
        _learns_to_generate),
    "pairs_too_easy": Diagnostic(
        ("rewards/accuracies",), 100, _pairs_too_easy,
        "Stop here, or use harder pairs: going on mostly moves the policy away from the reference."),
    "nothing_trained": Diagnostic(
        ("trained_tokens",), 50, _nothing_trained,
        "See which tokens have a weight with --mode=inspect, and look at chat.train_on and the columns of the data.",
        lambda run: not _learns_to_generate(run)),
}
# Those that are not of a window of metrics.
OVERFITS, END, RECOMPILED = "overfits", "end_never_trained", "recompiled"
NAMES = (*DIAGNOSTICS, OVERFITS, END, RECOMPILED)
# An evaluation's loss above its best by this share, three times in a row.
_WORSE = 0.01
# Updates after which the end of a text should have been seen.
_ENDS_AFTER = 50


class Diagnostics(Callback):
  """Looks for DIAGNOSTICS, for losses of evaluations that rise, and for ends of texts that are never trained.

  Args:
    silent: names of NAMES that are not to be said.
  """

  def __init__(self, silent: Sequence[str] = ()):
    self._silent = silent
    self._ends = None

  def on_train_begin(self, run):
    self._said = run.remembered.setdefault("health", [])
    run.remembered.setdefault("best", {})
    self._active = {name: diagnostic for name, diagnostic in DIAGNOSTICS.items()
                    if self._wanted(name) and diagnostic.where(run)}
    self._values: dict[str, deque[dict[str, float]]] = {
        name: deque(maxlen=diagnostic.window) for name, diagnostic in self._active.items()}
    self._row = None
    self._ends, stop_ids = None, _stop_ids(run)
    if stop_ids and self._wanted(END) and run.step == 0:
      self._ends, self._count = 0, jax.jit(functools.partial(_ends_trained, np.array(stop_ids, np.int32)))

  on_rollback = on_train_begin

  def on_step_end(self, run, step, metrics):
    self._look(run, metrics)
    if run.last_row is not self._row:
      self._row = run.last_row
      self._look(run, {name: value for name, value in self._row.items() if name not in metrics})
    if self._ends is not None and run.batch is not None:
      self._ends = self._ends + self._count(run.batch)
      if step >= _ENDS_AFTER:
        self._say_ends(run, step)

  def on_eval(self, run, name, metrics):
    key, best = f"eval/{name}/loss", run.remembered["best"]
    value = metrics.get(key, math.nan)
    if math.isnan(value) or not self._wanted(OVERFITS):
      return
    seen = best.setdefault(name, {"loss": value, "step": run.step, "worse": 0})
    if value <= seen["loss"]:
      seen.update(loss=value, step=run.step, worse=0)
      return
    seen["worse"] = seen["worse"] + 1 if value > (1 + _WORSE) * seen["loss"] else 0
    if seen["worse"] >= 3:
      text = f"{key} was lowest after step {seen['step']}, {seen['loss']:.4g}, and is {value:.4g} now."
      self._say(run, OVERFITS, text,
                f"Keep the best checkpoint (keep_best={key}), train for fewer epochs, or use more data, dropout or "
                "weight decay.")

  def on_train_end(self, run):
    # With less than that many steps: of all there were, if most documents have an end.
    texts = strategies.of(run.config).data == "texts"
    if self._ends is not None and not texts and run.step >= min(10, run.total_steps):
      self._say_ends(run, run.step)

  def _wanted(self, name):
    return name not in self._silent and name not in self._said

  def _look(self, run, metrics):
    for name, diagnostic in list(self._active.items()):
      if all(metric in metrics for metric in diagnostic.metrics):
        rows = self._values[name]
        rows.append(metrics)
        if len(rows) == diagnostic.window and run.step % max(1, diagnostic.window // 10) == 0:
          values = {metric: [row[metric] for row in rows] for metric in diagnostic.metrics}
          if all(math.isfinite(x) for some in values.values() for x in some) and (text := diagnostic.find(values, run)):
            self._say(run, name, text, diagnostic.advice)
            del self._active[name]

  def _say_ends(self, run, step):
    ends, self._ends = float(jax.device_get(self._ends)), None
    if not ends:
      self._say(run, END, f"in {step} steps no end of a text was trained (tokens {_stop_ids(run)}): the model does "
                "not learn to stop.", "See the rows with --mode=inspect. tokenizer.add_eos ends texts; a chat template "
                "must close the assistant's turn inside what is trained; answers that are cut off have no end.")

  def _say(self, run, name, text, advice):
    self._said.append(name)
    run.note("health", name, text, advice)


def check(config: Any) -> None:
  """Refuses names that do not exist. Raises ConfigError."""
  unknown = [name for name in config.health_silent if name not in NAMES]
  if unknown:
    raise ConfigError(f"health_silent names {', '.join(map(repr, unknown))}; allowed: {', '.join(NAMES)}.")


def _ends_trained(stop_ids: np.ndarray, batch: Mapping[str, jax.Array]) -> jax.Array:
  """How many tokens of the batch end a text and are trained; int32 scalar."""
  return jnp.sum(jnp.isin(batch["tokens"], stop_ids) & (batch["loss_weights"] > 0), dtype=jnp.int32)


def _stop_ids(run: Any) -> tuple[int, ...]:
  """The tokens that end what the model says, where training is to teach it; () elsewhere.

  Sampled completions that do not end are counted as such; texts of pretraining may be longer than all that is trained
  on here: whether they end is looked at from rows that have many documents.
  """
  if run.config.rollout.num_prompts:
    return ()
  if strategies.of(run.config).data == "texts":
    return run.tokenizer.stop_ids if run.config.tokenizer.add_eos and run.config.input.packing == "best_fit" else ()
  try:
    return ChatEncoder(run.config, run.tokenizer).stop_ids
  except DataError:  # rows without turns, beside a template that ends none
    return run.tokenizer.stop_ids
