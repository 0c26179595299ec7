"""A real chat model, end to end: python -m benchmarks.real_model FOLDER [--epoch]

FOLDER is SmolLM2-135M-Instruct with golden.npz, what transformers computed: `input_ids` [1, T], `logits` [1, T, V] and
`answer`, the tokens of its greedy answer. Compares logits (within 1e-5 of the largest), the answer, and the tensors
that are written again; with --epoch an epoch of LoRA on 32 conversations follows, by the trainer's command.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from models import hf
from trainer.generate.sampler import Sampler


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folder", type=Path)
  parser.add_argument("--epoch", action="store_true")
  args = parser.parse_args()
  model, params = hf.load(args.folder)
  with np.load(args.folder / "golden.npz") as opened:
    golden = dict(opened)
  tokens_BxT = golden["input_ids"].astype(np.int32)
  largest = np.abs(golden["logits"]).max()
  apart = np.abs(np.asarray(jax.jit(model.logits)(params, tokens_BxT)) - golden["logits"]).max()
  print(f"logits: at most {apart:.1e} apart, of {largest:.1f}")
  answer = Sampler(model).generate(params, [tokens_BxT[0]], max_new_tokens=len(golden["answer"]), temperature=0)[0].ids
  print(f"greedy answer: {'the same' if np.array_equal(answer, golden['answer']) else f'{answer}, another'}")
  with tempfile.TemporaryDirectory() as scratch:
    hf.save(*hf.load(args.folder, dtype=None), Path(scratch) / "again")
    before, after = (hf.TensorFolder(folder) for folder in (args.folder, Path(scratch) / "again"))
    same = all(before.read(name).tobytes() == after.read(name).tobytes() for name in before.tensors)
    print(f"written again: {len(before.tensors)} tensors, {'the same' if same else 'NOT the same'} bytes")
    if args.epoch:
      rows = [{"messages": [{"role": "user", "content": f"What is {i} plus 1?"},
                            {"role": "assistant", "content": str(i + 1)}]} for i in range(32)]
      (Path(scratch) / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
      subprocess.run([sys.executable, "-m", "trainer", "--config=configs/sft.py", f"--workdir={scratch}/run",
                      f"--config.model.hf={args.folder}", f"--config.input.sources.main.path={scratch}/rows.jsonl",
                      "--config.model.lora.rank=8", "--config.total_epochs=1", "--config.batch_size=2",
                      "--config.grad_accum_steps=1", "--config.seq_len=128",
                      "--config.input.sources.main.validation_fraction=0.2"], check=True)
  sys.exit(apart > 1e-5 * largest or not same or not np.array_equal(answer, golden["answer"]))


if __name__ == "__main__":
  main()
