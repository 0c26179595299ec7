"""Generation on the mesh that trains, and the command `python -m trainer.generate`.

`sampler` turns prompts into token ids and log-probs; `sampling` draws a token, `slots` says which row generates what,
`stop_strings` ends completions, `sample_page` shows them.

May import: trainer.checkpoints, trainer.config, trainer.distributed, trainer.export, trainer.startup, input_pipeline,
models.
"""
