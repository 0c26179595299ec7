"""Training batches: the same by any route, every row once an epoch, stages of weights and sizes, stops, refusals."""

import json
import re
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.steps import ROWS, Past
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.config import strategy as strategy_of
from trainer.config.checks import View
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns
from trainer.telemetry import terminal


def config(folder, sources=None, **changed):
  """Two sources, of 30 and 12 short documents, in rows of 16 bytes; `changed` are keys of the input section."""
  c = defaults()
  c.seq_len, c.batch_size = 16, 6
  for name, count in ({"a": 30, "b": 12} if sources is None else sources).items():
    path = folder / f"{name}.jsonl"
    rng = np.random.default_rng(count)
    texts = [f"{name}{i} " + "x" * int(rng.integers(0, 40)) for i in range(count)]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    c.input.sources[name] = source(type="jsonl", path=str(path))
  c.input.update(changed)
  return c


def make(c, folder):
  return loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=folder)


def same(a, b):
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_batches_are_the_same_by_any_route(tmp_path, packing):
  c = config(tmp_path, packing=packing, weight_stages=((4, {"a": 0.2}),), batch_size_stages=((7, 12),))
  data = make(c, tmp_path)
  straight = [data.batch(step) for step in range(12)]
  fresh = make(c, tmp_path)
  for step in (11, 3, 8, 0, 3):
    same(fresh.batch(step), straight[step])
  for workers in (1, 4):
    with loader.Prefetcher(data.batch, 0, 12, depth=4, workers=workers) as batches:
      for batch, wanted in zip(batches, straight, strict=True):
        same(batch, wanted)
  for step in (2, 7):
    size = len(straight[step]["tokens"])
    for rows in (slice(0, size // 2), slice(1, None, 2), np.array([5, 0, 5]), np.array([], int)):
      same(data.batch(step, rows), {key: value[rows] for key, value in straight[step].items()})


def rows_of(data, steps):
  return np.concatenate([data.batch(step)["tokens"] for step in range(steps)])


def test_batch_size_changes_neither_rows_nor_their_order(tmp_path):
  c = config(tmp_path)
  whole = rows_of(make(c, tmp_path), 20)
  c.input.batch_size_stages = ((3, 12), (5, 6), (6, 24))
  staged = make(c, tmp_path)
  assert [staged.batch_range(s) for s in (0, 2, 3, 4, 5, 6, 7)] == [
      (0, 6), (12, 6), (18, 12), (30, 12), (42, 6), (48, 24), (72, 24)]
  np.testing.assert_array_equal(rows_of(staged, 8)[:96], whole[:96])
  for rows in range(130):
    steps = staged.taken.steps_for(rows)
    assert staged.batch_range(steps)[0] >= rows and (steps == 0 or staged.batch_range(steps - 1)[0] < rows)
  c.batch_size, c.input.batch_size_stages = 40, ()
  np.testing.assert_array_equal(rows_of(make(c, tmp_path), 3), whole[:120])


def test_batches_are_made_ahead_by_the_threads_that_the_config_says_from_the_runs_step_on(tmp_path, monkeypatch):
  made = []
  monkeypatch.setattr(loader, "Prefetcher", lambda *given, **options: made.append((given, options)))
  data = make(config(tmp_path, prefetch=3, workers=5, batch_size_stages=((8, 12),)), tmp_path)
  program = types.SimpleNamespace(model=types.SimpleNamespace(vocab_size=258),
                                  place_rows=lambda rows, size: (rows(slice(1, 3)), size))
  data.batches(types.SimpleNamespace(step=7, total_steps=9, program=program))
  ((example, step, end), options), = made
  assert (step, end, options) == (7, 9, dict(depth=3, workers=5, closed=data._close))
  for step, size in ((7, 6), (8, 12)):
    batch, placed = example(step)
    same(batch, data.batch(step, np.array([1, 2])))
    assert placed == size
    same(data.take(types.SimpleNamespace(step=step)), data.batch(step))
  program.model.vocab_size = 200
  with pytest.raises(DataError, match="is not in the model's vocabulary of 200"):
    example(7)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_an_epoch_trains_every_byte_but_the_documents_first_token_once(tmp_path, packing):
  c = config(tmp_path, {"a": 30}, packing=packing, stop="all")
  data = make(c, tmp_path)
  texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
  wanted = np.sort(np.frombuffer("".join(texts).encode() , np.uint8)).tolist() + [257] * 30
  got = [b["tokens"][b["loss_weights"] > 0] for b in map(data.batch, range(data.num_steps))]
  assert np.sort(np.concatenate(got)).tolist() == wanted
  assert data.num_rows == data.rows_per_epoch and data.epoch(data.num_steps) == 1.0


def test_epochs_hold_the_same_rows_in_other_orders(tmp_path):
  c = config(tmp_path, {"a": 30}, packing="none")
  data = make(c, tmp_path)
  both = 2 * data.rows_per_epoch
  rows = rows_of(data, data.taken.steps_for(both))[:both].reshape(2, data.rows_per_epoch, -1)
  assert rows[0].tolist() != rows[1].tolist()
  assert sorted(rows[0].tolist()) == sorted(rows[1].tolist())
  c.seed += 1
  of_another = rows_of(make(c, tmp_path), data.taken.steps_for(both))[:len(rows[0])].tolist()
  assert sorted(of_another) == sorted(rows[0].tolist()) and of_another not in rows.tolist()


def test_the_last_batch_is_padded_and_counted(tmp_path):
  data = make(config(tmp_path, stop="all"), tmp_path)
  assert data.num_rows % 6 and data.num_steps == -(-data.num_rows // 6)
  last = data.batch(data.num_steps - 1)
  real = data.num_rows - 6 * (data.num_steps - 1)
  assert (last["source_ids"][:real] >= 0).all() and (last["source_ids"][real:] == -1).all()
  assert not last["segment_ids"][real:].any() and not last["loss_weights"][real:].any()
  assert sum(c["rows"] for c in data.counters(data.num_steps).values()) == data.num_rows
  assert min(c["epoch"] for c in data.counters(data.num_steps).values()) >= 1


def test_counters_are_the_counts(tmp_path):
  data = make(config(tmp_path, weight_stages=((4, {"a": 0.2}),)), tmp_path)
  ids = np.concatenate([data.batch(s)["source_ids"] for s in range(9)])
  for step in (0, 4, 9):
    counters = data.counters(step)
    assert [counters[n]["rows"] for n in data.source_names] == [(ids[:6 * step] == s).sum() for s in range(2)]
  # From row 24 on, one row in six is a's.
  assert (ids[24:54] == 0).sum() == 5 and (ids[:24] == 0).sum() == 12


def test_a_stage_of_weights_begins_with_its_step_also_where_batches_grow(tmp_path):
  data = make(config(tmp_path, weight_stages=((4, {"a": 0.0}),), batch_size_stages=((2, 12), (3, 6))), tmp_path)
  assert [0 in data.batch(step)["source_ids"] for step in range(7)] == [True] * 4 + [False] * 3


def test_an_epoch_is_as_many_rows_as_all_sources_have(tmp_path):
  c = config(tmp_path, packing="none")
  c.seq_len = 64  # a row for each document
  data = make(c, tmp_path)
  assert data.rows_per_epoch == 30 + 12 and data.epoch(7) == 1.0


def test_mixture_by_tokens_gives_trained_tokens_in_proportion(tmp_path):
  (tmp_path / "long.txt").write_text("long " * 400)
  (tmp_path / "short.txt").write_text("ab\n" * 200)
  c = defaults()
  c.seq_len = c.batch_size = 16
  c.input.update(packing="none", mixture_by="tokens")
  c.input.sources.long = source(path=str(tmp_path / "long.txt"), weight=1.0)
  c.input.sources.short = source(path=str(tmp_path / "short.txt"), documents="line", weight=3.0)
  data = make(c, tmp_path)
  trained = np.zeros(2)
  for step in range(100):
    batch = data.batch(step)
    np.add.at(trained, batch["source_ids"], batch["loss_weights"].sum(axis=1))
  assert trained[1] / trained[0] == pytest.approx(3, rel=0.02)


def test_a_source_keeps_its_order_when_others_join_or_go(tmp_path):
  both = make(config(tmp_path), tmp_path)
  alone = make(config(tmp_path, weight_stages=((0, {"b": 0.0}),)), tmp_path)
  assert alone.source_names == ("a",) and both.source_names == ("a", "b")
  batches = [both.batch(step) for step in range(10)]
  of_a = np.concatenate([b["tokens"][b["source_ids"] == 0] for b in batches])
  np.testing.assert_array_equal(of_a, rows_of(alone, 10)[:len(of_a)])


def test_the_fingerprint_follows_what_decides_the_rows(tmp_path):
  c = config(tmp_path)
  first = make(c, tmp_path).fingerprint
  c.input.update(prefetch=7, workers=3, stop="all")
  c.batch_size, c.input.batch_size_stages = 12, ((3, 24),)
  assert make(c, tmp_path).fingerprint == first
  c.batch_size, c.input.batch_size_stages = 6, ()
  seen = {first}
  for change in (lambda: c.update(seed=1), lambda: c.update(seq_len=8), lambda: c.input.update(packing="none"),
                 lambda: c.input.sources.a.update(weight=2.0), lambda: c.tokenizer.update(add_bos=False),
                 lambda: c.input.update(mixture_by="tokens"),
                 *(lambda k=k: c.input.update(weight_stages=((k, {"b": 2.0}),)) for k in (4, 5)),
                 lambda: (tmp_path / "a.jsonl").write_text('{"text": "other"}')):
    change()
    seen.add(make(c, tmp_path).fingerprint)
  assert len(seen) == 10


def test_training_texts_are_those_of_the_used_sources(tmp_path):
  c = config(tmp_path, weight_stages=((0, {"b": 0.0}),))
  texts = loader.train_texts(c, learns(c))
  assert [t.split()[0] for t in texts()] == [f"a{i}" for i in range(30)] == [t.split()[0] for t in texts()]


def test_statistics_are_those_of_the_rows(tmp_path):
  data = make(config(tmp_path, {"a": 30}, packing="best_fit", stop="all"), tmp_path)
  (row,) = data.stats()
  batches = [data.batch(step) for step in range(data.num_steps)]
  real = np.concatenate([b["source_ids"] for b in batches]) >= 0
  segments = np.concatenate([b["segment_ids"] for b in batches])[real]
  weights = np.concatenate([b["loss_weights"] for b in batches])[real]
  assert row["padded %"] == pytest.approx(100 * (segments == 0).mean())
  assert row["supervised %"] == pytest.approx(100 * weights.mean())
  assert (row["source"], row["documents"], row["skipped"], row["rows"]) == ("a", 30, 0, data.num_rows)
  head, line = terminal.stats(data.stats()).splitlines()
  assert head.split()[:2] == ["source", "documents"] and line.split()[:3] == ["a", "30", "0"]


TOKENS = [{"input_ids": [(7 * i + k) % 250 for k in range(n)], "weights": [k % 3 / 2 for k in range(n)]}
          for i, n in enumerate([*range(2, 21)] * 4)]


def of_tokens(folder, kind, rows=TOKENS, **changed):
  """A config whose only source holds rows of tokens, in a file of that kind."""
  folder.mkdir(exist_ok=True)
  path = folder / f"t.{kind}"
  if kind == "jsonl":
    path.write_text("\n".join(map(json.dumps, rows)))
  elif kind == "parquet":
    pq.write_table(pa.Table.from_pylist(rows), path)
  else:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
      writer.write(json.dumps(row).encode())
    writer.close()
  c = config(folder, {}, **changed)
  c.input.sources.t = source(type=kind, path=str(path))
  return c


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_weights_go_through_the_cache_and_the_plan_into_the_batch(tmp_path, packing):
  c = of_tokens(tmp_path, "jsonl", packing=packing, stop="all")
  data = make(c, tmp_path)
  got = []
  for step in range(data.num_steps):
    b = data.batch(step)
    there = b["loss_weights"] > 0
    before = np.roll(b["tokens"], 1, axis=1)
    got += zip(before[there].tolist(), b["tokens"][there].tolist(), b["loss_weights"][there].tolist(), strict=True)
  wanted = [(row["input_ids"][k - 1], row["input_ids"][k], row["weights"][k])
            for row in TOKENS for k in range(1, len(row["input_ids"])) if row["weights"][k]]
  assert sorted(got) == sorted(wanted)
  (stats,) = data.stats()
  assert stats["supervised %"] == pytest.approx(100 * len(wanted) / (16 * data.num_rows))


def test_rows_of_tokens_are_the_same_from_any_format(tmp_path):
  made = {kind: make(of_tokens(tmp_path / kind, kind), tmp_path / kind) for kind in ("jsonl", "parquet", "arrayrecord")}
  for step in range(20):
    for kind in ("parquet", "arrayrecord"):
      same(made["jsonl"].batch(step), made[kind].batch(step))
  again = make(of_tokens(tmp_path / "jsonl", "jsonl"), tmp_path / "jsonl")
  same(again.batch(7), made["jsonl"].batch(7))


def test_conversations_are_packed_whole_truncated_and_counted(tmp_path, caplog, monkeypatch):
  rows = [{"input_ids": [1] * n, "labels": [-100] * (n - 2) + [1] * 2} for n in [*range(3, 17)] * 3 + [17, 18, 40]]
  rows.append({"input_ids": [1] * 5, "labels": [-100] * 5})
  c = of_tokens(tmp_path, "jsonl", rows, stop="all")
  c.strategy = ConfigDict(dict(name="sft", normalize="sequence"))
  unused = types.SimpleNamespace(fingerprint="no conversations here")
  monkeypatch.setitem(sys.modules, "input_pipeline.examples.conversations",
                      types.SimpleNamespace(ChatEncoder=lambda config, tokenizer, trains_all: unused))
  data = make(c, tmp_path)
  c.input.max_over_long = 0.05
  with pytest.raises(DataError, match=r"source 't': 3 of 45 documents .* Set seq_len=17 or more"):
    make(c, tmp_path)
  (row,) = data.stats()
  assert (row["documents"], row["dropped: nothing to train"], row["documents split"]) == (45, 1, 0)
  assert row["records"] == "46 tokens with labels" and "46 tokens with labels" in terminal.stats(data.stats())
  # Of 17 the last but one token is trained; 18 and 40 lose all that is.
  assert (row["truncated"], row["tokens lost"], row["pieces untrained"]) == (3, 1 + 2 + 24, 2)
  weights = np.concatenate([data.batch(step)["loss_weights"] for step in range(data.num_steps)])
  assert weights.sum() == pytest.approx(43) and set(np.unique(weights)) == {0, 0.5, 1}
  assert "3 are truncated" in caplog.text and "dropped 1 (nothing to train)" in caplog.text


def test_the_fingerprint_follows_what_is_kept_and_how_it_is_weighed(tmp_path):
  c = config(tmp_path, packing="best_fit")
  c.strategy = ConfigDict(dict(name="seq", normalize="token"))
  seen = {make(c, tmp_path).fingerprint}
  for change in (lambda: c.input.update(over_long="truncate_end", max_over_long=1.0),
                 lambda: c.input.update(over_long="truncate_start"), lambda: c.strategy.update(normalize="sequence")):
    change()
    seen.add(make(c, tmp_path).fingerprint)
  c.input.max_over_long = 0.9
  assert len(seen | {make(c, tmp_path).fingerprint}) == 4


def test_the_config_view_of_a_run_is_enough(tmp_path):
  c = config(tmp_path, weight_stages=[[4, {"a": 0.2}]], batch_size_stages=[[3, 12]])
  same(make(View(c), tmp_path).batch(5), make(c, tmp_path).batch(5))


@pytest.mark.parametrize("top, inputs, said", [
    ({}, dict(batch_size_stages=((5, 9),)), r"9 from step 5 on is not a multiple of the micro-batch of 2 rows"),
    ({}, dict(batch_size_stages=((5, 8), (5, 10))), "steps must increase from 1 on, found 5"),
    ({}, dict(batch_size_stages=(5,)), r"5 is not \(step, batch_size\)"),
    ({"batch_size": 7}, {}, "batch_size=7 must be a positive multiple of grad_accum_steps=3"),
    ({}, dict(weight_stages=((5, {"c": 1.0}),)), "unknown source 'c'; input.sources has 'a', 'b'"),
])
def test_bad_config(tmp_path, top, inputs, said):
  c = config(tmp_path, **inputs)
  c.grad_accum_steps = 3
  c.update(top)
  with pytest.raises(ConfigError) as error:
    make(c, tmp_path)
  assert re.search(said, str(error.value)), str(error.value)


def test_no_sources(tmp_path):
  with pytest.raises(ConfigError, match="input.sources is empty: add one"):
    make(defaults(), tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("strategy", ["seq", "sft", "dpo", "kto"])
def test_columns_that_nothing_reads_are_named_with_their_rows(tmp_path, kind, strategy):
  said = dict(seq={"text": "a text"}, sft={"prompt": "q", "completion": "a"}, dpo={"prompt": "q", "chosen": "a",
              "rejected": "b"}, kto={"prompt": "q", "completion": "a", "label": True})[strategy]
  rows = [{**said, **{k: v + str(i) for k, v in said.items() if k == "prompt"}, "id": i, "note": "x" if i < 4 else None}
          for i in range(9)]
  if kind == "jsonl":
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
  else:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
  c = config(tmp_path, {}, packing="auto")
  c.strategy, c.seq_len = strategy_of(strategy), 64
  c.input.sources.x = source(type=kind, path=str(tmp_path / f"x.{kind}"))
  (stats,) = make(c, tmp_path).stats()
  # Of columns that were not read from the file, what they hold is not known.
  assert stats["columns not read"] == ("id 9, note 9" if (kind, strategy) == ("parquet", "seq") else "id 9, note 4")
  assert "id 9, note" in terminal.stats([stats])
  (tmp_path / "few.jsonl").write_text("\n".join(json.dumps(said | {"prompt": f"q{i}"} if strategy != "seq" else said)
                                                for i in range(9)))
  c.input.sources.x = source(type="jsonl", path=str(tmp_path / "few.jsonl"))
  assert "columns not read" not in make(c, tmp_path).stats()[0]


def test_a_source_is_used_that_has_a_weight_in_any_stage(tmp_path):
  c = config(tmp_path, {"a": 3, "b": 3, "c": 3}, weight_stages=((4, {"b": 0.0}), (9, {"a": 0.0, "b": 1.0})))
  c.input.sources.c.weight = 0.0
  assert loader.used_sources(c.input) == ["a", "b"]
  c.input.weight_stages = ((4, {"b": 0.0}),)
  assert loader.used_sources(c.input) == ["a", "b"]
  c.input.weight_stages = ((0, {"b": 0.0}), (4, {"c": 0.5}))
  assert loader.used_sources(c.input) == ["a", "c"]


def test_the_keys_of_a_source_without_weight_are_checked_and_no_row_of_it_is_read(tmp_path, caplog):
  c = config(tmp_path, {"a": 3, "b": 3, "c": 3}, packing="none")
  c.seq_len = 64
  c.input.sources.b.update(weight=0.0, path=str(tmp_path / "nowhere"), stream_files=1)
  batch = make(c, tmp_path).batch(0)
  assert [chr(first) for first in batch["tokens"][:, 1]] == ["ac"[s] for s in batch["source_ids"]]
  assert set(batch["source_ids"]) == {0, 1} and "source 'b' has weight 0 throughout and is not used" in caplog.text
  c.input.sources.b.split = "test"
  with pytest.raises(ConfigError, match="input.sources.b: split 'test'"):
    make(c, tmp_path)


def test_of_streams_each_begins_where_its_own_rows_are_and_the_slowest_says_the_epoch():
  """Steps of 6 rows, of which 3 are of a stream of 10 rows an epoch, and 2 of one of 40."""
  begun = []
  streams = {s: types.SimpleNamespace(begin=lambda row, s=s: begun.append((s, row)), epoch=lambda row, n=n: row / n,
                                      close=lambda: None) for s, n in ((0, 10), (2, 40))}
  data = loader.TrainData.__new__(loader.TrainData)
  data._streams, data.num_rows, data.source_names = streams, None, ("a", "b", "c")
  data.taken = types.SimpleNamespace(rows_before=lambda step: 6 * step)
  data._mixture = types.SimpleNamespace(draws=lambda rows: np.array([rows // 2, rows // 6, rows // 3]),
                                        rows=np.array([1, 4, 1]))
  data.go_to(5)
  assert begun == [(0, 15), (2, 10)]
  assert data.epoch(5) == 10 / 40
  assert data.counters(5) == {"a": {"rows": 15, "epoch": 1.5}, "b": {"rows": 5, "epoch": 1.25},
                              "c": {"rows": 10, "epoch": 0.25}}


def test_data_begin_where_the_past_ends_and_are_known_by_whether_prompts_are_shared(tmp_path, monkeypatch):
  begun = []
  monkeypatch.setattr(loader.TrainData, "go_to", lambda self, step: begun.append(step))
  c = config(tmp_path)
  first = make(c, tmp_path)
  past = Past(3, 3, ROWS, tuple(first.taken.pieces), 0)
  again = loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=tmp_path, past=past)
  assert begun == [0, 3] and again.fingerprint == first.fingerprint == again.past_fingerprint
  (tmp_path / "pairs.jsonl").write_text("".join(
      json.dumps({"prompt": f"q{n}", "chosen": "yes", "rejected": "no"}) + "\n" for n in range(4)))
  c = defaults()
  c.strategy, c.seq_len = strategy_of("dpo"), 32
  c.input.sources.pairs = source(type="jsonl", path=str(tmp_path / "pairs.jsonl"))
  alone, shared = (loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=tmp_path, share_prompts=shares)
                   for shares in (False, True))
  assert alone.fingerprint != shared.fingerprint
