"""Gradients are PEFT's (make_peft_references.py), and experts whose adapters differ in A are one parameter's."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, lora
from models.hf import peft
from models.hf.errors import HFError
from tests.models.hf.test_peft import REFERENCES, Case
from trainer import tree


def theirs(name, saved):
  """PEFT's gradients by our paths, in our layout."""
  def layers(module, part):
    return np.stack([saved[f"layers.{i}.{module}.{part}"] for i in range(2)])

  found = {}
  linears = {"attn/q": "self_attn.q_proj", "mlp/down": "mlp.down_proj"}
  for ours, module in linears.items():
    for path, part in (("lora_a", "lora_A"), ("lora_b", "lora_B"), ("lora_m", "lora_magnitude_vector")):
      if f"layers.0.{module}.{part}" in saved:
        stacked = layers(module, part)
        found[f"blocks/{ours}/{path}"] = stacked if path == "lora_m" else stacked.swapaxes(1, 2)
  if name == "llama_embed":  # one matrix here, there two with the same values
    found["embed/lora_a"] = saved["embed_tokens.lora_embedding_A"].T + saved["lm_head.lora_B"]
    found["embed/lora_b"] = saved["embed_tokens.lora_embedding_B"].T + saved["lm_head.lora_A"]
  for table, module in (("embed", "embed_tokens"), ("unembed", "lm_head")):
    if f"{module}.token_adapter.trainable_tokens_delta" in saved:
      found[f"{table}/lora_rows"] = saved[f"{module}.token_adapter.trainable_tokens_delta"]
  if "layers.0.mlp.experts.lora_A" in saved:
    for ours, module in (("down", "mlp.experts"), ("both", "mlp.experts.base_layer")):
      a, b = (layers(module, part) for part in ("lora_A", "lora_B"))
      found[f"{ours}/lora_a"] = a.reshape(2, 3, 2, -1).swapaxes(2, 3)  # [layer, expert, in, rank]
      found[f"{ours}/lora_b"] = b.reshape(2, -1, 2, 3).transpose(0, 3, 2, 1)  # [layer, expert, rank, out]
  return found


@pytest.mark.parametrize("name", ["llama_dora", "llama_embed", "llama_tokens", "llama_tokens_apart", "qwen3_moe",
                                  "gpt_oss"])
def test_gradients_are_those_of_peft(name):
  """With DoRA, what a column is divided by is a constant."""
  case, saved = Case(name), np.load(REFERENCES / name / "gradients.npz")
  params = tree.unflatten(tree.flatten(hf.load(case.folder / "base")[1]) | case.read())
  loss = lambda p: jnp.sum(jnp.square(case.model.logits(p, saved["tokens"])))  # noqa: E731
  gradients = {path: np.asarray(leaf) for path, leaf in tree.flatten(jax.jit(jax.grad(loss))(params)).items()
               if path in case.wanted}
  experts = "blocks/moe/experts"
  for part in ("lora_a", "lora_b"):
    if f"{experts}/down/{part}" in gradients:  # gate and up of an expert have one A there, and B's beside each other
      gradients[f"down/{part}"] = gradients.pop(f"{experts}/down/{part}")
      gate, up = (gradients.pop(f"{experts}/{of}/{part}") for of in ("gate", "up"))
      side_by_side = np.concatenate([gate, up], axis=-1)
      in_turns = np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)
      gradients[f"both/{part}"] = gate + up if part == "lora_a" else in_turns if name == "gpt_oss" else side_by_side
  expected = theirs(name, saved)
  assert gradients.keys() == expected.keys()
  for path, values in expected.items():
    np.testing.assert_allclose(gradients[path], values, rtol=0, atol=1e-5 * np.abs(values).max(), err_msg=path)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gate_and_up_with_different_a_are_one_parameter_of_twice_the_rank(name, tmp_path):
  """Of each expert B A is what its own matrices move by, in the order of the parameter's outputs."""
  case = Case(name)
  leaves = case.random()
  config, tensors = case.write(tmp_path / "out", leaves)
  assert config["rank_pattern"] == {"mlp.experts.gate_up_proj": 4}
  assert config["alpha_pattern"] == {"mlp.experts.gate_up_proj": 12}
  for layer in range(2):
    at = f"base_model.model.model.layers.{layer}.mlp.experts.base_layer"
    a, b = tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"]
    assert a.shape == (3 * 4, 16) and b.shape == (16, 4 * 3)
    moved = np.einsum("ore,eri->eio", b.reshape(16, 4, 3), a.reshape(3, 4, 16))
    gate, up = (leaves[f"blocks/moe/experts/{of}/lora_a"][layer] @ leaves[f"blocks/moe/experts/{of}/lora_b"][layer]
                for of in ("gate", "up"))
    expected = np.concatenate([gate, up], axis=-1)
    if name == "gpt_oss":
      expected = np.stack([gate, up], axis=-1).reshape(3, 16, 16)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
  for path, values in case.read(tmp_path / "out").items():
    np.testing.assert_array_equal(values, leaves[path])


def test_one_of_gate_and_up_alone(tmp_path):
  case = Case("qwen3_moe", targets=("experts/up",))
  leaves = case.random()
  config, tensors = case.write(tmp_path / "out", leaves)
  assert config["target_parameters"] == ["mlp.experts.gate_up_proj"] and config["rank_pattern"] == {}
  b = tensors["base_model.model.model.layers.0.mlp.experts.lora_B.weight"]
  assert not np.any(b[:8]) and np.all(b[8:])
  for path, values in case.read(tmp_path / "out").items():
    np.testing.assert_array_equal(values, leaves[path])


def test_experts_that_the_file_lacks_are_listed():
  with pytest.raises(HFError, match=r"mlp.experts.lora_A.weight \(6, 16\): not in the file|! .*experts.lora_A.weight"):
    Case("qwen3_moe", targets=("attn/q/", "experts/gate", "experts/up")).read()


def test_a_family_whose_experts_are_modules_has_no_place_for_them(tmp_path):
  case = Case("qwen3_moe", targets=("experts/down",))
  case.layout = case.layout._replace(family=next(family for family in hf.families.FAMILIES if family.name == "llama"))
  with pytest.raises(HFError, match="llama has no module for blocks/moe/experts/down/kernel"):
    case.write(tmp_path / "out", case.random())


def test_targets_are_what_peft_matches(tmp_path):
  config, _ = (case := Case("qwen3_moe")).write(tmp_path / "out", case.random())
  assert json.loads((tmp_path / "out" / peft.CONFIG).read_text()) == config
  assert config["target_modules"] == ["q_proj"] and lora.is_adapter("blocks/moe/experts/up/lora_b")
