"""`python -m trainer.parity`: what it writes for the peer is what is trained; with torch, the peer agrees."""

import json
import math
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from absl import app

from models import hf
from models.hf import files
from tests import tiny
from tests.trainer.strategies import test_dpo_runs as test_dpo
from tests.trainer.strategies import test_sft_runs as test_sft
from trainer import startup, tree
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.parity import command, record
from trainer.parity.command import compare
from trainer.telemetry.writers import read_rows

STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
  """A Python, as far as the command asks it, without torch."""
  file = tmp_path_factory.mktemp("bin") / "python"
  file.write_text("#!/bin/sh\necho 'torch transformers' >&2\nexit 1\n")
  file.chmod(0o755)
  return str(file)


def seq(corpus, **changed):
  c = tiny.config(corpus, **changed)
  c.optimizer.lr_mults, c.optimizer.freeze = ((".*mlp/down.*", 0.1),), ("^embed/",)
  c.schedule.update(name="cosine", warmup_steps=2, warmup_percent=-1.0, floor=0.0)
  return c


def test_what_is_written_is_what_is_trained(corpus, lacking, tmp_path, capsys):
  c = seq(corpus, grad_accum_steps=2)
  c.model.dropout, c.optimizer.ema_decay, c.precision.compute = 0.1, 0.99, "bfloat16"
  with pytest.raises(ConfigError, match="lacks torch transformers. Weft's side is done"):
    compare(c, tmp_path, steps=STEPS, peer=lacking)
  assert "both sides: float32, without dropout, ema_decay" in capsys.readouterr().out
  settings = json.loads((tmp_path / "settings.json").read_text())
  tensors = files.TensorFolder(tmp_path / "model").tensors
  named = [name for group in settings["groups"] for name in group["tensors"]] + settings["frozen"]
  assert sorted(named) == sorted(tensors) and settings["frozen"] == ["model.embed_tokens.weight"]
  # Warm-up over 2 of 8 steps, whose second has the peak; from it a cosine reaches 0 after the last.
  schedule = [0.5, 1.0, 0.5 * (1 + math.cos(math.pi / 7))]
  for group in settings["groups"]:
    slow = "model.layers.1.mlp.down_proj.weight" in group["tensors"]
    np.testing.assert_allclose(group["lr"], [1e-2 * (0.1 if slow else 1.0) * x for x in schedule], rtol=1e-6)
    for name in group["tensors"]:
      assert ("down_proj" in name) == slow and group["weight_decay"] == (0.0 if "norm" in name else 0.1), name
  # The run took these steps and no other.
  ours = json.loads((tmp_path / "weft.json").read_text())
  rows = [row for row in read_rows(tmp_path / "weft" / "metrics.jsonl") if "grad_norm" in row]
  assert ours == [{key: row[key] for key in ("loss", "grad_norm")} for row in rows] and len(ours) == STEPS

  # The first loss is that of the exported parameters on the first batch, each document by itself.
  model, params = hf.load(tmp_path / "model")
  batches = np.load(tmp_path / "batches.npz")
  total, weight, logits_of = 0.0, 0.0, jax.jit(model.logits)
  for row in range(c.batch_size):
    ids, segments, weights = (batches[f"0/{name}"][row] for name in ("tokens", "segment_ids", "loss_weights"))
    for segment in range(1, segments.max(initial=0) + 1):
      at = segments == segment
      alone = np.pad(ids[at], (0, len(ids) - at.sum()))[None]  # so that all lengths share a program
      logits = np.asarray(logits_of(params, alone), np.float64)[0, :at.sum() - 1]
      logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      total -= (logps[np.arange(len(logps)), ids[at][1:]] * weights[at][1:]).sum()
      weight += weights[at][1:].sum()
  assert ours[0]["loss"] == pytest.approx(total / weight, rel=1e-5)
  assert not np.array_equal(batches["0/tokens"], batches["1/tokens"])

  # The same command again trains nothing anew; another one is refused.
  before = (tmp_path / "weft.json").stat().st_mtime_ns
  with pytest.raises(ConfigError, match="lacks torch"):
    compare(c, tmp_path, steps=STEPS, peer=lacking)
  assert (tmp_path / "weft.json").stat().st_mtime_ns == before
  with pytest.raises(ConfigError, match="another config or other --steps"):
    compare(c, tmp_path, steps=STEPS + 1, peer=lacking)


def test_without_adamw_parameters_stay(corpus, lacking, tmp_path, capsys):
  c = tiny.config(corpus)
  c.optimizer.name = "lion"
  with pytest.raises(ConfigError, match="lacks"):
    compare(c, tmp_path, steps=2, peer=lacking)
  assert "without updates (PyTorch has no lion of these rules" in capsys.readouterr().out
  assert all(rate == 0 for group in json.loads((tmp_path / "settings.json").read_text())["groups"]
             for rate in group["lr"])
  rows = [row for row in read_rows(tmp_path / "weft" / "metrics.jsonl") if "update_norm" in row]
  assert [row["update_norm"] for row in rows] == [0, 0]


@pytest.mark.parametrize("change, says", [
    (dict(strategy=strategy("kto")), "strategy.name is 'kto'; the peer has seq, sft, dpo"),
    (dict(strategy=strategy("dpo", loss={"hinge": 1.0})), "strategy.loss has 'hinge'; the peer has sigmoid and sft"),
    (dict(strategy=strategy("dpo", ld_alpha=0.5)), "strategy.ld_alpha is 0.5"),
    (dict(model=dict(moe=dict(num_experts=4, expert_size=16, balance_loss=0.01))), "--config.model.moe.balance_loss=0"),
    (dict(model=dict(lora=dict(rank=2))), "Give --config.model.hf=FOLDER"),
])
def test_what_the_peer_has_not_is_refused(corpus, tmp_path, change, says):
  c = tiny.config(corpus)
  for key, value in change.items():
    if key == "strategy":
      c.strategy = value
    else:
      c[key].update(value)
  with pytest.raises(ConfigError, match=says):
    compare(c, tmp_path)
  assert not (tmp_path / "weft").exists()


def test_tensors_of_unequal_parts_are_refused(tmp_path, corpus, lacking):
  """Phi-3 has gate and up in one tensor."""
  content = json.loads((tiny.ROOT / "tests" / "models" / "hf" / "references" / "phi3" / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": 264}))
  c = tiny.config(corpus)
  c.model = defaults().model
  c.model.hf, c.init_from.fresh, c.tokenizer.type = str(tmp_path), True, "bytes"
  c.optimizer.lr_mults = ((".*mlp/up.*", 0.1),)
  with pytest.raises(ConfigError, match="gate_up_proj.weight holds .*, which the optimizer treats differently"):
    compare(c, tmp_path / "out", steps=1, peer=lacking)


@pytest.mark.parametrize("name", ["seq", "sft", "dpo", "lora"])
def test_losses_are_those_of_transformers(corpus, tmp_path, name):
  pytest.importorskip("torch")
  pytest.importorskip("transformers")
  if name == "seq":
    c = seq(corpus, strategy=strategy("seq", z_loss=1e-3, label_smoothing=0.1))
  elif name == "dpo":
    c = test_dpo.config(test_dpo.write_pairs(tmp_path / "pairs.jsonl"),
                        strategy=dict(loss={"sigmoid": 1.0, "sft": 0.5}, label_smoothing=0.1))
  else:
    c = test_sft.config(test_sft.write_conversations(tmp_path / "chats.jsonl"), strategy=dict(dft=name == "sft"))
  if name == "lora":
    pytest.importorskip("peft")
    c.model = defaults().model
    c.model.hf, c.model.lora.rank = str(tiny.hf_folder(tmp_path / "model")), 2
  assert compare(c, tmp_path / "out", steps=STEPS, peer=sys.executable) == 0
  ours, theirs = (json.loads((tmp_path / "out" / f"{side}.json").read_text()) for side in ("weft", "peer"))
  for key in ("loss", "grad_norm"):
    np.testing.assert_allclose([row[key] for row in ours], [row[key] for row in theirs["steps"]], rtol=2e-5)


# ----------------------------------------------------------------------------------------------
# The command, without a run and without a peer.


def test_the_command_compares_what_its_flags_say(monkeypatch, capsys):
  called = []
  flags = SimpleNamespace(workdir="w", steps=4, peer="a/python")
  monkeypatch.setattr(command, "flags", SimpleNamespace(FLAGS=type("Flags", (dict,), vars(flags))(config="flag")))
  config = {"precision": "p"}
  monkeypatch.setattr(command.config_typed, "of_flag", lambda flag: (config, ["a note"]) if flag == "flag" else None)
  monkeypatch.setattr(command, "compare", lambda *given: called.append(given) or 5)
  for name in ("set_environment", "errors_of_savers_in_short", "keep_compiled_programs"):
    monkeypatch.setattr(startup, name, lambda *given, name=name: called.append((name, *given)))
  with pytest.raises(SystemExit) as ended:
    command.main(["prog"])
  assert ended.value.code == 5 and capsys.readouterr().out == "a note\n"
  assert called == [("set_environment", "p"), ("errors_of_savers_in_short",), ("keep_compiled_programs",),
                    (config, "w", 4, "a/python")]
  with pytest.raises(app.UsageError, match="^unexpected arguments .'x'.$"):
    command.main(["prog", "x"])


def test_the_peer_is_run_once_it_has_what_it_needs(monkeypatch, tmp_path, corpus):
  """Weft's side is not run again where it is there for the same config and steps."""
  ran, trained = [], []
  c = tiny.config(corpus)

  def train(config, folder):
    trained.append(folder)
    folder.mkdir(parents=True)

  monkeypatch.setattr("trainer.main.train", train)

  def run(command, **options):
    ran.append([str(part) for part in command])
    return SimpleNamespace(returncode=0 if "-c" in command else 3, stderr="")

  monkeypatch.setattr(command.subprocess, "run", run)
  for _ in range(2):
    assert compare(c, tmp_path / "w", 2, "a/python") == 3
  assert trained == [tmp_path / "w" / "weft"] and (tmp_path / "w" / "peer.py").exists()
  assert [ran[0][0], *ran[0][3:]] == ["a/python", "torch", "transformers"]
  assert ran[1] == ["a/python", str(tmp_path / "w" / "peer.py"), str(tmp_path / "w")]
  with pytest.raises(ConfigError, match="^.*/w holds the comparison of another config or other --steps. Give another"):
    compare(c, tmp_path / "w", 3, "a/python")


def test_what_is_recorded_of_each_step(tmp_path):
  recorded = record.Record(str(tmp_path), 2)
  run = SimpleNamespace(step=1, stop_requested="")
  for step, stop in ((1, ""), (2, "trainer.parity")):
    run.step = step
    recorded.on_optimizer_step(run)
    assert run.stop_requested == stop
  run.stop_requested = "SIGTERM"
  recorded.on_optimizer_step(run)
  assert run.stop_requested == "SIGTERM"
  recorded.on_step_end(run, 1, {"loss": 2.0, "grad_norm": 1.0})
  recorded.on_step_end(run, 2, {"loss": 1.0, "objective": 1.5, "grad_norm": 0.5})
  recorded.on_train_end(run)
  assert json.loads((tmp_path / "weft.json").read_text()) == [
      {"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.5, "grad_norm": 0.5}]


def optimizer_of(rules):
  return SimpleNamespace(learning_rate=0.1, weight_decay=0.2, rules=rules,
                         schedule=lambda step, warmup: min((step + 1) / warmup, 1.0))


def ruled(mult=1.0, decay=1.0, warmup=1):
  return Rules(lr_mult=mult, wd_mult=decay, warmup_steps=warmup)


class Rules(NamedTuple):
  lr_mult: float
  wd_mult: float
  warmup_steps: int


def grouped(monkeypatch, tensors, rules, extra=()):
  shapes = {path: np.zeros(1) for path in [*rules, *extra]}
  run = SimpleNamespace(program=SimpleNamespace(optimizer=optimizer_of(rules), abstract_state={
      "params": tree.unflatten(shapes)}))
  monkeypatch.setattr(record, "_tensors", lambda folder, shapes: tensors)
  return record._groups(run, None, 3)


def test_groups_have_the_rates_of_each_step_and_what_is_frozen_has_none(monkeypatch):
  tensors = {"x": {"a/w"}, "y": {"b/w", "c/w"}, "z": {"d/w"}, "half": {"a/w", "d/w"}}
  rules = {"a/w": ruled(2.0, 0.0), "b/w": ruled(warmup=2), "c/w": ruled(warmup=2)}
  found, frozen = grouped(monkeypatch, tensors | {"half": {"d/w"}}, rules, ["d/w"])
  assert [(group["tensors"], group["weight_decay"]) for group in found] == [(["x"], 0.0), (["y"], 0.2)]
  np.testing.assert_allclose([group["lr"] for group in found], [[0.2, 0.2, 0.2], [0.05, 0.1, 0.1]])
  assert frozen == ["half", "z"]
  with pytest.raises(ConfigError, match="^half holds a/w, d/w, which the optimizer treats differently; PyTorch"):
    grouped(monkeypatch, tensors, rules, ["d/w"])


def test_adapters_are_one_group(monkeypatch):
  one = {"attn/lora_a": ruled(), "attn/lora_b": ruled()}
  (group,), frozen = grouped(monkeypatch, {"never": {"asked"}}, one)
  assert group["tensors"] is None and frozen == []
  with pytest.raises(ConfigError, match="^the peer trains adapters alone, all by the same rules. Leave out optimizer."):
    grouped(monkeypatch, {}, one | {"attn/lora_b": ruled(2.0)})
