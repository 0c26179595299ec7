"""What --mode=plan is made of, for published models of text: tests/models/hf/published has their config.json."""

import shutil

import jax
import pytest

from models import config as model_config
from tests import tiny
from tests.trainer.planning.test_plan_images import PUBLISHED
from trainer import program as program_lib

# As transformers 5.24 makes them of the same files, with biases by which experts are chosen, buffers there; of h-tiny,
# what its page says, too. And how many of the weights of products a token passes through: all but the experts' that it
# does not use.
PUBLISHED_SIZES = {
    "gemma_3n_e2b": (4_435_182_688, 30 * 256 * 262_144),  # of each layer's embeddings rows are read
    "gemma_3n_e4b": (6_835_235_568, 35 * 256 * 262_144),
    "dots1": (142_774_381_696, 61 * 122 * 3 * 4096 * 1408),
    "glm_4_7_flash": (29_943_393_920, 46 * 60 * 3 * 2048 * 1536),
    # In rows of fewer tokens than they choose keys, indexers are not asked.
    "glm_5": (743_911_218_432, 75 * 248 * 3 * 6144 * 2048 + 78 * (2048 * 4096 + 6144 * 128 + 6144 * 32)),
    "granite_4_h_tiny": (6_939_037_248, 40 * 58 * 3 * 1536 * 512),
    "nemotron_h_8b": (8_100_852_736, 0),
    "llama_4_scout": (107_769_861_120, 48 * 15 * 3 * 5120 * 8192),
    "llama_4_maverick": (400_711_848_960, 24 * 127 * 3 * 5120 * 8192),
    "qwen3_next_80b": (79_674_391_296, 48 * 502 * 3 * 2048 * 512),
    "gpt_oss_20b": (20_914_757_184, 24 * 28 * 3 * 2880 * 2880),
    "deepseek_v2": (235_741_434_880, 59 * 154 * 3 * 5120 * 1536),
    "kimi_k2": (1_026_408_232_448, 60 * 376 * 3 * 7168 * 2048),
    "glm_4_5_air": (106_852_251_264, 45 * 120 * 3 * 4096 * 1408),
    "granite_3_8b": (8_170_848_256, 0),
    "granite_3_3b_a800m": (3_298_793_472, 32 * 32 * 3 * 1536 * 512),
    "nemotron_3_nano": (31_577_940_288, 23 * 122 * 2 * 2688 * 1856),  # experts without a gate
    "olmo_3_32b": (32_233_522_176, 0),
    "smollm_3_3b": (3_075_098_624, 0),
    "command_r7b": (8_028_033_024, 0),
    "phi_4_mini": (3_836_021_760, 0),
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_parameters_and_operations_of_a_published_size(name, tmp_path):
  shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
  config = tiny.config(tmp_path / "no_corpus", seq_len=1024, batch_size=8)
  config.model = model_config.model()
  config.model.hf = str(tmp_path)
  config.precision.update(params="bfloat16", compute="bfloat16", frozen="bfloat16")
  config, _ = program_lib.resolve(config)
  model = program_lib.make_model(config, config.model.vocab_size)
  parameters, unused = PUBLISHED_SIZES[name]
  sizes = {path: leaf.size for path, leaf in model._logical().items()}
  assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params())) == parameters == sum(sizes.values())
  tied = config.model.tie_embeddings
  products = sum(n for path, n in sizes.items() if path.endswith(("/kernel", "/embedding") if tied else "/kernel"))
  products -= unused
  # States and attention to a short row are little beside them.
  assert 6 * products < model.flops_per_token(1024) < 1.1 * 6 * products
