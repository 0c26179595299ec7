"""Exports of a run that trained adapters: merged they compute what the run did, in PEFT's format they come back."""

import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf, lora
from models.hf import files, peft
from models.hf.errors import HFError
from tests import tiny
from tests.models.common import GEMMA4_SHARED
from trainer import tree
from trainer.checkpoints import init_from
from trainer.config import checks as config_checks
from trainer.errors import ConfigError
from trainer.export import command as export
from trainer.main import train

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 16)).astype(np.int32)
LORA = dict(rank=2, alpha=4.0, targets=("attn/[qv]/", "mlp/down"))
# Parts of some layers alone, and a kernel outside of layers.
GEMMA = dict(GEMMA4_SHARED, num_layers=4, num_heads=2, num_kv_heads=1, kv_shared_layers=2, tie_embeddings=True)
OF_GEMMA = dict(LORA, targets=("blocks/attn/[qv]/", "/wide_mlp/down", "per_layer/", "per_layer_proj"))


MOE = dict(intermediate_size=8, tie_embeddings=False,
           moe=dict(num_experts=4, experts_per_token=2, expert_size=8, normalize_weights=True))
# {what the fixture is called: (keys of the base, model.lora, how the base is kept)}
KINDS = {
    "float32": ({}, LORA, "float32"),
    # The embedding, which is the unembedding, is trained as a whole.
    "nf4": ({}, dict(LORA, modules_to_save=("^embed/",), dora=True), "nf4"),
    "gemma4": (GEMMA, OF_GEMMA, "float32"),
    "tables": (dict(tie_embeddings=True), dict(LORA, targets=("attn/[qv]/", "^embed/")), "bfloat16"),
    "rows": ({}, dict(LORA, targets=("attn/q/",), trainable_token_indices=(101, 32, 97)), "bfloat16"),
    "experts": (MOE, dict(LORA, targets=("attn/q/", "moe/experts/", "^unembed/")), "nf4"),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
  """(workdir, the run, the folder of its base) of two steps on adapters."""
  folder = tmp_path_factory.mktemp(request.param)
  changed, options, frozen = KINDS[request.param]
  base = tiny.hf_folder(folder / "base", **changed)
  config = tiny.config(tiny.write_corpus(folder / "corpus"), total_steps=2, evals={}, tokenizer=dict(type="bytes"),
                       model=dict(hf=str(base), lora=options, vocab_multiple=128), precision=dict(frozen=frozen))
  config.model.update({key: value for key, value in changed.items() if key in ("num_layers", "intermediate_size")})
  config.optimizer.learning_rate = 0.1
  return folder / "run", train(config, folder / "run"), base


def test_merged_it_computes_what_the_run_did(run, tmp_path):
  workdir, trained, base = run
  out = export.export(workdir, tmp_path / "out", dtype="float32")
  model, params = hf.load(out)
  assert not any(lora.is_adapter(path) for path in tree.flatten(params))
  logits = jax.jit(model.logits)(params, TOKENS)
  np.testing.assert_allclose(logits, jax.jit(trained.model.logits)(trained.state["params"], TOKENS), atol=1e-5)
  other, unchanged = hf.load(base)
  assert np.abs(logits - jax.jit(other.logits)(unchanged, TOKENS)).max() > 1e-2


def test_in_pefts_format_they_come_back(run, tmp_path):
  workdir, trained, base = run
  out = export.export(workdir, tmp_path / "out", adapter="peft")
  assert sorted(p.name for p in out.iterdir()) == [peft.CONFIG, peft.TENSORS]
  assert files.read_json(out / peft.CONFIG)["base_model_name_or_path"] == str(base)
  leaves, config = tree.flatten(trained.state["params"]), config_checks.resolve(trained.config_json)
  config.model.lora.peft = str(out)
  origin = init_from.origin_of(config)
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained.state["params"])
  adapters = {path: leaf for path, leaf in leaves.items() if re.search(trained.model.trained_only, path)}
  again, _ = init_from.first_params(origin, trained.model, target)
  again = {path: leaf for path, leaf in tree.flatten(again).items() if path in adapters}
  assert all(np.any(x) for x in again.values())
  for path, values in again.items():
    if path.endswith(("/lora_m", "/lora_rows")):  # its file has lengths or rows, of which the base's are no small part
      np.testing.assert_allclose(values, adapters[path], atol=1e-6, err_msg=path)
    else:
      assert np.asarray(values).tobytes() == np.asarray(adapters[path]).tobytes(), path
  with pytest.raises(HFError, match="already holds adapters"):
    export.export(workdir, out, adapter="peft")


def test_a_base_that_has_changed_is_noticed(run, tmp_path, caplog):
  workdir, trained, base = run
  file = base / files.SINGLE
  tensors, content = load_file(file), file.read_bytes()
  try:
    save_file({name: x + 0.01 for name, x in tensors.items()}, file)
    if trained.config.precision.frozen != "nf4":
      with pytest.raises(ConfigError, match="Its files have changed since"):
        export.export(workdir, tmp_path / "out")
    else:
      export.export(workdir, tmp_path / "out")
      assert "may differ in the last bit" in caplog.text
  finally:
    file.write_bytes(content)
