"""Tables of tokens in PEFT's files: what says the same twice is compared, what is another function is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.hf import peft
from models.hf.errors import HFError
from tests.models.hf.test_peft import REFERENCES, Case

EMBED = "base_model.model.model.embed_tokens"


@pytest.fixture
def spoiled(tmp_path):
  """spoiled(name, tensors, **config): a copy of a reference's adapters with these tensors (None: without) and keys."""
  def copy(name, tensors=None, **config):
    shutil.copytree(REFERENCES / name / "adapters", tmp_path / "adapters")
    file = tmp_path / "adapters" / peft.TENSORS
    changed = {**load_file(file), **(tensors or {})}
    save_file({key: values for key, values in changed.items() if values is not None}, file)
    file = tmp_path / "adapters" / peft.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return tmp_path / "adapters"

  return copy


@pytest.mark.parametrize("name, tensors, config, changed, message", [
    ("llama_embed", {}, dict(ensure_weight_tying=False), {}, "leaves the unembedding as it is.*tie_embeddings=False"),
    ("llama_embed", {"base_model.model.lm_head.lora_A.weight": np.ones((3, 16), np.float32)}, {}, {},
     "lm_head.lora_A.weight is not the adapter of the embedding"),
    ("llama_embed", {f"{EMBED}.base_layer.weight": np.ones((40, 16), np.float32)}, {}, {},
     "embed_tokens.base_layer.weight .* is not the base's own table"),
    ("llama_embed", {f"{EMBED}.base_layer.weight": np.ones((48, 16), np.float32)}, {}, {}, "one with more tokens"),
    ("llama_head", {"base_model.model.lm_head.base_layer.weight": np.ones((40, 16), np.float32)}, {}, {},
     "lm_head.base_layer.weight .* is not the base's own table"),
    ("llama_embed_apart", {}, dict(ensure_weight_tying=True), {}, "moves the unembedding, too"),
    ("llama_tokens", {}, {}, dict(trainable_token_indices=(3, 17, 39)), r"Set model.*=\(17, 3, 39\)"),
    ("llama_tokens", {}, {}, dict(trainable_token_indices=()), r"Set model.*=\(17, 3, 39\)"),
    ("llama_tokens", {f"{EMBED}.token_adapter.trainable_tokens_delta": np.ones((2, 16), np.float32)}, {}, {},
     r"trainable_tokens_delta is \(2, 16\)"),
    ("llama_tokens", {}, dict(trainable_token_indices="all"), {}, "trainable_token_indices is 'all'"),
    ("llama", {f"{EMBED}.token_adapter.trainable_tokens_delta": np.ones((2, 16), np.float32)}, {}, {},
     "trainable_tokens_delta .*: matches no target"),
])
def test_what_is_another_function_is_refused(spoiled, name, tensors, config, changed, message):
  folder = spoiled(name, tensors, **config)
  with pytest.raises(HFError, match=message):
    Case(name, **changed).read(folder)


def test_what_is_said_once_is_enough(spoiled):
  """The unembedding's adapter and the base's tables may be missing: PEFT itself needs neither."""
  folder = spoiled("llama_embed", {f"{EMBED}.base_layer.weight": None, **{
      f"base_model.model.lm_head.{name}.weight": None for name in ("base_layer", "lora_A", "lora_B")}})
  case = Case("llama_embed")
  for path, values in case.read(folder).items():
    np.testing.assert_array_equal(values, case.read()[path])


def test_rows_that_the_file_lacks_are_the_base_s(spoiled):
  """PEFT's list of indices is of the embedding alone."""
  folder = spoiled("llama_tokens_apart", {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": None},
                   trainable_token_indices=[17, 3, 39])
  case = Case("llama_tokens_apart")
  assert case.read(folder).keys() == case.wanted.keys() - {"unembed/lora_rows"}


def test_rows_of_two_tables_that_are_one_in_the_base(tmp_path):
  case = Case("llama_tokens")
  case.folder = REFERENCES / "llama_apart"  # whose name has the model's tables apart
  case.prepare(REFERENCES / "llama_tokens" / "base", rank=3, targets=("attn/q/",), trainable_token_indices=(17, 3, 39))
  with pytest.raises(HFError, match="PEFT would give both the same rows. Export the adapters merged"):
    case.write(tmp_path / "out", case.random())
  with pytest.raises(HFError, match="trains the rows of both as one. Leave model.tie_embeddings unset"):
    case.read(REFERENCES / "llama_tokens" / "adapters")
