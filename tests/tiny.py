"""A tiny model on generated text: what most tests of the trainer train."""

import importlib.metadata
import os
import random
import subprocess
import sys
from pathlib import Path

from ml_collections import ConfigDict

import trainer
from trainer.config import defaults, evaluator, reward, source, strategy

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "und", "läuft", "fort")


# The schedule of `defaults()`, for runs that must go on with the learning rates that they had.
COSINE = dict(name="cosine", warmup_percent=2.0)


def write_corpus(folder: Path, files: int = 24, seed: int = 0) -> Path:
  """Text files of random length and random words, the same each time."""
  folder.mkdir(parents=True, exist_ok=True)
  rng = random.Random(seed)
  for number in range(files):
    words = (rng.choice(WORDS) for _ in range(rng.randint(3, 60)))
    (folder / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
  return folder


def config(corpus: Path, **changed) -> ConfigDict:
  """A config whose every step takes milliseconds; `changed` are top-level keys or dicts of them."""
  c = defaults()
  c.input.sources.main = source(type="text", path=str(corpus), split="train", validation_fraction=0.3)
  c.update(batch_size=8, seq_len=32, total_steps=8, log_steps=1, ckpt_steps=3)
  c.schedule.update(name="constant", warmup_percent=-1.0)  # runs of any length have the same step
  c.model.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_multiple=8)
  c.optimizer.learning_rate = 1e-2
  c.evals.val = evaluator(type="loss", eval_steps=4)
  c.update(changed)
  return c


CONFIG_FILE = """
from pathlib import Path
from tests import tiny

def get_config(corpus):
  return tiny.config(Path(corpus), schedule=tiny.COSINE)
"""


def write_config_file(folder: Path) -> Path:
  """The same config as a file for the command line: --config=FILE:CORPUS."""
  path = folder / "tiny_config.py"
  path.write_text(CONFIG_FILE)
  return path


def command(config_file: Path, corpus: Path, workdir: Path, *overrides: str) -> list[str]:
  return [sys.executable, "-m", "trainer", f"--config={config_file}:{corpus}", f"--workdir={workdir}", *overrides]


# What programs are made with quickly, rather than well, and what users' runs make them with. XLA's older emitters went
# after jaxlib 0.10.
QUICK, AS_USERS = {"xla_backend_optimization_level": 0}, {"xla_backend_optimization_level": 3}
if importlib.metadata.version("jaxlib").startswith("0.10."):
  QUICK["xla_cpu_use_fusion_emitters"], AS_USERS["xla_cpu_use_fusion_emitters"] = False, True
  QUICK["xla_cpu_parallel_codegen_split_count"] = 1  # small programs are not cut up to be compiled in many threads
# Whether all programs are made as in users' runs, by each run for itself.
AS_IN_USERS_RUNS = bool(os.environ.get("WEFT_TEST_AS_USERS"))


def xla_flags(devices: int) -> str:
  """Of tests, which compile for longer than they compute: so many devices, and programs made quickly rather than well.

  With WEFT_TEST_AS_USERS=1 they are made as in users' runs. `jax.jit(compiler_options=AS_USERS)` makes one program so:
  for two that are the same bits there.
  """
  flags = {"xla_force_host_platform_device_count": devices, **({} if AS_IN_USERS_RUNS else QUICK)}
  return " ".join(f"--{flag}={value}".lower() for flag, value in flags.items())


def environment(devices: int, **more: str) -> dict[str, str]:
  """Of a process of its own with so many devices: how many threads they need it finds out itself."""
  inherited = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
  return {**inherited, "XLA_FLAGS": xla_flags(devices), **more}


def run(argv: list[str], devices: int = 1, **more: str) -> subprocess.CompletedProcess:
  """Runs a command of ours to its end in a process of its own."""
  return subprocess.run(argv, cwd=ROOT, env=environment(devices, **more), capture_output=True, text=True, timeout=300,
                        check=False)


def hf_folder(folder: Path, seed: int = 1, **changed) -> Path:
  """A Hugging Face folder of a tiny random Llama with a tokenizer of bytes; `changed` are keys of its config."""
  from input_pipeline.tokenizer.tokenizer import BytesTokenizer
  from models import api, hf  # after conftest has set JAX's flags
  from tests.models.initial import initial
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=264, tie_embeddings=False)
  cfg.update(changed)
  made = api.make_model(cfg, vocab_size=cfg.vocab_size, params_dtype="float32", compute_dtype="float32")
  made.architecture = hf.keys_of(cfg, cfg.vocab_size)
  hf.save(made, initial(made, seed), folder)
  BytesTokenizer().save(folder / "tokenizer.json")
  return folder


def model(compute_dtype: str = "float32", **changed):
  """A tiny float32 model with a vocabulary of 24, without the rest of a run."""
  from models import api  # after conftest has set JAX's flags
  cfg = defaults().model
  cfg.update(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_multiple=8)
  cfg.update(changed)
  return api.make_model(cfg, vocab_size=24, params_dtype="float32", compute_dtype=compute_dtype, remat="none")


def batch(rows: int, length: int, seed: int = 0, vocab: int = 24):
  """Rows of two segments and ragged padding, with weights that are 0, 1 or fractional; the last row is empty."""
  import numpy as np
  rng = np.random.default_rng(seed)
  cut = rng.integers(2, length - 2, rows)[:, None]
  end = rng.integers(length - 2, length + 1, rows)[:, None]
  end[-1] = 0
  at = np.arange(length)[None, :]
  segments = np.where(at >= end, 0, np.where(at < cut, 1, 2)).astype(np.int32)
  starts = (at == 0) | (at == cut)
  weights = rng.choice([0.0, 0.5, 1.0], (rows, length)).astype(np.float32) * (segments > 0) * ~starts
  return {
      "tokens": rng.integers(0, vocab, (rows, length)).astype(np.int32),
      "positions": np.where(at < cut, at, at - cut).astype(np.int32) * (segments > 0),
      "segment_ids": segments,
      "loss_weights": weights,
      "source_ids": (np.arange(rows) % 2).astype(np.int32),
  }


def equations(jaxpr):
  """All equations, those within others included; without those that have no results, which a compiler removes."""
  from jax.extend import core
  for equation in jaxpr.eqns:
    if not equation.outvars:
      continue
    yield equation
    for value in equation.params.values():
      for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
          yield from equations(getattr(part, "jaxpr", part))


def assert_on_policy(c: ConfigDict, workdir: Path) -> None:
  """Trains with GRPO on the prompts of `c`; the policy of the first step is the one that sampled."""
  c.strategy = strategy("grpo")
  c.rollout.update(num_prompts=2, group_size=2, max_new_tokens=4)
  c.rollout.rewards.a = reward(type="regex", pattern="[a-m]")
  from trainer.telemetry.writers import read_rows  # after conftest has set JAX's flags
  trainer.train(c, workdir)
  first = next(row for row in read_rows(workdir / "metrics.jsonl") if "policy/ratio_mean" in row)
  assert abs(first["policy/ratio_mean"] - 1) < 1e-5
  assert first["sampling/sampling_logp_difference/max"] < 1e-5
