"""Sums over tokens with their gradient: the same as of all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cpu import padding
from tests import tiny
from tests.models.initial import initial
from trainer.config.checks import View
from trainer.config.sections import strategy
from trainer.distributed import mesh as mesh_lib
from trainer.strategies import chunked_loss, seq, sft
from trainer.strategies.chunked_loss import split_tokens, sum_over_tokens
from trainer.strategies.logprobs import cross_entropy, token_stats

pytestmark = pytest.mark.devices(8)

N, D, V = 37, 8, 50


def inputs(dtype="float32"):
  rng = np.random.default_rng(0)
  hidden, kernel = rng.normal(size=(N, D)), rng.normal(size=(D, V))
  return (jnp.asarray(hidden, dtype), jnp.asarray(kernel, jnp.float32),
          (jnp.asarray(rng.integers(0, V, N)), jnp.asarray(rng.random(N), jnp.float32)))


def losses_of(hidden_nxD, kernel_DxV, tokens):
  stats = token_stats(hidden_nxD[None], kernel_DxV, tokens[0][None], chunk=V, want=("logprob", "logsumexp", "entropy"))
  return tokens[1] * cross_entropy(stats, z_loss=0.1)[0], {"entropy": stats.entropy[0]}


@pytest.mark.parametrize("chunks", [1, 4, 37, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_cut_or_whole_the_same_sum_and_gradient(chunks, dtype, tolerance):
  hidden, kernel, tokens = inputs(dtype)

  def whole(hidden, kernel):
    losses, more = losses_of(hidden, kernel, tokens)
    return 3.0 * jnp.sum(losses), more["entropy"]

  def cut(hidden, kernel):
    total, more = sum_over_tokens(losses_of, chunks, (), hidden, kernel, tokens, jnp.ones(N, bool))
    return 3.0 * total, more["entropy"]

  expected, found = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, kernel) for f in (whole, cut))
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_allclose(np.float32(b), np.float32(a), rtol=tolerance, atol=tolerance * float(jnp.abs(a).max()))
  np.testing.assert_allclose(jax.jit(cut)(hidden, kernel)[0], expected[0][0], rtol=tolerance)  # without a gradient


def test_tokens_that_do_not_count_come_last_and_are_left_out():
  counts = np.zeros(N, bool)
  counts[[3, 5, 20, 21, 36]] = True
  split = jax.jit(split_tokens, static_argnums=1)(counts, 10)
  values = np.arange(1.0, N + 1)
  np.testing.assert_array_equal(split.cut(values, 10)[0], [4, 6, 21, 22])
  np.testing.assert_array_equal(split.cut(values, 10)[1, 0], 37)
  np.testing.assert_array_equal(split.join(split.cut(values, 10)), values)
  assert split.number == 2 and split_tokens(np.zeros(N, bool), 10).number == 0
  # What stands in the other chunks is not computed, whatever it is.
  hidden, kernel, tokens = inputs()
  tokens = tokens[0], jnp.where(counts, tokens[1], 0.0)
  poisoned = jnp.where((split.places < 8)[:, None], hidden, jnp.nan)

  def total(hidden, kernel):
    return sum_over_tokens(losses_of, 10, (), hidden, kernel, tokens, counts)[0]

  expected = jax.value_and_grad(lambda h, k: jnp.sum(losses_of(h, k, tokens)[0]), (0, 1))(hidden, kernel)
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(jax.value_and_grad(total, (0, 1))(poisoned, kernel)),
                  strict=True):
    np.testing.assert_allclose(b, a, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("loss", "cfg"), [
    (seq, strategy("seq", label_smoothing=0.1, z_loss=0.01)), (sft, strategy("sft", dft=True)), (sft, strategy("sft"))])
def test_strategies_do_not_depend_on_the_chunk(loss, cfg, more, monkeypatch):
  """Value, gradient and metrics, of rows and of the whole; in both ways on one device, and on a mesh; and, if `more`,
  on another one with tied embeddings, and with entries added to the vocabulary."""
  batch = tiny.batch(4, 12)

  def run(chunk, mesh=None, tied=False):
    model = tiny.model(vocab_chunk=chunk, final_logit_cap=5.0, tie_embeddings=tied)
    params = initial(model)

    def total(params):
      terms, metrics = loss.loss(model, params, batch, None, View(cfg))
      return jnp.sum(terms["loss"].sum), (jnp.sum(terms["loss"].weight), terms | metrics)

    with mesh_lib.activation_rules(mesh) if mesh is not None else jax.disable_jit(False):
      return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

  one, twice = run(24), run(5)
  monkeypatch.setattr(chunked_loss, "MIN_TOKENS", 1)
  several = run(5)
  split = run(5, mesh_lib.make_mesh(dict(data=2, fsdp=2, context=2)))
  pairs = [(one, other) for other in (twice, several, split)]
  if more:
    tied = run(24, tied=True), run(5, mesh_lib.make_mesh(dict(fsdp=2, expert=2, tensor=2)), tied=True)
    monkeypatch.setattr(padding, "TOO_EVEN", 8)  # of which the vocabulary of 24 is a multiple: entries are added
    pairs += [(one, run(24)), (one, run(5)), tied, (tied[0], run(5, tied=True))]
  for expected, other in pairs:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(other), strict=True):
      np.testing.assert_allclose(b, a, rtol=3e-5, atol=3e-6, err_msg=jax.tree_util.keystr(path))
  assert several[0][1][1]["loss"].sum.shape == twice[0][1][1]["loss"].sum.shape == (4,) and float(several[0][0]) > 1


def test_entries_are_added_once_not_for_each_part():
  """Those that put rows of logits apart on a CPU."""
  model = tiny.model(vocab_size=4096, vocab_chunk=1024)
  batch = {name: jax.ShapeDtypeStruct((8, 512), x.dtype) for name, x in tiny.batch(4, 12).items()}

  def total(params, batch):
    return jnp.sum(seq.loss(model, params, batch, None, View(strategy("seq")))[0]["loss"].sum)

  program = list(tiny.equations(jax.make_jaxpr(jax.grad(total))(model.abstract_params(), batch).jaxpr))
  in_loops = [of_loop for equation in program if equation.primitive.name in ("scan", "while")
              for part in equation.params.values() if hasattr(part, "jaxpr") for of_loop in tiny.equations(part.jaxpr)]

  def padded(equations):
    return [equation for equation in equations if equation.primitive.name == "pad"
            and equation.outvars[0].aval.shape == (16, 4160)]

  assert len(padded(program)) == 1 and not padded(in_loops)
  logits = {equation.outvars[0].aval.shape[-1] for equation in in_loops if equation.primitive.name == "exp"}
  assert 4160 in logits and 4096 not in logits


def test_on_a_mesh_every_device_sums_over_its_own_tokens(monkeypatch):
  """Unless the vocabulary is split, rows do not divide, or the kernel's gradient is large."""
  def chunks(sizes, rows=8, length=12, rules=()):
    hidden, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, length, 16), (16, 50)))
    with mesh_lib.activation_rules(mesh_lib.make_mesh(sizes), rules):
      return chunked_loss.token_chunks(hidden, kernel, 3)

  monkeypatch.setattr(chunked_loss, "MIN_TOKENS", 4)
  assert chunks(dict(data=8)) == chunks(dict(fsdp=4, context=2)) == chunks(dict(fsdp=2, expert=4)) == 3
  assert chunks(dict(fsdp=4, tensor=2)) == chunks(dict(data=8), rows=4) == chunks(dict(data=8), length=9) == 1
  # The vocabulary may be split over the very devices that rows are.
  assert chunks(dict(data=2, fsdp=4)) == 3 and chunks(dict(data=2, fsdp=4), rules=(("vocab", "data"),)) == 1
  monkeypatch.setattr(chunked_loss, "MOST_BYTES", 4 * 16 * 50 - 1)
  assert chunks(dict(data=8)) == 1
