"""A plan's page has the numbers of its estimate, each where it belongs: made by hand, all of them different."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests import tiny
from trainer.planning import page
from trainer.planning import plan as plan_lib
from trainer.planning.compile import Compiled
from trainer.planning.estimate import ASSUMPTIONS, Estimate
from trainer.planning.network import Transfer
from trainer.planning.plan import assumptions
from trainer.telemetry import hardware

MIB = 2**20


def estimate(**changed):
  transfers = [Transfer("all-gather", "parameters", ("fsdp",), "NVLink", 3 * MIB, 0.002, True),
               Transfer("all-to-all", "tokens", ("expert", "fsdp"), "InfiniBand", 5 * MIB, 0.25, False)]
  seconds = dict(compute=2.0, memory=0.5, hidden=0.0015, exposed=0.00025, step=4.0)
  return Estimate(**dict(
      sizes=dict(data=2, fsdp=4, tensor=1), remat="full",
      memory=dict(parameters=10 * MIB, activations=30.5 * MIB, rest=0.25 * MIB), host=7 * MIB, per_row=2 * MIB, rows=3,
      usable=100 * MIB, model_flops=1.5e12, hardware_flops=6e12,
      transfers=transfers, seconds=seconds, tokens=8192.0, mfu=0.375) | changed)


def plan(compiled=None, **changed):
  now = estimate(**changed)
  other = estimate(sizes=dict(data=8), remat="none", usable=20 * MIB, seconds=now.seconds | dict(step=8.0), mfu=0.1875)
  return page.Plan(["asked"], (1_234_567, 89_012, 345), now, compiled, "XLA is away", [now, other], [other, now],
                   ["type this"], ["taken for granted"])


def section(made, title):
  """The lines of a part, with single spaces."""
  return [re.sub(r" +", " ", line).strip() for line in dict(page.sections(made))[title].splitlines()]


def test_what_a_step_takes():
  made = plan()
  assert section(made, "Parameters") == ["all 1,234,567", "trained 89,012", "that a token passes through 345"]
  assert section(made, "Operations of a step") == [
      "model 1.5e+12 FLOPs", "with what is recomputed 6e+12 FLOPs (4.00 ×)", "tokens 8,192"]
  assert section(made, "Time of a step, predicted") == [
      "matrix products 2.00 s", "memory traffic 500.0 ms", "transfers beside computation 1.5 ms",
      "transfers that computation waits for 250 µs", "a step 4.00 s = the longest of the first three, and the fourth",
      "tokens/s 2,048", "MFU 37.5%"]
  assert (section(made, "What"), section(made, "What to type"), section(made, "Assumed")) == (
      ["asked"], ["type this"], ["taken for granted"])


@pytest.mark.parametrize("compiled, words", [
    (None, ["An estimate, not compiled: XLA is away."]),
    (Compiled(failure="x" * 700, too_large=True), [f"It does NOT fit, says the compiler: {'x' * 600} …"]),
    (Compiled(failure="no such thing"), ["It does not compile: no such thing"]),
    (Compiled(arguments=40 * MIB, outputs=41 * MIB, temporaries=62 * MIB, aliased=40 * MIB, seconds=9.6), [
        "compiled: arguments 40.00 MiB", "compiled: outputs 41.00 MiB", "compiled: temporaries 62.00 MiB",
        "compiled: outputs in place of arguments 40.00 MiB",
        "all, compiled 103.00 MiB of 100.00 MiB: does NOT fit (compiled in 10 s)"])])
def test_the_memory_of_a_device(compiled, words):
  shown = section(plan(compiled), "Memory of each device")
  assert shown[:5] == ["parameters 10.00 MiB", "activations 30.50 MiB", "rest 256.00 KiB",
                       "all, estimated 40.75 MiB of 100.00 MiB: fits", "in the host's memory 7.00 MiB"]
  # (100 - 40.75) / 2 more than the three that there are.
  assert shown[5:-1] == words
  assert shown[-1] == "Each further row of a micro-batch on a device: 2.00 MiB; the most that fit: 32 (now 3)."
  full = section(plan(host=0.0, usable=40.75 * MIB), "Memory of each device")
  assert full[3:5] == ["all, estimated 40.75 MiB of 40.75 MiB: fits", "An estimate, not compiled: XLA is away."]
  assert "does NOT fit" in section(plan(usable=40 * MIB), "Memory of each device")[3]


def test_what_travels():
  title = "Between devices, received by each in a step"
  head = "collective of axes link bytes time beside computation"
  assert section(plan(), title) == [head, "all-to-all tokens expert+fsdp InfiniBand 5.00 MiB 250.0 ms no",
                                    "all-gather parameters fsdp NVLink 3.00 MiB 2.0 ms yes"]
  assert section(plan(transfers=[]), title) == ["nothing"]
  compiled = Compiled(copied=6 * MIB, collectives=(
      ("all-gather", ("data", "fsdp"), 1200, 4 * MIB, 1 * MIB), ("send", ("data",), 1, 0, 0)))
  assert section(plan(compiled), title)[3:] == [
      "", "of the compiled program:", "collective axes times bytes beside computation",
      "all-gather data+fsdp 1,200 4.00 MiB 25%", "send data 1 0 B",
      "parameters and gradients copied or transposed: 6.00 MiB"]


def test_what_else_could_be():
  made = plan()
  assert section(made, "Other remat policies") == [
      "remat memory step tokens/s MFU most rows", "full (as configured) 40.75 MiB fits 4.00 s 2,048 37.5% 32",
      "none 40.75 MiB does not fit 8.00 s 1,024 18.8% 0"]
  assert section(made, "Other meshes, by predicted time")[1:] == [
      "data=8 40.75 MiB does not fit 8.00 s 1,024 18.8% 0",
      "data=2, fsdp=4 (as configured) 40.75 MiB fits 4.00 s 2,048 37.5% 32"]
  assert page.mesh_text(dict(data=1, fsdp=1)) == "one device"


def test_text_and_page_have_all_of_it():
  made = plan()
  assert page.text(made).startswith("What\n----\nasked\n\nParameters\n----------\n")
  html = page.page(made)
  for title, body in page.sections(made):
    assert title in html and body.splitlines()[0].replace("'", "&#39;") in html, title
  bars = re.findall(r"<dt>([^<]*)</dt><dd><i style=\"width:([\d.]+)%\"></i><span>([^<]*)", html)
  assert bars == [
      ("parameters", "24.5", "10.00 MiB"), ("activations", "74.8", "30.50 MiB"),  # rest is below a hundredth
      ("all, estimated", "100.0", "40.75 MiB of 100.00 MiB"),
      ("matrix products", "50.0", "2.00 s"), ("memory traffic", "12.5", "500.0 ms"),
      ("transfers beside computation", "0.0", "1.5 ms"), ("transfers waited for", "0.0", "250 µs"),
      ("a step", "100.0", "4.00 s"), ("data=8", "100.0", "8.00 s, 40.75 MiB, does not fit"),
      ("data=2, fsdp=4 (configured)", "50.0", "4.00 s, 40.75 MiB")]
  compiled = page.page(plan(Compiled(arguments=20 * MIB)))
  assert "all, compiled" not in html and re.search(
      r"<dt>all, compiled</dt><dd><i style=\"width:49.1%\"></i><span>20.00 MiB</span>", compiled)


@pytest.mark.parametrize("name, ends", [
    ("h100:8", ["unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise", "shared out evenly among experts"]),
    ("cpu:8", ["its memory and links are guesses", "shared out evenly among experts"]),
    ("v5e:2x4", ["shared out evenly among experts"])])
def test_what_is_taken_for_granted(name, ends):
  topology = hardware.topology(name, 1, 1e12)
  of = ASSUMPTIONS[topology.chip.platform]
  first, reached, *_, = lines = assumptions(of, topology, estimate())
  for number in (topology.chip.peak / 1e12, topology.chip.link_bandwidth / 1e9, topology.chip.network_bandwidth / 1e9):
    assert f"{number:.4g} " in first
  assert reached == (f"reached of it: {of.products:.0%} in products, {of.memory:.0%} of the memory's and "
                     f"{of.links:.0%} of links' bandwidth")
  assert len(lines) == 4 + len(ends) and all(line.endswith(end) for line, end in zip(lines[4:], ends, strict=True))
  assert len(assumptions(of, topology, estimate(transfers=[]))) == 3 + len(ends)


def planned(monkeypatch, tmp_path, **changed):
  """A plan whose estimates are those from above, so that nothing is traced; and what it was made with."""
  now, asked = estimate(), []
  program = SimpleNamespace(
      optimizer=SimpleNamespace(notes=("adamw: 7 arrays",), split=lambda params: ({"a": params["a"]}, {})),
      model="model", abstract_state={"params": {"a": np.zeros((2, 3)), "b": np.zeros(5)}})
  planner = SimpleNamespace(estimate=lambda sizes: now, traced=lambda: (program, None), mesh=lambda sizes: "a mesh",
                            assumptions=ASSUMPTIONS["gpu"])
  monkeypatch.setattr(plan_lib, "Planner", lambda *of: (asked.append(of), planner)[1])
  monkeypatch.setattr(plan_lib, "active_parameters", lambda model: 9)
  monkeypatch.setattr(plan_lib.mesh_lib, "param_shardings", lambda params, mesh, rules: (None, ["b is whole"]))
  for name, gives in (("remats", ["r"]), ("meshes", []), ("advice", ["do"])):
    monkeypatch.setattr(plan_lib.plan_search, name, lambda *_, gives=gives: list(gives))
  monkeypatch.setattr(plan_lib.plan_compile, "refusal", lambda topology: "")
  monkeypatch.setattr(plan_lib.plan_compile, "compile_step", lambda *of: (asked.append(of), "compiled")[1])
  asking = dict(batch_size=16, grad_accum_steps=2, plan=dict(topology="h100:8"), mesh=dict(data=8)) | changed
  return plan_lib.make_plan(tiny.config(tmp_path, **asking), tmp_path), asked, now


def test_a_plan_says_what_was_asked(monkeypatch, tmp_path, capsys):
  made, asked, now = planned(monkeypatch, tmp_path)
  assert made.heading[1:4] == [
      "mesh: data=2, fsdp=4", "a step: 16 rows of 32 tokens, 8 at a time; remat full; parameters float32, products "
      "bfloat16", "vocabulary: bytes"]
  assert "h100" in made.heading[0] and made.heading[-2:] == ["adamw: 7 arrays", "b is whole"]
  assert (made.parameters, made.estimate, made.compiled, made.why_not) == ((11, 6, 9), now, "compiled", "")
  assert (made.by_remat, made.by_mesh, made.advice) == (["r"], [now], ["do"])  # the one that is asked for is there
  (config, vocabulary, topology, sources), compiled = asked
  assert (config.batch_size, vocabulary, topology.devices, sources) == (16, 258, 8, ["main"])
  assert compiled[1:3] == (258, ["main"]) and "compiling the step for h100:8" in capsys.readouterr().out
  made, asked, _ = planned(monkeypatch, tmp_path, plan=dict(topology="h100:8", compile="never"))
  assert (made.compiled, made.why_not, len(asked)) == (None, "plan.compile is never", 1)
  many = dict(plan=dict(topology="cpu:64"), mesh=dict(data=8, fsdp=8), batch_size=128)
  made, asked, _ = planned(monkeypatch, tmp_path, **many)
  assert made.compiled is None and "more than 16 host devices; --config.plan.compile=always does it" in made.why_not


def test_a_run_that_runs_out_of_memory_is_told_its_plan(monkeypatch, tmp_path):
  made = plan()
  monkeypatch.setattr(plan_lib, "make_plan", lambda config, workdir: made._replace(heading=[config.plan.compile]))
  said = plan_lib.out_of_memory(tiny.config(tmp_path, plan=dict(topology="h100:8", compile="always")), tmp_path,
                                RuntimeError("OOM: 9 GiB\nmore"))
  assert said.startswith("The devices' memory is exhausted: OOM: 9 GiB\n\nWhat\n----\nnever\n\nParameters")
  assert said.endswith("docs/precision.md has more.") and "more" not in said.splitlines()[0]
  monkeypatch.setattr(plan_lib, "make_plan", lambda *_: 1 / 0)
  said = plan_lib.out_of_memory(tiny.config(tmp_path), tmp_path, RuntimeError("OOM"))
  assert "memory is exhausted: OOM\nLess memory" in said and said.endswith("(No plan could be made: division by zero)")
