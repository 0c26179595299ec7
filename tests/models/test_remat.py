"""Remat policies: gradients stay; what is computed again, and what is kept where, is what the policy says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import tpu as attention_tpu
from models.attention.mask import QKV, Rule
from models.remat import HOST_MEMORY, remat_policy
from tests.models.common import BATCH, B, T, make, paths, random_params
from tests.tiny import equations
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError

# Of the model of tests/models/common.py.
LAYERS, D, F = 2, 16, 24
# Products of a layer's forward pass that are made again: none, or of q, k, v, scores, values, o, gate, up (never those
# of down, which no gradient needs).
AGAIN = {"full": 8, "attention": 3, "attention_mlp": 0, "offload": 8, "offload_attention": 3, "dots": 0,
         "dots_no_batch": 2}
# Kept of each token and layer, in numbers, besides what enters the layer: q, k, v, output, log-normalisers; stream,
# gate, up.
ATTENTION, MLP = 4 * D + 4, D + 2 * F
KEPT = {"full": 0, "attention": ATTENTION, "attention_mlp": ATTENTION + MLP, "offload": 0,
        "offload_attention": ATTENTION}


def loss(remat, scan_layers=True, **options):
  model = make(remat=remat, scan_layers=scan_layers, num_layers=LAYERS, attention_block=T, **options)
  return model, lambda params: jnp.tanh(model.apply(params, BATCH).hidden).sum()


@functools.cache
def grads(remat, scan_layers=True):
  model, f = loss(remat, scan_layers)
  return paths(jax.jit(jax.grad(f))(random_params(model)))


def backward(remat, **options):
  model, f = loss(remat, **options)
  return jax.make_jaxpr(jax.grad(f))(model.abstract_params()).jaxpr


def count(jaxpr, primitive):
  return sum(equation.primitive.name == primitive for equation in equations(jaxpr))


@pytest.mark.parametrize("remat, scan_layers", [
    ("attention", True), ("attention_mlp", True), ("offload", True), ("offload", False), ("offload_attention", True)])
def test_keeping_by_name_changes_no_gradient(remat, scan_layers):
  """I11."""
  expected = grads("none", scan_layers)
  for path, g in grads(remat, scan_layers).items():
    np.testing.assert_allclose(g, expected[path], rtol=1e-6, atol=1e-6 * float(jnp.abs(expected[path]).max()))


@pytest.mark.parametrize("remat", AGAIN)
def test_products_that_are_computed_again(remat):
  assert count(backward(remat), "dot_general") - count(backward("none"), "dot_general") == AGAIN[remat]


@pytest.mark.parametrize("remat, again", [("attention", 3), ("attention_mlp", 0)])
def test_experts_products_are_computed_again_unless_they_are_kept(remat, again):
  """Gate and up; and down, which the gradient of the router's weights needs."""
  moe = dict(num_experts=4, experts_per_token=2, expert_size=8)
  grouped = [count(backward(name, moe=moe), "platform_index") for name in (remat, "none")]
  assert grouped[0] - grouped[1] == again


def stacked(remat, **options):
  """What the first scan, the forward pass, keeps of its layers: all that it does not carry from one to the next."""
  scan = next(equation for equation in equations(backward(remat, **options)) if equation.primitive.name == "scan")
  outputs = zip((v.aval for v in scan.outvars), scan.params["jaxpr"].out_avals, strict=True)
  return [aval for aval, of_a_layer in outputs if aval.shape != of_a_layer.shape]


@pytest.mark.parametrize("remat", KEPT)
def test_what_is_kept_of_a_layer_and_where(remat):
  """The first scan is the forward pass: what it stacks is what the backward pass takes."""
  kept = stacked(remat)
  # Of tokens alone: parameters are there anyway, and no copy of them is kept.
  assert all(a.shape[:2] == (LAYERS, B) and T in a.shape[2:] for a in kept)
  stacks = {space: sum(math.prod(a.shape) for a in kept if (a.memory_space == jax.memory.Space.Host) == host)
            / (LAYERS * B * T) for space, host in (("host", True), ("device", False))}
  assert stacks["host"] == (D if remat in HOST_MEMORY else 0)
  assert stacks["device"] == KEPT[remat] + (0 if remat in HOST_MEMORY else D)


@pytest.mark.parametrize("remat", ["full", "attention", "attention_mlp"])
def test_of_bfloat16_bits_are_kept_on_cpu(remat):
  """As many numbers as otherwise; XLA for CPU would convert the stack of all layers, once for each."""
  kept = stacked(remat, compute_dtype=jnp.bfloat16)
  assert {str(a.dtype) for a in kept} <= {"uint16", "float32"}
  numbers = sum(math.prod(a.shape) for a in kept) / (LAYERS * B * T)
  assert numbers == KEPT[remat] + D
  # In float32: attention's log-normalisers.
  assert sum(math.prod(a.shape) for a in kept if a.dtype == jnp.float32) / (LAYERS * B * T) == (
      0 if remat == "full" else ATTENTION - 4 * D)


@pytest.mark.parametrize("remat", ["full", "attention_mlp"])
@pytest.mark.parametrize("pattern", [("global",), ("local", "global"), ("local", "local", "global")])
def test_no_parameter_is_copied_for_the_backward_pass(pattern, remat):
  """However many layers a step of the scan has, and where some are left over, which run by themselves."""
  model, f = loss(remat, layer_pattern=pattern, window=3)
  scans = [equation for equation in equations(jax.make_jaxpr(jax.grad(f))(model.abstract_params()).jaxpr)
           if equation.primitive.name == "scan"]
  assert all(T in v.aval.shape for v in scans[0].outvars) if len(pattern) <= LAYERS else not scans


@pytest.mark.devices(8)
@pytest.mark.parametrize("remat", ["dots", "dots_no_batch"])
def test_products_on_a_mesh_are_kept_as_on_one_device(remat):
  """Although they are in functions with gradients of their own."""
  def kept(mesh):
    with mesh_lib.activation_rules(mesh, defaults().activation_rules):
      # Of those with kernels, which have no two dimensions of tokens: q, k, v, o, gate, up and what enters the layer.
      return sorted(math.prod(a.shape) for a in stacked(remat) if a.shape.count(T) < 2 and a.shape[-1] != T)

  assert kept(mesh_lib.make_mesh(dict(data=1, fsdp=2), jax.devices()[:2])) == kept(
      mesh_lib.make_mesh({}, jax.devices()[:1]))


@pytest.mark.parametrize("remat, forward", [("full", 2), ("attention", 1), ("attention_mlp", 1)])
def test_the_tpu_kernel_runs_forward_once_where_its_results_are_kept(remat, forward):
  segments = jnp.ones((1, 128), jnp.int32)

  def f(q, k, v):
    return jnp.sin(attention_tpu.attend(Rule(1.0), QKV(q, k, v), segments, interpret=True)).sum()

  def kernels(f):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    return count(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(x, x, x).jaxpr, "pallas_call")

  assert kernels(remat_policy(remat)(f, False)) - kernels(f) == forward - 1


def test_auto_keeps_the_products_of_layers_in_a_scan():
  for scan_layers, expected in ((True, "attention_mlp"), (False, "none")):
    found = [str(jax.make_jaxpr(jax.grad(f))(model.abstract_params())) for model, f in (
        loss(name, scan_layers) for name in ("auto", expected))]
    assert found[0] == found[1]


@pytest.mark.devices(8)
def test_auto_on_several_cpu_devices_makes_nothing_again():
  mesh = mesh_lib.make_mesh(dict(data=8))
  with mesh_lib.activation_rules(mesh, defaults().activation_rules):
    products = {name: count(backward(name), "tanh") + count(backward(name), "dot_general") + count(
        backward(name), "rsqrt") for name in ("auto", "none", "attention_mlp")}
  # Norms are cheap enough to be made again.
  assert products["auto"] == products["none"] < products["attention_mlp"]


def test_unknown_policies_are_refused():
  with pytest.raises(ConfigError, match="allowed: auto, none, full, attention"):
    remat_policy("some")
