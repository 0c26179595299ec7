"""Periodic evaluation: each evaluator is a class with run(params, step), see common.py."""
