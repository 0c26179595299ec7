"""What modules that predict tokens further ahead read, by hand; what they compute: tests/models/hf/test_mtp.py."""

import functools

import jax
import numpy as np

from configs import deepseek_v3
from models import api, blocks
from models.mtp import ahead
from tests import tiny
from tests.models.initial import initial
from trainer import tree


def test_a_token_is_padding_where_its_segment_ends_before_the_one_that_is_read():
  tokens = np.array([[3, 4, 5, 6, 7, 8]], np.int32)
  segments = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
  read, there = ahead(tokens, segments, 1)
  np.testing.assert_array_equal(read[:, :-1], tokens[:, 1:])
  np.testing.assert_array_equal(there, [[1, 1, 0, 2, 0, 0]])
  np.testing.assert_array_equal(ahead(tokens, segments, 2)[1], [[1, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(ahead(tokens, np.ones_like(segments), 4)[1], [[1, 1, 0, 0, 0, 0]])


def test_loads_of_modules_experts_are_of_the_tokens_that_they_see():
  """Behind the layers', one dense and one with experts."""
  model = tiny.model(mtp_layers=2, moe=dict(num_experts=4, experts_per_token=2, dense_layers=1))
  batch = tiny.batch(4, 16)
  counts = np.asarray(jax.jit(model.apply)(initial(model), batch).metrics["moe"].counts)
  segments = np.asarray(batch["segment_ids"])
  seen = [int(np.sum((segments[:, :16 - k] > 0) & (segments[:, :16 - k] == segments[:, k:]))) for k in (0, 1, 2)]
  np.testing.assert_array_equal(counts.sum(axis=1), 2 * np.array(seen))


def test_deepseek_v3_has_as_many_parameters_more_as_published():
  """README_WEIGHTS.md of its folder: 11.5 billion of its own, besides the shared embedding and unembedding."""
  def parameters(modules):
    section = deepseek_v3.get_config().model
    section.mtp_layers = modules
    model = api.make_model(section, vocab_size=129_280, params_dtype="bfloat16", compute_dtype="bfloat16")
    return sum(leaf.size for leaf in tree.flatten(model.abstract_params()).values())

  assert round(parameters(0) / 1e9) == 671 and abs(parameters(1) - parameters(0) - 11.5e9) < 0.15e9


def test_a_module_reads_what_the_one_before_it_gave():
  """Only the first reads the decoder: with the first one's kernels of attention and MLP other, so is the second."""
  model, batch = tiny.model(mtp_layers=2), tiny.batch(2, 8)
  apply, params = jax.jit(model.apply), initial(model)
  moved = {**params, "mtp": jax.tree.map(lambda leaf: leaf.at[0].multiply(2.0), params["mtp"])}
  before, after = (np.asarray(apply(of, batch).ahead) for of in (params, moved))
  there = np.asarray(batch["segment_ids"]) > 0
  assert np.any(before[0][there] != after[0][there]) and np.any(before[1][there] != after[1][there])
  last = {**params, "mtp": jax.tree.map(lambda leaf: leaf.at[1].multiply(2.0), params["mtp"])}
  np.testing.assert_array_equal(before[0], np.asarray(apply(last, batch).ahead)[0])


def test_each_module_has_dropout_of_its_own_which_no_layer_has(monkeypatch):
  """All parameters but the norms' are 0: nothing passes but what stands in dropout's place, a draw of its key."""
  monkeypatch.setattr(blocks, "dropout", lambda y, rate, key: y + jax.random.uniform(key, y.shape))
  model, batch = tiny.model(mtp_layers=2, dropout=0.5), tiny.batch(2, 8)
  params = tree.unflatten({path: np.full(leaf.shape, float(path.endswith("norm/scale")), np.float32)
                           for path, leaf in tree.flatten(model.abstract_params()).items()})
  made = jax.jit(functools.partial(model.apply, train=True))(params, batch, rng=jax.random.key(0))
  first, second = made.ahead
  assert np.std(first) > 0.1 and np.abs(first - second).max() > 0.1
  for module in made.ahead:  # of a layer's draws it would be some 0.6
    assert abs(np.corrcoef(np.ravel(made.hidden), np.ravel(module))[0, 1]) < 0.3
