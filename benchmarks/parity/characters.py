"""nanoGPT's character model on Tiny Shakespeare, trained by PyTorch and by Weft, beside the quickstart's model of as
many parameters: `python -m benchmarks.parity.characters --data input.txt --peer peers/bin/python --out runs/characters`

The setting is nanoGPT's for a CPU (its README: 4 layers, width 128, 64 characters, 12 rows, 2,000 steps, no dropout;
it reports a validation loss of 1.88): AdamW, a warm-up and a cosine, the last tenth of the text held out. `torch`: a
plain loop with the GPT-2 of transformers without biases (characters_peer.py). `weft`: the same model and settings.
`quickstart`: the block, the optimizer and the schedule of configs/quickstart.py, as many parameters, steps and rows.
All predict every character of the validation text from those before it in its row of 64, in nats. Several seeds each;
what is in --out is not run again.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from benchmarks.parity.__main__ import HERE, ROOT, run
from trainer.config import defaults, evaluator, source
from trainer.telemetry.writers import read_rows

SETTINGS = dict(layers=4, heads=4, width=128, length=64, rows=12, steps=2000, learning_rate=1e-3, floor=0.1, warmup=100,
                b1=0.9, b2=0.99, weight_decay=0.1, clip_norm=1.0, held_out=0.1)


def write(out: Path, data: Path, settings: dict) -> None:
  """Writes settings.json, both parts of the text, and a tokenizer whose tokens are its characters.

  Raises:
    ValueError: the folder holds results of other settings.
  """
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  out.mkdir(parents=True, exist_ok=True)
  text = data.read_text("utf-8")
  cut = int(len(text) * (1 - settings["held_out"]))
  settings = settings | {"vocab": sorted(set(text))}
  file = out / "settings.json"
  if file.exists() and json.loads(file.read_text()) != settings:
    raise ValueError(f"{out} holds results of other settings than these; remove it, or choose another --out.")
  for name, part in (("train", text[:cut]), ("validation", text[cut:])):
    (out / f"{name}.txt").write_text(part, "utf-8")
  tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(settings["vocab"])}))
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.decoder = decoders.Fuse()
  tokenizer.save(str(out / "tokenizer.json"))
  file.write_text(json.dumps(settings))


def get_config(arg: str) -> ConfigDict:
  """Weft's sides; `arg`: the folder that `write` made, weft or quickstart, and the seed."""
  folder, side, seed = arg.split(",")
  s = json.loads((Path(folder) / "settings.json").read_text())
  c = defaults()
  c.seed = int(seed)
  c.input.sources.main = source(type="text", path=f"{folder}/train.txt", split="all")
  c.tokenizer.type, c.tokenizer.path, c.tokenizer.add_bos, c.tokenizer.add_eos = "hf", folder, False, False
  m, o = c.model, c.optimizer
  m.vocab_size, m.num_layers, m.num_heads, m.hidden_size = len(s["vocab"]), s["layers"], s["heads"], s["width"]
  # A row's first token is not predicted: as many targets as nanoGPT's rows have.
  c.seq_len, c.batch_size, c.total_steps = s["length"] + 1, s["rows"], s["steps"]
  o.b1, o.b2, o.weight_decay, o.clip_norm = s["b1"], s["b2"], s["weight_decay"], s["clip_norm"]
  if side == "weft":
    m.norm, m.norm_eps, m.activation, m.intermediate_size = "layernorm", 1e-5, "gelu_exact", 4 * s["width"]
    m.positions, m.max_positions = "learned", c.seq_len
    o.name, o.learning_rate = "adamw", s["learning_rate"]
    o.wd_mults = ((r".*(scale|bias)$", 0.0),)  # nanoGPT decays embeddings, too
    c.schedule = dict(name="cosine", warmup_steps=s["warmup"], floor=s["floor"])
  else:
    m.intermediate_size, m.qk_norm = 8 * s["width"] // 3, True  # three matrices, as many numbers as two of 4 × width
    o.name, o.learning_rate = "muon", 1e-2
    c.schedule = dict(name="wsd", decay_percent=50.0, floor=0.02)
  c.precision.params = c.precision.compute = "float32"
  held_out = source(type="text", path=f"{folder}/validation.txt", split="all")
  c.evals.val = evaluator(type="loss", sources=dict(main=held_out), eval_percent=10.0, batch_size=64)
  c.ckpt_percent = 0.0
  c.report = False
  return c


def result(out: Path, side: str, seed: int, peer: str) -> dict:
  """{parameters, curve: [[updates, validation loss], …], seconds} of a run, made unless it is there."""
  file, log = out / f"{side}-{seed}.json", out / f"{side}-{seed}.log"
  if file.exists():
    return json.loads(file.read_text())
  began = time.monotonic()
  if side == "torch":
    run([peer, str(HERE / "characters_peer.py"), str(out), str(seed), str(out / "torch.part")], log, PYTHONPATH="")
    found = json.loads((out / "torch.part").read_text())
  else:
    workdir = out / f"{side}-{seed}"
    run([sys.executable, "-m", "trainer", f"--config={HERE}/characters.py:{out},{side},{seed}",
         f"--workdir={workdir}"], log, PYTHONPATH=str(ROOT))
    rows = [row for row in read_rows(workdir / "metrics.jsonl") if "eval/val/loss" in row]
    started = json.loads((workdir / "run.json").read_text())["starts"][-1]
    found = {"parameters": started["parameters"]["all"], "curve": [[row["step"], row["eval/val/loss"]] for row in rows]}
  found["seconds"] = time.monotonic() - began
  file.write_text(json.dumps(found))
  return found


def table(found: dict[str, list[dict]]) -> str:
  """Markdown: parameters, the validation loss at the end (mean, least to most of the seeds), seconds of the command."""
  lines = ["| | parameters | validation loss | least to most | wall time |", "|---|---|---|---|---|"]
  for side, runs in found.items():
    last = [one["curve"][-1][1] for one in runs]
    lines.append(f"| {side} | {runs[0]['parameters']:,} | {np.mean(last):.3f} | {min(last):.3f} to {max(last):.3f} | "
                 f"{np.mean([one['seconds'] for one in runs]):.0f} s |")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--data", type=Path, required=True, help="Tiny Shakespeare, or another text")
  parser.add_argument("--peer", required=True, help="the Python with torch and transformers")
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
  args = parser.parse_args()
  out = args.out.resolve()
  write(out, args.data, SETTINGS | {"steps": args.steps})
  found: dict[str, list[dict]] = {"torch": [], "weft": [], "quickstart": []}
  for seed in range(args.seeds):
    for side, runs in found.items():
      runs.append(result(out, side, seed, args.peer))
      print(f"{side}, seed {seed}: {runs[-1]['curve'][-1][1]:.3f} in {runs[-1]['seconds']:.0f} s", flush=True)
  print(table(found))


if __name__ == "__main__":
  main()
