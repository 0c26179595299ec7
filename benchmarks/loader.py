"""Tokens per second of the input pipeline alone, from a warm cache, on the standard library's sources.

    python benchmarks/loader.py [--seconds 5]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs import quickstart
from input_pipeline import loader
from input_pipeline.tokenizer.tokenizer import make_tokenizer
from trainer.config import checks as config_checks


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seconds", type=float, default=5.0)
  seconds = parser.parse_args().seconds
  with tempfile.TemporaryDirectory() as folder:
    for packing in ("concat", "best_fit", "none"):
      config = quickstart.get_config()
      config.input.packing, config.batch_size = packing, 32
      config = config_checks.resolve(config)
      tokenizer = make_tokenizer(config.tokenizer, loader.train_texts(config, "texts"), Path(folder) / "tokenizer.json")
      data = loader.make_train_data(config, tokenizer, learns="texts", workdir=folder)
      data.batch(0)  # the epoch's plan
      step, start = 0, time.perf_counter()
      while time.perf_counter() - start < seconds:
        data.batch(step)
        step += 1
      rate = step * 32 * config.seq_len / (time.perf_counter() - start)
      print(f"{packing:<9} {rate / 1e6:6.1f} M tokens/s in one thread, {step} batches of 32 × {config.seq_len}")


if __name__ == "__main__":
  main()
