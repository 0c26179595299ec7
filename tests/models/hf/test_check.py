"""`python -m models.hf.check`: what it computes is what transformers computed, and it says where two models part."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from models import hf
from models.hf import check
from tests import tiny

REFERENCES = tiny.ROOT / "tests" / "models" / "hf" / "references"


@pytest.fixture(scope="module")
def olmo(tmp_path_factory):
  """(what transformers gave, what is compared)."""
  reference = np.load(REFERENCES / "olmo3" / "reference.npz")
  return reference, check.ours(REFERENCES / "olmo3", reference["tokens"].astype(np.int32),
                               tmp_path_factory.mktemp("check") / "gradients")


def test_logits_and_gradients_are_those_of_transformers(olmo):
  reference, found = olmo
  assert check.apart(found["logits"], reference["logits"]) < 1e-5
  for i, name in enumerate(reference["gradient_names"].tolist()):
    assert check.apart(found[f"gradient {name}"], reference[f"gradient_{i}"]) < 1e-4, name
  content = json.loads((REFERENCES / "olmo3" / "config.json").read_text())
  layers = content["num_hidden_layers"]
  assert [name for name in found if name.startswith("layer")] == [f"layer {i}" for i in range(layers)]
  tensors = hf.TensorFolder(REFERENCES / "olmo3").tensors
  assert {name.removeprefix("gradient ") for name in found if name.startswith("gradient")} == {*tensors}


def test_says_where_they_part(olmo):
  _, found = olmo
  assert check.report(found, found, 1e-4)[1]
  assert check.report(found, found, 1e-4)[0].endswith("They agree: nothing is apart by more than 0.0001 of its norm.")
  after = [f"layer {i}" for i in range(len([name for name in found if name.startswith("layer")]))] + ["logits", "loss"]
  for changed, says in ((after, "They part in what enters the first layer"), (after[2:], "They part in layer 1: what"),
                        (after[-2:], "They part in the last layer or behind it"),
                        (["gradient lm_head.weight"], "Values agree, gradients do not")):
    other = {name: value * (1 + 1e-3 * (name in changed)) for name, value in found.items()}
    text, agree = check.report(found, other, 1e-4)
    assert not agree and text.splitlines()[-1].startswith(says), changed
    assert text.count("  <") == len(changed)
  # A gradient that is zero there, and here but for rounding of the whole; one that is not; one that is small.
  whole = np.sqrt(sum(np.sum(value**2) for name, value in found.items() if name.startswith("gradient")))
  for mine, theirs, agrees in ((1e-8, 0.0, True), (1e-6, 0.0, False), (1e-6, 1.001e-6, False)):
    one, other = ({**found, "gradient router": np.array([size * whole])} for size in (mine, theirs))
    assert check.report(one, other, 1e-4)[1] == agrees
  text, _ = check.report(found, {name: value for name, value in found.items() if name != "logits"}, 1e-4)
  assert "not compared, since transformers did not write it: logits\n" in text


def test_a_thousandth_is_too_far(olmo, monkeypatch, capsys):
  monkeypatch.setattr(check, "ours", lambda *_: olmo[1])
  monkeypatch.setattr(sys, "argv", ["check", str(REFERENCES / "olmo3")])
  for factor, code in ((1.0, 0), (1.001, 1)):
    monkeypatch.setattr(check, "theirs", lambda *_, factor=factor: {name: x * factor for name, x in olmo[1].items()})
    with pytest.raises(SystemExit) as ended:
      check.main()
    assert int(ended.value.code) == code and "by more than 0.0001" in capsys.readouterr().out or code


def test_of_a_folder_with_images_the_text_model_is_compared_where_it_is_a_family(tmp_path):
  """With what transformers made of a text without images; names are those of the text model."""
  folder = REFERENCES.parent / "native_references" / "qwen3_5"
  reference = np.load(folder / "reference.npz")
  found = check.ours(folder, reference["text"], tmp_path / "gradients")
  assert check.apart(found["logits"], reference["text_logits"]) < 1e-5
  assert "gradient model.layers.1.self_attn.q_proj.weight" in found
  assert not [name for name in found if "visual" in name or "language_model" in name]
  with pytest.raises(hf.HFError, match="is a model of images; what is compared is text alone"):
    check.ours(REFERENCES.parent / "native_references" / "qwen3_vl", reference["text"], tmp_path / "gradients")


def test_apart_is_relative_to_the_norm():
  assert check.apart(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == pytest.approx(1 / np.sqrt(34))


def test_what_cannot_be_compared_is_told(tmp_path):
  command = [sys.executable, "-m", "models.hf.check"]
  done = tiny.run([*command, str(tmp_path)])
  assert done.returncode == 1 and "HFError" in done.stderr and "Traceback" not in done.stderr
  broken = tmp_path / "python"
  broken.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
  broken.chmod(0o755)
  done = tiny.run([*command, str(REFERENCES / "llama"), f"--peer={broken}", "--length=8"])
  assert done.returncode == 1 and "no torch here" in done.stderr and "Traceback" not in done.stderr


def test_with_transformers(tmp_path):
  """A folder whose second layer is another one here than there."""
  pytest.importorskip("torch")
  pytest.importorskip("transformers")
  command = [sys.executable, "-m", "models.hf.check", str(REFERENCES / "nemotron_h_moe"), "--length=20"]
  done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  folder = shutil.copytree(REFERENCES / "llama", tmp_path / "llama")
  tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
  mine = check.ours(folder, tokens, tmp_path / "gradients")
  model, params = hf.load(folder)
  params["blocks"]["mlp_norm"]["scale"] = params["blocks"]["mlp_norm"]["scale"].at[0].add(0.01)
  hf.save(model, params, folder, overwrite=True)
  other = check.theirs(folder, tokens, sys.executable, tmp_path)
  text, agree = check.report(mine, other, 1e-4)
  assert not agree and text.splitlines()[-1].startswith("They part in layer 0")


def test_the_other_program_is_asked_and_its_last_words_are_told(tmp_path, monkeypatch):
  asked = []

  def run(command, capture_output, text):
    asked.append([str(part) for part in command])
    np.savez(tmp_path / "theirs.npz", logits=np.ones(2))
    return subprocess.CompletedProcess(command, code, "", "\n".join(f"line {n}" for n in range(8)))

  monkeypatch.setattr(check.subprocess, "run", run)
  monkeypatch.setattr(check, "_gradients", lambda folder: {f"gradient of {folder.name}": 7})
  code, tokens = 0, np.arange(6, dtype=np.int32).reshape(2, 3)
  found = check.theirs("folder", tokens, "a/python", tmp_path)
  assert found.keys() == {"logits", "gradient of theirs"} and found["logits"].tolist() == [1, 1]
  assert asked == [["a/python", str(check.PEER), "folder", str(tmp_path / "tokens.npy"), str(tmp_path / "theirs")]]
  np.testing.assert_array_equal(np.load(tmp_path / "tokens.npy"), tokens)
  code = 1
  with pytest.raises(hf.HFError) as told:
    check.theirs("folder", tokens, "a/python", tmp_path)
  assert str(told.value) == ("a/python check_peer.py failed; it needs torch and transformers (--peer). It said:\n"
                             "line 3\nline 4\nline 5\nline 6\nline 7")


def test_models_of_images_and_errors_are_told(monkeypatch, tmp_path):
  class Model:
    class spec:
      vision = object()

  monkeypatch.setattr(check.hf, "load", lambda *given, **named: (Model, {}))
  monkeypatch.setattr(check, "ignored", lambda folder: ())
  with pytest.raises(hf.HFError, match="^folder is a model of images; what is compared is text alone.$"):
    check.ours("folder", np.zeros((1, 2), np.int32), tmp_path)
  monkeypatch.setattr(check.hf, "architecture", lambda *given: (None, {"vocab_size": 5}, ["a note"]))
  monkeypatch.setattr(sys, "argv", ["check", "folder"])
  with pytest.raises(SystemExit) as ended:
    check.main()
  assert ended.value.code == "HFError: folder is a model of images; what is compared is text alone."
