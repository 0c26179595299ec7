"""A file is replaced as a whole, or not at all."""

import os

import pytest

from trainer import atomic


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
  file = tmp_path / "state.json"
  atomic.write(file, "läuft\n")
  atomic.write(file, b"goes on\n")

  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  with pytest.raises(OSError, match="No space"):
    atomic.write(file, "new")
  assert file.read_bytes() == b"goes on\n" and list(tmp_path.iterdir()) == [file]
