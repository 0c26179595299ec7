"""The plan as text and as a page."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from trainer.planning.compile import Compiled
from trainer.planning.estimate import Estimate
from trainer.report import pages
from trainer.telemetry.terminal import table

size = functools.partial(pages.size, digits=2)


class Plan(NamedTuple):
  """All that is shown.

  Attributes:
    heading: lines that say what was asked.
    parameters: (total, trained, of a token).
    estimate: of the config as it is.
    compiled: what the compiler says, None: it was not asked; `why_not` says why.
    by_remat, by_mesh: alternatives.
    advice: what would be better, and what to type.
    assumptions: lines.
  """

  heading: list[str]
  parameters: tuple[int, int, int]
  estimate: Estimate
  compiled: Compiled | None
  why_not: str
  by_remat: list[Estimate]
  by_mesh: list[Estimate]
  advice: list[str]
  assumptions: list[str]


def seconds(value: float) -> str:
  """A time for people."""
  return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms" if value >= 1e-3 else f"{value * 1e6:,.0f} µs"


def sections(plan: Plan) -> list[tuple[str, str]]:
  """(title, text) of each part."""
  e, parts = plan.estimate, [("What", "\n".join(plan.heading))]
  total, trained, active = plan.parameters
  parts.append(("Parameters", table([
      ("all", f"{total:,}"), ("trained", f"{trained:,}"), ("that a token passes through", f"{active:,}")])))
  parts.append(("Memory of each device", _memory(plan)))
  parts.append(("Operations of a step", table([
      ("model", f"{e.model_flops:.4g} FLOPs"),
      ("with what is recomputed", f"{e.hardware_flops:.4g} FLOPs  ({e.hardware_flops / e.model_flops:.2f} ×)"),
      ("tokens", f"{e.tokens:,.0f}")])))
  parts.append(("Between devices, received by each in a step", _transfers(plan)))
  t = e.seconds
  parts.append(("Time of a step, predicted", table([
      ("matrix products", seconds(t["compute"])), ("memory traffic", seconds(t["memory"])),
      ("transfers beside computation", seconds(t["hidden"])), ("transfers that computation waits for",
                                                               seconds(t["exposed"])),
      ("a step", seconds(t["step"]) + "  = the longest of the first three, and the fourth"),
      ("tokens/s", f"{e.tokens / t['step']:,.0f}"), ("MFU", f"{e.mfu:.1%}")])))
  parts.append(("Other remat policies", alternatives(plan.by_remat, e, by_mesh=False)))
  parts.append(("Other meshes, by predicted time", alternatives(plan.by_mesh, e, by_mesh=True)))
  parts.append(("What to type", "\n".join(plan.advice)))
  parts.append(("Assumed", "\n".join(plan.assumptions)))
  return parts


def text(plan: Plan) -> str:
  """For a terminal."""
  return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections(plan))


def _memory(plan: Plan) -> str:
  e, c = plan.estimate, plan.compiled
  rows = [(kind, size(value)) for kind, value in e.memory.items()]
  rows.append(("all, estimated", f"{size(e.total)} of {size(e.usable)}: {'fits' if e.fits else 'does NOT fit'}"))
  if e.host:
    rows.append(("in the host's memory", size(e.host)))
  if c is not None and not c.failure:
    rows += [("compiled: arguments", size(c.arguments)), ("compiled: outputs", size(c.outputs)),
             ("compiled: temporaries", size(c.temporaries)), ("compiled: outputs in place of arguments",
                                                              size(c.aliased)),
             ("all, compiled", f"{size(c.total)} of {size(e.usable)}: "
                               f"{'fits' if c.total <= e.usable else 'does NOT fit'} (compiled in {c.seconds:.0f} s)")]
  lines = [table(rows)]
  if c is None:
    lines.append(f"An estimate, not compiled: {plan.why_not}.")
  elif c.too_large:
    lines.append(f"It does NOT fit, says the compiler: {_first_lines(c.failure)}")
  elif c.failure:
    lines.append(f"It does not compile: {_first_lines(c.failure)}")
  lines.append(f"Each further row of a micro-batch on a device: {size(e.per_row)}; the most that fit: {e.most_rows} "
               f"(now {e.rows}).")
  return "\n".join(lines)


def _first_lines(message: str, most: int = 600) -> str:
  return message if len(message) <= most else message[:most] + " …"


def _transfers(plan: Plan) -> str:
  e = plan.estimate
  rows = [("collective", "of", "axes", "link", "bytes", "time", "beside computation")]
  rows += [(x.kind, x.what, "+".join(x.axes), x.link, size(x.bytes), seconds(x.seconds), "yes" if x.hidden else "no")
           for x in sorted(e.transfers, key=lambda x: -x.seconds)]
  lines = [table(rows, range(4)) if len(rows) > 1 else "nothing"]
  if plan.compiled is not None and plan.compiled.collectives:
    c = plan.compiled
    rows = [(kind, "+".join(axes), f"{count:,}", size(sent), f"{hidden / sent:.0%}" if sent else "")
            for kind, axes, count, sent, hidden in c.collectives]
    head = ("collective", "axes", "times", "bytes", "beside computation")
    lines += ["", "of the compiled program:", table([head, *rows], range(2)),
              f"parameters and gradients copied or transposed: {size(plan.compiled.copied)}"]
  return "\n".join(lines)


def mesh_text(sizes: dict[str, int]) -> str:
  """A mesh in short."""
  return ", ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def alternatives(found: Sequence[Estimate], now: Estimate, by_mesh: bool) -> str:
  """A table of other possibilities, the one that is configured marked."""
  rows = [("mesh" if by_mesh else "remat", "memory", "", "step", "tokens/s", "MFU", "most rows")]
  for e in found:
    name = mesh_text(e.sizes) if by_mesh else e.remat
    mark = " (as configured)" if (e.sizes, e.remat) == (now.sizes, now.remat) else ""
    rows.append((name + mark, size(e.total), "fits" if e.fits else "does not fit", seconds(e.seconds["step"]),
                 f"{e.tokens / e.seconds['step']:,.0f}", f"{e.mfu:.1%}", str(e.most_rows)))
  return table(rows)


def page(plan: Plan) -> str:
  """The page: memory, time and meshes as bars, and everything as text."""
  e, c = plan.estimate, plan.compiled
  memory = [(kind, value, size(value)) for kind, value in e.memory.items() if value >= 0.01 * e.total]
  memory.append(("all, estimated", e.total, f"{size(e.total)} of {size(e.usable)}"))
  if c is not None and not c.failure:
    memory.append(("all, compiled", c.total, size(c.total)))
  names = {"compute": "matrix products", "memory": "memory traffic", "hidden": "transfers beside computation",
           "exposed": "transfers waited for", "step": "a step"}
  times = [(text, e.seconds[name], seconds(e.seconds[name])) for name, text in names.items()]
  meshes = [(mesh_text(o.sizes) + (" (configured)" if o.sizes == e.sizes else ""), o.seconds["step"],
             f"{seconds(o.seconds['step'])}, {size(o.total)}{'' if o.fits else ', does not fit'}")
            for o in plan.by_mesh]
  return pages.page("Weft: the plan", pages.tag("h1", "The plan"),
                    pages.bars(memory, "memory of each device"), pages.bars(times, "time of a step, predicted"),
                    pages.bars(meshes, "a step on other meshes, predicted"),
                    *(pages.section("", title, pages.tag("pre", content)) for title, content in sections(plan)))
