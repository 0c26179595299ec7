"""Which folders are checkpoints."""

import pytest

from trainer.checkpoints import names
from trainer.errors import ConfigError


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
  for name in ("9", "100", "10", "11.tmp", "x"):
    (tmp_path / name).mkdir()
  assert names.listed(tmp_path) == [9, 10, 100] and names.listed(tmp_path / "none") == []


def test_find_takes_a_workdir_its_checkpoints_or_one_of_them(tmp_path):
  for step in ("9", "10", "3.unreadable"):
    (tmp_path / "checkpoints" / step / "state").mkdir(parents=True)
  newest = tmp_path / "checkpoints" / "10"
  assert names.find(str(tmp_path)) == names.find(str(tmp_path / "checkpoints")) == newest
  assert names.find(str(tmp_path / "checkpoints" / "9")) == tmp_path / "checkpoints" / "9"
  with pytest.raises(ConfigError, match="nowhere does not exist: give a workdir, or one of its checkpoints"):
    names.find(str(tmp_path / "nowhere"))
  with pytest.raises(ConfigError, match="state holds no checkpoint: give"):
    names.find(str(newest / "state"))


def test_what_was_set_aside_is_named_where_nothing_else_is_left(tmp_path):
  (tmp_path / "checkpoints").mkdir()
  for name in ("5.unreadable", "4.unreadable~"):
    (tmp_path / "checkpoints" / name).mkdir()
  assert names.set_aside(tmp_path / "checkpoints") == ["4.unreadable~", "5.unreadable"]
  for given in (tmp_path, tmp_path / "checkpoints"):
    with pytest.raises(ConfigError, match="but those that were set aside as damaged .4.unreadable~, 5.unreadable."):
      names.find(str(given))
