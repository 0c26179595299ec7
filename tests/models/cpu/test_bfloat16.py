"""bfloat16 on CPU: products, their gradients, and that programs that are told so have them made by the library."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cpu
from models.sharding import logical_axes
from tests import tiny
from tests.models.cpu.bfloat16_steps import CASES
from trainer import startup

SHAPES = [((6, 16), 24), ((6, 24), 16), ((2, 3, 16), 16)]


def arrays(x_shape, outputs, dtype=jnp.bfloat16):
  """x, w and a gradient of x @ w."""
  shapes = x_shape, (x_shape[-1], outputs), (*x_shape[:-1], outputs)
  return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def exact(x):
  return np.asarray(x, np.float64)


def close(found, expected, dtype):
  """Sums are right to float32's digits, and rounded once."""
  assert found.dtype == dtype
  np.testing.assert_allclose(exact(found), expected, atol=1e-5, rtol=2.0**-8 if dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype, platform", [(jnp.float32, "cpu"), (jnp.bfloat16, "cpu"), (jnp.bfloat16, "gpu")])
@pytest.mark.parametrize("shape, outputs", SHAPES)
def test_products_and_their_gradients(shape, outputs, dtype, platform, monkeypatch):
  monkeypatch.setattr(logical_axes, "platform", lambda: platform)
  x, w, g = arrays(shape, outputs, dtype)
  rows, of_rows = exact(x).reshape(-1, shape[-1]), exact(g).reshape(-1, outputs)
  y, backward = jax.vjp(cpu.matmul, x, w)
  close(y, exact(x) @ exact(w), dtype)
  dx, dw = backward(g)
  close(dx, exact(g) @ exact(w).T, dtype)
  close(dw, rows.T @ of_rows, dtype)
  close(cpu.inputs_gradient(g, w), exact(g) @ exact(w).T, dtype)
  close(cpu.kernel_gradient(x, g), rows.T @ of_rows, jnp.float32)


def test_the_gradient_of_a_kernel_of_integers_is_exact():
  x, g = (jax.random.randint(jax.random.key(i), (40, n), -127, 128, jnp.int8) for i, n in enumerate((16, 8)))
  for a, b in ((x, g), (g, x)):
    found = cpu.kernel_gradient(a, b, jnp.int32)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.asarray(a, int).T @ np.asarray(b, int))


def test_bits_are_those_of_the_number():
  x = jnp.asarray([1.0, -2.5, 0.0, jnp.inf, 3e-39], jnp.bfloat16)
  bits = cpu.as_bits(x)
  assert bits.dtype == jnp.uint16 and bits[0] == 0x3F80
  np.testing.assert_array_equal(cpu.from_bits(bits), x)
  single = x.astype(jnp.float32)
  assert cpu.as_bits(single) is single and cpu.from_bits(single) is single


PROGRAM = """
from trainer import startup
startup.set_environment(dict(compute="{compute}", matmul="{matmul}"))
import jax, jax.numpy as jnp
from models import cpu
from models.quantization.matmul import QuantizedMatmul
product = QuantizedMatmul("int8", "all") if "{matmul}" == "int8" else cpu.matmul
x, w = jnp.ones((512, 64), "{compute}"), jnp.ones((64, {outputs}), "{compute}")
step = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.square(product(x, w).astype(jnp.float32))), (0, 1)))
value, gradients = step(x, w)
# In 8 bits to about a hundredth each.
for found, right in ((value, 512 * {outputs} * 64.0**2), (gradients[1][0, 0], 2 * 512 * 64.0)):
  assert abs(found / right - 1) < 0.03, (found, right)
text = step.lower(x, w).compile().as_text()
import re
print(len(re.findall(r" dot\\(", text)), len(re.findall(r"kind=kCustom", text)))
"""


@pytest.mark.parametrize("outputs", [32, 128])
@pytest.mark.parametrize("compute, matmul", [("bfloat16", "none"), ("float32", "int8")])
def test_all_three_products_of_a_layer_are_the_librarys(compute, matmul, outputs):
  """In a program of its own, since flags are read once."""
  if compute == "bfloat16" and not startup.has_matrix_unit():
    pytest.skip("this processor has no AMX, so that products of bfloat16 are left to XLA")
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | dict(JAX_PLATFORMS="cpu")
  done = subprocess.run([sys.executable, "-c", PROGRAM.format(compute=compute, matmul=matmul, outputs=outputs)],
                        cwd=tiny.ROOT, env=environment, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  dots, library = map(int, done.stdout.split())
  # Each is in a computation of its own, which the library makes.
  assert dots == 3 and library >= 3


def compared(*cases):
  """Cases in one process of its own, since flags are read once: how it ended."""
  # The second flag is for the code that XLA makes itself, and saves half of the time; what is left to the library is
  # decided before (of Llama's steps 104 computations either way).
  flags = f"{startup.YNN}={startup.SUMS_AND_PRODUCTS} --xla_backend_optimization_level=0"
  environment = tiny.environment(1, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
  return subprocess.run([sys.executable, "-m", "tests.models.cpu.bfloat16_steps", *cases], cwd=tiny.ROOT, text=True,
                        capture_output=True, env=environment, timeout=800)


@pytest.mark.parametrize("cases", [
    pytest.param(("llama",), id="llama"),
    pytest.param([name for name in CASES if name != "llama"], marks=pytest.mark.slow, id="others")])
def test_models_compute_what_they_do_in_float32_where_products_are_the_librarys(cases):
  """Where the compiler turned a product that the library was to make, the program would end with UNIMPLEMENTED."""
  done = compared(*cases)
  assert [name for name in cases if f"{name}: " not in done.stdout] == [], done.stderr[-4000:]
