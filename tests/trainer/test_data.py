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
