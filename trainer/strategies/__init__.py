"""Training objectives. A strategy is one file with a pure `loss`, and one line in STRATEGIES.

    loss(model, params, batch, rng, cfg) -> (loss_sum, weight, metrics)

The loss is a SUM with its WEIGHT, never a mean: the update divides once, by the whole optimizer step's weight over
every device and micro-batch. `metrics` maps a name to a `Mean(sum, weight)`; sums and weights of shape [B]
(one per row) are also reported per data source. `model` is the seam of models/api.py; `cfg` is `config.strategy`.
"""

from collections.abc import Callable
from typing import Any

from trainer.strategies import seq

Loss = Callable[..., tuple[Any, Any, dict[str, Any]]]

# The options and defaults of each are in trainer/config.py STRATEGIES.
STRATEGIES: dict[str, Loss] = {"seq": seq.loss}
