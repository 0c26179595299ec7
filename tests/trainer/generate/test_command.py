"""python -m trainer.generate: what it prints is what the model says, from a run and from a Hugging Face folder."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from trainer import train
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import command as generate
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import StopStrings


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  config = tiny.config(tiny.write_corpus(folder / "corpus"), total_steps=3)
  config.evals = {}
  return folder / "workdir", train(config, folder / "workdir")


def mesh():
  return mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=1))


def expected(loaded, texts, **options):
  ids = [loaded.prompter.text(text).ids for text in texts]
  found = Sampler(loaded.model, mesh()).generate(loaded.params, ids, stop_ids=loaded.prompter.stop_ids, **options)
  return [loaded.tokenizer.decode(c.text_ids) for c in found]


@pytest.mark.devices(8)
def test_a_run_is_loaded_as_it_was_trained_onto_any_mesh(workdir):
  folder, run = workdir
  loaded = generate.load_run(folder, mesh())
  for mine, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(run.state["params"]), strict=True):
    np.testing.assert_array_equal(mine, theirs)
  earlier = generate.load_run(folder, mesh(), step=3)
  assert earlier.origin == loaded.origin and earlier.origin.endswith("3")


def test_the_template_is_the_runs_where_none_is_named(workdir, tmp_path):
  folder = shutil.copytree(workdir[0], tmp_path / "w")
  config = json.loads((folder / "config.json").read_text())
  config["chat"]["template"] = "plain"
  (folder / "config.json").write_text(json.dumps(config))
  assert generate.load_run(folder, mesh()).config.chat.template == "plain"


def test_adapters_are_loaded_onto_their_base(tmp_path):
  config = tiny.config(tiny.write_corpus(tmp_path / "corpus"), total_steps=2)
  config.evals, config.model.lora.rank = {}, 2
  run = train(config, tmp_path / "workdir")
  loaded = generate.load_run(tmp_path / "workdir", mesh())
  for mine, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(run.state["params"]), strict=True):
    np.testing.assert_array_equal(mine, theirs)


def test_the_command_prints_what_the_sampler_gives(workdir, capsys):
  folder, _ = workdir
  loaded = generate.load_run(folder, mesh())
  prompts = ["the quick", "lä"]
  ids = [loaded.prompter.text(text) for text in prompts]
  options = dict(max_new_tokens=9, temperature=1.0, stop_ids=loaded.prompter.stop_ids, seed=5)
  sampler = Sampler(loaded.model, mesh(), chunk=2)
  generate.complete(loaded, sampler, ids[:1], dict(options, num_samples=1))
  assert capsys.readouterr().out == expected(loaded, prompts[:1], max_new_tokens=9, seed=5)[0] + "\n"
  generate.complete(loaded, sampler, ids, dict(options, num_samples=2))
  out = capsys.readouterr().out
  for text in expected(loaded, prompts, num_samples=2, max_new_tokens=9, seed=5):
    assert f"\n{text}\n" in out
  assert out.count("--- prompt 1, sample 1: ") == 1


def test_characters_are_printed_once_they_are_whole():
  def part(ids, reason=""):
    return Completion(0, 0, np.array(ids, np.int32), np.zeros(len(ids)), np.zeros(len(ids)), reason)

  a, b = "ä".encode()
  parts = [part([104, a]), part([b, 105]), part([a]), part([106, 257], "stop")]
  assert list(generate.printed(BytesTokenizer(), iter(parts))) == ["h", "äi", "", "\ufffdj"]


@pytest.mark.parametrize("keep, shown", [(False, "y"), (True, "yes")])
def test_a_string_that_ends_a_completion_is_asked_for_and_cut(capsys, keep, shown):
  """Of one that is shown as it comes, of several, and in a conversation, in which it is not said again."""
  asked, tokenizer = [], BytesTokenizer()
  says = [Completion(prompt, sample, np.frombuffer(b"yes", np.uint8).astype(np.int32), np.full(3, -0.5, np.float32),
                     np.zeros(3), "stop", "es") for prompt in (0, 1) for sample in (0, 1)]

  class Sampler:
    def stream(self, params, prompts, request):
      asked.append((params, prompts, request.stop, request.num_samples, request.seed, request.images))
      yield says[0]

    def generate(self, params, prompts, *, stop, num_samples, seed, images=None):
      asked.append((params, prompts, stop, num_samples, seed, images))
      return says

  prompter = SimpleNamespace(messages=lambda said: SimpleNamespace(ids=[m["content"] for m in said], images=()))
  loaded = SimpleNamespace(tokenizer=tokenizer, params="parameters", prompter=prompter)
  stop = StopStrings(tokenizer, ("es",), keep, "--stop")
  of = [SimpleNamespace(ids=name, images=()) for name in "ab"]
  how = dict(max_new_tokens=4, num_samples=1, seed=9)
  generate.complete(loaded, Sampler(), of[:1], how, stop)
  assert capsys.readouterr().out == f"{shown}\n"
  generate.complete(loaded, Sampler(), [of[0], SimpleNamespace(ids="b", images=("picture",))],
                    dict(num_samples=2, seed=8), stop)
  lines = capsys.readouterr().out.splitlines()
  assert lines[1::2] == [shown] * 4 and [line.split(":")[0] for line in lines[::2]] == [
      f"--- prompt {n}, sample {sample}" for n in (0, 1) for sample in (0, 1)]
  assert all("3 tokens, " in line and "'es'" in line and "log-prob -1.500" in line for line in lines[::2])
  typed = iter(["one", "two"])
  with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
    patch.setattr("builtins.input", lambda prompt: next(typed))
    generate.converse(loaded, Sampler(), how, None, (), stop)
  assert {params for params, *_ in asked} == {"parameters"}
  assert [rest for _, *rest in asked] == [
      [["a"], stop, 1, 9, None], [["a", "b"], stop, 2, 8, [[], ["picture"]]], [[["one"]], stop, 1, 9, None],
      [[["one", shown, "two"]], stop, 1, 9, None]]


@pytest.mark.host_patches
def test_a_conversation_goes_on_until_the_input_ends(workdir, capsys, monkeypatch):
  folder, _ = workdir
  loaded = generate.load_run(folder, mesh(), template="plain")
  asked = []
  original = loaded.prompter.messages

  def messages(given, **more):
    asked.append([(m["role"], m["content"]) for m in given])
    return original(given, **more)

  monkeypatch.setattr(loaded.prompter, "messages", messages)
  lines = iter(["hello", "", "again", "/new", "fresh"])

  def typed(prompt):
    try:
      return next(lines)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr("builtins.input", typed)
  options = dict(num_samples=1, max_new_tokens=3, stop_ids=loaded.prompter.stop_ids, seed=1)
  says = Completion(0, 0, np.frombuffer(b"yes", np.uint8).astype(np.int32), np.zeros(3), np.zeros(3), "length")
  generate.converse(loaded, SimpleNamespace(stream=lambda *_: iter([says])), options, "Be kind.")
  out = capsys.readouterr().out
  first, second, third = asked
  assert first == [("system", "Be kind."), ("user", "hello")] and third == [("system", "Be kind."), ("user", "fresh")]
  assert second == [*first, ("assistant", "yes"), ("user", "again")]
  assert out.count("yes") == 3


def test_a_hugging_face_folder_in_a_process_of_its_own(tmp_path):
  folder = tiny.hf_folder(tmp_path / "model")
  argv = [sys.executable, "-m", "trainer.generate", f"--hf={folder}", "--max_new_tokens=4", "--seed=3", "--prompt=abc"]
  done = tiny.run(argv)
  assert done.returncode == 0, done.stderr
  assert done.stdout == expected(generate.load_folder(folder, mesh()), ["abc"], max_new_tokens=4, seed=3)[0] + "\n"


@pytest.mark.parametrize("template, chat, told", [("plain", False, True), ("plain", True, False),
                                                  (None, False, False)])
def test_a_prompt_to_a_chat_model_says_that_there_is_chat(workdir, capsys, template, chat, told):
  given = dict(workdir=str(workdir[0]), hf=None, step=None, tensor=1, template=template, prompt=["a"], image=[],
               video=[], chat=chat, system=None, max_new_tokens=2, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
               num_samples=1, seed=0, stop=[], keep_stop=False)
  generate._run(type("Flags", (), given))
  assert ("With --chat it is what the user says" in capsys.readouterr().err) == told


@pytest.mark.parametrize("changed, message", [
    (dict(), "give one of --workdir"), (dict(hf="a", workdir="b"), "give one of --workdir"),
    (dict(hf="a", step=3), "--step is a checkpoint of a run"), (dict(workdir="nowhere"), "holds no config.json")])
def test_wrong_flags_are_told(changed, message):
  flags = dict(workdir=None, hf=None, step=None, tensor=1, template=None)
  with pytest.raises(ConfigError, match=message):
    generate._run(type("Flags", (), {**flags, **changed}))
