"""Attention over packed rows: `dispatch` chooses what computes it, `blocked` is the reference, others are kernels for
chips.

`ring` splits rows over devices, `rope` rotates, `cache` keeps keys and values for generation. `deltanet` stands in its
place in some models' layers, with a state of a fixed size instead of keys and values; `delta_rule` is its arithmetic,
`delta_gpu` decides whether the kernels for GPUs (`delta_kernels`) compute it.

May import: models.cpu, models.gpu, models.layers, models.remat, models.sharding, models.spec.
"""
