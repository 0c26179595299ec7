"""Every command in the documentation runs, or is checked, or is marked with what it needs or what runs it.

What "runs" means is in CONTRIBUTING.md.
"""

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from input_pipeline.chat import builtin
from input_pipeline.sources import python as readers_python
from tests import docs_commands, tiny
from tests.docs_commands import PAGES, commands
from trainer.config import defaults

pytestmark = pytest.mark.host_patches

# Pages whose commands run, at a small size, too; of all they are checked.
RUN = ("tutorial.md", "sft.md", "dpo.md", "grpo.md", "precision.md", "huggingface.md")
# What takes minutes even so, and has a test of its own.
LONG = ("trainer.speedrun",)
# Programs that any system has, and that touch nothing but the working folder.
SHELL = ("mkdir", "cat", "cp", "echo", "printf", "ls", "head", "rm", "for")
# Sources enough for a tokenizer and a validation part.
STDLIB = ("abc.py", "ast.py", "bisect.py", "calendar.py", "cmd.py", "codecs.py", "contextlib.py", "copy.py", "csv.py",
          "dis.py", "enum.py", "fileinput.py", "fnmatch.py", "functools.py", "glob.py", "gzip.py", "heapq.py", "io.py",
          "json/decoder.py", "json/encoder.py", "keyword.py", "linecache.py", "operator.py", "pprint.py", "queue.py")
CHATS = [{"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A {n}."}]}
         for n in range(40)]
PAIRS = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 2}"} for n in range(40)]
# Runs that pages begin from without making them.
BEGUN = {
    "quickstart": "--config=configs/quickstart.py",
    "quickstart_sft": "--config=configs/quickstart_sft.py:runs/quickstart",
}


def python_files(page):
  """{name: code} of a page's blocks of Python that begin with the name of a file."""
  text = (tiny.ROOT / "docs" / page).read_text(encoding="utf-8")
  return dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """A folder with all that commands name: configs, texts, a Hugging Face folder; runs come as they are asked for."""
  folder = tmp_path_factory.mktemp("prepared")
  (folder / "configs").symlink_to(tiny.ROOT / "configs")
  page = (tiny.ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
  code = next(c for c in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "def get_config" in c)
  (folder / "my_config.py").write_text(code, encoding="utf-8")
  for name in ("my_texts", "other_texts"):
    tiny.write_corpus(folder / name)
  for name in ("FOLDER", "path/to/folder"):
    tiny.hf_folder(folder / name)
    shutil.copy(builtin.TEMPLATES / "plain.jinja", folder / name / "chat_template.jinja")
  for name in STDLIB:
    (folder / "library" / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / name, folder / "library" / name)
  return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
  """The working folder of one page."""
  for path in prepared.iterdir():
    if path.name != "runs":
      (tmp_path / path.name).symlink_to(path)
  (tmp_path / "runs").mkdir()
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(readers_python.sysconfig, "get_paths", lambda: {"stdlib": str(prepared / "library")})
  return tmp_path


def begin(name, prepared, monkeypatch):
  """A run of BEGUN, and those it begins from, made once."""
  if (prepared / "runs" / name).exists():
    return
  if before := re.search(":runs/(.*)", BEGUN[name]):
    begin(before[1], prepared, monkeypatch)
  with monkeypatch.context() as patch:
    patch.chdir(prepared)
    docs_commands.run(docs_commands.small(["trainer", BEGUN[name], f"--workdir=runs/{name}"]), patch)


def provide(page, text, prepared, folder, monkeypatch):
  """The data and the begun runs that a page's commands name, and the page's own Python files."""
  (folder / "data").mkdir(exist_ok=True)
  rows = PAIRS if page == "dpo.md" else CHATS
  (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  for name in BEGUN:
    made = re.search(rf"trainer --config=\S+ --workdir=runs/{name}(?!\w)", text)
    if not made and re.search(rf"runs/{name}(?!\w)", text):
      begin(name, prepared, monkeypatch)
      (folder / "runs" / name).symlink_to(prepared / "runs" / name)
  if page == "tutorial.md":
    files = python_files(page) | {name: code for name, code in python_files("extending.md").items() if "models" in name}
    for name, code in files.items():
      path = folder / name
      path.unlink(missing_ok=True)  # a link to the one of all pages
      path.parent.mkdir(exist_ok=True)
      path.write_text(code, encoding="utf-8")


def listed(page):
  return [command for command in commands(page) if not command.needs and not command.run_by]


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=lambda page: page.name)
def test_commands_are_checked_or_marked(page, prepared, folder, monkeypatch):
  provide(page.name, "", prepared, folder, monkeypatch)
  for command in listed(page):
    one(command, False, monkeypatch)


@pytest.mark.parametrize("name", RUN)
def test_commands_run(name, prepared, folder, monkeypatch):
  page = tiny.ROOT / "docs" / name
  provide(name, "\n".join(command.text for command in listed(page)), prepared, folder, monkeypatch)
  for command in listed(page):
    one(command, True, monkeypatch)


def one(command, runs, monkeypatch):
  """Runs or checks one command."""
  argv, stdin = command.argv, "Hi"
  if argv[0] in SHELL and "trainer" not in command.text:
    if runs or command.page not in RUN:  # of what has not run there is nothing to look at
      subprocess.run(["bash", "-euc", command.text], check=True)
    return
  if argv[0] == "echo":
    stdin, argv = argv[1], argv[argv.index("|") + 1:]
  assert argv[:2] == ["python", "-m"], f"{command}: mark what it needs or what runs it, see CONTRIBUTING.md"
  if argv[2] == "pytest":
    selected, words = tiny.ROOT / argv[3], argv[argv.index("-k") + 1:] if "-k" in argv else []
    cases = [path.name for path in selected.parent.glob("*references/*")]
    assert all(word in selected.read_text(encoding="utf-8") or word in cases for word in words), command
    return
  docs_commands.check(argv[2:], monkeypatch)
  if runs and argv[2] not in LONG:
    docs_commands.run(docs_commands.small(argv[2:]), monkeypatch, stdin)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_marks_name_what_is_there_and_no_command_is_hidden(page):
  assert docs_commands.unseen(page) == []
  for command in commands(page):
    if command.run_by:
      assert (tiny.ROOT / command.run_by).exists(), command


def test_overrides_in_running_text_name_keys_and_flags():
  """`--config.KEY=…` anywhere, in tables, sentences and the docstrings of configs, too."""
  known = set(paths(defaults()))
  named = ("input.sources", "evals", "callbacks", "loggers", "rollout.rewards")
  unknown = set()
  for page in [*PAGES, *sorted((tiny.ROOT / "configs").glob("*.py"))]:
    for key in re.findall(r"--config\.([a-z_][a-z_0-9.]*[a-z_0-9])=(?!value)", page.read_text(encoding="utf-8")):
      if key not in known and not key.startswith(tuple(f"{name}." for name in named)):
        unknown.add((page.name, key))
  assert not {(page, key) for page, key in unknown if not key.startswith("strategy.")}


def paths(config, prefix=""):
  for key, value in config.items():
    yield prefix + key
    if hasattr(value, "items"):
      yield from paths(value, f"{prefix}{key}.")


@pytest.mark.parametrize("config", sorted((tiny.ROOT / "configs").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_commands_in_the_docstrings_of_configs(config, folder, monkeypatch):
  text = re.match(r'"""(.*?)"""', config.read_text(encoding="utf-8"), re.DOTALL)[1].replace("\\\n", " ")
  found = [line.split() for line in text.splitlines() if line.strip().startswith("python -m trainer")]
  assert found, "the docstring does not say how to run it"
  for argv in found:
    docs_commands.check([arg.strip("'") for arg in argv[2:]], monkeypatch)
