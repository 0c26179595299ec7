"""The parsers that read what comes from elsewhere, each as a function of bytes: to test properties and to fuzz.

Each either returns, or raises one of OURS. Whatever else it raises is a mistake of ours.
"""

import base64
import functools
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import zstandard

from input_pipeline.chat.schema import ShapeReader
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.answers import compile_pattern
from input_pipeline.examples.prompts import PromptReader
from input_pipeline.examples.registry import make_encoder
from input_pipeline.examples.rollouts import RolloutReader
from input_pipeline.examples.schema_pairs import PairReader
from input_pipeline.files import NotJSONError, Tally, parse_json
from input_pipeline.images import films
from input_pipeline.images.images import ImageError, ImageRef, Preprocess, read, to_pixels
from input_pipeline.mixture import stage_weights
from input_pipeline.sources.readers import READERS, Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from models.hf import architecture, peft_config
from models.hf.files import TensorFolder
from trainer import strategies, tree
from trainer.config import checks as config_checks
from trainer.config import defaults, durations, source
from trainer.distributed import mesh
from trainer.errors import ConfigError, DataError

OURS = (ConfigError, DataError, OSError)
FILMS = films.Sampling(films.TOGETHER, 2, 8, None, None, 4, 768, 64, 640, 2.0)
PATHS = ("embed/embedding", "blocks/attn/q/kernel", "blocks/mlp/up/kernel", "final_norm/scale")


@functools.cache
def folder() -> Path:
  """Where the parsers of files find them; one for the process."""
  return Path(tempfile.mkdtemp(prefix="weft-parsers-"))


def rows_of(kind: str, name: str, **changed) -> Callable[[bytes], list[Record]]:
  """All records of one file."""
  def parse(data: bytes) -> list[Record]:
    file = folder() / name
    file.write_bytes(data)
    return list(READERS[kind](source(type=kind, path=str(file), **changed), "main").read(Tally()))
  return parse


def json_of(data: bytes):
  """The JSON in it, as a row's would be read; raises DataError."""
  try:
    return parse_json(data.decode("utf-8"))
  except (UnicodeDecodeError, NotJSONError) as e:
    raise DataError(f"a row: {e}") from e


def record_of(data: bytes) -> Record:
  fields = json_of(data)
  if not isinstance(fields, dict):
    raise DataError("a row: no object")
  return Record("a:1", "a:1", fields)


@functools.cache
def encoder(strategy: str):
  config = defaults()
  config.strategy = config_checks.strategy(strategy)
  config.chat.template = "plain"
  resolved = config_checks.resolve(config)
  strategies.fill_in(resolved)
  return make_encoder(resolved, BytesTokenizer(), learns=strategies.learns(resolved))


def shape(data: bytes):
  return ShapeReader(roles=("critic",)).read(record_of(data))


def encode(strategy: str) -> Callable[[bytes], list]:
  """Everything from a row to token ids."""
  return lambda data: encoder(strategy).encode([record_of(data)])


def template(data: bytes) -> str:
  source = data.decode("utf-8", "replace")
  messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
  return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True)


def image(data: bytes):
  """The bytes of an image file."""
  found = read(ImageRef(data, "a:1: image"), 1_000_000)
  return to_pixels(found.data, Preprocess(8))


def film(data: bytes):
  """The bytes of a film: an animated picture, or what a run keeps of one. Those of videos are FFmpeg's to read."""
  if any(data[at:at + len(begins)] == begins for at, begins, _ in films.CONTAINERS):
    raise ImageError("a video")
  found = films.read(ImageRef(data, "a:1: video", film=True), FILMS, 1_000_000)
  return to_pixels(found.data, Preprocess(8))


def film_field(data: bytes):
  """What a row has as its film."""
  value = json_of(data)
  if not re.search(r'"(/|~|file:)', json.dumps(value)):
    return films.read(ImageRef(value, "a:1: video", folder() / "none", True), FILMS, 1_000_000)
  raise ImageError("an absolute path, which is not followed in tests")


def image_field(data: bytes):
  """What a row has as its image. Only what it names in a folder without images can be read."""
  value = json_of(data)
  if isinstance(value, (dict, list)) or not str(value).startswith(("/", "~", "file:")):
    return read(ImageRef(value, "a:1: image", folder() / "none"), 1_000_000)
  raise ImageError("an absolute path, which is not followed in tests")


def safetensors(data: bytes):
  """A whole file of tensors, each of which is then read."""
  where = folder() / "weights"
  where.mkdir(exist_ok=True)
  (where / "model.safetensors").write_bytes(data)
  found = TensorFolder(where)
  return [found.read(name).sum() for name in found.tensors]


def tensor_header(data: bytes):
  """A header, before as many bytes as a small file has."""
  return safetensors(len(data).to_bytes(8, "little") + data + b"\0" * 64)


def index(data: bytes):
  where = folder() / "index"
  where.mkdir(exist_ok=True)
  (where / "model.safetensors.index.json").write_bytes(data)
  return TensorFolder(where)


def model_config(data: bytes):
  where = folder() / "config"
  where.mkdir(exist_ok=True)
  (where / "config.json").write_bytes(data)
  return architecture(where)


def adapter_config(data: bytes):
  where = folder() / "adapter"
  where.mkdir(exist_ok=True)
  (where / "adapter_config.json").write_bytes(data)
  return peft_config.read(where)


def tokenizer(data: bytes, name: str = "tokenizer.json"):
  where = folder() / f"tokenizer of {name}"
  if not where.exists():
    BytesTokenizer().save(where / "tokenizer.json")
  (where / name).write_bytes(data)
  return load_tokenizer(where).encode_batch(["a b"])


def overrides(data: bytes):
  """{dotted key: value} put into a config."""
  config = defaults().to_dict()
  for key, value in record_of(data).fields.items():
    *parents, last = key.split(".")
    node = config
    for parent in parents:
      node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict):
      node[last] = value
  resolved = config_checks.resolve(config)
  config_checks.validate(resolved)
  return resolved


def duration(data: bytes):
  given = record_of(data).fields
  section = defaults()
  for key in [key for key in section if key.startswith("ckpt_")]:
    section[key] = None
  config = config_checks.resolve({**section.to_dict(), **{f"ckpt_{key}": value for key, value in given.items()}})
  return durations.resolve(config, "ckpt", durations.RunLengths(100, batch_size=8, seq_len=64, rows_per_epoch=50))


def mesh_sizes(data: bytes):
  sizes = config_checks.resolve({"mesh": record_of(data).fields}).mesh
  return mesh.axis_sizes(sizes, 8, "cpu")


def regex(data: bytes):
  """A pattern over parameters, and one for answers."""
  pattern = data.decode("utf-8", "replace")
  compile_pattern(pattern, "evals.val.extract")
  return tree.match(((pattern, 1.0),), PATHS, "optimizer.lr_mults")


def weights(data: bytes):
  stages = json_of(data)
  return stage_weights({"a": 1.0, "b": 2.0}, stages if isinstance(stages, list) else [stages])


PARSERS: dict[str, Callable[[bytes], object]] = {
    "text": rows_of("text", "a.txt"), "lines": rows_of("text", "a.txt", documents="line"),
    "jsonl": rows_of("jsonl", "a.jsonl"), "gz": rows_of("jsonl", "a.jsonl.gz"), "zst": rows_of("jsonl", "a.jsonl.zst"),
    "parquet": rows_of("parquet", "a.parquet"), "shape": shape,
    "chat": encode("sft"), "pairs": encode("dpo"), "labels": encode("kto"), "responses": encode("grpo"),
    "pair_shape": lambda data: PairReader().pair(record_of(data)),
    "prompt": lambda data: PromptReader().ask(record_of(data)),
    "rollout": lambda data: RolloutReader().rollout(record_of(data)),
    "template": template, "image": image, "image_field": image_field, "film": film,
    "film_field": film_field, "safetensors": safetensors,
    "tensor_header": tensor_header, "index": index, "model_config": model_config, "adapter_config": adapter_config,
    "tokenizer": tokenizer,
    "tokenizer_config": functools.partial(tokenizer, name="tokenizer_config.json"),
    "overrides": overrides, "duration": duration, "mesh": mesh_sizes, "regex": regex, "weights": weights,
}
# What a fuzzer and the tests begin with: inputs that reach far into each parser.
SEEDS: dict[str, list[bytes]] = {
    "gz": [gzip.compress(b'{"text": "a"}', mtime=0)], "zst": [zstandard.compress(b'{"text": "a"}')],
    "shape": [b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'],
    "chat": [b'{"prompt": "a", "completion": "b"}', b'{"input_ids": [1, 2], "labels": [1, -100]}',
             b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'],
    "pairs": [b'{"prompt": "a", "chosen": "b", "rejected": "c"}'],
    "labels": [b'{"prompt": "a", "completion": "b", "label": true}'],
    "responses": [b'{"prompt": "a", "responses": ["b", "c"], "rewards": [1, 0], "masks": [true, false]}',
                  b'{"prompt": [1], "responses": [[2], [3]], "rewards": [1, 0.5]}'],
    "template": [b"{% for m in messages %}{{ m.role | upper ~ ': ' + m['content'] }}{% endfor %}",
                 b"{% set n = namespace(a=1) %}{% macro f(x) %}{{ x * 2 }}{% endmacro %}{{ f('a')[::-1].split('b') }}"],
    "tensor_header": [b'{"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}}'],
    "index": [b'{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'],
    "model_config": [json.dumps(dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=8, hidden_size=8, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_act="silu", rms_norm_eps=1e-6,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8})).encode()],
    "adapter_config": [b'{"peft_type": "LORA", "r": 3, "lora_alpha": 8, "rank_pattern": {"q": 3}}'],
    "tokenizer": [b'{"version": "1.0", "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": '
                  b'false, "rstrip": false, "normalized": false, "special": true}], "model": {"type": "WordLevel", '
                  b'"vocab": {"a": 0, "<s>": 1}, "unk_token": "a"}, "pre_tokenizer": {"type": "Whitespace"}}'],
    "tokenizer_config": [b'{"eos_token": "<|eos|>", "added_tokens_decoder": {"258": {"content": "<x>"}}}'],
    "overrides": [b'{"optimizer.learning_rate": 0.1, "input.sources": {"a": {"type": "text"}}, "total_steps": 3}',
                  b'{"optimizer.learning_rate": 0.1, "input": 1}'],
    "duration": [b'{"steps": 3}', b'{"percent": 20.5}', b'{"epochs": 0.5}'], "mesh": [b'{"data": -1, "tensor": 2}'],
    "regex": [b"(attn|mlp)/.*kernel$"], "weights": [b'[[10, {"a": 0.5}], [20, {"b": 0}]]'],
    "jsonl": [b'{"text": "a"}\n\n{"text": "b"}\n'],
}
# A picture of 1 × 1 pixel, and a file of one tensor.
_PNG = (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0:~\x9bU\0\0\0\nIDATx\x9cch\0\0\0\x82\0\x81"
        b"w\xcdr\xb6\0\0\0\0IEND\xaeB`\x82")
# A GIF of two frames of 2 × 2 pixels.
_FILM = (b"R0lGODlhAgACAIEAAAAAAP///wAAAAAAACH5BAAKAAAALAAAAAACAAIAAAgGAAEIBBAQACH5BAEKAAEALAAAAAACAAIAgf///wAA"
         b"AAAAAAAAAAgGAAEIBBAQADs=")
SEEDS |= {
    "rollout": SEEDS["responses"], "pair_shape": SEEDS["pairs"], "prompt": SEEDS["shape"] + SEEDS["chat"],
    "image": [_PNG], "image_field": [b'"a.png"', json.dumps("data:image/png;base64," + base64.b64encode(
        _PNG).decode()).encode(), b'{"image_url": {"url": "http://127.0.0.1/a.png"}}'],
    "film": [base64.b64decode(_FILM)], "film_field": [
        json.dumps({"frames": ["data:image/png;base64," + base64.b64encode(_PNG).decode()] * 2, "fps": 2}).encode(),
        b'{"video": {"path": "a.gif"}}', b'["a.png", "b.png"]'],
    "safetensors": [len(SEEDS["tensor_header"][0]).to_bytes(8, "little") + SEEDS["tensor_header"][0] + b"\0" * 64],
}
