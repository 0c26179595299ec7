"""Every test here runs under the guard: see guard.py."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hostile import guard as guard_lib


@pytest.fixture(autouse=True)
def guard(tmp_path, monkeypatch):
  """Armed during the test; what it saw fails the test, even where something swallowed the exception."""
  spare = tmp_path / "spare"  # for what Python's libraries make in the system's folder of temporary files
  spare.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(spare))
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  caches = (Path(os.environ["WEFT_TEST_CACHE"]), spare)
  watching = guard_lib.Guard(tmp_path, (tmp_path, *caches))
  with guard_lib.armed(watching):
    yield watching
  assert not watching.seen, "\n".join(watching.seen)


@pytest.fixture
def asleep(guard):
  """For a test that starts a program of its own: the guard is of this process alone."""
  with guard_lib.asleep():
    yield
