"""What data of rollouts are made of; that they are the right ones: tests/trainer/rollouts and tests/input_pipeline."""

from types import SimpleNamespace

import jax
import pytest

from trainer import data as data_lib
from trainer.config import defaults, strategy
from trainer.distributed import mesh as mesh_lib


@pytest.mark.devices(4)
@pytest.mark.parametrize("apart, sampling", [(0, slice(0, 4)), (1, slice(3, 4))])
def test_rollouts_are_sampled_by_the_policy_on_the_devices_that_are_kept_for_it(tmp_path, monkeypatch, apart, sampling):
  """Without any, on those that train."""
  config = defaults()
  config.strategy = strategy("grpo")
  config.rollout.update(num_prompts=2, devices=apart)
  mesh = mesh_lib.make_mesh(dict(data=-1), jax.devices()[:4 - apart])
  monkeypatch.setattr(data_lib, "make_tokenizer", lambda *given: SimpleNamespace(vocab_size=24))
  monkeypatch.setattr(data_lib.program_lib, "make_model", lambda config, vocab_size: f"model of {vocab_size}")
  monkeypatch.setattr(data_lib.program_lib, "shares_prompts", lambda config, model, mesh: (model, mesh.size))
  monkeypatch.setattr(data_lib.prompt_data, "prompt_texts", lambda config: None)
  monkeypatch.setattr(data_lib.prompt_data, "make_prompt_data", lambda *given: "prompts")
  monkeypatch.setattr(data_lib.rollout, "Rollouts", lambda config, prompts, policy, **more: (prompts, policy, more))
  tokenizer, model, (prompts, policy, more) = data_lib.make_data(config, mesh, tmp_path, "past")
  assert (policy.model, policy.tokenizer, prompts) == (model, tokenizer, "prompts") and model == "model of 24"
  assert list(policy.mesh.devices.flat) == jax.devices()[sampling]
  assert more == dict(share_prompts=("model of 24", 4 - apart), workdir=tmp_path, past="past")


def test_rows_of_files_are_told_where_they_are_kept_and_where_they_go_on(tmp_path, monkeypatch):
  config, checked = defaults(), []
  config.strategy = strategy("distill")
  monkeypatch.setattr(data_lib, "make_tokenizer", lambda *given: SimpleNamespace(vocab_size=24, given=given))
  monkeypatch.setattr(data_lib.teachers, "check", lambda *given: checked.append(given))
  monkeypatch.setattr(data_lib.program_lib, "make_model", lambda config, vocab_size: f"model of {vocab_size}")
  monkeypatch.setattr(data_lib.program_lib, "shares_prompts", lambda *given: given)
  monkeypatch.setattr(data_lib.loader, "train_texts", lambda config, learns: f"texts of {learns}")
  monkeypatch.setattr(data_lib.loader, "make_train_data", lambda *given, **more: (given, more))
  tokenizer, model, (given, more) = data_lib.make_data(config, "the mesh", tmp_path, "past")
  learns = data_lib.strategies.learns(config)
  assert tokenizer.given == (config.tokenizer, f"texts of {learns}", tmp_path / "tokenizer.json", True)
  assert (given, model, checked) == ((config, tokenizer), "model of 24", [(config, tokenizer)])
  assert more == dict(learns=learns, workdir=tmp_path, share_prompts=(config, model, "the mesh"), progress=True,
                      past="past")
