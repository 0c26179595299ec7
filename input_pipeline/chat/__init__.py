"""Conversations: what a row is by its columns, chat templates and their sandbox, and which characters are trained.

May import: input_pipeline.files, input_pipeline.images, input_pipeline.once, input_pipeline.remarks,
input_pipeline.sources, input_pipeline.tokenizer.
"""
