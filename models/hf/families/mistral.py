"""Mistral: a Llama without biases, with a sliding window in all layers (7B 0.1) or in none.

Folders of Mistral Small 3.1 and of what came of it (mistral3) hold a tower for images beside it, which is passed over.
"""

from models.hf.families import common
from models.hf.family import Tensor
from models.hf.images import TextPart
from models.hf.keys import Key, Window
from models.hf.rope import Rope

# Of folders with a tower.
WHOLE = "Mistral3ForConditionalGeneration"
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
IGNORED = (r"rotary_emb\.inv_freq$", r"^(model\.)?(vision_tower|multi_modal_projector)\.")
HEAD = Tensor("language_model.lm_head.weight", "unembed/kernel", transpose=True, prefixed=False)
# How images become tokens.
INERT = frozenset({"image_token_index", "image_token_id", "multimodal_projector_bias", "spatial_merge_size",
                   "vision_feature_layer", "projector_hidden_act"})

MISTRAL = TextPart(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM", WHOLE),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED,
        Rope(), Window(default=4096),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP, HEAD),
    prefixes=PREFIXES, ignored=IGNORED, inert=INERT,
)
