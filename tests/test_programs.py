"""Programs that are the same are compiled once, and only those."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from evaluators import loss
from tests import programs, tiny
from trainer import train

pytestmark = pytest.mark.skipif(tiny.AS_IN_USERS_RUNS, reason="with WEFT_TEST_AS_USERS nothing is shared")


@pytest.fixture
def compiled():
  """How many programs of functions named `mine` there are."""
  programs.forget()
  return compiled_now


def product(size, factor=3.0, **options):
  """Of a new function each time, as a new run makes them."""

  def mine(x):
    return jnp.tanh(x) @ x * factor

  return jax.jit(mine, **options)(np.eye(size, dtype=np.float32))


def total(rows):
  def mine(x):
    return x.sum() + 1

  return jax.jit(mine)(rows)


def test_programs_are_let_go_of_before_linux_has_no_area_for_more(compiled, monkeypatch):
  """Areas are counted only when there are LOOK_AFTER programs more, since that takes longer than some tests."""
  monkeypatch.setattr(programs, "LOOK_AFTER", 2)
  monkeypatch.setattr(programs, "MEMORY_BYTES", 2**60)
  sizes = iter(range(2, 9))
  for areas, kept in ((2**30, 2), (0, 3), (0, 0)):
    monkeypatch.setattr(programs, "AREAS", areas)
    for _ in range(2 if areas else 1):
      product(next(sizes))
    programs.forget_if_large()
    assert compiled_now() == kept


def compiled_now():
  return sum(name == "@jit_mine" for _, name, *_ in programs._compiled)


def call(function):
  def mine(x):
    return jax.pure_callback(function, jax.ShapeDtypeStruct((), np.float32), x)

  return jax.jit(mine)(np.float32(2))


def test_one_module_is_one_program(compiled):
  first = product(5)
  assert compiled() == 1
  np.testing.assert_array_equal(product(5), first)
  assert compiled() == 1
  assert product(5, factor=4.0)[0, 0] == pytest.approx(4 * np.tanh(1.0))
  assert compiled() == 2


@pytest.mark.devices(8)
def test_options_and_devices_make_another(compiled):
  product(6)
  product(6, compiler_options={"xla_backend_optimization_level": 3})
  assert compiled() == 2
  numbers = np.ones((8, 6), np.float32)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  for where, count in ((NamedSharding(mesh, PartitionSpec("data")), 3), (NamedSharding(mesh, PartitionSpec()), 4),
                       (NamedSharding(mesh, PartitionSpec("data")), 4), (jax.devices()[1], 5), (jax.devices()[2], 6)):
    assert total(jax.device_put(numbers, where)) == 49
    assert compiled() == count


def test_each_keeps_the_python_that_it_calls(compiled):
  assert call(lambda x: np.float32(x + 1)) == 3
  assert call(lambda x: np.float32(x * 10)) == 20
  assert compiled() == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_runs_that_train_in_the_same_way_have_one_step(corpus, tmp_path):
  """Whatever else differs; what is only read when it is traced counts as read by each."""
  def step(name, **changed):
    config = tiny.config(corpus, total_steps=2, ckpt_steps=1000)
    config.evals, config.strategy.z_loss = {}, 1e-3
    config.update(changed)
    return train(config, tmp_path / name).program.update_fn

  first = step("first")
  assert step("again", log_steps=2) is first
  assert step("other", optimizer=dict(learning_rate=0.5)) is not first
  assert step("longer", total_steps=3) is first
  falling = step("falling", schedule=tiny.COSINE)
  assert falling is not first
  assert step("longer falling", schedule=tiny.COSINE, total_steps=3) not in (first, falling)  # its rates are others


def test_what_evaluates_a_loss_is_one_for_equal_models_where_there_is_one_device():
  model, again, other = tiny.model(), tiny.model(), tiny.model(num_layers=1)
  made = loss._make_row_sums
  assert made(model) is made(again) and made(model) is not made(other)
  with programs.devices(8):
    assert made(model) is not made(again)


def test_jax_is_not_imported_before_its_settings_are_made():
  """Workers inherit them; without any (`pytest -n 0`) JAX must read them here."""
  ran = tiny.run([sys.executable, "-c", "import sys, tests.conftest; sys.exit('jax' in sys.modules)"])
  assert ran.returncode == 0, ran.stderr
