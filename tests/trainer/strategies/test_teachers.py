"""Runs with several teachers, and with what teachers say kept before the first step: the loss by all models' logits."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf
from tests import tiny
from tests.models.initial import initial
from tests.trainer.strategies import test_distill as distill
from tests.trainer.strategies.pairs import jitted_logits
from tests.trainer.strategies.test_distill import Keep
from trainer import strategies, train
from trainer.config import defaults, evaluator, source, strategy
from trainer.errors import ConfigError, DataError
from trainer.metrics import to_floats
from trainer.strategies import distill as distill_lib
from trainer.strategies import teachers

BETA, TEMPERATURE = 0.3, 0.7


def folders(tmp_path):
  return {"a": tiny.hf_folder(tmp_path / "a", num_layers=3, hidden_size=32, vocab_size=258),
          "b": tiny.hf_folder(tmp_path / "b", seed=3, vocab_size=258)}


def config_of(folder, *, of=distill.config_of, **options):
  """Two sources, `left` and `right`, in rows of their own."""
  changed = {key: options.pop(key) for key in ("total_steps",) if key in options}
  c = of(folder, **changed)
  c.strategy = strategy("distill", beta=BETA, temperature=TEMPERATURE, **options)
  file = folder / "right.jsonl"
  file.write_text("".join(json.dumps(dict(prompt=f"{i} or", completion=f" {i - 1}.")) + "\n" for i in range(16)))
  c.input.sources = dict(left=c.input.sources.main, right=source(type="jsonl", path=str(file)))
  return c


def mixed(paths, weights, sources=None):
  return {name: dict(path=str(paths[name]), weight=weight, sources=(sources or {}).get(name, ()))
          for name, weight in weights.items()}


def losses_by_hand(c, paths, weights_of):
  """{step: the loss}, by logits of all models; `weights_of(source)`: {teacher: weight}."""
  student, teachers, found = distill.tiny_student(c), {name: hf.load(path) for name, path in paths.items()}, {}
  names = sorted(c.input.sources)
  for step, (before, batch, _) in Keep.found.items():
    logits = np.asarray(jitted_logits(student)(jax.tree.map(jnp.asarray, before), batch))[..., :258]
    theirs = {name: np.asarray(jitted_logits(model)(params, batch))[..., :258]
              for name, (model, params) in teachers.items()}
    total = 0.0
    for row, at in enumerate(batch["source_ids"]):
      weights = batch["loss_weights"][row][None]
      if not weights.any():  # padding
        continue
      for name, weight in weights_of(names[at]).items():
        total += weight * distill.divergence(logits[row][None], theirs[name][row][None], weights, BETA, TEMPERATURE
                                             ) * weights[:, 1:].sum()
    found[step] = total / batch["loss_weights"][:, 1:].sum()
  return found


def losses():
  return {step: kept[2] for step, kept in Keep.found.items()}


def test_the_loss_is_the_weighted_mean_over_teachers(tmp_path):
  paths = folders(tmp_path)
  c = config_of(tmp_path, total_steps=2, teachers=mixed(paths, {"a": 3.0, "b": 1.0}))
  train(c, tmp_path / "w")
  wanted = losses_by_hand(c, paths, lambda source: {"a": 0.75, "b": 0.25})
  assert losses() == pytest.approx(wanted, abs=1e-6) and len(wanted) == 2


@pytest.mark.parametrize("top_k", [0, 258])
def test_a_teacher_of_some_sources_is_heard_in_their_rows_alone(tmp_path, top_k):
  paths = folders(tmp_path)
  c = config_of(tmp_path, total_steps=2, teachers=mixed(paths, {"a": 2.0, "b": 3.0}, {"a": ("left",)}),
                cached_top_k=top_k)
  run = train(c, tmp_path / "w")
  batches = [kept[1]["source_ids"] for kept in Keep.found.values()]
  assert {0, 1} <= {int(at) for ids in batches for at in ids}
  wanted = losses_by_hand(c, paths, lambda source: {"a": 0.4, "b": 0.6} if source == "left" else {"b": 1.0})
  assert losses() == pytest.approx(wanted, abs=1e-6)
  assert ("reference" in run.state) == (top_k == 0)


def test_kept_tokens_of_a_teacher_stand_for_it(tmp_path):
  """With all of them the losses are those with the teacher in memory; with few they are smaller, and what is kept is
  read again without being computed."""
  path = str(folders(tmp_path)["a"])
  train(config_of(tmp_path, teacher=path), tmp_path / "live")
  live = losses()
  train(config_of(tmp_path, teacher=path, cached_top_k=258), tmp_path / "all")
  assert losses() == pytest.approx(live, abs=1e-6) and len(live) == 4
  c = config_of(tmp_path, teacher=path, cached_top_k=4)
  c.callbacks.keep.stop = 2
  train(c, tmp_path / "few")
  few, kept = losses(), sorted((tmp_path / "cache").glob("*-teacher-*"))
  assert len(kept) == 4 and few[1] < live[1]
  shapes = {key: Keep.found[1][1][key].shape for key in ("teacher_ids", "teacher_logprobs")}
  assert shapes == {"teacher_ids": (4, 16, 1, 4), "teacher_logprobs": (4, 16, 1, 5)}
  times = [file.stat().st_mtime_ns for folder in kept for file in folder.iterdir()]
  train(config_of(tmp_path, teacher=path, cached_top_k=4), tmp_path / "few")
  parts = few | losses()
  assert times == [file.stat().st_mtime_ns for folder in kept for file in folder.iterdir()]
  train(config_of(tmp_path, teacher=path, cached_top_k=4), tmp_path / "whole")
  assert losses() == parts
  # It is known by its fingerprint when the run goes on.
  shutil.rmtree(path)
  tiny.hf_folder(tmp_path / "a", seed=2, vocab_size=258)
  c = config_of(tmp_path, teacher=path, cached_top_k=4, total_steps=6)
  c.allow_config_changes = True
  with pytest.raises(ConfigError, match="was trained with another reference"):
    train(c, tmp_path / "few")


def test_on_policy_each_completion_has_the_teachers_of_its_source(tmp_path):
  paths = folders(tmp_path)
  c = config_of(tmp_path, of=lambda folder, **changed: distill.on_policy(folder, None, **changed), total_steps=2,
                teachers=mixed(paths, {"a": 1.0, "b": 1.0}, {"a": ("left",), "b": ("right",)}))
  c.rollout.num_prompts, c.input.share_prompts = 4, "never"
  train(c, tmp_path / "w")
  wanted = losses_by_hand(c, paths, lambda source: {"a" if source == "left" else "b": 1.0})
  assert losses() == pytest.approx(wanted, abs=1e-6)
  assert {0, 1} <= {int(at) for kept in Keep.found.values() for at in kept[1]["source_ids"]}
  c.strategy.cached_top_k = 4
  with pytest.raises(ConfigError, match="what the student will say in rollouts is not known before"):
    train(c, tmp_path / "x")


def test_teachers_that_cannot_be_are_refused(tmp_path):
  paths = folders(tmp_path)
  a, b = (str(paths[name]) for name in "ab")
  more = str(tiny.hf_folder(tmp_path / "more", vocab_size=264))  # entries beyond the tokens
  for options, message in (
      (dict(teacher=a, teachers={"b": dict(path=b)}), "Give one teacher or several"),
      (dict(teachers={"b": dict(weight=1.0)}), "strategy.teachers.b.path is None; it must be of type str"),
      (dict(teachers={"b/c": dict(path=b)}), "strategy.teachers has the name 'b/c'; allowed: letters, digits, _ and -"),
      (dict(teachers={"1": dict(path=b)}), "strategy.teachers has the name '1'"),
      (dict(teachers={"b": b}), "strategy.teachers.b is '.*; it must be a dict such as"),
      (dict(teachers={"b": dict(path=b, weight=0.0)}), "strategy.teachers.b.weight is 0.0; it must be above 0"),
      (dict(teachers={"b": dict(path=b, source=("left",))}), "strategy.teachers.b has the key 'source'; allowed: path"),
      (dict(teachers={"b": dict(path=b, sources=("lft",))}), "strategy.teachers.b.sources has 'lft'; the sources are"),
      (dict(teachers={"b": dict(path=b, sources=("left",))}), "input.sources.right has no teacher"),
      (dict(teachers={"b": dict(path=str(tmp_path / "no"))}), "strategy.teachers.b.path is .* which is no folder"),
      (dict(teacher=a, cached_top_k=259), "strategy.cached_top_k is 259, but there are 258 tokens"),
      (dict(teacher=more, cached_top_k=260), "strategy.cached_top_k is 260, but there are 258 tokens"),
      (dict(teacher=a, cached_top_k=-1), "strategy.cached_top_k is -1; it must be at least 0")):
    with pytest.raises(ConfigError, match=message):
      train(config_of(tmp_path, **options), tmp_path / "w")
  c = config_of(tmp_path, teacher=a, cached_top_k=4)
  c.input.sources.left.stream_files = 1
  with pytest.raises(ConfigError, match="a teacher reads all data before the first step"):
    train(c, tmp_path / "w")


def decided(path, folder):
  """The model, whose logits are 30 times as large, so that few entries have most of the mass."""
  model, params = hf.load(path)
  hf.save(model, {**params, "unembed": jax.tree.map(lambda kernel: 30 * kernel, params["unembed"])}, folder)
  for file in path.glob("tokenizer*"):
    shutil.copy(file, folder)
  return folder


def taught_rows(folder, path, k):
  """16 documents of tokens in a file, with the k most probable entries of the teacher, in no order, as it says them of
  the document alone: by all logits, in float64."""
  model, params = hf.load(path)
  rng, lines = np.random.default_rng(0), []
  for i in range(16):
    ids = rng.integers(0, 258, 4 + i % 5).tolist()
    padded = np.pad(ids, (0, 16 - len(ids)))[None]
    z = np.asarray(jitted_logits(model)(params, padded), np.float64)[0, :len(ids) - 1, :258]
    logq = z - np.log(np.exp(z).sum(-1, keepdims=True))
    best = [rng.permutation(np.argsort(-row)[:k]) for row in logq]
    said = [[None] * 2 + [part.tolist() for part in parts[1:]]  # of the first trained token on
            for parts in (best, [row[some] for row, some in zip(logq, best, strict=True)])]
    lines.append(dict(input_ids=ids, labels=[-100] * 2 + ids[2:], teacher_ids=said[0], teacher_logprobs=said[1]))
  file = folder / "taught.jsonl"
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return lines, file


def taught_config(folder, file, packing="none", **options):
  c = distill.config_of(folder, strategy=strategy("distill", **options), seed=7)
  c.input.sources.main.path, c.input.packing = str(file), packing
  return c


@pytest.mark.parametrize("beta, packing", [(0.0, "none"), (0.3, "best_fit"), (1.0, "best_fit")])
def test_rows_that_bring_what_a_teacher_said(tmp_path, beta, packing):
  """As a cache of the teacher itself, which has one entry less of a token: the loss at the first step by loops over
  all logits in float64, and at all steps, which follow from gradients, that of the cache."""
  path, k = decided(folders(tmp_path)["a"], tmp_path / "decided"), 3
  lines, file = taught_rows(tmp_path, path, k + 1)
  options = dict(beta=beta, cached_top_k=k)
  run = train(taught_config(tmp_path, file, packing, teacher="rows", **options), tmp_path / "rows")
  found, kept = losses(), dict(Keep.found)
  assert "reference" not in run.state and not list((tmp_path / "cache").glob("*-teacher-*"))
  assert kept[1][1]["teacher_ids"].shape == (4, 16, 1, k)
  assert (kept[1][1]["segment_ids"].max() > 1) == (packing == "best_fit")
  train(taught_config(tmp_path, file, packing, teacher=str(path), **options), tmp_path / "cached")
  assert losses() == pytest.approx(found, abs=1e-6) and len(found) == 4

  before, batch, _ = kept[1]
  said = {tuple(line["input_ids"]): line for line in lines}
  student, total = distill.tiny_student(run.config), 0.0
  z = np.asarray(jitted_logits(student)(jax.tree.map(jnp.asarray, before), batch), np.float64)[..., :258]
  p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  for row, t in np.argwhere(batch["loss_weights"] > 0):
    first = t - batch["positions"][row, t]
    own = batch["segment_ids"][row] == batch["segment_ids"][row, t]
    line = said[tuple(batch["tokens"][row][own].tolist())]
    best = sorted(zip(line["teacher_logprobs"][t - first], line["teacher_ids"][t - first], strict=True))[-k:]
    ids, q = [i for _, i in best], np.exp([logq for logq, _ in best])
    mine = p[row, t - 1]
    for a, b in zip([*mine[ids], 1 - mine[ids].sum()], [*q, 1 - q.sum()], strict=True):
      m = (1 - beta) * a + beta * b
      total += b * np.log(b / a) if beta == 0 else a * np.log(a / b) if beta == 1 else (
          beta * b * np.log(b / m) + (1 - beta) * a * np.log(a / m))
  assert found[1] == pytest.approx(total / batch["loss_weights"].sum(), abs=1e-6)


def test_taught_rows_can_be_streamed_and_evaluated_without(tmp_path):
  path = folders(tmp_path)["a"]
  _, file = taught_rows(tmp_path, path, 4)
  c = taught_config(tmp_path, file, teacher="rows", cached_top_k=4, beta=0.0)
  c.input.sources.main.stream_files, c.total_steps = 1, 2
  held = tmp_path / "held.jsonl"
  held.write_text(json.dumps(dict(prompt="1 and", completion=" 2")) + "\n")
  c.evals.val = evaluator(type="loss", sources=dict(main=source(type="jsonl", path=str(held))))
  streamed = train(c, tmp_path / "streamed")
  assert np.isfinite(streamed.last_eval[1]["eval/val/loss"]) and Keep.found[2][1]["teacher_ids"].shape == (4, 16, 1, 4)
  assert np.isfinite(list(losses().values())).all()


def test_taught_rows_that_cannot_be_are_refused(tmp_path):
  paths = folders(tmp_path)
  _, file = taught_rows(tmp_path, paths["a"], 4)
  for options, message in (
      (dict(), "strategy.teacher is 'rows', and strategy.cached_top_k is 0"),
      (dict(cached_top_k=259), "strategy.cached_top_k is 259, but there are 258 tokens"),
      (dict(cached_top_k=4, temperature=0.5), "strategy.temperature is 0.5, but what rows bring"),
      (dict(cached_top_k=4, teachers={"b": dict(path=str(paths["b"]))}), "Give one teacher or several")):
    with pytest.raises(ConfigError, match=message):
      train(taught_config(tmp_path, file, teacher="rows", **options), tmp_path / "w")
  text = tmp_path / "text.jsonl"
  text.write_text(json.dumps(dict(prompt="a", completion="b")) + "\n")
  with pytest.raises(DataError, match=r"text.jsonl:1: no 'input_ids' \(or null\)"):
    train(taught_config(tmp_path, text, teacher="rows", cached_top_k=4), tmp_path / "w")
  c = distill.on_policy(tmp_path, "rows")
  with pytest.raises(ConfigError, match="no row says what a teacher expects where the student"):
    train(c, tmp_path / "w")


@pytest.mark.devices(8)
def test_kept_tokens_on_a_mesh(tmp_path):
  """On devices that share rows, parameters and the vocabulary the losses are those where each has some rows."""
  paths, found = folders(tmp_path), []
  for axes in (dict(data=8), dict(data=2, fsdp=2, tensor=2)):
    c = config_of(tmp_path, total_steps=2, teachers=mixed(paths, {"a": 3.0, "b": 1.0}), cached_top_k=6)
    c.mesh.update(axes)
    c.update(batch_size=8)
    c.input.cache_dir = str(tmp_path / f"cache{len(found)}")
    run = train(c, tmp_path / f"w{len(found)}")
    found.append(losses())
    assert "reference" not in run.state
  assert found[0] == pytest.approx(found[1], abs=1e-5)


# ---------------------------------------------------------------- teachers that rows name


def routed_config(folder, paths, *, of=distill.config_of, names="abb", **options):
  """16 rows, which name their teachers in the column `domain`, in this order again and again: b as "code"."""
  changed = {key: options.pop(key) for key in ("total_steps",) if key in options}
  c = of(folder, **changed)
  teachers = {"a": dict(path=str(paths["a"])), "b": dict(path=str(paths["b"]), keys=("code", "b"))}
  c.strategy = strategy("distill", **(dict(beta=BETA, temperature=TEMPERATURE, teacher_key="domain",
                                           teachers=teachers) | options))
  rows = [dict(prompt=f"{i} and", completion=f" {i + 1}", domain={"a": "a", "b": "code"}[names[i % len(names)]])
          for i in range(16)]
  file = folder / "routed.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  c.input.sources.main.path = str(file)
  return c


def routed_by_hand(c, paths):
  """{step: (the loss, {teacher: (its mean, its tokens)})} of the teacher of each token, in float64."""
  student, teachers, found = distill.tiny_student(c), {name: hf.load(path) for name, path in paths.items()}, {}
  for step, (before, batch, _) in Keep.found.items():
    everything = [np.asarray(jitted_logits(model)(params, batch), np.float64)[..., :258] / TEMPERATURE
                  for model, params in ((student, jax.tree.map(jnp.asarray, before)), *teachers.values())]
    logp, *logqs = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in everything)
    sums, tokens = np.zeros(2), np.zeros(2)
    for row, t in np.argwhere(batch["loss_weights"] > 0):
      whose = batch["teacher_index"][row, t]
      a, b = logp[row, t - 1], logqs[whose][row, t - 1]
      m = np.log((1 - BETA) * np.exp(a) + BETA * np.exp(b))
      sums[whose] += (BETA * np.exp(b) * (b - m) + (1 - BETA) * np.exp(a) * (a - m)).sum()
      tokens[whose] += 1
    found[step] = sums.sum() / tokens.sum(), {
        name: (sums[n] / tokens[n], tokens[n]) for n, name in enumerate(paths) if tokens[n]}
  return found


def logged(workdir):
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return {row["step"]: row for row in rows if "loss" in row}


def check_routed(c, paths, workdir):
  """The losses, and what is told of each teacher."""
  wanted, told = routed_by_hand(c, paths), logged(workdir)
  assert losses() == pytest.approx({step: loss for step, (loss, _) in wanted.items()}, abs=1e-6)
  for step, (_, of_each) in wanted.items():
    for name in paths:
      mean, tokens = of_each.get(name, (None, 0))
      assert told[step][f"teachers/{name}/tokens"] == tokens
      assert told[step].get(f"teachers/{name}/loss") == (mean and pytest.approx(mean, abs=1e-6))


@pytest.mark.parametrize("packing, top_k", [("best_fit", 0), ("none", 258)])
def test_each_row_learns_from_the_teacher_that_it_names(tmp_path, packing, top_k):
  """By loops over all logits in float64; packed, rows of several teachers are side by side, and of the kept tokens of
  all teachers the row's own are taken."""
  paths = folders(tmp_path)
  c = routed_config(tmp_path, paths, total_steps=2, cached_top_k=top_k)
  c.input.packing, c.log_steps, c.seq_len = packing, 1, 32 if packing == "best_fit" else 16
  train(c, tmp_path / "w")
  check_routed(c, paths, tmp_path / "w")
  texts = [json.loads(line) for line in (tmp_path / "routed.jsonl").read_text().splitlines()]
  whose = {f"{row['prompt']}{row['completion']}": "ab".index(row["domain"][0].replace("c", "b")) for row in texts}
  seen = set()
  for _, batch, _ in Keep.found.values():
    for row, segments in enumerate(batch["segment_ids"]):
      for segment in range(1, segments.max(initial=0) + 1):
        ids = batch["tokens"][row][segments == segment]
        text = bytes(int(i) for i in ids if i < 256).decode()
        trained = (segments == segment) & (batch["loss_weights"][row] > 0)
        assert set(batch["teacher_index"][row][trained]) == {whose[text]}
        seen.add(whose[text])
  assert seen == {0, 1}


def test_gradients_are_those_of_the_dense_formula_of_each_tokens_teacher(tmp_path):
  paths, rng = folders(tmp_path), np.random.default_rng(0)
  c = routed_config(tmp_path, paths)
  teachers, student = {name: hf.load(path) for name, path in paths.items()}, distill.tiny_student(c)
  params = initial(student)
  shape = (3, 12)
  batch = dict(tokens=rng.integers(0, 258, shape), positions=np.arange(12)[None].repeat(3, 0),
               segment_ids=np.ones(shape, np.int32), loss_weights=rng.integers(0, 3, shape).astype(np.float32),
               teacher_index=rng.integers(0, 2, shape).astype(np.int32), source_ids=np.zeros(3, np.int32))
  batch["loss_weights"][:, 0] = 0

  def ours(params):
    terms, _ = strategies.find("distill").loss(
        student, params, batch, None, c.strategy, {"teacher": {name: given for name, (_, given) in teachers.items()}})
    return jnp.sum(terms["loss"].sum) / jnp.sum(terms["loss"].weight)

  def dense(params):
    def logp(model, params):
      return jax.nn.log_softmax(model.logits(params, batch)[..., :258] / TEMPERATURE)

    a = logp(student, params)[:, :-1]
    of_each = jnp.stack([logp(model, given)[:, :-1] for model, given in teachers.values()])
    b = jnp.take_along_axis(of_each, batch["teacher_index"][None, :, 1:, None], 0)[0]
    m = jnp.log((1 - BETA) * jnp.exp(a) + BETA * jnp.exp(b))
    of_token = (BETA * jnp.exp(b) * (b - m) + (1 - BETA) * jnp.exp(a) * (a - m)).sum(-1)
    return jnp.sum(of_token * batch["loss_weights"][:, 1:]) / batch["loss_weights"].sum()

  (loss, grads), (wanted, others) = (jax.jit(jax.value_and_grad(fn))(params) for fn in (ours, dense))
  assert float(loss) == pytest.approx(float(wanted), abs=1e-6)
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), grads, others)


def test_gradients_of_rows_of_one_teacher_are_what_it_alone_gives(tmp_path):
  """Parameters after steps, which are gradients added up, are the same to the bit."""
  paths, states = folders(tmp_path), []
  for options in (dict(), dict(teacher_key=None, teachers={}, teacher=str(paths["b"]))):
    c = routed_config(tmp_path, paths, names="b", total_steps=2, **options)
    run = train(c, tmp_path / f"w{len(states)}")
    states.append((losses(), jax.device_get(run.state["params"])))
  (routed, params), (alone, others) = states
  assert routed == alone and len(alone) == 2
  jax.tree.map(np.testing.assert_array_equal, params, others)


def routed_rollouts(folder, paths, **options):
  c = routed_config(folder, paths, of=lambda folder, **changed: distill.on_policy(folder, None, **changed),
                    total_steps=2, **options)
  c.rollout.num_prompts, c.log_steps, c.input.share_prompts = 4, 1, "never"
  return c


def test_on_policy_each_completion_has_the_teacher_that_its_row_names(tmp_path):
  paths = folders(tmp_path)
  c = routed_rollouts(tmp_path, paths, names="ab")
  train(c, tmp_path / "w")
  check_routed(c, paths, tmp_path / "w")
  whose, seen = {f"{i} and": i % 2 for i in range(16)}, set()
  for _, batch, _ in Keep.found.values():
    for row, segments in enumerate(batch["segment_ids"]):
      for segment in range(1, segments.max(initial=0) + 1):
        mine = segments == segment
        ids = batch["tokens"][row][mine & (batch["loss_weights"][row] == 0)]
        prompt = bytes(int(i) for i in ids if i < 256).decode()
        assert set(batch["teacher_index"][row][mine & (batch["loss_weights"][row] > 0)]) == {whose[prompt]}
        seen.add(whose[prompt])
  assert seen == {0, 1}


def test_within_a_rollout_a_run_goes_on_with_the_same_teachers(tmp_path):
  """And not with rows that name others."""
  paths = folders(tmp_path)
  train(routed_rollouts(tmp_path, paths, names="ab"), tmp_path / "whole")
  whole = losses()
  c = routed_rollouts(tmp_path, paths, names="ab")
  c.callbacks.keep.stop = 1
  train(c, tmp_path / "parts")
  first = losses()
  c = routed_rollouts(tmp_path, paths, names="ba")
  c.allow_config_changes = True
  with pytest.raises(ConfigError, match="the teachers that its prompts name cannot be had again"):
    train(c, tmp_path / "parts")
  train(routed_rollouts(tmp_path, paths, names="ab"), tmp_path / "parts")
  assert first | losses() == whole and list(first) == [1]


@pytest.mark.parametrize("of", ["file", "stream", "rollout"])
def test_rows_without_a_teacher_are_refused_by_their_line(tmp_path, of):
  paths = folders(tmp_path)
  for value, message in ((None, "no 'domain' .or null., which names the row's teacher .strategy.teacher_key.; its "
                          "columns are .*Give it: one of 'a', 'code', 'b'"),
                         ("cod", "'domain' is 'cod', which is no teacher; allowed: 'a', 'code', 'b'"),
                         (3, "'domain' is 3, which is no teacher")):
    c = routed_config(tmp_path, paths, of=(lambda folder, **changed: distill.on_policy(folder, None, **changed))
                      if of == "rollout" else distill.config_of)
    c.input.sources.main.stream_files = int(of == "stream")
    file = tmp_path / "routed.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[4]["domain"] = value
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=f"routed.jsonl:5: {message}"):
      train(c, tmp_path / "w")
  assert not list((tmp_path / "w").glob("checkpoints/*"))


def test_routes_that_cannot_be_are_refused(tmp_path):
  paths = folders(tmp_path)
  a, b = (dict(path=str(paths[name])) for name in "ab")
  for options, message in (
      (dict(teachers={}, teacher=a["path"]), "strategy.teacher_key is 'domain', but strategy.teachers is empty"),
      (dict(teachers={"a": a | {"sources": ("main",)}}), "strategy.teachers.a has sources, and strategy.teacher_key"),
      (dict(teachers={"a": a | {"weight": 2.0}}), "strategy.teachers.a has a weight, and strategy.teacher_key"),
      (dict(teachers={"a": a, "b": b | {"keys": ("a",)}}), "strategy.teachers.b.keys has 'a', which stands for 'a'"),
      (dict(teachers={"a": a | {"keys": ("x",)}}, teacher_key=None), "strategy.teachers.a.keys is .* is not set")):
    with pytest.raises(ConfigError, match=message):
      train(routed_config(tmp_path, paths, **options), tmp_path / "w")


# ----------------------------------------------------------------------------------------------
# What a config says of teachers, of models that are not there.


@pytest.fixture
def anywhere(monkeypatch):
  """Paths that all lead to a teacher of text, with so many tokens as `sizes` says: (path, key) of those asked for."""
  asked = []
  tower = SimpleNamespace(vision=SimpleNamespace(tower="none"))
  monkeypatch.setattr(teachers.teacher, "find", lambda path, key="strategy.teacher": (
      asked.append((path, key)) or SimpleNamespace(section=tower)))
  monkeypatch.setattr(teachers.teacher, "check", lambda config, tokenizer, path, key: asked.append((path, key)))
  monkeypatch.setattr(teachers.teacher, "make_model", lambda path, params, compute, key: SimpleNamespace(
      num_real_vocab=int(path), no_prefix_sharing=None if path == "9" else f"{path} cannot", of=(params, compute, key)))
  return asked


def several(column=None, **options):
  return strategy("distill", teachers=options, teacher_key=column)


def test_teachers_are_what_the_config_says(anywhere):
  found = teachers.of(several(a=dict(path="1", weight=2, sources=("x", "y")), b_2=dict(path="2")))
  assert found == {"a": ("1", "strategy.teachers.a.path", 2.0, ("x", "y")),
                   "b_2": ("2", "strategy.teachers.b_2.path", 1.0, ())}
  assert anywhere == [("1", "strategy.teachers.a.path"), ("2", "strategy.teachers.b_2.path")]
  assert teachers.of(strategy("distill", teacher="3")) == {"": ("3", "strategy.teacher", 1.0, ())}
  assert teachers.of(strategy("distill", teacher="rows")) == {}
  assert [teachers.routes(several(a=dict(path="1", sources=given))) for given in ((), ("x",))] == [False, True]


@pytest.mark.parametrize("column, given, message", [
    ("who", None, "strategy.teacher_key is 'who', but strategy.teachers is empty. Name those that rows choose from."),
    (None, dict(path="1", wieght=2.0), "strategy.teachers.a has the key 'wieght'; allowed: path, weight, sources, key"),
    (None, dict(path="1", weight=True), "strategy.teachers.a.weight is True; it must be of type float."),
    (None, dict(path="1", weight=float("inf")), "strategy.teachers.a.weight is inf; it must be above 0."),
    (None, dict(path="1", weight=-1.0), "strategy.teachers.a.weight is -1.0; it must be above 0."),
    (None, dict(path="1", sources="x"), "strategy.teachers.a.sources is 'x'; it must be of type list."),
    ("who", dict(path="1", weight=2.0), "strategy.teachers.a has a weight, and strategy.teacher_key is 'who': a row"),
    ("who", dict(path="1", sources=("x",)), "strategy.teachers.a has sources, and strategy.teacher_key is 'who'"),
    (None, dict(path="1", keys=("math",)), "strategy.teachers.a.keys is ('math',), but strategy.teacher_key is not se"),
])
def test_a_teacher_that_cannot_be_is_named(anywhere, column, given, message):
  cfg = SimpleNamespace(teacher=None, teachers={} if given is None else {"a": given}, teacher_key=column)
  cfg.get = vars(cfg).get
  with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
    teachers.of(cfg)


def test_weights_are_shares_of_those_that_teach_a_source(anywhere):
  cfg = several(a=dict(path="1", weight=3.0), b=dict(path="2", sources=("x",)), c=dict(path="3", sources=("x", "y")))
  found = teachers.weights(cfg, ("x", "y", "z"))
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, [[0.6, 0.2, 0.2], [0.75, 0, 0.25], [1, 0, 0]], rtol=1e-6)
  heard = teachers.heard(lambda params, batch, *rest: (batch, rest), cfg, ("x", "y", "z"))
  batch = {"source_ids": jnp.array([2, 1])}
  (found, rest) = heard("params", batch, "rng", 7)
  assert rest == ("rng", 7) and found["source_ids"] is batch["source_ids"]
  np.testing.assert_array_equal(found["teacher_numbers"], [[0, 1, 2]] * 2)
  np.testing.assert_allclose(found["teacher_weights"], [[1, 0, 0], [0.75, 0, 0.25]])
  # Of what is kept, [B, T, M, k], those of the row's own teachers come first.
  (found, _) = heard("params", batch | {"teacher_ids": jnp.zeros((2, 4, 2, 5), int)})
  np.testing.assert_array_equal(found["teacher_numbers"], [[0, 1], [0, 2]])
  np.testing.assert_allclose(found["teacher_weights"], [[1, 0], [0.75, 0.25]])
  shares = teachers.shares(found, 2)
  assert [(whose.tolist(), share.tolist()) for whose, share in shares] == [
      ([[0], [0]], [[1.0], [0.75]]), ([[1], [2]], [[0.0], [0.25]])]
  for alone in (several(a=dict(path="1")), several("who", a=dict(path="1"), b=dict(path="2"))):
    assert teachers.heard(test_weights_are_shares_of_those_that_teach_a_source, alone, ("x",)) is (
        test_weights_are_shares_of_those_that_teach_a_source)
  assert teachers.shares({}, 2) == []


def test_a_place_hears_the_teacher_of_the_token_that_it_predicts():
  batch = {teachers.routed.INDEX: jnp.array([[1, 0, 1, 0]])}
  found = [(int(whose[0, 0]), share.tolist()) for whose, share in teachers.shares(batch, 2)]
  assert found == [(0, [[1, 0, 1, 0]]), (1, [[0, 1, 0, 1]])]


def test_each_teacher_s_loss_is_its_mean_where_it_is_heard():
  losses, weights = [jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0, 6.0], [7.0, 8.0]])], jnp.array(
      [[1.0, 0.5], [0.0, 2.0]])
  heard_as = [(jnp.array([[0], [1]]), jnp.array([[1.0], [0.5]])), (jnp.array([[1], [0]]), jnp.array([[0.0], [0.5]]))]
  found = to_floats(jax.device_get(teachers.metrics(["a", "b", "c"], losses, heard_as, weights)))
  # a: of row 0 the first, of row 1 the second; b: of row 1 the first.
  assert found == {"teachers/a/loss": pytest.approx((1 + 0.5 * 2 + 2 * 8) / 3.5), "teachers/a/tokens": 3.5,
                   "teachers/b/loss": 4.0, "teachers/b/tokens": 2.0, "teachers/c/tokens": 0.0}


def test_what_is_kept_of_teachers_has_their_names():
  one, cfg = strategy("distill", teacher="1"), several(a=dict(path="1"), b=dict(path="2"))
  assert teachers.joined({"": 5}) == 5 and teachers.apart(one, 5) == {"": 5}
  assert teachers.joined({"a": 1, "b": 2}) == {"a": 1, "b": 2} and teachers.apart(cfg, {"b": 2, "a": 1}) == {
      "a": 1, "b": 2}


def checked(cached_top_k=0, **sources):
  """A config with sources x, y and z, of which the last has no weight, and teachers of these sources."""
  c = defaults()
  c.input.sources = {name: source(path="p", weight=weight) for name, weight in (("x", 1.0), ("y", 2.0), ("z", 0.0))}
  c.strategy = several(**{name: dict(path=str(8 + len(name)), sources=of) for name, of in sources.items()})
  c.strategy.cached_top_k = cached_top_k
  return c


@pytest.mark.parametrize("config, streamed, message", [
    (checked(a=("v", "x")), None, "strategy.teachers.a.sources has 'v'; the sources are x, y, z."),
    (checked(a=(), b=("z",)), None, "strategy.teachers.b.sources is ('z',), none of which is used: their weight is 0."),
    (checked(a=("x",), b=("z", "x")), None, "input.sources.y has no teacher: each of strategy.teachers is one of othe"),
    (checked(4, a=()), "y", "strategy.cached_top_k is 4, but input.sources.y.stream_files is 3: a teacher reads all d"),
    (checked(10, a=(), bb=()), None, "strategy.cached_top_k is 10, but there are 9 tokens. Use at most that, or 0 for"),
    (checked(9, a=("x",), b=("y", "z")), None, None), (checked(0, a=()), "y", None), (checked(9, a=()), "z", None)])
def test_sources_without_a_teacher_and_others_are_refused(anywhere, config, streamed, message):
  if streamed:
    config.input.sources[streamed].stream_files = 3
  tokenizer = SimpleNamespace(vocab_size=20)
  if message is None:
    teachers.check(config, tokenizer)
    assert ("9", "strategy.teachers.a.path") in anywhere
  else:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
      teachers.check(config, tokenizer)


def test_what_rows_bring_of_a_teacher_is_of_the_run_s_tokens(anywhere):
  c = checked(a=())
  c.strategy = strategy("distill", teacher="rows", cached_top_k=20)
  teachers.check(c, SimpleNamespace(vocab_size=20))
  with pytest.raises(ConfigError, match="^strategy.cached_top_k is 20, but there are 19 tokens. Use at most as many"):
    teachers.check(c, SimpleNamespace(vocab_size=19))
  assert anywhere == []


def test_models_of_teachers(anywhere):
  c = checked(a=(), bb=())
  c.precision.update(params="float32", compute="bfloat16")
  made = teachers.make_model(c, teachers.of(c.strategy)["bb"])
  assert made.of == ("float32", "bfloat16", "strategy.teachers.bb.path")
  assert teachers.no_prefix_sharing(c.strategy) == "10 cannot"
  assert teachers.no_prefix_sharing(strategy("distill", teacher="9")) is None


@pytest.mark.parametrize("cfg, tower, of_teacher, message", [
    (dict(cached_top_k=-1), "none", "none", "strategy.cached_top_k is -1; it must be at least 0 (the whole distributi"),
    ({}, "siglip", "none", "strategy distill learns from texts alone, but the student or its teacher sees images."),
    ({}, "none", "siglip", "strategy distill learns from texts alone"),
    (dict(beta=-0.1), "none", "none", "strategy.beta is -0.1; allowed: 0 (forward KL) to 1"),
    (dict(beta=1.1), "none", "none", "strategy.beta is 1.1"),
    (dict(temperature=0.0), "none", "none", "strategy.temperature is 0.0; it must be above 0."),
    (dict(teacher="rows"), "none", "none", "strategy.teacher is 'rows', and strategy.cached_top_k is 0. Say how many"),
    (dict(teacher="rows", cached_top_k=2, temperature=2.0), "none", "none", "strategy.temperature is 2.0, but what ro"),
    (dict(beta=0.0), "none", "none", None), (dict(beta=1.0), "none", "none", None)])
def test_options_of_distillation_that_cannot_work(anywhere, monkeypatch, cfg, tower, of_teacher, message):
  seen = SimpleNamespace(section=SimpleNamespace(vision=SimpleNamespace(tower=of_teacher)))
  monkeypatch.setattr(teachers.teacher, "find", lambda path, key: seen)
  monkeypatch.setattr(distill_lib.teacher, "find", lambda path, key="": seen)
  given = strategy("distill", **{"teacher": "9", **cfg})
  model = SimpleNamespace(vision=SimpleNamespace(tower=tower))
  if message is None:
    distill_lib.check(given, 1, model)
  else:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
      distill_lib.check(given, 1, model)
