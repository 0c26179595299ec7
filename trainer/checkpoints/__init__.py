"""Checkpoints: what a run leaves on disk and goes on from.

`checkpoint` saves and restores the state, `checksums` and `damage` tell a damaged one from one that cannot be read just
now, `init_from` takes parameters from another run or a Hugging Face folder.

May import: trainer.distributed, models, input_pipeline.tokenizer.
"""
