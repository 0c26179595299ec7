"""Tests of models/cpu."""
