"""What a run says of itself: metrics' writers and loggers, throughput and MFU, events, diagnostics, loss spikes.

May import: trainer.callbacks, trainer.config, trainer.distributed, trainer.startup, trainer.strategies, trainer.update,
input_pipeline, models.
"""
