"""Caches of what teachers say: when a teacher is read, in whose memory, and that no two of them are mixed up."""

import os
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest

from tests import tiny
from tests.trainer.strategies.test_distill import Keep, config_of
from trainer import state, train
from trainer.config import strategy
from trainer.errors import ConfigError
from trainer.strategies import cached_teachers, teacher


@pytest.fixture
def seen():
  """What happens, in order: teachers that are read, and states that are made. (Without `monkeypatch`, since no program
  changes: tests/programs.py.)"""
  found = []

  def told(module, name, of):
    real = getattr(module, name)
    return mock.patch.object(module, name, lambda *args: (found.append(of(*args)), real(*args))[1])

  with told(teacher, "load", lambda config, target, path, key: path), told(state, "initialise", lambda *_: "state"):
    yield found


def run(folder, name, path, **changed):
  c = config_of(folder, strategy=strategy("distill", teacher=str(path), cached_top_k=4), total_steps=1, **changed)
  train(c, folder / name)
  return Keep.found[1][2]


def caches(folder):
  return sorted(path.name for path in (folder / "cache").glob("*-teacher-*"))


def test_a_cache_is_made_before_the_student_and_found_without_the_teacher(tmp_path, seen):
  path = tiny.hf_folder(tmp_path / "a", vocab_size=258)
  loss, held = run(tmp_path, "first", path), caches(tmp_path)
  assert seen == [str(path), "state"]
  assert run(tmp_path, "second", path) == loss and seen[2:] == ["state"]
  # It is known, and a part of the cache is not there.
  shutil.rmtree(tmp_path / "cache" / held[0])
  assert run(tmp_path, "third", path) == loss and seen[3:] == [str(path), "state"] and caches(tmp_path) == held


def test_a_teacher_is_read_where_its_files_or_the_cache_are_not_known(tmp_path, seen):
  path = tiny.hf_folder(tmp_path / "a", vocab_size=258)
  loss, held = run(tmp_path, "first", path), caches(tmp_path)
  # Other files with the same parameters: the cache is theirs.
  (path / "notes.json").write_text("{}")
  assert run(tmp_path, "second", path) == loss and seen[2:] == [str(path), "state"] and caches(tmp_path) == held
  # What is remembered is lost or spoilt.
  (tmp_path / "cache" / "teachers.json").write_text("{")
  assert run(tmp_path, "third", path) == loss and seen[4:] == [str(path), "state"]
  # It lies elsewhere: the files count.
  path.rename(tmp_path / "moved")
  assert run(tmp_path, "fourth", tmp_path / "moved") == loss and seen[6:] == ["state"]


def test_two_models_in_one_cache_folder_are_never_mixed_up(tmp_path, seen):
  """The second has the first one's path, names, sizes and times."""
  path, other = (tiny.hf_folder(tmp_path / name, seed=seed, vocab_size=258) for name, seed in (("a", 1), ("b", 2)))
  loss = run(tmp_path, "first", path)
  for file in path.iterdir():
    was = file.stat()
    shutil.copy(other / file.name, file)
    assert file.stat().st_size == was.st_size
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
  again, number = run(tmp_path, "second", path), len(caches(tmp_path))
  assert again != loss and [at for at in seen if at != "state"] == [str(path)] * 2
  alone = tmp_path / "alone"
  alone.mkdir()
  assert run(alone, "w", other) == again and number == 2 * len(caches(alone))
  # One precision of parameters is not another, either.
  c = config_of(tmp_path, strategy=strategy("distill", teacher=str(path), cached_top_k=4), total_steps=1)
  c.precision.params = "bfloat16"
  train(c, tmp_path / "bfloat16")
  assert len(caches(tmp_path)) > number


def test_a_run_that_goes_on_is_refused_another_teacher_found_in_the_cache(tmp_path, seen):
  path, other = (tiny.hf_folder(tmp_path / name, seed=seed, vocab_size=258) for name, seed in (("a", 1), ("b", 2)))
  run(tmp_path, "first", path)
  run(tmp_path, "second", other)
  c = config_of(tmp_path, strategy=strategy("distill", teacher=str(other), cached_top_k=4), total_steps=2,
                allow_config_changes=True)
  with pytest.raises(ConfigError, match="was trained with another reference"):
    train(c, tmp_path / "first")
  assert seen[-1] == "state" and seen.count(str(other)) == 1


def test_a_run_is_known_by_its_checkpoint(tmp_path, seen):
  """A run that has gone on is another teacher."""
  c = config_of(tmp_path, strategy=strategy("distill", teacher=str(tiny.hf_folder(tmp_path / "a", vocab_size=258))),
                total_steps=1, log_steps=1)
  train(c, tmp_path / "run")
  first = cached_teachers.Prints(tmp_path).key(str(tmp_path / "run"), "x", "")
  assert cached_teachers.Prints(tmp_path).key(str(tmp_path / "run" / "checkpoints" / "1"), "x", "") == first
  assert cached_teachers.Prints(tmp_path).key(str(tmp_path / "run"), "x", "y") != first
  c.total_steps, c.allow_config_changes = 2, True
  train(c, tmp_path / "run")
  assert cached_teachers.Prints(tmp_path).key(str(tmp_path / "run"), "x", "") != first


def test_whatever_decides_what_a_teacher_says_is_another_cache(tmp_path):
  """Here the files are known, so that nothing is computed: the caches are asked for by name."""
  path, asked = str(tiny.hf_folder(tmp_path / "a", vocab_size=258)), []
  data = SimpleNamespace(use_teachers=lambda *_: None, teacher=lambda identity, *more: (
      asked.append((identity, more[1], more[2])), SimpleNamespace(complete=True))[1])
  keys = set()
  for real, micro, compute, options in (
      (258, 2, "float32", {}), (257, 2, "float32", {}), (258, 4, "float32", {}), (258, 2, "bfloat16", {}),
      (258, 2, "float32", dict(temperature=0.5)), (258, 2, "float32", dict(cached_top_k=3))):
    c = config_of(tmp_path, strategy=strategy("distill", **(dict(teacher=path, cached_top_k=4) | options)))
    c.precision.compute = compute
    program = SimpleNamespace(precompute=True, model=SimpleNamespace(num_real_vocab=real),
                              options=SimpleNamespace(micro_batch_size=micro))
    with mock.patch.object(cached_teachers.Prints, "get", lambda _, key: keys.add(key) or "known"):
      assert cached_teachers.precompute(c, program, [data], tmp_path) == ("known", teacher.KEY)
  assert len({identity for identity, _, _ in asked}) == len(asked) == 6 and len(keys) == 1
  assert {top for _, top, _ in asked} == {3, 4} and all(sources == ["main"] for _, _, sources in asked)
