"""Embeddings of a file of texts: the command `python -m trainer.embed`.

May import: trainer.config, trainer.distributed, trainer.generate, trainer.startup, trainer.strategies, input_pipeline.
"""
