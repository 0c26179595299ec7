"""A file is replaced as a whole, or not at all."""

import os

import pytest

from trainer import whole_files


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
  file = tmp_path / "state.json"
  whole_files.write(file, "läuft\n")
  whole_files.write(file, b"goes on\n")

  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  with pytest.raises(OSError, match="No space"):
    whole_files.write(file, "new")
  assert file.read_bytes() == b"goes on\n" and list(tmp_path.iterdir()) == [file]
