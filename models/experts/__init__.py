"""Mixture of experts: the router (`moe`), its experts' arrays (`kernels`), products with one matrix
per expert (`grouped`), experts on several devices.

May import: models.activations, models.attention, models.gpu, models.layers, models.quantization, models.remat,
models.sharding, models.spec.
"""
