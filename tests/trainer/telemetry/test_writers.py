"""metrics.jsonl and event files survive crashes and full disks."""

import json
import struct

import pytest

from trainer.telemetry import writers
from trainer.telemetry.writers import JsonlWriter, MultiWriter, TensorBoardWriter, read_rows


def test_rows_after_the_resumed_step_are_dropped_and_a_cut_line_is_left_out(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
  writer = JsonlWriter(path, resume_step=2)
  writer.write_scalars(3, {"loss": 1.5})
  writer.close()
  assert read_rows(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.5}]


def test_the_last_evaluation_is_the_newest_that_is_not_later(tmp_path):
  rows = [{"step": 2, "eval/x/loss": 4.0}, {"step": 4, "eval/x/loss": 3.0, "eval/y/loss": 7.0},
          {"step": 5, "loss": 1.0}, {"step": 8, "eval/x/loss": 2.0}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = [writers.last_evaluation(tmp_path, step) for step in (1, 2, 3, 4, 7, 8)]
  assert [step for step, _ in found] == [-1, 2, 2, 4, 4, 8]
  assert found[0][1] == {} and found[4][1] == {"eval/x/loss": 3.0, "eval/y/loss": 7.0}
  assert writers.evaluations(tmp_path, 7) == {"eval/x/loss": (4, 3.0), "eval/y/loss": (4, 7.0)}
  assert writers.evaluations(tmp_path, 8) == {"eval/x/loss": (8, 2.0), "eval/y/loss": (4, 7.0)}


def test_a_broken_row_in_the_middle_is_an_error_with_its_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a metrics row"):
    read_rows(path)


def test_rows_are_valid_json_even_for_non_finite_values(tmp_path):
  writer = JsonlWriter(tmp_path / "m.jsonl", resume_step=-1)
  writer.write_scalars(1, {"loss": float("nan"), "grad_norm": float("inf")})
  writer.close()

  def refuse(constant):
    raise AssertionError(constant)

  assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)["loss"] == "nan"


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
  class FullFile:
    def write(self, text):
      raise OSError(28, "No space left on device")

  writer = JsonlWriter(tmp_path / "metrics.jsonl", -1)
  monkeypatch.setattr(writer, "_file", FullFile())
  with pytest.raises(OSError, match=r"No space left on device. Free space, .* Not written: '.*metrics.jsonl'"):
    writer.write_scalars(1, {"loss": 1.0})


@pytest.mark.parametrize("resumed, purged", [(-1, 0), (0, 1), (7, 8)])
def test_tensorboard_leaves_out_what_earlier_files_say_of_later_steps(tmp_path, resumed, purged):
  """The step of a session that starts is the first that it takes from them (read by tensorboardX's own messages)."""
  from tensorboardX.proto.event_pb2 import Event
  TensorBoardWriter(tmp_path, resumed).close()
  data, events = next(tmp_path.glob("events*")).read_bytes(), []
  while data:
    size = struct.unpack("<Q", data[:8])[0]
    events.append(Event.FromString(data[12:12 + size]))
    data = data[16 + size:]
  assert [event.step for event in events] == [purged, purged] and events[1].session_log.status == 1


def test_tensorboard_files_are_written_beside_jsonl(tmp_path):
  writer = MultiWriter((JsonlWriter(tmp_path / "m.jsonl", -1), TensorBoardWriter(tmp_path / "tb", -1)))
  writer.write_scalars(1, {"loss": 1.0})
  (events,) = (tmp_path / "tb").glob("events*")
  # They are there at once: a process may be killed before it closes its files.
  assert b"loss" in events.read_bytes() and read_rows(tmp_path / "m.jsonl") == [{"step": 1, "loss": 1.0}]
  writer.write_texts(1, {"sample": "text"})
  assert b"text" in events.read_bytes()
  writer.flush()
  writer.close()
  assert all(one._file.closed for one in writer.writers)
