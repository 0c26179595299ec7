"""Hugging Face folders: what a run takes from one and writes as one; the command `python -m trainer.export`.

May import: trainer.checkpoints, trainer.config, trainer.startup, trainer.strategies, input_pipeline, models.
"""
