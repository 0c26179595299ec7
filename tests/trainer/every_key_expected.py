"""What is seen of keys that choose a state, a step, an epoch or a file, once they have the value of their first row in
every_key_table.py or every_key_sections.py: worked out by hand, from defaults and the files of every_key_bases.py.

`EXPECTED[key]` is a value, or a function of `Made` that gives it; `SEEN[key]` is what to look at where that is not what
the row sees.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.trainer.every_key import Made, digest
from tests.trainer.every_key_runs import decoding_processes
from trainer import tree

BUILT_IN = ["Record", "Notes", "Watchdog", "Preemption", "Health", "MetricsLog", "Diagnostics", "Progress", "Profiler"]
EVERY_SEVENTH = list(range(140, 1001, 140))  # steps of a run of 1000
EVERY_FIFTH = list(range(200, 1001, 200))


def _epochs(m: Made) -> int:
  """20 epochs of rows, 8 a step, to the nearest step."""
  return math.floor(20 * m.data.rows_per_epoch / 8 + 0.5)


def _durations(prefix: str, of_steps: Any) -> dict[str, Any]:
  """Each unit's value is 140 steps; `of_steps`: what is seen where these are given as steps."""
  found = {f"{prefix}_{unit}": 140 for unit in ("examples", "tokens", "percent")}
  return found | {f"{prefix}_steps": of_steps, f"{prefix}_epochs": _epochs}


def _evaluation(**changed: Any) -> str:
  plan = dict(every=100, at_start=True, at_end=True, on_error="stop") | changed  # a tenth of the run
  return f"Evaluation({', '.join(f'{key}={value!r}' for key, value in plan.items())})"


def _spikes(**changed: Any) -> list[dict[str, str]]:
  options = dict(action="rollback", metric="loss", in_a_row=3, window=100, deviations=10.0, margin=20, skip=20,
                 max_rollbacks=10) | changed
  return [{f"_{key}".replace("max_rollbacks", "most"): repr(value) for key, value in options.items()}]


def _drawn(m: Made, seed: int) -> dict[str, np.ndarray]:
  """{path: the values that a model with this seed begins with}."""
  return {path: np.asarray(leaf) for path, leaf in tree.flatten(jax.jit(m.model.init)(jax.random.key(seed))).items()}


def _parameters(choose: Callable[[dict, dict], dict]) -> Callable[[Made], dict]:
  """Made by path of what a run begins with by itself, and of what the run `files.run` has saved: all is one more than a
  run with the seed 7 begins with."""
  def parameters(m: Made) -> dict:
    own, saved = _drawn(m, 0), {path: leaf + 1 for path, leaf in _drawn(m, 7).items()}
    return digest(tree.unflatten(own | choose(own, saved)))

  return parameters


def _keys_from_queries(own: dict, saved: dict) -> dict:
  """theirs of q are ours of k; ours of q are fresh."""
  queries, keys = "blocks/attn/q/kernel", "blocks/attn/k/kernel"
  return saved | {keys: saved[queries], queries: own[queries]}


def ranges(m: Made) -> list[tuple[int, int]]:
  """(first row, how many) of the first steps."""
  return [m.data.batch_range(step) for step in range(4)]


SEEN: dict[str, Callable[[Made], Any]] = {
  "input.batch_size_stages": ranges,
  "batch_size": ranges,
  "grad_accum_steps": lambda m: m.program.options.micro_batch_size,
  "input.images.workers": lambda m: set(m.seen(decoding_processes)),  # of each epoch that a batch spans
  "seq_len": lambda m: (m.data.row_tokens, m.data.tokens_seen(3)),
  "input.weight_stages": lambda m: {name: found["rows"] for name, found in m.data.counters(9).items()},
  "source.weight": lambda m: {name: found["rows"] for name, found in m.data.counters(3).items()},
  "input.stop": lambda m: m.data.num_steps,
  # Of two that are started one may end before it is needed.
  "rollout.reward_workers": lambda m: m.begun.run.data.producer.scorer._size,
  "optimizer.ema_decay": lambda m: (m.program.options.ema_decay, sorted(m.program.abstract_state)),
  "optimizer.clip_norm": lambda m: m.program.options.clip_norm,
  "optimizer.learning_rate": lambda m: m.optimizer.learning_rate,
  **{f"schedule.warmup_{unit}": lambda m: m.optimizer.schedule.warmup_steps
     for unit in ("steps", "examples", "tokens", "epochs", "percent")},
  **{f"strategy({name}).reference_ema": lambda m: m.program.options.reference_mix
     for name in ("dpo", "kto", "grpo", "ppo")},
  **{f"strategy({name}).reference_ema_steps": lambda m: m.program.options.reference_mix
     for name in ("dpo", "kto", "grpo", "ppo")},
  **{f"strategy({name}).precompute": lambda m: (m.program.precompute, "reference" in m.program.abstract_state)
     for name in ("dpo", "kto", "grpo")},
}

EXPECTED: dict[str, Any] = {
  **{key: value for key, value in _durations("total", 140).items() if key != "total_percent"},
  **_durations("log", [140, 140]),
  **_durations("ckpt", EVERY_SEVENTH),
  **_durations("keep", sorted({*EVERY_FIFTH, *EVERY_SEVENTH})),
  **_durations("evaluator.eval", {"val": _evaluation(every=140)}),
  **{f"schedule.warmup_{unit}": 140 for unit in ("steps", "examples", "tokens", "epochs", "percent")},
  "evals": {"val": _evaluation(every=7)},
  "evaluator.at_start": {"val": _evaluation(at_start=False)},
  "evaluator.at_end": {"val": _evaluation(at_end=False)},
  "evaluator.on_error": {"val": _evaluation(on_error="warn")},
  # Saved after 3, 6, 9 and 12, with the values 0.5, 0.1, 0.9 and 0.5; two of them stay by themselves.
  "keep_last": [12],
  "keep_best": [6, 9, 12],
  "keep_best_mode": [9, 12],
  "profile.start_step": [3, 5],
  "profile.num_steps": [10, 13],
  "optimizer.max_nonfinite_steps": 3,
  "callbacks": [*BUILT_IN, "Callback", "Page"],
  "report": BUILT_IN,
  "loggers": ["JsonlWriter", "TensorBoardWriter", "Memory"],
  "health_silent": [("ratio_one",)],
  "spikes.action": _spikes(action="warn"),
  **{f"spikes.{key}": _spikes(**{key: value}) for key, value in dict(
    metric="grad_norm", window=50, deviations=7.0, in_a_row=2, margin=10, skip=10, max_rollbacks=3).items()},
  "init_from.path": _parameters(lambda own, saved: saved),
  "init_from.ignore": _parameters(lambda own, saved: {
    path: leaf for path, leaf in saved.items() if not path.startswith("embed/")}),
  "init_from.remap": _parameters(_keys_from_queries),
  "init_from.fresh": lambda m: digest(tree.unflatten(_drawn(m, 0))),
  "resume": _parameters(lambda own, saved: saved),
  "init_from.made_by": True,
  "allow_config_changes": "continuing",
  "export.path": [("out", ["float32"])],
  "export.dtype": [("out", ["float16"])],
  "export.mtp": [("out", ["float32"])],
  "processes.join_seconds": [17],
  "processes.heartbeat_seconds": [17.0, 600.0, 3600.0],
  "processes.hang_seconds": [60.0, 17.0, 3600.0],
  "processes.phase_seconds": [60.0, 600.0, 17.0],
  "input.prefetch": 5,
  "input.workers": 3,
  "input.images.workers": {2},
  "input.cache_dir": False,
  "input.batch_size_stages": [(0, 8), (8, 8), (16, 16), (32, 16)],
  "batch_size": [(0, 16), (16, 16), (32, 16), (48, 16)],
  "grad_accum_steps": 8,  # of 16 rows
  "seq_len": (48, 3 * 8 * 48),
  # A step of 8 rows by halves; then 64 rows, a tenth of which, 6.4, is main's.
  "input.weight_stages": {"main": 4 + 6, "other": 4 + 58},
  "source.weight": {"main": 20, "other": 4},  # five sixths of 24 rows
  "input.stop": lambda m: math.ceil(m.data.rows_per_epoch / 8),
  "optimizer.ema_decay": (0.9, ["ema", "nonfinite", "nonfinite_in_a_row", "opt", "params", "step"]),
  "optimizer.clip_norm": 0.5,
  "optimizer.learning_rate": 1e-3,
  **{f"strategy({name}).reference_ema": (0.5, 512) for name in ("dpo", "kto", "grpo", "ppo")},
  **{f"strategy({name}).reference_ema_steps": (0.5, 7) for name in ("dpo", "kto", "grpo", "ppo")},
  **{f"strategy({name}).precompute": (True, False) for name in ("dpo", "kto", "grpo")},
  "rollout.updates": [(4 * step, 4) for step in range(8)],  # four prompts a step
  "rollout.epochs": [(step, 1) for step in range(8)],  # four prompts for two updates, twice
  "rollout.batch_size": 16,
  "rollout.max_without_lesson": 3,
  "rollout.max_staleness": ["Ahead", 2, None, None],
  "rollout.concurrent": ["Concurrent", 1, None, None],
  "rollout.in_flight": ["Concurrent", 1, None, "_newest"],
  "rollout.schedule": ["Ahead", 1, {0: (0, [], 0), 1: (1, [], 0)}, None],
  # Of eight, the last ones.
  "rollout.devices": ([[4], [5], [6], [7]], [[0], [1], [2], [3]]),
  "rollout.tensor": ([[4, 5], [6, 7]], [[0], [1], [2], [3]]),
  "rollout.carry_over": [0, True],
  "rollout.replay_groups": [2, 4],
  "rollout.replay_window": [1, 3],
  "rollout.environment_workers": 2,
  "rollout.turn_share": 1,  # else one a turn
  "rollout.kept_texts": 5,
  "rollout.share_beginnings": True,
  "rollout.prefill_chunk": 8,
  "rollout.tool_format": "bare",
  "rollout.reward_workers": 2,
  "rollout.reward_timeout_seconds": 5.0,
}
