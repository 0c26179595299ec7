"""Hugging Face folders: what a run takes from one and writes as one; the command `python -m trainer.export`."""
