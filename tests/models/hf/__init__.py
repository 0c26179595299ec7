"""Tests of models/hf/."""
