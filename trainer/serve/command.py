"""Serve a model over HTTP: python -m trainer.serve --workdir=DIR [--step=N] | --hf=DIR [--port=8000] [--rows=32]

The protocol is that of OpenAI's /v1/chat/completions and /v1/completions, with streams, log-probs and, as vLLM has
them, token ids in and out; requests that wait are generated together. `POST /v1/load_weights {"path": FOLDER}` takes
other parameters of the same model. Needs starlette and uvicorn: pip install 'weft[serve]'.
"""

import sys
from typing import Any

from absl import app, flags

from trainer import startup
from trainer.errors import ConfigError, DataError


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

  if (given.workdir is None) == (given.hf is None):
    raise ConfigError("give one of --workdir (a run) and --hf (a Hugging Face folder).")
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=given.tensor))
  if given.hf:
    loaded = generate.load_folder(given.hf, mesh, template=given.template)
  else:
    loaded = generate.load_run(given.workdir, mesh, step=given.step, template=given.template)
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


def _define_flags() -> None:
  """Only for the command."""
  flags.DEFINE_string("workdir", None, "A run's folder.")
  flags.DEFINE_integer("step", None, "Which of its checkpoints. Default: the newest.")
  flags.DEFINE_string("hf", None, "A Hugging Face folder, in place of a run.")
  flags.DEFINE_string("template", None, "Chat template in place of the model's: a name, or a .jinja file.")
  flags.DEFINE_string("name", None, "Of the model, as responses tell it. Default: the folder.")
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all.")
  flags.DEFINE_integer("port", 8000, "Port to listen on.")
  flags.DEFINE_integer("rows", 32, "Texts that are generated at a time.", lower_bound=1)
  flags.DEFINE_integer("prefill_chunk", 0, "Prompts longer than this are run so many tokens at a time, between the "
                       "steps of others; 0: each at once.", lower_bound=0)
  flags.DEFINE_integer("kept_texts", 0, "Conversations whose keys and values are kept when they have been answered, so "
                       "that of one that goes on only what is new is run.", lower_bound=0)
  flags.DEFINE_integer("tensor", 1, "Devices that each matrix is split over; the others each hold a share of it.")


def main(argv: list[str]) -> None:
  """Runs the command."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  startup.keep_compiled_programs()
  with startup.one_message(ConfigError, DataError, OSError):
    try:
      import uvicorn
    except ImportError as error:
      raise ConfigError(f"{error}. python -m trainer.serve needs it: pip install 'weft[serve]'.") from error
    given = flags.FLAGS
    uvicorn.run(make_app(given), host=given.host, port=given.port, log_level="warning")
