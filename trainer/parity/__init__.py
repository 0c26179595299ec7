"""A run beside transformers: `python -m trainer.parity` trains a config's first steps, and PyTorch the same from the
same parameters.

May import: trainer.callbacks, trainer.config, trainer.export, trainer.main, trainer.program, trainer.startup,
trainer.strategies, models.
"""
