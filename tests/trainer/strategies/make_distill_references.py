"""Writes distill_references.npz: TRL's `generalized_jsd_loss` of some logits, and its gradients.

    python tests/trainer/strategies/make_distill_references.py

in an environment with trl; run with trl 1.16 (trl.experimental.gkd). Logits are products, so that Weft can be given
hidden states and kernels: student [2, 5, 6] @ [6, 23], teacher [2, 5, 9] @ [9, 23]; the last two positions of the
second row do not count.
"""

from pathlib import Path

import numpy as np
import torch
from trl.experimental.gkd import GKDTrainer

BETAS, TEMPERATURES = (0.0, 0.1, 0.5, 0.9, 1.0), (1.0, 0.7)

if __name__ == "__main__":
  rng = np.random.default_rng(0)
  made = dict(hidden=rng.normal(size=(2, 5, 6)), kernel=rng.normal(size=(6, 23)), teacher_hidden=rng.normal(
      size=(2, 5, 9)), teacher_kernel=rng.normal(size=(9, 23)), weights=np.ones((2, 5)))
  made["weights"][1, 3:] = 0
  labels = torch.where(torch.tensor(made["weights"]) > 0, 1, -100)
  for beta in BETAS:
    for temperature in TEMPERATURES:
      hidden, kernel = (torch.tensor(made[key], requires_grad=True) for key in ("hidden", "kernel"))
      teacher = torch.tensor(made["teacher_hidden"]) @ torch.tensor(made["teacher_kernel"])
      loss = GKDTrainer.generalized_jsd_loss(hidden @ kernel, teacher, labels=labels, beta=beta,
                                             temperature=temperature)
      loss.backward()
      name = f"{beta}/{temperature}"
      made |= {f"loss/{name}": loss.item(), f"dhidden/{name}": hidden.grad.numpy(),
               f"dkernel/{name}": kernel.grad.numpy()}
  np.savez_compressed(Path(__file__).parent / "distill_references.npz", **made)
