"""Every flag of a command gets where it belongs: what is behind the flags notes what it is asked for, and computes
nothing."""

import contextlib
import io
import json
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from absl import flags

from input_pipeline.images.images import ImageRef
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.distributed import mesh as mesh_lib
from trainer.embed import command as embed_command
from trainer.errors import ConfigError
from trainer.export import command as export_command
from trainer.generate import command as generate_command
from trainer.generate import sampler
from trainer.lm_eval import command as lm_eval_command
from trainer.serve import app as serve_app
from trainer.serve import command as serve_command
from trainer.serve import engine as serve_engine


class Asked(dict):
  """{name of a function: (its arguments, its keywords)}, as it was called last."""

  def note(self, name, gives=None):
    def function(*arguments, **keywords):
      self[name] = arguments, keywords
      return gives(*arguments, **keywords) if callable(gives) else gives
    return function


def given(command: ModuleType, **changed):
  """The flags of a command with their defaults, but for `changed`."""
  values = flags.FlagValues()
  defined = {name: getattr(flags, name) for name in dir(flags) if name.startswith("DEFINE_")}
  into = {name: lambda *arguments, real=real, **more: real(*arguments, **more, flag_values=values)
          for name, real in defined.items()}
  nothing = lambda *_: None  # noqa: E731
  with mock.patch.multiple(command.flags, **into, mark_flags_as_required=nothing, mark_flag_as_required=nothing):
    command._define_flags()
  found = {name: values[name].value for name in values} | changed
  assert len(found) == len(list(values)), changed.keys() - set(values)
  return SimpleNamespace(**found)


@contextlib.contextmanager
def noted(asked, module, **functions):
  with mock.patch.multiple(module, **{name: asked.note(name, gives) for name, gives in functions.items()}):
    yield


def loaded(template=None, **more):
  prompter = SimpleNamespace(template=template, stop_ids=(7,),
                             text=lambda text, where, images=(): ("text", text, where, images),
                             messages=lambda given, where, images: ("chat", given, where, images))
  return SimpleNamespace(origin="origin", tokenizer=BytesTokenizer(), prompter=prompter, prefix_end="|",
                         model="the model", params="the parameters", **more)


SAMPLING = dict(max_new_tokens=11, temperature=0.25, top_k=12, top_p=0.75, min_p=0.125, seed=14)


@pytest.mark.parametrize("changed, prompts", [
    (dict(prompt=["a", "b"]), [("text", "a", "prompt 0", []), ("text", "b", "prompt 1", [])]),
    (dict(prompt=["a"], image=["i.png"], video=["v.gif"]),
     [("text", "a|", "prompt 0", ["i.png", ImageRef("v.gif", "v.gif", video=True)])]),
    (dict(prompt=["a"], image=["i.png"], chat=True, system="s"),
     [("chat", [dict(role="system", content="s"), dict(role="user", content="a")], "prompt 0", ["i.png"])])])
def test_generate(changed, prompts, capsys):
  asked, model = Asked(), loaded()
  with noted(asked, generate_command, load_run=model, load_folder=lambda *_, template: loaded(template),
             Sampler="sampler", complete=None), noted(asked, mesh_lib, make_mesh="mesh"):
    generate_command._run(given(generate_command, workdir="w", step=3, template="t", tensor=4, num_samples=13,
                                stop=["xy"], keep_stop=True, **SAMPLING, **changed))
    assert asked["load_run"] == (("w", "mesh"), dict(step=3, template="t"))
    assert asked["make_mesh"] == ((dict(data=1, fsdp=-1, tensor=4),), {})
    (_, sampler, made, options, stop), _ = asked["complete"]
    assert sampler == "sampler" and made == prompts and options == dict(SAMPLING, num_samples=13, stop_ids=(7,))
    assert asked["Sampler"] == (("the model", "mesh"), dict(chunk=32))
    assert (stop.strings, stop._keep) == (("xy",), True)
    assert capsys.readouterr().err == "origin\n"
    for chat in (False, True):  # without a template there is nothing to say of --chat, with one where it is not given
      generate_command._run(given(generate_command, hf="h", template="t", prompt=["a"], chat=chat))
      assert asked["load_folder"] == (("h", "mesh"), dict(template="t"))
      assert asked["Sampler"][1] == dict(chunk=generate_command.CHUNK)  # one text is shown as it comes
      assert ("With --chat it is what the user says" in capsys.readouterr().err) == (not chat)


def test_generate_from_standard_input(monkeypatch):
  asked = Asked()
  monkeypatch.setattr(sys, "stdin", io.StringIO("a text\nof two lines"))
  with noted(asked, generate_command, load_folder=loaded(), Sampler="sampler", complete=None), noted(
      asked, mesh_lib, make_mesh="mesh"):
    generate_command._run(given(generate_command, hf="h"))
  assert asked["complete"][0][2] == [("text", "a text\nof two lines", "prompt 0", [])]


def test_generate_from_a_keyboard(monkeypatch):
  asked = Asked()
  monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
  flags_of = dict(hf="h", system="s", image=["i.png"], stop=["x"], **SAMPLING)
  with noted(asked, generate_command, load_folder=lambda *_, template: loaded(template), Sampler="sampler",
             converse=None), noted(asked, mesh_lib, make_mesh="mesh"):
    generate_command._run(given(generate_command, template="plain", **flags_of))
    (_, sampler, options, system, images, stop), _ = asked["converse"]
    assert options == dict(SAMPLING, num_samples=1, stop_ids=(7,))
    assert asked["Sampler"] == (("the model", "mesh"), dict(rows=1, chunk=generate_command.CHUNK))
    assert (sampler, system, images, stop.strings, stop._keep) == ("sampler", "s", ["i.png"], ("x",), False)
    for changed, message in ((dict(num_samples=2, template="plain"), "a conversation has one answer"),
                             (dict(), "no chat template to converse with"),
                             (dict(prompt=["a"]), "--system is a message of a conversation")):
      with pytest.raises(ConfigError, match=message):
        generate_command._run(given(generate_command, **flags_of | changed))


def test_lm_eval(tmp_path, capsys):
  asked, utils = Asked(), SimpleNamespace(handle_non_serializable=str, make_table=lambda results, of="results": of)
  sizes = dict(template="t", max_length=40, batch_size=5, tensor=2)
  flags_of = dict(tasks=["a", "b"], include_path=str(tmp_path), num_fewshot=3, apply_chat_template=True,
                  log_samples=True, system_instruction="s", gen_kwargs="g", fewshot_as_multiturn=True)
  lm = SimpleNamespace(name="n")
  with noted(asked, lm_eval_command, require=None, from_run=lm, from_folder=lm, evaluate={"groups": {"x": 1}}), \
      mock.patch.dict(sys.modules, {"lm_eval": SimpleNamespace(utils=utils), "lm_eval.utils": utils}):
    for limit, taken in ((7.0, 7), (0.5, 0.5), (None, None)):
      lm_eval_command._run(given(lm_eval_command, workdir="w", step=3, limit=limit, out=str(tmp_path / "o" / "r.json"),
                                 **sizes, **flags_of))
      assert asked["evaluate"] == ((lm, ["a", "b"]), dict(
          {name: value for name, value in flags_of.items() if name != "tasks"}, limit=taken, batch_size=5))
    assert asked["from_run"] == (("w",), dict(sizes, step=3))
    assert json.loads((tmp_path / "o" / "r.json").read_text()) == dict(
        groups={"x": 1}, model_source="weft", model_name="n")
    assert capsys.readouterr().out.splitlines()[:3] == ["results", "groups", str(tmp_path / "o" / "r.json")]
    lm_eval_command._run(given(lm_eval_command, hf="h", **sizes, **flags_of | dict(apply_chat_template=False)))
    assert asked["from_folder"] == (("h",), sizes) and asked["evaluate"][1]["fewshot_as_multiturn"] is False
    for changed, message in ((dict(workdir="w"), "give one of"), (dict(hf=None), "give one of"),
                             (dict(step=3), "--step is a checkpoint"), (dict(tasks=None), "give --tasks"),
                             (dict(out=str(tmp_path)), "is a folder; give a file, e.g. .*results.json"),
                             (dict(include_path=str(tmp_path / "no")), "--include_path .*no is no folder")):
      with pytest.raises(ConfigError, match=message):
        lm_eval_command._run(given(lm_eval_command, **dict(hf="h", **sizes, **flags_of) | changed))


def test_export(tmp_path, monkeypatch, capsys):
  asked = Asked()
  changed = dict(step=3, dtype="bfloat16", ema=True, adapter="peft", mtp=False, overwrite=True)
  monkeypatch.setattr(export_command, "flags", SimpleNamespace(FLAGS=given(
      export_command, workdir="w", out="o", max_shard_gb=0.25, **changed)))
  with noted(asked, export_command, export="o"), mock.patch.object(export_command.jax.config, "update"):
    export_command.main(["export"])
  assert asked["export"] == (("w", "o"), dict(changed, max_shard_bytes=250_000_000, progress=True))
  assert capsys.readouterr().out == "o: adapters in PEFT's format\n"


def test_serve():
  pytest.importorskip("starlette")
  asked, model = Asked(), loaded()
  model.params = {"a": np.zeros(2)}
  flags_of = dict(template="t", rows=5, prefill_chunk=6, kept_texts=7, tensor=2)
  with noted(asked, generate_command, load_run=model, load_folder=model), noted(asked, mesh_lib, make_mesh="mesh"), \
      noted(asked, sampler, Sampler="sampler"), noted(asked, serve_engine, Engine="engine"), \
      noted(asked, serve_app, Server=SimpleNamespace(app=lambda: "app")):
    assert serve_command.make_app(given(serve_command, workdir="runs/w/", step=3, **flags_of)) == "app"
    assert asked["load_run"] == (("runs/w/", "mesh"), dict(step=3, template="t"))
    assert asked["make_mesh"] == ((dict(data=1, fsdp=-1, tensor=2),), {})
    assert asked["Sampler"] == (("the model", "mesh"), dict(rows=5, chunk=generate_command.CHUNK, prefill_chunk=6))
    assert asked["Engine"] == (("sampler", model.params, model.tokenizer, 7), {})
    (engine, of, name, print_of, reload), _ = asked["Server"]
    assert (engine, of, name, reload) == ("engine", model, "runs/w", None)  # a run takes no other parameters
    serve_command.make_app(given(serve_command, hf="h", name="n", **flags_of))
    assert asked["load_folder"] == (("h", "mesh"), dict(template="t"))
    assert asked["Server"][0][2:4] == ("n", print_of) and asked["Server"][0][4] is not None
    for changed in (dict(), dict(hf="h", workdir="w")):
      with pytest.raises(ConfigError, match="give one of --workdir"):
        serve_command.make_app(given(serve_command, **changed))


def test_serve_listens_where_it_is_told():
  asked = Asked()
  values = given(serve_command, workdir="w", host="0.0.0.0", port=81)
  with noted(asked, serve_command, make_app="app"), mock.patch.dict(
      sys.modules, uvicorn=SimpleNamespace(run=asked.note("run"))):
    serve_command._run(values)
  assert asked["make_app"] == ((values,), {})
  assert asked["run"] == (("app",), dict(host="0.0.0.0", port=81, log_level="info", access_log=False))


def test_embed(tmp_path, capsys):
  asked, model = Asked(), loaded()
  vectors = np.array([[1.0, 0.1], [0.0, -2.0]], np.float32)
  flags_of = dict(texts="t", key="k", prompt="query", batch_size=5, tensor=2)
  embedder = asked.note("embed", (vectors, 1))
  embedder.images, embedder.max_length = "as images", 9
  with noted(asked, embed_command, of_folder=None, Embedder=lambda *_: embedder, read_texts=["x", "y"]), noted(
      asked, generate_command, load_run=model, load_folder=model), noted(asked, mesh_lib, make_mesh="mesh"):
    embed_command._run(given(embed_command, workdir="w", step=3, out=str(tmp_path / "o.npy"), **flags_of))
    assert asked["load_run"] == (("w", "mesh"), dict(step=3, template=None)) and "of_folder" not in asked
    assert asked["make_mesh"] == ((dict(data=1, fsdp=-1, tensor=2),), {})
    assert asked["Embedder"] == ((model, "mesh", 5), {}) and asked["read_texts"] == (("t", "k", "as images"), {})
    assert asked["embed"] == ((["x", "y"], "query"), {})
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), vectors)
    assert capsys.readouterr().err == "origin: 2 texts, 1 of them cut to 9 tokens\n"
    embed_command._run(given(embed_command, hf="h", pooling="last", max_length=8, **flags_of))
    assert asked["load_folder"] == (("h", "mesh"), dict(template=None))
    assert asked["of_folder"] == ((model, "last", 8), {})
    assert capsys.readouterr().out == "[1.0, 0.1]\n[0.0, -2.0]\n"
    for changed, message in ((dict(), "give one of"), (dict(hf="h", workdir="w"), "give one of"),
                             (dict(workdir="w", pooling="last"), "are of a folder"),
                             (dict(workdir="w", max_length=8), "are of a folder"),
                             (dict(hf="h", step=3), "--step is a checkpoint"),
                             (dict(hf="h", out="o.txt"), "Name it FILE.npy")):
      with pytest.raises(ConfigError, match=message):
        embed_command._run(given(embed_command, **flags_of | changed))
