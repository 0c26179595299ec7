"""What tests/trainer/test_startup.py runs in a process of its own: the first evaluation of a run on a mesh of CPU
devices, in bfloat16. Its program has a loop with collectives, and others after it that need not wait for the loop."""

import os
import sys

from trainer import startup
from trainer.callbacks import Callback

PRECISION = "bfloat16"


class Stop(Callback):
  """Ends the process before the first step."""

  def on_step_begin(self, run):
    print("evaluated:", run.last_eval, flush=True)
    os._exit(0)


def main(workdir: str) -> None:
  startup.set_environment(dict(compute=PRECISION))
  from configs import quickstart
  from trainer import train

  config = quickstart.get_config()
  config.mesh.update(data=1, fsdp=2, context=4)
  config.tokenizer.type, config.model.vocab_multiple, config.precision.compute = "bytes", 1024, PRECISION
  del config.evals.samples
  config.evals.val.baselines = ()
  config.input.sources.main.validation_fraction = 0.01  # of 5%: it stood still in so few batches as well
  config.callbacks.stop = dict(type="tests.trainer.evaluate_on_a_mesh.Stop")
  train(config, workdir)


if __name__ == "__main__":
  main(sys.argv[1])
