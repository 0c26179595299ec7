"""The guard sees what it is for, and what it sees is not done."""

import os
import socket
import subprocess
import sys

import jinja2
import pytest

from tests.hostile.guard import ForbiddenError


@pytest.mark.parametrize("act", [
    lambda inside, outside: socket.getaddrinfo("localhost", 1),
    lambda inside, outside: socket.create_connection(("127.0.0.1", 1), 1),
    lambda inside, outside: subprocess.run([sys.executable, "-c", ""], check=True),
    lambda inside, outside: os.system("true"),
    lambda inside, outside: outside.write_text("a"),
    lambda inside, outside: os.rename(inside, outside),
    lambda inside, outside: outside.parent.joinpath("folder").mkdir(),
    lambda inside, outside: os.symlink(inside, outside),
    lambda inside, outside: os.close(os.open(outside, os.O_CREAT | os.O_WRONLY)),
    lambda inside, outside: eval(compile("1", str(inside), "eval")),
    lambda inside, outside: exec("pwned = 1"),
    lambda inside, outside: jinja2.Environment().from_string("{{ 1 }}"),
], ids=["name", "connect", "program", "shell", "write", "rename", "mkdir", "link", "descriptor", "file of data",
        "canary", "template"])
def test_what_is_forbidden_is_seen_and_not_done(act, guard, tmp_path, tmp_path_factory):
  inside, outside = tmp_path / "work" / "a", tmp_path / "b"
  inside.parent.mkdir()
  inside.write_text("a")
  with guard.only(tmp_path / "work"):
    with pytest.raises(ForbiddenError):
      act(inside, outside)
  assert len(guard.seen) == 1 and inside.exists() and not outside.exists()
  guard.seen.clear()


def test_what_is_allowed_is_done(guard, tmp_path):
  (tmp_path / "work").mkdir()
  with guard.only(tmp_path / "work"):
    (tmp_path / "work" / "a").write_text("a")
    (tmp_path / "work" / "a").rename(tmp_path / "work" / "b")
    assert (tmp_path / "work" / "b").read_text() == "a"
    assert eval(compile("1 + 1", "<string>", "eval")) == 2
