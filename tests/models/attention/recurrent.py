"""Rules of layers that have a state, in a loop over tokens."""

import jax
import jax.numpy as jnp


def in_a_loop(rule, state_shape):
  """`chunked` of a module (models/attention/delta_rule.py, state_space.py) by its `one_token`, token by token.

  Args:
    state_shape: of all rows' states.
  """
  def scan(inputs, segment_ids_BxT):
    *given, owner_BxT = rule._prepared(*inputs, segment_ids_BxT)

    def step(carry, token):
      state, before_B = carry
      *inputs, owner_B = token
      state = jnp.where((owner_B == before_B)[:, None, None, None], state, 0.0)
      state, out = rule.one_token(state, *inputs)
      return (state, owner_B), out

    begin = jnp.zeros(state_shape, given[0].dtype), jnp.zeros(state_shape[0], owner_BxT.dtype)
    (state, _), out = jax.lax.scan(step, begin, [part.swapaxes(0, 1) for part in (*given, owner_BxT)])
    return jnp.where((segment_ids_BxT > 0)[..., None, None], out.swapaxes(0, 1), 0.0), state

  return scan
