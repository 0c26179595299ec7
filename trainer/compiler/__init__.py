"""The compiled step: made for each shape of batches, and the same bits each time it runs.

May import: trainer.planning, trainer.startup.
"""
