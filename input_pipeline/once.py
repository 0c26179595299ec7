"""Warnings about files and templates, which many parts of a run read: each is printed once in a process."""

from absl import logging

_said: set[str] = set()


def warning(message: str, *args: object) -> None:
  """`absl.logging.warning`, unless the same text was printed before."""
  text = message % args
  if text not in _said:
    _said.add(text)
    logging.warning("%s", text)


def forget() -> None:
  """Another run begins in this process: everything may be said again."""
  _said.clear()
