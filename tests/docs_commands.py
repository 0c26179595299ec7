"""The commands in the documentation: found, checked, and run at a small size in this process."""

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from absl import app, flags

from tests import tiny
from trainer import program
from trainer.config import typed as config_typed

PAGES = [tiny.ROOT / "README.md", tiny.ROOT / "CONTRIBUTING.md", *sorted((tiny.ROOT / "docs").glob("*.md"))]
# What begins a line that a reader would type; in a block that is not marked as bash it would go unseen.
TYPED = re.compile(r"^\s*(\$ )?(\w+=\S+ )*(python3? |pip |srun |sbatch |mkdocs |vllm |docker |kubectl )")

BLOCK = re.compile(r"(?:^<!-- (needs|run by): (.+?) -->\n)?^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
  """A line of a block of bash, with what it was continued by, and without comments."""

  page: str
  text: str
  # What it needs that a test has not; which test or script runs it instead; both "" where it is run here.
  needs: str
  run_by: str

  @property
  def argv(self) -> list[str]:
    return shlex.split(self.text, comments=True)


def commands(page: Path) -> Iterator[Command]:
  """Those of all blocks of bash of a page, in order."""
  text = page.read_text(encoding="utf-8")
  for match in BLOCK.finditer(text):
    mark, said, block = match.groups()
    for line in block.replace("\\\n", " ").splitlines():
      if line.strip() and not line.strip().startswith("#"):
        yield Command(page.name, line.strip(), said if mark == "needs" else "", said if mark == "run by" else "")


def unseen(page: Path) -> list[str]:
  """Lines that look like commands, in blocks that are not of bash."""
  text = page.read_text(encoding="utf-8")
  blocks = [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
            if language not in ("bash", "python", "pycon")]
  outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
  indented = [line for line in outside.splitlines() if line.startswith("    ")]
  return [line for line in [*"\n".join(blocks).splitlines(), *indented] if TYPED.match(line)]


# ----------------------------------------------------------------------------------------------
# What makes a command small. Later flags win over those before them.

_MODEL = [f"--config.model.{key}" for key in ("num_layers=1", "hidden_size=16", "intermediate_size=32", "num_heads=2")]
_RUN = [f"--config.{key}" for key in (
    "total_steps=3", "log_steps=1", "batch_size=8", "grad_accum_steps=1", "seq_len=64", "input.max_over_long=1.0")]
_EPOCHS = ["--config.total_epochs=-1"]
_ROLLOUT = [f"--config.rollout.{key}" for key in ("num_prompts=4", "group_size=2", "max_new_tokens=4", "batch_size=8")]


def _evals(*names: str, **more: str) -> list[str]:
  """These run at the end alone; `samples` does not (what generates takes long to compile, and other commands do it)."""
  flags_of = [f"--config.evals.{name}.{key}" for name in names for key in ("at_start=False", "eval_percent=0")]
  return [*flags_of, *(f"--config.evals.{key.replace('__', '.')}={value}" for key, value in more.items())]


_SAMPLES = _evals("samples", samples__at_end="False")
_HELD_OUT = ["--config.input.sources.main.validation_fraction=0.3"]

SMALL = {
    "configs/quickstart.py": [
        *_RUN, *_MODEL, *_SAMPLES, *_evals("val", val__batch_size="8"), "--config.tokenizer.vocab_size=300"],
    "configs/quickstart_sft.py": [*_RUN, *_MODEL, *_SAMPLES, *_evals("val", val__batch_size="8")],
    "configs/quickstart_dpo.py": [*_RUN, *_MODEL, *_SAMPLES, *_evals("pairs", pairs__batch_size="8")],
    "configs/quickstart_arithmetic.py": [*_RUN, *_MODEL, *_evals("pass1", pass1__at_end="False")],
    "configs/quickstart_grpo.py": [*_RUN, *_MODEL, *_ROLLOUT, *_evals("pass1", pass1__max_documents="4")],
    "configs/sft.py": [*_RUN, *_EPOCHS, *_HELD_OUT, *_evals("val")],
    "configs/dpo.py": [*_RUN, *_EPOCHS, *_HELD_OUT, *_evals("pairs")],
    "first.py": ["--config.total_steps=4", "--config.model.num_layers=2"],
    "own_model.py": ["--config.total_steps=4"],
}


def small(argv: list[str]) -> list[str]:
  """The command's flags, with those that make it small."""
  config = next((arg.partition("=")[2].partition(":")[0] for arg in argv if arg.startswith("--config=")), None)
  if config is None:  # export, generate
    more = ["--max_new_tokens=4"] if "trainer.generate" in argv else []
    return [re.sub(r"^--step=\d+$", "--step=3", arg) for arg in argv] + more
  more = SMALL[config]
  if any(arg.startswith("--config.model.hf=") for arg in argv):
    more = [arg for arg in more if arg not in _MODEL]
  return [re.sub(r"^--step=\d+$", "--step=2", arg) for arg in argv] + more


def check(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  """Parses the flags of `python -m MODULE …` by the module's own, and checks the config with these very values.

  `argv` begins with the module. Nothing is trained.
  """
  with _flags(monkeypatch, argv):
    module = runpy.run_module("trainer.__main__" if argv[0] == "trainer" else argv[0], run_name="not main")
    if argv[0] == "trainer":
      config_typed.parse_flags(argv)
      program.resolve(config_typed.of_flag(flags.FLAGS["config"])[0])
    elif "_define_flags" in module:
      module["_define_flags"]()
      flags.FLAGS([arg for arg in argv if not arg.startswith("--config.")])  # which some hand on to the runs they start


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch, stdin: str = "") -> None:
  """`python -m MODULE …` in this process; `argv` begins with the module.

  Raises:
    AssertionError: it did not end with exit code 0.
  """
  code = exit_code(argv, monkeypatch, stdin)
  assert code == 0, f"{shlex.join(argv)} ended with {code}"


def exit_code(argv: list[str], monkeypatch: pytest.MonkeyPatch, stdin: str = "") -> int | str:
  """The same, with what it ends with: a number, or a message that Python would print."""
  monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
  monkeypatch.setenv("GLIBC_TUNABLES", "")  # or it would begin anew, as another process
  with _flags(monkeypatch, argv):
    try:
      runpy.run_module(argv[0], run_name="__main__")
    except SystemExit as end:
      return end.code or 0
  return 0


@contextlib.contextmanager
def _flags(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> Iterator[None]:
  """The command line is `argv`; flags that are defined meanwhile are gone afterwards."""
  app.define_help_flags()  # once for all programs
  known = set(flags.FLAGS)
  monkeypatch.setattr(sys, "argv", argv)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", RuntimeWarning)  # that the module has been imported before
      yield
  finally:
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)
