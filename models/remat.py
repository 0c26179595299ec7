"""What the backward pass recomputes instead of keeping it (`config.remat`)."""

from collections.abc import Callable

import jax

from trainer.config import ConfigError

# Names of config.remat beside those of jax.checkpoint_policies. None: keep nothing, recompute all.
REMAT = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# The members of jax.checkpoint_policies that are policies; the others make one from arguments.
JAX_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def remat_policy(name: str) -> Callable:
  """`wrap(f, in_scan)`, the transformation of one layer's function that `config.remat` names.

  Names: none, those of REMAT, those of JAX_POLICIES; raises ConfigError for others.
  """
  if name == "none":
    return lambda f, in_scan: f
  if name not in REMAT and name not in JAX_POLICIES:
    raise ConfigError(f"remat: found {name!r}, allowed: none, {', '.join(REMAT)}, {', '.join(JAX_POLICIES)}.")
  policy = REMAT[name] if name in REMAT else getattr(jax.checkpoint_policies, name)
  # Inside a scan nothing can merge the recomputation with the forward pass, so no barrier is needed.
  return lambda f, in_scan: jax.checkpoint(f, policy=policy, prevent_cse=not in_scan)
