"""PaliGemma 1 and 2: SigLIP, a linear projector, and a Gemma 1 or 2 in which images and prompt see one another."""

from models.hf.families import common
from models.hf.families.gemma import GEMMA, GEMMA2
from models.hf.families.towers import SIGLIP
from models.hf.images import Wrapper
from models.hf.keys import Key, Same

PALIGEMMA = Wrapper(
    model_types=("paligemma",),
    architectures=("PaliGemmaForConditionalGeneration",),
    texts=(GEMMA, GEMMA2),
    towers=(SIGLIP,),
    keys=(
        Key("image_token_index", "vision.image_token", default=256000, alias="image_token_id"),
        Same("projection_dim", "hidden_size", "the projector gives what the text model takes"),
        Same("hidden_size", "hidden_size", "it is that of text_config"),
    ),
    table=common.pair("linear", "projector/linear"),
    fixed={"vision.projector": "linear", "vision.attention": "prefix"},
    both_ways=True,
    inert=frozenset({"_vocab_size", "ignore_index", "vocab_size"}),
)
