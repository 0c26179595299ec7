"""Optimizers: gradients in, updates of the parameters out.

`optimizer` puts it together with its rules for parameters (freezing, multipliers, weight decay, warm-up); `transforms`
holds Adam, Lion, Muon and the others, `schedules` the learning rate over the steps, `moments` the state in fewer bits,
`offload` the state in the host's memory.

May import: trainer.config.
"""
