"""A teacher by its path: a folder or a run; its files and section, and what is said where it cannot teach."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from models import config as config_lib
from trainer.errors import ConfigError
from trainer.strategies import teacher


@pytest.fixture
def run(tmp_path, monkeypatch):
  """`run(**model)`: a source that is the run in tmp_path/w, whose config.json has these keys of its model."""
  def of(**model):
    saved = tmp_path / "w" / "checkpoints" / "7"
    (saved / "params").mkdir(parents=True, exist_ok=True)
    (saved / "params" / "a").write_text("1")
    (tmp_path / "w" / "config.json").write_text("{}")
    monkeypatch.setattr(teacher.checkpoint, "find", lambda path: saved)
    monkeypatch.setattr(teacher.hf.files, "read_json", lambda file: {
        tmp_path / "w" / "config.json": {"model": model, "seed": 3}}[file])
    monkeypatch.setattr(teacher, "load_tokenizer", lambda file: {
        tmp_path / "w" / "tokenizer.json": SimpleNamespace(vocab_size=77)}[file])
    return teacher.find(str(tmp_path / "w"), "rollout.rewards.x.path")
  return of


def test_a_run_teaches_with_its_own_model_and_tokenizer(run, tmp_path):
  fresh = config_lib.model()
  found = run(num_layers=9, layer_pattern=["local", "global"], lora=dict(rank=0, alpha=3.0), gone="x")
  assert found.section.num_layers == 9 and found.section.layer_pattern == ("local", "global")
  assert found.section.lora.alpha == 3.0 and "gone" not in found.section
  assert found.section.hidden_size == fresh.hidden_size  # what its config does not say
  assert (found.vocab_size, found.tokenizer, found.is_hf) == (77, tmp_path / "w" / "tokenizer.json", False)
  assert found.config["seed"] == 3 and found.path == str(tmp_path / "w")
  saved = tmp_path / "w" / "checkpoints" / "7"
  assert teacher.files(found) == {
      "params/a": saved / "params" / "a", "../../config.json": tmp_path / "w" / "config.json"}


def test_a_run_of_adapters_is_to_be_exported_first(run, tmp_path):
  with pytest.raises(ConfigError, match=f"^rollout.rewards.x.path is '{tmp_path}/w', a run that trained adapters. "
                                        f"Export it first, .*trainer.export --workdir={tmp_path}/w.$"):
    run(lora=dict(rank=4))


def test_of_a_folder_tensors_and_configs_are_read(tmp_path):
  for name in ("config.json", "a.safetensors", "deep/b.safetensors", "README.md", "old.bin"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
  source = teacher.Source(str(tmp_path), ConfigDict(), tmp_path, 5)
  assert source.is_hf and teacher.files(source) == {
      name: tmp_path / name for name in ("config.json", "a.safetensors", "deep/b.safetensors")}


@pytest.mark.parametrize("path, message", [
    (None, "^k is not set. Give a Hugging Face folder, or a run"),
    ("/no/such", "^k is '/no/such', which is no folder. Give a Hugging Face folder, or a run")])
def test_a_path_that_leads_nowhere(path, message):
  with pytest.raises(ConfigError, match=message):
    teacher.find(path, "k")


def test_a_folder_that_holds_no_model_is_told_by_its_key(tmp_path):
  with pytest.raises(ConfigError, match=f"^k: {tmp_path} holds no checkpoint"):
    teacher.find(str(tmp_path), "k")
  (tmp_path / "adapter_config.json").write_text("{}")
  with pytest.raises(ConfigError, match="^k is '.*', adapters without the model that they change"):
    teacher.find(str(tmp_path), "k")


@pytest.mark.parametrize("theirs, what", [
    ([b"a", b"b"], "they split texts in other ways, or have other special tokens"),
    ([b"a", b"b", b"c"], "this one has 2 entries, that one 3"),
    ([b"a", b"x", b"y"], "entry 1 is b'b' here, and b'x' there"),
])
def test_how_its_tokenizer_differs_is_said(monkeypatch, theirs, what):
  asked = []
  source = teacher.Source("p", "section", Path("t"), 2)
  monkeypatch.setattr(teacher, "find", lambda path, key: asked.append((path, key)) or source)
  monkeypatch.setattr(teacher.api, "validate", lambda section, seq_len: asked.append((section, seq_len)))
  monkeypatch.setattr(teacher, "load_tokenizer", lambda file: SimpleNamespace(fingerprint="theirs", token_bytes=theirs))
  monkeypatch.setattr(teacher, "saved_fingerprint", lambda tokenizer: tokenizer.fingerprint)
  ours = SimpleNamespace(fingerprint="ours", token_bytes=[b"a", b"b"], vocab_size=3)
  config = SimpleNamespace(seq_len=64, model=SimpleNamespace(vocab_size=2))
  with pytest.raises(ConfigError) as told:
    teacher.check(config, ours, "p", "k")
  assert str(told.value).startswith(f"k is 'p', whose tokenizer is another one than this run's: {what}. It reads the")
  assert asked == [("p", "k"), ("section", 64)]
  ours.fingerprint = "theirs"
  teacher.check(config, ours, "p", "k")  # the run's model reads no more of the tokenizer's entries than it
  config.model.vocab_size = None
  with pytest.raises(ConfigError, match="k is 'p', whose embeddings are of 2 tokens, where this run's model has 3"):
    teacher.check(config, ours, "p", "k")


@pytest.mark.parametrize("is_hf", [True, False])
def test_its_parameters_come_from_its_own_place_and_are_all_there(monkeypatch, is_hf):
  source = teacher.Source("p", "section", Path("t"), 2, None if is_hf else {"seed": 3})
  of_run = teacher.init_from.Origin(path="of the run", remap=(("a", "b"),), ignore=("x",), folder="f", peft="q",
                                    fresh=True, seed=8, tokenizer="t", hf_ignore=("y",), typed={}, model="its model")
  asked = []
  monkeypatch.setattr(teacher, "find", lambda path, key: asked.append((path, key)) or source)
  monkeypatch.setattr(teacher, "make_model", lambda *given: asked.append(given) or "model")
  monkeypatch.setattr(teacher.init_from, "origin_of", lambda config: of_run)
  said = "3 arrays from /runs/fresh arrays"

  def first_params(origin, model, target):
    asked.append((origin, model, target))
    return "loaded", said

  monkeypatch.setattr(teacher.init_from, "first_params", first_params)
  config = SimpleNamespace(precision=SimpleNamespace(params="float32", compute="bfloat16"))
  assert teacher.load(config, "target", "p", "k") == "loaded"
  (_, made, (origin, model, target)) = asked
  assert made == ("p", "float32", "bfloat16", "k") and (model, target) == ("model", "target")
  assert (origin.path, origin.folder) == ((None, "p") if is_hf else ("p", None))
  assert (origin.remap, origin.ignore, origin.peft, origin.fresh, origin.tokenizer, origin.hf_ignore, origin.typed,
          origin.model, origin.seed) == ((), (), None, False, None, (), None, "section", 8)
  for said in ("2 arrays from p, 1 fresh arrays", "fresh parameters"):
    with pytest.raises(ConfigError, match=f"^k: p does not have all of its model's parameters .{said}..$"):
      teacher.load(config, "target", "p", "k")
