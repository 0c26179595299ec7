"""What --mode=plan is made of, for published models of images and text: tests/models/hf/published has config.json."""

import shutil
from pathlib import Path

import jax
import pytest

from models import config as model_config
from tests import tiny
from trainer import program as program_lib
from trainer.telemetry import hardware

PUBLISHED = Path(__file__).parents[2] / "models/hf/published"
# As transformers 5.24 makes them of the same files; of Gemma 4 with its buffers, 2,364 numbers; of Mistral Small with
# the unembedding that its folder has, although the file leaves out that it has one.
PARAMETERS = {"qwen3_vl_8b": 8_767_123_696, "qwen2_5_vl_7b": 8_292_166_656, "qwen3_5_397b": 396_802_360_816,
              "gemma_4_31b": 31_273_086_512 + 2_364, "mistral_small_3_1": 23_340_272_640 + 131_072 * 5_120,
              "qwen2_vl_7b": 8_291_375_616, "smolvlm_2b": 2_246_784_880}
TOPOLOGY = hardware.topology("h100:8")


def resolved(name, path):
  """Rows of 1,024 tokens and up to 256 tiles."""
  shutil.copy(PUBLISHED / f"{name}.json", path / "config.json")
  config = tiny.config(path / "no_corpus", seq_len=1024, batch_size=8, mesh=dict(data=1, fsdp=8))
  config.model, config.plan.images_per_row = model_config.model(), 256
  config.model.hf = str(path)
  config.precision.update(params="bfloat16", compute="bfloat16")
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, TOPOLOGY.chip.platform)
  return config


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_operations_of_a_published_size(name, tmp_path):
  """Parameters to the last one; six operations a parameter and token, of experts those of the chosen ones, of the tower
  those for the patches of a tile, four or nine."""
  config = resolved(name, tmp_path)
  model = program_lib.make_model(config, config.model.vocab_size)
  assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params())) == PARAMETERS[name]
  moe = config.model.moe
  share = moe.experts_per_token / max(moe.num_experts, 1)
  sizes = {path: leaf.size * (share if "/experts/" in path else 1) for path, leaf in model._logical().items()
           if path.endswith("/kernel")}
  patches = model.spec.vision.patches
  tower, projector = (sum(n for path, n in sizes.items() if path.startswith(f"{part}/"))
                      for part in ("vision", "projector"))
  products = 6 * (1024 * (sum(sizes.values()) - tower - projector) + 256 * (patches * tower + projector))
  assert products < 1024 * model.flops_per_token(1024, images_per_row=256) < 1.2 * products
