"""Images: read, checked, made into arrays, cached, and written into batches."""
