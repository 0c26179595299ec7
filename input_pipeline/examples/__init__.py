"""From a record to token ids and the weight of each: an encoder for each kind of data that a strategy learns from.

May import: input_pipeline.chat, input_pipeline.files, input_pipeline.images, input_pipeline.remarks,
input_pipeline.sources, input_pipeline.tokenizer.
"""
