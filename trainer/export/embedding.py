"""What an exported model of embeddings has beside its tensors: how it pools, its prompts, and where its texts end."""

from pathlib import Path
from typing import Any

from input_pipeline.chat.image_placeholders import sees
from input_pipeline.examples.embedded import max_length_of, text_tokens
from input_pipeline.tokenizer import hf_classes
from input_pipeline.tokenizer.tokenizer import Tokenizer, write_ends
from models.hf import files, sentence_transformers

# Switches of some classes of tokenizers, which would write BOS and EOS in another way than tokenizer.json says.
_SWITCHES = ("add_bos_token", "add_eos_token")


def write(out: Path, config: Any, tokenizer: Tokenizer) -> None:
  """Makes of a folder with tensors and tokenizer one that sentence-transformers loads.

  A tokenizer of which others would begin or end texts otherwise than they were trained is written anew.
  """
  cfg = config.strategy
  if "pooling" not in cfg:  # a strategy of the user's own, which says nothing of it
    return
  tokens, named_in = text_tokens(config, tokenizer), out / "tokenizer_config.json"
  if (tokens.head, tokens.tail) != getattr(tokenizer, "ends", ((), ())):
    tokenizer.save(out / "tokenizer.json")
    write_ends(out / "tokenizer.json", tokens.head, tokens.tail)
    named = {key: value for key, value in files.read_json(named_in).items() if key not in _SWITCHES}
    files.write_json(named_in, {**named, "tokenizer_class": hf_classes.AS_IT_IS})
  named = files.read_json(named_in)
  if named.get("pad_token") is None:  # texts of several lengths are padded together, and the padding is masked
    names = tokenizer.named_tokens
    files.write_json(named_in, {**named, "pad_token": names.get("eos_token") or next(iter(names.values()), None)})
  sentence_transformers.write(out, config.model.hidden_size, sentence_transformers.Found(
      cfg.pooling, cfg.query_prompt, cfg.document_prompt, max_length_of(config), bool(cfg.as_messages),
      cfg.generation_prompt), sees(config))
