"""The plan as text, as a page and as a picture."""

import io
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from trainer.plan_compile import Compiled
from trainer.plan_estimate import Estimate
from trainer.terminal import table

GIB = 2**30


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


def size(value: float) -> str:
  """Bytes for people."""
  for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
    if value >= factor:
      return f"{value / factor:,.2f} {unit}"
  return f"{value:,.0f} B"


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


def picture(plan: Plan) -> str:
  """Memory, time and meshes as an SVG picture."""
  import matplotlib
  with matplotlib.rc_context({"svg.hashsalt": "weft"}):
    out = io.StringIO()
    draw(plan).savefig(out, format="svg", metadata={"Date": None})
  svg = out.getvalue()
  return svg[svg.index("<svg"):]


def draw(plan: Plan) -> Any:
  """The picture as a matplotlib figure."""
  import matplotlib
  from matplotlib.figure import Figure
  e = plan.estimate
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    top, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    memory, time = top.subplots(1, 2)
    _draw_memory(memory, plan)
    names = ("compute", "memory", "hidden", "exposed", "step")
    labels = ("matrix products", "memory traffic", "transfers beside\ncomputation", "transfers waited for", "a step")
    scale, unit = (1, "seconds") if e.seconds["step"] >= 1 else (1e3, "milliseconds")
    bars = time.barh(labels, [e.seconds[name] * scale for name in names],
                     color=["#4878a8", "#6acc64", "#d5bb67", "#c44e52", "#444444"])
    time.bar_label(bars, fmt="%.3g", padding=3)
    time.invert_yaxis()
    time.margins(x=0.15)
    time.set(xlabel=unit, title=f"time: MFU {e.mfu:.0%}, {e.tokens / e.seconds['step']:,.0f} tokens/s")
    axes = below.subplots()
    shown = plan.by_mesh
    bars = axes.barh([mesh_text(o.sizes) + (" (configured)" if o.sizes == e.sizes else "") for o in shown],
                     [o.seconds["step"] * scale for o in shown],
                     color=["#4878a8" if o.fits else "#dddddd" for o in shown])
    axes.bar_label(bars, [f"{o.total / GIB:.2f} GiB{'' if o.fits else ', does not fit'}" for o in shown], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=f"predicted step, {unit}", title="other meshes")
    for part in (memory, time, axes):
      part.spines[["top", "right"]].set_visible(False)
  return figure


def _draw_memory(axes: Any, plan: Plan) -> None:
  e, c = plan.estimate, plan.compiled
  colors = ["#4878a8", "#6acc64", "#ee854a", "#d65f5f", "#956cb4", "#8c613c", "#dc7ec0", "#797979", "#d5bb67"]
  left, small = 0.0, 0.0
  for (kind, value), color in zip(e.memory.items(), colors * 2, strict=False):
    if value < 0.01 * e.total:
      small += value
      continue
    axes.barh(["estimated"], [value / GIB], left=left / GIB, color=color, label=kind)
    left += value
  if small:
    axes.barh(["estimated"], [small / GIB], left=left / GIB, color="#bbbbbb", label="other")
  if c is not None and not c.failure:
    kept = c.arguments + c.outputs - c.aliased
    axes.barh(["compiled"], [kept / GIB], color="#222222", label="compiled: arguments, outputs")
    axes.barh(["compiled"], [c.temporaries / GIB], left=kept / GIB, color="#888888", label="compiled: temporaries")
  if e.usable < 20 * e.total:
    axes.axvline(e.usable / GIB, color="#c44e52", linestyle="--")
  axes.invert_yaxis()
  axes.set(xlabel="GiB of each device", title=f"memory: {size(e.total)} of {size(e.usable)}")
  axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def page(plan: Plan, svg: str) -> str:
  """The page, self-contained."""
  body = "".join(f"<h2>{escape(title)}</h2>\n<pre>{escape(content)}</pre>\n" for title, content in sections(plan))
  return _PAGE.format(svg=svg, body=body)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Weft: the plan</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style>
<h1>The plan</h1>
{svg}
{body}
</html>
"""
