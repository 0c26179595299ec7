"""Serve a model over HTTP: python -m trainer.serve --workdir=DIR [--step=N] | --hf=DIR [--port=8000] [--rows=32]

The protocol is that of OpenAI's /v1/chat/completions and /v1/completions, with streams, log-probs and, as vLLM has
them, token ids in and out; requests that wait are generated together. `POST /v1/load_weights {"path": FOLDER}` takes
other parameters of the same model. Needs starlette and uvicorn: pip install 'weft[serve]'.
"""

import sys
from typing import Any

from absl import flags

from trainer import startup
from trainer.errors import ConfigError


def make_app(given: Any) -> Any:
  """The ASGI application of these flags.

  Raises:
    ConfigError, DataError: no such model.
  """
  import jax

  from models import hf
  from trainer import tree
  from trainer.checkpoints.fingerprint import fingerprint
  from trainer.distributed import mesh as mesh_lib
  from trainer.generate import command as generate
  from trainer.generate.sampler import Sampler
  from trainer.serve.app import Server
  from trainer.serve.engine import Engine

  loaded, mesh = generate.load(given)
  sys.stderr.write(f"{loaded.origin}\n")

  def reload(folder: str) -> tuple[Any, str]:
    dtype = jax.tree.leaves(loaded.params)[0].dtype
    _, other = hf.load(folder, dtype=dtype, shardings=lambda p: mesh_lib.param_shardings(p, mesh)[0])
    if problems := tree.compare(tree.flatten(other), tree.flatten(loaded.model.abstract_params())):
      raise ConfigError(f"{folder} holds another model than the one that is served: {problems[0]}.")
    return other, fingerprint(other)

  sampler = Sampler(loaded.model, mesh, rows=given.rows, chunk=generate.CHUNK, prefill_chunk=given.prefill_chunk)
  engine = Engine(sampler, loaded.params, loaded.tokenizer, given.kept_texts)
  name = given.name or (given.hf or given.workdir).rstrip("/")
  return Server(engine, loaded, name, fingerprint(loaded.params), reload if given.hf else None).app()


def _run(given: Any) -> None:
  try:
    import uvicorn
  except ImportError as error:
    raise ConfigError(f"{error}. python -m trainer.serve needs it: pip install 'weft[serve]'.") from error
  # It says where it listens, once it does.
  uvicorn.run(make_app(given), host=given.host, port=given.port, log_level="info", access_log=False)


def _define_flags() -> None:
  startup.define_model_flags()
  flags.DEFINE_string("name", None, "Of the model, as responses tell it. Default: the folder.")
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all.")
  flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any that is free.", lower_bound=0, upper_bound=65535)
  flags.DEFINE_integer("rows", 32, "Texts that are generated at a time.", lower_bound=1)
  flags.DEFINE_integer("prefill_chunk", 0, "Prompts longer than this are run so many tokens at a time, between the "
                       "steps of others; 0: each at once.", lower_bound=0)
  flags.DEFINE_integer("kept_texts", 0, "Conversations whose keys and values are kept when they have been answered, so "
                       "that of one that goes on only what is new is run.", lower_bound=0)


def main(argv: list[str]) -> None:
  startup.run_given(argv, _run)
