"""Tests of input_pipeline, one file a module."""
