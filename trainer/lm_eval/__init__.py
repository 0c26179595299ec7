"""Scores with lm-evaluation-harness: the command `python -m trainer.lm_eval`, and a model as the harness sees one.

May import: trainer.config, trainer.distributed, trainer.generate, trainer.startup, trainer.strategies, input_pipeline,
models.
"""
