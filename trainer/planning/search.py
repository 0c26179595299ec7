"""What else could be: other meshes, other remat policies, larger batches; and what to type for them."""

import math
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.planning.estimate import Estimate, Planner

# Policies compared, from the one that keeps most.
REMATS = ("none", "dots_no_batch", "attention_mlp", "attention", "full")
# Meshes shown.
SHOWN = 8
# What is faster by less than this share of a step is not advised: estimates are no better.
CLEARLY = 0.02
# The shortest part of a row that is worth splitting off, and the widest axes that are tried.
SHORTEST_PART, WIDEST = 2048, dict(tensor=16, context=16, expert=64)


def remats(planner: Planner, sizes: Any) -> list[Estimate]:
  """The estimate with each policy, the config's own included."""
  own = planner.config.remat
  policies = (*REMATS, *(() if own in REMATS else (own,)))
  return [planner.estimate(sizes, remat) for remat in tqdm(policies, desc="remat policies traced", unit="policy",
                                                           leave=False, disable=None)]


def meshes(planner: Planner) -> list[Estimate]:
  """Estimates on other meshes: those that fit from the fastest on, or if none does, those that need least memory."""
  found = []
  for sizes in _factorizations(planner):
    try:
      found.append(planner.estimate(sizes))
    except ConfigError:  # it cannot split the batch
      continue
  fitting = [estimate for estimate in found if estimate.fits]
  if fitting:
    # Of two that are as fast to three digits, the one that needs less memory.
    return sorted(fitting, key=lambda e: (float(f"{e.seconds['step']:.2e}"), e.total))[:SHOWN]
  return sorted(found, key=lambda e: e.total)[:SHOWN]


def _factorizations(planner: Planner) -> Iterator[dict[str, int]]:
  """Sizes of the axes that could make sense."""
  topology, config = planner.topology, planner.config
  spec = getattr(planner.traced()[0].model, "spec", None)
  group = planner.devices // topology.slices
  switch = 0 if topology.chip.torus else topology.per_group  # tensor parallelism does not leave a node
  for tensor in _divisors(group, min(WIDEST["tensor"], switch or group)):
    if spec is None and tensor > 1 or spec is not None and spec.num_heads % tensor:
      continue
    for context in _divisors(group // tensor, WIDEST["context"]):
      if context > 1 and (spec is None or spec.no_split_length or config.seq_len // context < SHORTEST_PART
                          or config.seq_len % (2 * context * tensor)):
        continue
      experts = 1 if spec is None or spec.moe is None else spec.moe.num_experts
      for expert in _divisors(math.gcd(group // tensor // context, experts), WIDEST["expert"]):
        rest = group // tensor // context // expert
        for fsdp in _divisors(rest, rest):
          yield dict(slice=topology.slices, data=rest // fsdp, fsdp=fsdp, expert=expert, context=context, tensor=tensor)


def _divisors(n: int, most: int) -> list[int]:
  return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def flags(sizes: dict[str, int], remat: str | None = None) -> str:
  """What to type for that mesh, and that remat."""
  parts = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()
           if size > 1 or axis == "data"]  # `data` is -1 by default, the others 1
  return " ".join(parts + ([f"--config.remat={remat}"] if remat else []))


def advice(planner: Planner, now: Estimate, by_remat: list[Estimate], by_mesh: list[Estimate]) -> list[str]:
  """Sentences on what would be better, each with what to type."""
  said, config = [], planner.config
  step = now.seconds["step"]
  if not now.fits:
    said.append(f"It does not fit: {now.total / 2**30:.1f} GiB of {now.usable / 2**30:.1f} on each device.")
    if 0 < now.most_rows < now.rows:
      accum = config.grad_accum_steps * next(
          n for n in range(2, now.rows + 1) if now.rows % n == 0 and now.rows // n <= now.most_rows)
      said.append(f"The same batch in smaller micro-batches fits: --config.grad_accum_steps={accum}")
  elif now.most_rows > now.rows:
    micro = now.most_rows * math.prod(now.sizes[axis] for axis in mesh_lib.BATCH_AXES)
    fits = f"Up to {micro:,} rows fit in a micro-batch, {now.most_rows} on a device where there are {now.rows}"
    # Fewer micro-batches are the same training; a larger batch is another one.
    accum = next(n for n in range(1, config.grad_accum_steps + 1)
                 if config.grad_accum_steps % n == 0 and config.batch_size // n <= micro)
    if accum < config.grad_accum_steps:
      said.append(f"{fits}. The same batch in fewer micro-batches: --config.grad_accum_steps={accum}")
    else:
      said.append(f"{fits}. A larger batch is another training, with another best learning rate, and what is counted "
                  f"in steps sees more rows; if that is wanted: --config.batch_size={micro * config.grad_accum_steps}")
  others = [e for e in by_remat if e.remat != now.remat and e.fits]
  quickest = [(e, f"--config.remat={e.remat}") for e in sorted(others, key=lambda e: e.seconds["step"])[:1]]
  quickest += [(e, flags(e.sizes)) for e in by_mesh[:1] if e.fits and e.sizes != now.sizes]
  better = [(e, typed) for e, typed in quickest if not now.fits or e.seconds["step"] < (1 - CLEARLY) * step]
  said += [f"{'Faster' if now.fits else 'Fits'}, {_seconds(e)}: {typed}" for e, typed in better]
  if not now.fits and len(said) == 1:
    said.append("Nothing that was tried fits: more devices, shorter rows, a smaller micro-batch with another mesh, "
                "or adapters (model.lora.rank).")
  if now.fits and not better:
    gain = max((1 - e.seconds["step"] / step for e, _ in quickest), default=0.0)
    said.append(f"No other mesh or remat is faster by {CLEARLY:.0%} of a step or more, within which estimates are no "
                "guide" + (f"; the fastest of them is by {gain:.1%}." if gain >= 0.0005 else "."))
  return said


def _seconds(estimate: Estimate) -> str:
  return f"{estimate.seconds['step']:.3g} s a step, {estimate.total / 2**30:.2f} GiB"
