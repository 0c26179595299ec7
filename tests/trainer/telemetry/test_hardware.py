"""The table of hardware, and topologies by name."""

import types

import pytest

from trainer.errors import ConfigError
from trainer.telemetry import hardware


@pytest.mark.parametrize(("kind", "name"), [
    ("TPU v5 lite", "v5e"), ("TPU v5p", "v5p"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU v4", "v4"),
    ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"),
    ("cpu", None), ("TPU v2", None)])
def test_what_jax_calls_a_device_is_found_by_the_longest_beginning(kind, name):
  assert hardware.find(kind) == name


@pytest.mark.parametrize(("name", "chip"), hardware.CHIPS.items())
def test_every_chip_has_plausible_figures(name, chip):
  assert 0 < chip.usable <= 1.01 * chip.memory * (2**30 / 1e9 if chip.platform == "tpu" else 1)
  # The network is slower than links, links slower than memory, and a byte takes some hundred operations.
  assert chip.network_bandwidth < chip.link_bandwidth < chip.memory_bandwidth
  assert 50 < chip.peak / chip.memory_bandwidth < 700
  assert chip.platform == "tpu" if chip.torus else chip.platform == "gpu"


@pytest.mark.parametrize(("name", "slices", "devices", "groups"), [
    ("v5e:16x16", 1, 256, 1), ("v5e:4x4", 2, 32, 2), ("v5p:4x4x8", 1, 128, 1), ("v5p:2x2x1", 1, 4, 1),
    ("V6E:8x8", 1, 64, 1), ("v4:4x4x4", 1, 64, 1), ("tpu7x:4x4x4", 1, 128, 1), ("h100:8x4", 1, 32, 4),
    ("h100:8x4", 2, 64, 8), ("h200:8", 1, 8, 1), ("a100:4x2", 1, 8, 2), ("cpu:8", 1, 8, 1)])
def test_topologies_are_counted(name, slices, devices, groups):
  topology = hardware.topology(name, slices)
  assert (topology.devices, topology.groups) == (devices, groups)
  assert topology.slices == (slices if topology.chip.platform == "tpu" else 1)
  assert str(devices) in topology.describe()


def test_host_devices_share_the_machine():
  one, eight = (hardware.topology(f"cpu:{n}", cpu_peak=8e10).chip for n in (1, 8))
  assert (one.peak, eight.peak) == (8e10, 1e10)
  assert one.usable == pytest.approx(8 * eight.usable)


@pytest.mark.parametrize(("name", "slices", "said"), [
    ("v5x:4x4", 1, ["'v5x'", "do you mean v5", "h100"]),
    ("h10:8", 1, ["do you mean h100"]),
    ("v5e", 1, ["after the colon", "v5e:16x16"]),
    ("v5e:4xfour", 1, ["'4xfour'"]),
    ("v5e:3x5", 1, ["v5e slices are", "16x16", "nearest is v5e:4x4"]),
    ("v5e:32x16", 1, ["nearest is v5e:16x16"]),
    ("v5p:4x4", 1, ["multiples of 4 in each dimension", "v5p:2x2x4"]),
    ("v5p:6x4x4", 1, ["multiples of 4"]),
    ("h100:16x2", 1, ["at most 8", "h100:8x4"]),
    ("cpu:2x4", 1, ["just a number"]),
    ("v5e:4x4", 0, ["plan.slices is 0"])])
def test_what_cannot_be_names_what_can(name, slices, said):
  with pytest.raises(ConfigError) as error:
    hardware.topology(name, slices)
  for words in said:
    assert words in str(error.value)


def _devices(kind, **places):
  count = len(next(iter(places.values())))
  return [types.SimpleNamespace(platform="gpu" if "NVIDIA" in kind else "tpu", device_kind=kind,
                                **{key: values[i] for key, values in places.items()}) for i in range(count)]


def test_devices_that_are_here_are_recognised():
  grid = [(x, y, 0) for x in range(4) for y in range(2)]
  slice_of = hardware.of_devices(_devices("TPU v5 lite", coords=grid, slice_index=[0] * 8, process_index=[0] * 8))
  assert (slice_of.name, slice_of.devices, slice_of.groups) == ("v5e:4x2", 8, 1)
  both = hardware.of_devices(_devices("TPU v5 lite", coords=grid * 2, slice_index=[0] * 8 + [1] * 8,
                                      process_index=[0] * 16))
  assert (both.devices, both.slices) == (16, 2)
  nodes = hardware.of_devices(_devices("NVIDIA H100 80GB HBM3", process_index=[0] * 8 + [1] * 8))
  assert (nodes.name, nodes.devices, nodes.groups) == ("h100:8x2", 16, 2)
  with pytest.raises(ConfigError, match="not in the table"):
    hardware.of_devices(_devices("TPU v2", process_index=[0]))
