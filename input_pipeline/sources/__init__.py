"""Sources of records: readers of file formats, and named sources with their splits.

May import: input_pipeline.bad_rows, input_pipeline.files, input_pipeline.urls.
"""
