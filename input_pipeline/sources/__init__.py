"""Sources of records: readers of file formats, and named sources with their splits."""
