"""muP: what a step changes does not depend on the width, whichever optimizer takes it; and what it is not for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.initial import initial
from trainer import program, tree
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.optim import mup

VOCAB, LENGTH = 64, 32
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (8, LENGTH)).astype(np.int32)
BATCH = dict(tokens=TOKENS, positions=np.tile(np.arange(LENGTH, dtype=np.int32), (8, 1)),
             segment_ids=np.ones((8, LENGTH), np.int32))


def config(width, base, *, name="adamw", learning_rate=0.01, weight_decay=0.0, **model):
  """Two layers with heads of 16."""
  c = defaults()
  c.model.update(dict(num_layers=2, hidden_size=width, intermediate_size=2 * width, num_heads=width // 16, head_dim=16,
                      mup_base_size=base, tie_embeddings=False) | model)
  c.optimizer.update(name=name, learning_rate=learning_rate, weight_decay=weight_decay)
  c.optimizer.min_dim_size_to_factor = 8  # of Adafactor, so that it factors at each width
  c.schedule.update(name="constant", warmup_percent=-1.0)
  c.precision.update(params="float32", compute="float32")
  return c


def made(c):
  """(model, optimizer), once the config is filled in."""
  mup.fill_in(c)
  model = program.make_model(c, VOCAB)
  return model, program.make_optimizer(c, model, 100, lambda *_, **__: 0)


def trained(c, steps=4):
  """(parameters, how large the change of the logits is, RMS) after some steps on one batch."""
  model, optimizer = made(c)

  def logits(params):
    return model.apply(params, BATCH).hidden @ model.unembedding(params)

  @jax.jit
  def step(params, state, k):
    def loss(params):
      logp_BxTxV = jax.nn.log_softmax(logits(params)[:, :-1])
      return -jnp.take_along_axis(logp_BxTxV, TOKENS[:, 1:, None], -1).mean()

    updates, state = optimizer.update(jax.grad(loss)(params), state, params, k)
    return optimizer.apply(updates, params, k), state

  first = params = initial(model)
  state = optimizer.init(params)
  for k in range(steps):
    params, state = step(params, state, k)
  change = jax.jit(lambda a, b: jnp.sqrt(jnp.mean(jnp.square(logits(a) - logits(b)))))
  return params, float(change(params, first))


@pytest.mark.parametrize("name, rate", [("adamw", 0.01), ("lion", 0.003), ("adafactor", 0.01), ("muon", 0.02)])
def test_a_step_changes_logits_alike_at_any_width(name, rate):
  """The coordinate check (arXiv 2203.03466, appendix D.1): with muP 8 times the width changes little, without it grows
  with it."""
  changes = {base: [trained(config(width, base, name=name, learning_rate=rate))[1] for width in (32, 256)]
             for base in (None, 32)}
  assert changes[None][0] == changes[32][0]  # at the base width nothing is different
  assert changes[None][1] > 2 * changes[None][0]
  assert 0.6 < changes[32][1] / changes[32][0] < 1.4


def test_rates_and_decay_are_those_of_the_table():
  """Matrices of the blocks at a quarter of the rate and four times the decay; all else as it was, as are one's own
  factors."""
  experts = dict(num_experts=4, experts_per_token=2, dense_layers=1)
  c = config(128, 32, weight_decay=0.1, moe=experts)
  c.optimizer.lr_mults = ((r"attn/q", 3.0), (r"^embed", 0.5))
  rules = made(c)[1].rules
  plain = made(config(128, None, weight_decay=0.1, moe=experts))[1].rules
  assert c.model.logit_scale == 0.25
  for path, rule in rules.items():
    hidden = path.startswith("blocks/") and path.endswith("kernel")
    own = 3.0 if "attn/q" in path else 0.5 if path.startswith("embed") else 1.0
    assert rule.lr_mult == own * (0.25 if hidden else 1.0), path
    assert rule.wd_mult == plain[path].wd_mult * (4 if hidden else 1), path
  assert {"blocks/moe/experts/up/kernel", "blocks/moe/router/kernel", "blocks/mlp/down/kernel"} <= rules.keys()
  muon = made(config(128, 32, name="muon"))[1].rules
  assert muon["blocks/attn/o/kernel"].lr_mult == 0.5 and muon["unembed/kernel"].lr_mult == 1


def test_the_first_logits_are_smaller_and_their_gradient_with_them():
  params, _ = trained(config(128, None), steps=0)
  one, other = (made(config(128, base))[0] for base in (None, 32))
  mine, theirs = (np.asarray(jax.jit(model.apply)(params, BATCH).hidden) for model in (one, other))
  np.testing.assert_allclose(mine / 4, theirs, rtol=1e-6)
  assert tree.flatten(params).keys() == tree.flatten(one.abstract_params()).keys()


def test_a_resolved_config_stays_as_it_is():
  c = config(128, 32)
  assert mup.fill_in(c) and c.model.logit_scale == 0.25
  assert "0.25 of the rate" in mup.fill_in(c)[0] and c.model.logit_scale == 0.25
  assert "0.5 of the rate" in mup.fill_in(config(128, 32, name="muon"))[0]


@pytest.mark.parametrize("changed, says", [
    (dict(mup_base_size=0), "at least 1"), (dict(init_std=0.02), "leave it unset"),
    (dict(scale_embeddings=True), "use False"), (dict(head="score"), "use lm"), (dict(lora=dict(rank=2)), "adapters"),
    (dict(logit_scale=0.5), "makes it 0.25"), (dict(hf="somewhere"), "a model that is there"),
    (dict(per_layer_size=4), "embeddings for each layer"),
    (dict(altup=dict(num_inputs=2)), "several streams"), (dict(laurel_rank=4), "low-rank connections"),
    (dict(layer_pattern=("delta", "global")), "delta layers"),
    (dict(layer_pattern=("mamba", "global")), "mamba layers"), (dict(vision=dict(tower="siglip")), "a tower"),
])
def test_what_it_is_not_for_is_refused(changed, says):
  c = config(128, 32)
  c.model.update(changed)
  with pytest.raises(ConfigError, match=says):
    mup.fill_in(c)


def test_steps_that_follow_the_size_of_gradients_are_refused():
  with pytest.raises(ConfigError, match="optimizer.name means sgd"):
    mup.fill_in(config(128, 32, name="sgd"))
