"""SmolVLM and Idefics3: a SigLIP tower, of whose features those of neighbours are put end to end, and a Llama."""

import math
from dataclasses import replace

import numpy as np

from models.hf.families.llama import LLAMA
from models.hf.families.towers import TABLE, sizes
from models.hf.family import Tensor
from models.hf.images import Tower, Wrapper
from models.hf.keys import Key, Rule

# Of parts that the first version's class had, of no effect in any that is read here.
_OF_TEXT = frozenset({"_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor",
                      "qk_layer_norms", "rope_interleaved", "use_resampler"})


class Places(Rule):
  """The table of positions is read by fractions of an image's sides; rounding may bring some to a neighbour's entry."""

  def read(self, source, model):
    side = model["vision.image_size"] // model["vision.patch_size"]
    begins = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    found = np.searchsorted(begins, np.arange(side, dtype=np.float32) * np.float32(1 / side), side="right")
    if not np.array_equal(found, np.arange(side)):
      raise source.error("image_size", f"another, whose patches are not {side} a side: rounding gives some of them the "
                         "positions of others in the original")
    for key in ("max_image_size", "size", "use_base_siglip"):  # of the processor
      source.get(key, object, None)
    return {}


class Scale(Rule):
  """How many neighbours a side are put together; ours is how many tokens that makes of an image."""

  def read(self, source, model):
    side, scale = model["vision.image_size"] // model["vision.patch_size"], source.get("scale_factor", int, 2)
    if scale < 1 or side % scale:
      raise source.error("scale_factor", f"a divisor of the {side} patches of a side")
    return {"vision.tokens_per_image": (side // scale) ** 2}

  def write(self, model):
    side = model["vision.image_size"] // model["vision.patch_size"]
    return {"scale_factor": side // math.isqrt(model["vision.tokens_per_image"])}


class Frames(Rule):
  """A video's frames are images (in the processor of SmolVLM, not in Idefics3's)."""

  def read(self, source, model):
    return {"vision.video.token": model["vision.image_token"]}


def _family(name: str, architecture: str, *more: Rule) -> Wrapper:
  tower = Tower("siglip", (f"{name}_vision", name),
                (*sizes(1152, 3072, 12, 16, 32, 1e-6, "gelu_pytorch_tanh"), Places()), TABLE)
  return Wrapper(
      model_types=(name,), architectures=(architecture,),
      texts=(replace(LLAMA, inert=LLAMA.inert | _OF_TEXT),), towers=(tower,),
      keys=(Key("image_token_id", "vision.image_token", default=128257), Scale(), *more),
      table=(Tensor("modality_projection.proj.weight", "projector/linear/kernel", transpose=True),),
      fixed={"vision.projector": "shuffle", "vision.attention": "causal"}, tied=False,
      inert=frozenset({"use_reentrant_checkpointing"}),
      names=((("model.text_model.", ""),), ("model.vision_model.",), ("model.connector.",)))


SMOLVLM = _family("smolvlm", "SmolVLMForConditionalGeneration", Frames())
IDEFICS3 = _family("idefics3", "Idefics3ForConditionalGeneration")
