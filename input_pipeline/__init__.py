"""Documents to batches: sources, tokenizer, on-disk token cache, packing, mixture, loader. Free of JAX."""
