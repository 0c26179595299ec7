"""Folders of the library sentence-transformers: a bare body, how its hidden states become an embedding, and prompts.

    modules.json                          Transformer, Pooling, Normalize
    1_Pooling/config.json                 which hidden states
    sentence_bert_config.json             the longest text in tokens; newer ones have it in tokenizer_config.json, and
                                          here whether texts are made messages, which go through the chat template
    config_sentence_transformers.json     prompts by name, what is compared
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.hf import files
from models.hf.errors import HFError

MODULES, PROMPTS, LENGTH = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_OLD = "sentence_transformers.models."
# {ours: theirs}; older files have a switch for each way of pooling.
POOLINGS = {"last": "lasttoken", "mean": "mean"}
_SWITCHES = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
_ANSWER = "add_generation_prompt"
# transformers writes 1e30 where there is no bound.
_NO_LENGTH = 1 << 30
# Names that folders have for the prompt of what is found.
_OF_DOCUMENTS = ("document", "passage", "corpus")


class Found(NamedTuple):
  """What a folder says of embeddings.

  Attributes:
    max_length: None if it says nothing.
    as_messages: texts are what the user says in a conversation, prompts its system message.
    generation_prompt: conversations end with what begins the model's answer.
  """

  pooling: str
  query_prompt: str
  document_prompt: str
  max_length: int | None
  as_messages: bool = False
  generation_prompt: bool = False


def read(folder: str | Path) -> Found | None:
  """What a folder says; None: it is none of sentence-transformers.

  Raises:
    HFError: it has modules or a way of pooling that are not computed here.
  """
  folder = Path(folder).expanduser()
  if not (folder / MODULES).is_file():
    return None
  where = folder / MODULES
  try:
    modules = json.loads(where.read_bytes())
  except ValueError as e:
    raise HFError(f"{where} is not valid JSON: {e}. Fetch it again.") from e
  if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
    raise HFError(f"{where} is no list of modules with their types. Fetch it again.")
  kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
  if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
    raise HFError(f"{where} has the modules {', '.join(kinds)}; read are Transformer, Pooling and Normalize. "
                  "Whatever else changes embeddings is not computed here: remove modules.json to begin from the "
                  "Transformer alone.")
  if modules[0].get("path"):
    raise HFError(f"{where}: the Transformer is in {modules[0]['path']!r}; it is read from the folder itself. Move its "
                  "files there, and write \"path\": \"\".")
  prompts = _json(folder / PROMPTS).get("prompts") or {}
  said = _json(folder / LENGTH)
  length = said.get("max_seq_length")
  length = length or _json(folder / "tokenizer_config.json").get("model_max_length")
  document = next((prompts[name] for name in _OF_DOCUMENTS if prompts.get(name)), "")
  return Found(_pooling(folder / str(modules[1].get("path")) / files.CONFIG), prompts.get("query") or "", document,
               length if isinstance(length, int) and 0 < length < _NO_LENGTH else None,
               "message" in (said.get("modality_config") or {}), _generation_prompt(folder / LENGTH, said))


def _generation_prompt(file: Path, said: Mapping[str, Any]) -> bool:
  options = said.get("processing_kwargs") or {}
  rendering = options.get("chat_template") or {}
  others = [*options.keys() - {"chat_template"}, *rendering.keys() - {_ANSWER}]
  if others:
    raise HFError(f"{file}: processing_kwargs has {', '.join(map(repr, others))}; read is chat_template alone, and of "
                  f"it {_ANSWER!r}. Whatever else changes texts is not computed here.")
  return bool(rendering.get(_ANSWER, False))


def _pooling(file: Path) -> str:
  content = _json(file)
  mode = content.get("pooling_mode")
  modes = [mode] if isinstance(mode, str) else list(mode or ()) or [
      key.removeprefix("pooling_mode_") for key, value in content.items() if key.startswith("pooling_mode_") and value]
  modes = ["mean" if found == "mean_tokens" else found for found in modes]
  ours = [name for name, theirs in POOLINGS.items() if [theirs] == modes]
  if not ours:
    raise HFError(f"{file}: pools by {', '.join(map(str, modes)) or 'nothing'}; read are "
                  f"{', '.join(POOLINGS.values())}.")
  if content.get("include_prompt") is False and ours == ["mean"]:
    raise HFError(f"{file}: include_prompt is false, which leaves prompts out of the mean; here they are in it.")
  return ours[0]


def _json(file: Path) -> Mapping[str, Any]:
  """An object in a file, empty without the file."""
  return files.read_json(file) if file.is_file() else {}


def write(out: Path, hidden_size: int, found: Found, images: bool = False) -> None:
  """Makes a folder of sentence-transformers of that of a bare body with its tokenizer; `images`: it sees them."""
  kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
  modules = [{"idx": i, "name": str(i), "path": path, "type": f"{_OLD}{kind}"} for i, (kind, path) in enumerate(kinds)]
  (out / "1_Pooling").mkdir(exist_ok=True)
  switches = {name: name == _SWITCHES[POOLINGS[found.pooling]] for name in (
      "pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens",
      "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken")}
  forward = {"method": "forward", "method_output_name": "last_hidden_state"}
  messages: dict[str, Any] = {} if not found.as_messages else {
      "transformer_task": "feature-extraction", "module_output_name": "token_embeddings", "modality_config": {
          "text": forward, **({"image": forward} if images else {}), "message": {
              **forward, "format": "structured" if images else "auto"}},
      "processing_kwargs": {"chat_template": {_ANSWER: found.generation_prompt}}}
  files_of: dict[str, dict[str, Any]] = {
      "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, **switches, "include_prompt": True},
      LENGTH: {"max_seq_length": found.max_length, "do_lower_case": False, **messages},
      PROMPTS: {"prompts": {"query": found.query_prompt, "document": found.document_prompt},
                "default_prompt_name": None, "similarity_fn_name": "cosine"}}
  for name, content in files_of.items():
    files.write_json(out / name, content)
  files.write_json(out / MODULES, modules)  # last: it says that the folder is complete
