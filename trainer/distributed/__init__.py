"""Devices and processes: the mesh and its sharding rules, joining processes, and noticing those that die or hang.

May import: trainer.callbacks, trainer.startup, models.
"""
