"""The token microscope: its numbers are those of the loss, and its page shows what the batch holds, escaped."""

import contextlib
import html
import io
import json
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import browser, tiny
from tests.evaluators import digits
from tests.models.initial import initial
from tests.trainer import rollout_runs, test_image_runs
from tests.trainer.report.test_pages import pictures
from tests.trainer.strategies import pairs as pairs_lib
from tests.trainer.strategies import test_dpo_runs as test_dpo
from tests.trainer.strategies import test_grpo
from trainer import train, update
from trainer.config import source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.modes import microscope
from trainer.modes.replay import replay
from trainer.report import pages
from trainer.strategies import presets
from trainer.telemetry.writers import read_rows


def logged(workdir, step):
  return next(row for row in read_rows(workdir / "metrics.jsonl") if row["step"] == step and "loss" in row)


def replayed(config, workdir, step):
  """The rows that a replay writes, those of padding left out."""
  lines = replay(config, workdir, step).read_text(encoding="utf-8").splitlines()
  return [row for row in map(json.loads, lines) if row["tokens"]]


def page_of(workdir, step):
  """(HTML of the page, {columns, parts: what it knows of each segment}, the texts of the tokens of each segment)."""
  text = (workdir / "replay" / f"step-{step}.html").read_text(encoding="utf-8")
  data = {"columns": json.loads(html.unescape(re.search(r'data-columns="([^"]*)"', text)[1])), "parts": []}
  boxes = []
  for found, box in re.findall(r'<div class="tokens"[^>]* data-tokens="([^"]*)">(.*?)</div>', text, re.DOTALL):
    part = json.loads(html.unescape(found))
    segment, row = re.fullmatch(r"segment (\d+) · row (\d+)", part["where"]).groups()
    data["parts"].append(part | {"segment": int(segment), "row": int(row)})
    boxes.append([html.unescape(re.sub(r"<[^>]*>", "", span)) for span in re.findall(r"<i.*?</i>", box, re.DOTALL)])
  return text, data, boxes


def named(name, **changed):
  """The options of grpo's tests, as a config has them."""
  return pairs_lib.Options(test_grpo.cfg_of(**changed) | dict(name=name))


def trained(rows, name):
  """That number of all trained tokens."""
  return np.array([x for row in rows for x, w in zip(row[name], row["loss_weights"], strict=True) if w > 0])


# ----------------------------------------------------------------------------------------------
# The numbers.


def write_chats(folder):
  rows = [{"prompt": f"say {word}", "completion": f" {word} and {word[::-1]}"} for word in tiny.WORDS * 3]
  (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return source(type="jsonl", path=str(folder / "chats.jsonl"))


@pytest.mark.devices(8)
@pytest.mark.parametrize("name", ["seq", "sft"])
def test_weights_times_log_probs_add_up_to_the_logged_loss(name, tmp_path):
  """With dropout, in micro-batches, after updates that are taken again; of the smoothed loss it is the metric nll."""
  config = tiny.config(tiny.write_corpus(tmp_path / "texts"), total_steps=4, ckpt_steps=2, grad_accum_steps=2)
  config.evals = {}
  config.mesh.update(data=4, tensor=2)
  config.strategy = strategy(name, label_smoothing=0.1) if name == "seq" else strategy(name, normalize="sequence")
  config.model.update(dropout=0.3, vocab_chunk=100, final_logit_cap=20.0)
  if name == "sft":
    config.input.sources.main = write_chats(tmp_path)
  train(config, tmp_path / "w")
  rows, metrics = replayed(config, tmp_path / "w", 4), logged(tmp_path / "w", 4)
  weights, logps = (np.concatenate([row[key] for row in rows]) for key in ("loss_weights", "logprobs"))
  assert 0 < sum(weights > 0) < len(weights)
  total = -sum(w * lp for w, lp in zip(weights, logps, strict=True) if w > 0)
  assert total / sum(weights) == pytest.approx(metrics["nll" if name == "seq" else "loss"], rel=1e-6)
  if name == "sft":
    # Also of what is not trained, but for the first of a segment.
    assert all(row["logprobs"][0] is None and row["entropies"][1] is not None for row in rows)
    entropies = np.concatenate([[x or 0 for x in row["entropies"]] for row in rows])
    assert metrics["entropy"] == pytest.approx(np.average(entropies, weights=weights), rel=1e-5)


@pytest.mark.parametrize("chunk", [5, 8, 2048])
def test_log_probs_entropies_and_ranks_are_those_of_the_full_distribution(chunk):
  model = tiny.model(vocab_chunk=chunk, vocab_multiple=7, final_logit_cap=3.0)  # 28 entries, of which 24 are real
  params = initial(model, 1)
  params["embed"]["embedding"] = params["embed"]["embedding"] * 20.0
  batch = {key: jnp.asarray(part) for key, part in tiny.batch(4, 16).items()}
  cfg = pairs_lib.Options(name="seq")
  found = jax.jit(lambda params, batch: microscope.of_tokens(model, params, batch, None, cfg))(params, batch)
  logits = np.asarray(model.logits(params, batch), np.float64)[..., :24]
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  seen = 0
  for row, at in np.argwhere(np.asarray(microscope.predicted(batch)) > 0):
    before, token = p[row, at - 1], int(batch["tokens"][row, at])
    assert batch["segment_ids"][row, at] == batch["segment_ids"][row, at - 1] > 0
    assert found["logprobs"][row, at] == pytest.approx(math.log(before[token]), abs=1e-5)
    assert found["entropies"][row, at] == pytest.approx(-(before * np.log(before)).sum(), abs=1e-5)
    assert found["ranks"][row, at] == 1 + (before > before[token]).sum()
    assert found["top_tokens"][row, at] == before.argmax()
    seen += 1
  starts = np.count_nonzero(np.diff(batch["segment_ids"], axis=1, prepend=0) * (batch["segment_ids"] > 0))
  assert seen == np.count_nonzero(batch["segment_ids"]) - starts


@pytest.mark.parametrize("precompute", [False, True])
def test_margins_of_preferences_follow_from_the_tokens(precompute, tmp_path):
  pairs = test_dpo.write_pairs(tmp_path / "pairs.jsonl")
  config = test_dpo.config(pairs, total_steps=3, ckpt_steps=1, strategy=dict(beta=0.3, precompute=precompute))
  train(config, tmp_path / "w")
  rows, metrics = replayed(config, tmp_path / "w", 3), logged(tmp_path / "w", 3)
  margins, chosen = [], []
  for row in rows:
    starts = [i for i, lp in enumerate(row["logprobs"]) if lp is None]
    ends = [*starts[1:], len(row["tokens"])]
    sides = [[i for i in range(a, b) if row["loss_weights"][i] > 0] for a, b in zip(starts, ends, strict=True)]
    sides = [side for side in sides if side]  # of a prompt that both share nothing is trained
    sums = [sum(row["ref_log_ratios"][i] for i in side) for side in sides]
    chosen += [sum(row["logprobs"][i] for i in side) for side in sides[::2]]
    margins += [0.3 * (a - b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    told = [x is not None for x in row["ref_logprobs"]]
    assert told == [w > 0 for w in row["loss_weights"]] if precompute else sum(told) == len(told) - len(starts)
  assert len(margins) > 8
  assert np.mean(margins) == pytest.approx(metrics["rewards/margins"], rel=1e-4) and abs(np.mean(margins)) > 1e-2
  assert np.mean(chosen) == pytest.approx(metrics["logps/chosen"], rel=1e-5)
  text = page_of(tmp_path / "w", 3)[0]
  assert text.count(", chosen</h3>") == text.count(", rejected</h3>") == len(margins)
  assert text.count(" · the prompt of segments ") == len(margins)
  assert text.count('<div class="pair"') == 2 * len(margins)


def test_single_answers_are_named_by_their_verdict(tmp_path):
  rows = [{"prompt": f"{word}: ", "completion": word.upper(), "label": i % 2 == 0}
          for i, word in enumerate(tiny.WORDS * 2)]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  config = tiny.config(tmp_path, seq_len=128, total_steps=3, ckpt_steps=1000)
  config.evals = {}
  config.strategy = strategy("kto")
  config.input.sources.main = source(type="jsonl", path=str(tmp_path / "a.jsonl"))
  train(config, tmp_path / "w")
  replayed(config, tmp_path / "w", 3)
  text, data, _ = page_of(tmp_path / "w", 3)
  kinds = re.findall(r"<h3>segment \d+ · ([^<]*)</h3>", text)
  assert {kind for kind in kinds if not kind.startswith("the prompt of segments")} == {
      "desirable", "not desirable", "mismatched, for the estimate"}
  assert len(kinds) == len(data["parts"])
  # z is of the mismatched ones alone.
  ratios = [sum(r for r, w in zip(part["values"]["ref_log_ratios"], part["values"]["weights"], strict=True) if w)
            for part, kind in zip(data["parts"], kinds, strict=True) if kind.startswith("mismatched")]
  assert np.mean(ratios) == pytest.approx(logged(tmp_path / "w", 3)["kl"], abs=2e-4)


# ----------------------------------------------------------------------------------------------
# Rollouts.


def of_rollouts(prompts, score="low", **changed):
  """Two rollouts of two updates each, and a checkpoint within each."""
  usual = dict(total_steps=4, ckpt_steps=3, strategy=dict(kl_coef=0.1))
  return rollout_runs.config(prompts, score, **usual | changed)


def files_of(workdir):
  """{file: when it was written} of all but what replays write."""
  return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if "replay" not in str(path)}


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
  """(workdir, {step: rows of its replay}, files before the replays, what these said) of a run on rewards."""
  folder = tmp_path_factory.mktemp("rolled")
  config = of_rollouts(rollout_runs.write_prompts(folder))
  train(config, folder / "w")
  before, said = files_of(folder / "w"), io.StringIO()
  with contextlib.redirect_stdout(said):
    return folder / "w", {step: replayed(config, folder / "w", step) for step in (1, 2, 3, 4)}, before, said


def test_a_rollout_is_sampled_again_and_every_token_is_as_it_was(rolled):
  """From the run's beginning, from what a checkpoint holds of a rollout, and in updates that are taken again."""
  workdir, replays, before, said = rolled
  for step, rows in replays.items():
    metrics = logged(workdir, step)
    loss = np.average([row["loss"] for row in rows], weights=[row["weight"] for row in rows])
    assert loss == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-7)
    ratios, logps, old, sampled, refs = (trained(rows, key) for key in (
        "ratios", "logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs"))
    assert len(ratios) == metrics["trained_tokens"]
    np.testing.assert_allclose(ratios, np.exp(logps - old), rtol=1e-5)
    np.testing.assert_allclose(old, sampled, atol=1e-5)
    assert np.mean(ratios) == pytest.approx(metrics["policy/ratio_mean"], rel=1e-6)
    assert np.mean(trained(rows, "clipped")) == metrics["clip_ratio/region_mean"]
    d = logps - refs
    assert np.mean(np.expm1(-d) + d) == pytest.approx(metrics["kl"], rel=1e-4, abs=1e-9)
    assert np.mean(trained(rows, "entropies")) == pytest.approx(metrics["entropy"], rel=1e-5)
    assert np.all(ratios == 1) == (np.abs(ratios - 1).max() < 1e-5) == (step % 2 == 1)
    # What stands in prompts has no ratio and no advantage, but a log-prob.
    for row in rows:
      assert all((x is None) == (w == 0) for key in ("ratios", "advantages", "old_logprobs", "clipped")
                 for x, w in zip(row[key], row["loss_weights"], strict=True))
  assert files_of(workdir) == before
  assert sorted(path.name for path in (workdir / "replay").iterdir()) == sorted(
      f"step-{step}.{kind}" for step in replays for kind in ("html", "jsonl"))
  assert said.getvalue().count("logged when it ran") == 4 and "NOT what was trained on" not in said.getvalue()


def test_advantages_of_tokens_are_those_of_the_logged_samples(rolled):
  """Of both updates of the first rollout together: each completion once, all its tokens alike."""
  workdir, replays, *_ = rolled
  found = []
  for step in (1, 2):
    for row in replays[step]:
      edges = [*(i for i, lp in enumerate(row["logprobs"]) if lp is None), len(row["tokens"])]
      for a, b in zip(edges, edges[1:], strict=False):
        told = {x for x in row["advantages"][a:b] if x is not None}
        if not any(w > 0 for w in row["loss_weights"][a:b]):
          assert not told  # a prompt that several completions share
          continue
        assert len(told) == 1
        found.append((sum(w > 0 for w in row["loss_weights"][a:b]), told.pop()))
  table = sorted((line["tokens"], line["advantage"]) for line in rollout_runs.table(workdir, 1))
  assert len(found) == 16 and len({advantage for _, advantage in table}) > 8
  np.testing.assert_allclose(sorted(found), table, atol=1e-6)


_CALLS = []


def unsteady(completions, completion_ids, **columns):
  """Never the same twice."""
  _CALLS.append(1)
  return [len(_CALLS) + sum(ids) / 256 for ids in completion_ids]


def test_rewards_that_change_from_call_to_call_are_told(tmp_path, capsys):
  config = of_rollouts(rollout_runs.write_prompts(tmp_path), score=None, total_steps=1, ckpt_steps=1000)
  config.rollout.rewards.odd = dict(type=f"{__name__}.unsteady")
  train(config, tmp_path / "w")
  replayed(config, tmp_path / "w", 1)
  told = capsys.readouterr().out
  assert "This is NOT what was trained on: of rollout-00000001, 16 of 16 completions are those that were logged" in told


def test_nothing_to_learn_is_nothing_to_show(tmp_path, capsys):
  config = of_rollouts(rollout_runs.write_prompts(tmp_path), "never", total_steps=1, ckpt_steps=1000)
  train(config, tmp_path / "w")
  assert replayed(config, tmp_path / "w", 1) == []
  assert "update 1: 0 rows, 0 with a loss that is not finite; nothing is trained" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", presets.RATIOS)
@pytest.mark.parametrize("clip", test_grpo.CLIPS)
def test_ratios_and_bounds_are_those_of_the_loss(clip, ratio):
  """Off the policy, with each kind of clipping: means of the tokens' numbers are the loss's own metrics."""
  model, logits, batch = test_grpo.table()
  cfg = named("grpo", kl_coef=0.1, **test_grpo.clipped(clip, ratio))
  found = microscope.of_tokens(model, logits, {key: jnp.asarray(part) for key, part in batch.items()}, None, cfg)
  _, _, metrics = test_grpo.of_table(cfg)
  mask = batch["loss_weights"] > 0

  def mean(name):
    return float(np.mean(np.asarray(found[name])[mask]))

  assert mean("ratios") == pytest.approx(metrics["policy/ratio_mean"], rel=1e-6)
  assert mean("entropies") == pytest.approx(metrics["entropy"], rel=1e-6)
  share = {"ppo": "clip_ratio/region_mean", "cispo": "cispo_clip_ratio"}.get(clip)
  if share:
    assert 0 < mean("clipped") == pytest.approx(metrics[share])
  elif clip == "dual":
    assert mean("clipped") > metrics["clip_ratio/region_mean"]
  else:
    assert mean("clipped") == 0
  offline = microscope.of_tokens(
      model, logits, {k: jnp.asarray(v) for k, v in batch.items() if k != "old_logprobs"}, None, cfg)
  assert np.all(np.asarray(offline["ratios"])[mask] == 1)


def test_which_tokens_the_ones_before_them_predict():
  """Neither the first of a row or segment, nor an image's, nor padding, nor one that the token before it sees."""
  batch = dict(segment_ids=np.array([[1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3], [1, 0, 0, 0, 0, 1]]))
  expected = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(microscope.predicted(batch), expected)
  batch["image_index"] = np.array([[0, 0, 1, 0, 0, 0], [0] * 6, [0] * 6])
  expected[0, 2] = 0
  np.testing.assert_array_equal(microscope.predicted(batch), expected)
  batch["block_ids"] = np.array([[0] * 6, [1, 1, 2, 2, 0, 0], [0] * 6])  # what has one number is seen at once
  expected[1] = [0, 0, 1, 0, 1, 1]
  np.testing.assert_array_equal(microscope.predicted(batch), expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_where_a_token_has_no_number_it_is_masked(ahead):
  """Log-probs of the reference that were computed ahead are those of trained tokens alone."""
  seen = object.__new__(microscope.Microscope)
  names = ("logprobs", "ranks", "ref_logprobs", "ref_log_ratios", "old_logprobs", "returns")
  batch = dict(segment_ids=np.array([[1, 1, 1, 2]]), loss_weights=np.array([[1.0, 0.0, 0.5, 1.0]]))
  batch |= dict(ref_logprobs=np.zeros((1, 4))) if ahead else {}
  asked = []

  def call(look, batch, step):
    asked.append((look, step))
    return {name: jnp.arange(4.0)[None] for name in names}

  seen._rows, seen._look = SimpleNamespace(call=call), "look"
  found = seen.look(batch, 7)
  read, trained = [[None, 1, 2, None]], [[None, None, 2, 3]]
  assert asked == [("look", 7)] and {name: part.tolist() for name, part in found.items()} == {
      "logprobs": read, "ranks": read, "ref_logprobs": trained if ahead else read,
      "ref_log_ratios": trained if ahead else read, "old_logprobs": trained, "returns": trained}


def test_what_is_summed_of_a_segment():
  numbers = {"logprobs": np.ma.array([[-9.0, -1.0, -2.0, -4.0]]),
             "ref_log_ratios": np.ma.array([[9.0, 0.5, -0.75, 1.0]]),
             "advantages": np.ma.array([[7.0, -0.25, 3.0, 3.0]])}
  facts = microscope._sums(numbers, 0, np.arange(1, 4), np.array([0.5, 1.5, 0.0]))
  assert facts == [("tokens", "3"), ("trained", "2"), ("mean −log p", "1.7500"), ("Σ log p", "−3.0000"),
                   ("Σ log p/p_ref", "−0.2500"), ("advantage", "−0.2500")]
  assert microscope._sums(numbers, 0, np.arange(2), np.zeros(2)) == [("tokens", "2"), ("trained", "0")]


def test_colours_have_one_scale_for_all_log_probs_and_none_for_rounding():
  values = [{"logprobs": [None, -0.5], "old_logprobs": [-3.0], "ratios": [4.0, "inf"], "ranks": [1, 1],
             "advantages": [-0.25, 0.125], "entropies": [0.01], "weights": [1.0, 0.0]}]
  found = {column["key"]: column for column in microscope.columns(values[0].keys() - {"weights"}, values)}
  assert {key: column["scale"] for key, column in found.items()} == {
      "logprobs": 3.0, "old_logprobs": 3.0, "weights": 1.0, "ratios": pytest.approx(math.log(4), rel=1e-3),
      "ranks": pytest.approx(math.log(2), rel=1e-3), "advantages": 0.25, "entropies": 0.1}
  assert [found[key]["kind"] for key in ("logprobs", "ratios", "ranks", "advantages")] == [
      "low", "ratio", "rank", "signed"]
  assert list(found) == [key for key, *_ in microscope.COLUMNS if key in found]
  # A hundred tokens and an odd one: full at the 98th of a hundred.
  many = [{"entropies": [*range(100), 1e6]}]
  assert {c["key"]: c["scale"] for c in microscope.columns(["entropies"], many)}["entropies"] == 98


def test_tokens_of_an_image_are_one_with_its_picture():
  picture = np.full((2, 3, 3), 77, np.uint8)
  values = {"weights": [1.0, 0.0, 0.0, 0.5, 0.0], "ranks": [1, 2, 3, 4, 5]}
  box = str(microscope.token_box(["a", "", "", "b", ""], [0, 2, 2, 0, 3], {2: picture}, values, "row 0, segment 1",
                                 where="here", ids=[10, 11, 12, 13, 14]))
  data = json.loads(html.unescape(re.search(r'data-tokens="([^"]*)"', box)[1]))
  assert data == {"values": {"weights": [1.0, 0.0, 0.5, 0.0], "ranks": [1, 2, 4, 5]}, "where": "here",
                  "ids": [10, 11, 13, 14]}
  assert 'aria-label="tokens of row 0, segment 1; arrow keys move"' in box
  (shown,) = pictures(box)
  np.testing.assert_array_equal(shown, picture)
  assert re.findall("⟨image: . tokens⟩", box) == ["⟨image: 2 tokens⟩", "⟨image: 1 tokens⟩"]
  assert box.count('class="trained"') == 2 and box.count('class="image"') == 2


def test_a_segment_is_named_by_what_it_is():
  batch = dict(segment_ids=np.array([[3, 1, 2, 4]]), segment_roles=np.array([[1, 2, 0, 1]]),
               prompt_ids=np.array([[0, 3, 3, 0]]))
  said = [microscope._label("pairs", batch, 0, number) for number in (1, 2, 3, 4)]
  assert said[:3] == ["pair 1, chosen", "pair 1, rejected", "the prompt of segments 1, 2"]
  assert said[3].startswith("pair 2, ") and microscope._label("rollouts", batch, 0, 1) == said[0].split(", ")[1]
  assert microscope._label("texts", dict(segment_ids=batch["segment_ids"]), 0, 1) == ""


def test_each_micro_batch_has_the_dropout_that_it_had_in_that_update(monkeypatch):
  asked = []

  def of_tokens(model, params, part, rng, cfg, *reference):
    asked.append((model, params, cfg, reference))
    return {"bits": jnp.broadcast_to(jax.random.bits(rng), part["tokens"].shape)}

  monkeypatch.setattr(microscope, "of_tokens", of_tokens)
  options = SimpleNamespace(micro_batch_size=2, seed=5)
  run = SimpleNamespace(config=SimpleNamespace(strategy="cfg"), program=SimpleNamespace(options=options), model="model",
                        mesh=mesh_lib.make_mesh({}, jax.devices()[:1]))
  seen = microscope.Microscope(run, None)
  found = seen._look(3.0, {"tokens": jnp.zeros((4, 1), int)}, 7, 4.0)["bits"]
  expected = [int(jax.random.bits(update.step_key(5, 7, index))) for index in (0, 1, 0, 1)]
  assert found[:, 0].tolist() == expected and len(set(expected)) == 2
  assert asked[0][0] == "model" and asked[0][2] == "cfg" and len(asked[0][3]) == 1


def paged(monkeypatch, lengths, rows=3, tokens=10):
  """(which rows the page shows with how many tokens left, its notes), of rows of so many tokens, the last one first."""
  monkeypatch.setattr(microscope, "MOST_ROWS", rows)
  monkeypatch.setattr(microscope, "MOST_TOKENS", tokens)
  asked, seen = [], object.__new__(microscope.Microscope)

  def row(batch, numbers, number, loss, most, values):
    asked.append((number, loss, most))
    values += [{"weights": [0.5] * min(most, lengths[number])}]
    return pages.tag("p", f"row {number}")

  seen._row = row
  batch = {"segment_ids": np.array([[1] * n + [0] * (20 - n) for n in lengths])}
  order = list(range(len(lengths)))[::-1]
  text = seen.page("The <title>", batch, {}, np.arange(len(lengths)) / 2, order, ["a note"])
  return asked, [html.unescape(part) for part in re.findall("<p>(.*?)</p>", text)], text


def test_a_page_has_so_many_rows_and_tokens(monkeypatch):
  asked, said, text = paged(monkeypatch, [1, 2, 0, 3, 1])
  assert asked == [(4, 2.0, 10), (3, 1.5, 9), (1, 0.5, 6)]  # row 2 is padding
  assert said[:2] == ["a note", "The 3 row(s) with the highest loss of 4; all of them are in the file beside this one."]
  assert said[2].startswith("Underlined: trained.") and said[3:] == ["row 4", "row 3", "row 1"]
  assert "<h1>The &lt;title&gt;</h1>" in text
  asked, said, _ = paged(monkeypatch, [5, 9, 1, 20])
  assert asked == [(3, 1.5, 10)] and said[1].startswith("The 1 row(s) with the highest loss of 4; all")
  assert paged(monkeypatch, [1, 9])[1][1] == "All 2 row(s), the highest loss first."


@pytest.mark.parametrize("data, size, groups", [
    ("pairs", 2, [[5], [1, 2], [3, 4]]), ("matches", 3, [[5], [1, 2, 3], [4]]),
    ("rollouts", 1, [[5], [1], [2], [3], [4]])])
def test_what_belongs_together_stands_side_by_side_after_what_it_shares(monkeypatch, data, size, groups):
  """Segments 1 to 4, of which 5 is the prompt; 3 tokens each, of which 13 are shown."""
  segments = np.repeat([5, 1, 2, 3, 4], 3)[None]
  batch = dict(segment_ids=segments, tokens=np.arange(15)[None] + 65, loss_weights=(segments < 5) * 0.5,
               positions=np.tile(np.arange(3), 5)[None], prompt_ids=np.where(segments < 5, 5, 0))
  numbers = {name: np.ma.array(-np.arange(15.0)[None]) for name in ("logprobs", "ranks")}
  numbers["top_tokens"] = np.ma.array(np.arange(15)[None] + 97, mask=segments == 5)
  seen, values = object.__new__(microscope.Microscope), []
  record = SimpleNamespace(data=data, sequences_each=lambda cfg: size)
  monkeypatch.setattr(microscope.strategies, "of", lambda config: record)
  monkeypatch.setattr(microscope.image_tokens, "layout_of", lambda model: None)
  tokenizer = SimpleNamespace(decode=lambda ids, skip_special: "".join(map(chr, ids)))
  seen._run = SimpleNamespace(config=SimpleNamespace(strategy=None), model=None, tokenizer=tokenizer)
  seen._rows = SimpleNamespace(source=lambda batch, row: f"source of {row}")
  text = str(seen._row(batch, numbers, 0, 1.23456, 13, values))
  found = [[int(n) for n in re.findall(r"<h3>segment (\d)", part)] for part in text.split('<div class="pair">')[1:]]
  assert found == groups and "row 0 · source of 0 · loss 1.2346" in text and 'id="row-0"' in text
  boxes = [json.loads(html.unescape(box)) for box in re.findall(r'data-tokens="([^"]*)"', text)]
  assert [(box["where"], box["ids"], box["positions"], box["instead"]) for box in boxes[:2]] == [
      ("segment 5 · row 0", [65, 66, 67], [0, 1, 2], [""] * 3),
      ("segment 1 · row 0", [68, 69, 70], [0, 1, 2], [*"def"])]
  assert values[1] == {"logprobs": [-3, -4, -5], "ranks": [-3, -4, -5], "weights": [0.5] * 3} == boxes[1]["values"]
  assert values[0]["weights"] == [0] * 3 and boxes[4]["ids"] == [77] and text.count("… 2 more token(s) of this") == 1


# ----------------------------------------------------------------------------------------------
# Memory.


@pytest.mark.parametrize("chunk, has_logits", [(128, False), (2048, True)])
def test_no_logits_for_the_whole_vocabulary_in_the_compiled_program(chunk, has_logits):
  """The same search does find them where one chunk is the vocabulary."""
  model = tiny.model(vocab_size=2048, vocab_chunk=chunk)
  cfg = named("grpo", kl_coef=0.1)
  batch = {key: jnp.asarray(part) for key, part in tiny.batch(4, 64).items()}
  batch |= dict(segment_roles=jnp.ones((4, 2), jnp.int32), advantages=jnp.ones((4, 2)), old_logprobs=jnp.zeros((4, 64)))
  params = jax.eval_shape(model.init, jax.random.key(0))
  program = jax.jit(lambda params, batch: microscope.of_tokens(model, params, batch, jax.random.key(0), cfg, params))
  text = program.lower(params, batch).compile().as_text()
  largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"[a-z]\w*\[([0-9,]+)\]", text))
  assert (largest >= 4 * 64 * 2048) == has_logits
  assert has_logits or largest <= 4 * 64 * 2048 / 8


# ----------------------------------------------------------------------------------------------
# The page.


def test_the_page_shows_each_token_with_its_numbers_and_asks_no_network(rolled):
  workdir, rows = rolled[0], rolled[1][4]
  text, data, boxes = page_of(workdir, 4)
  assert [c["key"] for c in data["columns"]] == [
      "logprobs", "weights", "ref_logprobs", "ref_log_ratios", "behavior_logprobs", "old_logprobs", "ratios",
      "advantages", "clipped", "entropies", "ranks"]
  order = [int(n) for n in re.findall(r"<h2>row (\d+) ", text)]
  losses = {row["row"]: row["loss"] for row in rows}
  assert [losses[n] for n in order] == sorted(losses.values(), reverse=True)
  by_row = {row["row"]: row for row in rows}
  for number in order:
    parts = [part for part in data["parts"] if part["row"] == number]
    row = by_row[number]
    assert sum((part["ids"] for part in parts), []) == row["tokens"]
    assert all(np.all(np.diff(part["positions"]) == 1) and len(part["positions"]) == len(part["ids"]) for part in parts)
    for ours, theirs in (("logprobs", "logprobs"), ("ratios", "ratios"), ("weights", "loss_weights")):
      for a, b in zip(sum((part["values"][ours] for part in parts), []), row[theirs], strict=True):
        assert (a is None and b is None) or a == pytest.approx(b, rel=1e-4)
  assert [len(box) for box in boxes] == [len(part["ids"]) for part in data["parts"]]
  assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|src=|@import|url\(", text) and "default-src 'none'" in text
  assert text.count('class="trained"') == sum(sum(w > 0 for w in row["loss_weights"]) for row in rows)


@pytest.mark.host_patches
def test_a_long_batch_is_cut_and_says_so(tmp_path, monkeypatch):
  corpus = tiny.write_corpus(tmp_path / "texts")
  config = tiny.config(corpus, total_steps=1, ckpt_steps=1000)
  config.evals = {}
  train(config, tmp_path / "w")
  monkeypatch.setattr(microscope, "MOST_ROWS", 3)
  monkeypatch.setattr(microscope, "MOST_TOKENS", 40)
  rows = replayed(config, tmp_path / "w", 1)
  text, data, _ = page_of(tmp_path / "w", 1)
  assert len(rows) == 8 and "The 2 row(s) with the highest loss of 8; all of them are in the file" in text
  left = re.search(r"… (\d+) more token\(s\) of this segment", text)
  assert sum(len(part["ids"]) for part in data["parts"]) == 40 and int(left.group(1)) > 0
  assert {part["row"] for part in data["parts"]} == {row["row"] for row in sorted(rows, key=lambda r: -r["loss"])[:2]}


def test_images_stand_where_their_tokens_are(tmp_path):
  config = test_image_runs.config(tmp_path, "dpo", total_steps=1, ckpt_steps=1000)
  config.input.images.augment.color = 0.0
  train(config, tmp_path / "w")
  rows = replayed(config, tmp_path / "w", 1)
  text, data, boxes = page_of(tmp_path / "w", 1)
  shown = pictures(text)
  known = {digits.picture(n).tobytes() for n in range(9)}
  assert len(shown) == len(boxes) == len(data["parts"]) and all(part.tobytes() in known for part in shown)
  for box, part in zip(boxes, data["parts"], strict=True):
    assert sum("⟨image: 4 tokens⟩" in piece for piece in box) == 1 and len(box) == len(part["ids"])
    assert "what?" in "".join(box) and part["ids"].count(258) == 1
    # Image and prompt are read in both directions: what is seen is not predicted.
    values = part["values"]
    assert [lp is None for lp in values["logprobs"]] == [w == 0 for w in values["weights"]]
  assert sum(len(part["ids"]) for part in data["parts"]) + 3 * len(shown) == sum(len(row["tokens"]) for row in rows)


# What the page's script does: colours by what the switch says, and the numbers of the token that is chosen.
ACT = """
const colours = () => new Set([...inside.querySelectorAll(".tokens > i")].map(i => i.style.backgroundColor));
const choose = label => [...inside.querySelectorAll("#switch label")].find(l => l.textContent === label).click();
const told = () => inside.querySelector("#told").innerText.replace(/\\s+/g, " ");
const boxes = inside.querySelectorAll(".tokens");
found.parts = boxes.length;
choose("weight"); found.weights = [...colours()];
choose("advantage"); found.advantages = [...colours()]; found.legend = inside.querySelector("#legend").textContent;
const box = boxes[boxes.length - 1];
box.children[1].click(); found.clicked = told();
box.dispatchEvent(new KeyboardEvent("keydown", {key: "End"})); found.last = told();
box.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"})); found.before = told();
found.chosen = inside.querySelectorAll(".tokens > i.chosen").length;
"""


@pytest.mark.skipif(browser.find() is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("width, dark", [(390, True), (1280, False)])
def test_the_page_in_a_browser(rolled, width, dark):
  text, data, boxes = page_of(rolled[0], 4)
  found = browser.measure(text, width, dark, act=ACT)
  assert found.get("failed") is None and found["console"] == [] and found["wide"] == []
  assert found["scroll"] <= found["width"] and found["parts"] == len(boxes)
  # Weights are 0 and 1: no colour and one; advantages have both signs, and each completion its own.
  assert len(found["weights"]) == 2 and "" in found["weights"]
  assert len(found["advantages"]) > 3 and found["legend"].startswith("worse −") and found["legend"].endswith("better")
  part, texts = data["parts"][-1], boxes[-1]
  for name, place in (("clicked", 1), ("last", len(texts) - 1), ("before", len(texts) - 2)):
    assert f"id {part['ids'][place]} · position {part['positions'][place]} · segment {part['segment']}" in found[name]
    for label, key in (("log p", "logprobs"), ("entropy", "entropies"), ("ratio p/p_old", "ratios")):
      value = part["values"][key][place]
      number = "–" if value is None else f"{value:.17g}".replace("-", "−") if value == int(value) else (
          repr(value).replace("-", "−"))
      assert f"{label} {number} " in found[name] + " "
  assert found["chosen"] == 1


def test_ranks_count_what_is_likelier():
  """Of two tokens' logits, in chunks of two entries, of which the last of six is nobody's."""
  kernel = jnp.array([[0.1, 0.5, 0.3, 0.5, 0.2, 9.0], [5.0, 4.0, 3.0, 2.0, 1.0, 9.0]])
  found = [microscope.ranks(jnp.eye(2)[None], kernel, jnp.array([targets]), chunk=2, num_real_vocab=5)
           for targets in ([1, 0], [4, 4], [3, 2])]
  assert [ranks.tolist() for ranks, _ in found] == [[[1, 1]], [[4, 5]], [[1, 3]]]
  assert {int(top[0, 1]) for _, top in found} == {0} and {int(top[0, 0]) for _, top in found} <= {1, 3}
