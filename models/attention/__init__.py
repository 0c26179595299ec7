"""Attention over packed rows: `dispatch` chooses what computes it, `blocked` is the reference, others are kernels for
chips.

`ring` splits rows over devices, `rope` rotates, `cache` keeps keys and values for generation.

May import: models.cpu, models.gpu, models.layers, models.remat, models.sharding, models.spec.
"""
