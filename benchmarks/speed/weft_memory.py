"""Weft's side of `python -m benchmarks.speed.memory`: `… weft_memory LENGTH VOCAB` prints one line of JSON."""

import json
import sys

from benchmarks.speed import peak
from trainer import startup


def main(length: int, vocab: int) -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np

  from benchmarks.speed import weft_config
  from trainer import program as program_lib
  from trainer.distributed import mesh as mesh_lib

  imported = peak.used_mb("VmRSS")
  config = weft_config.get_config("seq,unused")
  config.batch_size, config.seq_len = 1, length
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, "cpu")
  model = program_lib.make_model(config, vocab)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model),
                                     mesh_lib.make_mesh({}), ["main"])
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract_state)
  state["params"] = jax.jit(model.init)(jax.random.key(0))
  whole = dict(tokens=np.random.default_rng(0).integers(4, vocab, (1, length)), segment_ids=np.ones((1, length)),
               positions=np.arange(length)[None], loss_weights=np.ones((1, length)))
  batch = {key: np.asarray(whole.get(key, np.zeros(leaf.shape)), leaf.dtype)
           for key, leaf in program_lib.abstract_batch(config, model, 1).items()}
  for _ in range(3):  # the first two compile: the state is placed anew
    peak.forget()
    state, _ = jax.block_until_ready(program.update_fn(state, batch))
  print(json.dumps(dict(mb=peak.used_mb() - imported, versions={"jax": jax.__version__})))


if __name__ == "__main__":
  startup.use_huge_pages()
  startup.set_environment()
  main(*map(int, sys.argv[1:]))
