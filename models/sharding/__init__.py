"""Where arrays live on a mesh: logical axes of activations, and products with split kernels.

May import: models.cpu, models.remat.
"""
