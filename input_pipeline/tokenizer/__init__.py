"""Tokenizers: bytes, a BPE trained here, and those of Hugging Face folders; texts as token ids with weights.

May import: input_pipeline.once.
"""
