"""Images: read, checked, made into arrays, cached, and written into batches.

May import: input_pipeline.examples, input_pipeline.files.
"""
