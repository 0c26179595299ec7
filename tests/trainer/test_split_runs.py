"""Runs on images that are cut into squares, from a folder to a folder: tests/split.py has the folder and the rows.

What is expected is transformers' own, in float64 (tests/input_pipeline/references/make_split_references.py).
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline.examples.prompts import Prompter
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from models import hf
from tests import split, tiny
from tests.input_pipeline.test_split_images import packed
from tests.models.hf.test_images import assert_close
from tests.trainer.report.test_pages import pictures
from trainer import program as program_lib
from trainer import train
from trainer import tree as tree_lib
from trainer.distributed import mesh as mesh_lib
from trainer.export import command as export
from trainer.generate.sampler import Sampler
from trainer.planning import estimate


@pytest.fixture(scope="module")
def reference():
  return split.reference()


@pytest.fixture(scope="module")
def loaded():
  return hf.load(split.FOLDER, dtype="float32")


@pytest.mark.parametrize(("packing", "rows", "seq_len"), [("best_fit", 1, 600), ("none", 6, 200)])
def test_loss_logits_and_gradients_are_those_of_transformers(packing, rows, seq_len, tmp_path, reference, loaded):
  """Of all conversations, each in its own row, and all in one: 1e-5 of the largest entry of each gradient."""
  model, params = loaded
  data = packed(tmp_path, seq_len=seq_len, batch_size=rows, input=dict(packing=packing))
  batch = data.batch(0)
  config, _ = program_lib.resolve(split.config(tmp_path, seq_len=seq_len, batch_size=rows))
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model),
                                     mesh_lib.make_mesh(config.mesh), ["rows"])

  def loss(params):
    terms, _ = program.loss_fn(params, batch, jax.random.key(0))
    return sum(term.sum.sum() / term.weight.sum() for term in terms.values())

  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  np.testing.assert_allclose(value, reference["loss"], rtol=1e-6)
  hf.save(model, gradients, tmp_path / "gradients")
  found = load_file(tmp_path / "gradients" / "model.safetensors")
  expected = {name.removeprefix("gradient:"): values for name, values in reference.items() if ":" in name}
  expected = {name: values for name, values in expected.items() if not name.startswith("float32")}
  assert found.keys() == expected.keys() and len(found) > 50
  for name, values in expected.items():
    if name.endswith("k_proj.bias"):  # which moves all keys alike, so that its gradient is 0
      assert max(np.abs(found[name]).max(), np.abs(values).max()) < 1e-6 * np.abs(expected[name[:-4] + "weight"]).max()
    else:
      assert_close(found[name], values, 1e-5)
  logits = np.asarray(jax.jit(model.logits)(params, batch))
  for r, s in {(r, s) for r, row in enumerate(batch["segment_ids"].tolist()) for s in row if s}:
    here = np.flatnonzero(batch["segment_ids"][r] == s)
    ids = batch["tokens"][r][here].astype(np.int64)
    (i,) = (i for i in range(len(split.GRIDS)) if np.array_equal(reference[f"ids{i}"], ids))
    before = here[:-1][batch["loss_weights"][r][here][1:] > 0]
    assert_close(logits[r, before], reference[f"logits{i}"], 1e-5)


def test_float32_of_transformers_is_no_closer(reference):
  """What the bounds above leave out of account: its own rounding is a tenth of them."""
  errors = {name: values for name, values in reference.items()
            if name.startswith("float32:") and not name.endswith("k_proj.bias")}
  assert 1e-7 < max(errors.values()) < 2e-6


def prompt_of(tmp_path, i=0):
  config, _ = program_lib.resolve(split.config(tmp_path))
  (row, *_) = [json.loads(line) for line in split.rows(tmp_path, only=i).read_text().splitlines()]
  parts = [{**part, "image": tmp_path / part["image"]} if "image" in part else part
           for part in row["messages"][0]["content"]]
  return Prompter(config, load_tokenizer(split.FOLDER)).messages([dict(role="user", content=parts)])


def test_what_is_sampled_greedily_is_what_transformers_generates(tmp_path, reference, loaded):
  model, params = loaded
  prompt = prompt_of(tmp_path)
  # The reference's prompt ends in the space that an answer begins with.
  ids = reference["ids0"][:reference["prompt"]].astype(np.int32)
  np.testing.assert_array_equal(ids[:len(prompt.ids)], prompt.ids)
  (completion,) = Sampler(model, rows=1).generate(params, [ids], images=[list(prompt.images)], max_new_tokens=8,
                                                  temperature=0.0)
  np.testing.assert_array_equal(completion.ids, reference["sampled"])


def test_a_run_is_exported_with_squares_and_loads_to_the_bit(tmp_path):
  run = train(split.config(tmp_path / "data"), tmp_path / "run")
  out = export.export(tmp_path / "run", tmp_path / "out")
  before, after = tree_lib.flatten(run.state["params"]), tree_lib.flatten(hf.load(out)[1])
  assert before.keys() == after.keys()
  assert max(np.abs(np.asarray(before[path]) - after[path]).max() for path in before) == 0.0
  assert json.loads((out / "preprocessor_config.json").read_text()) == json.loads(
      (split.FOLDER / "preprocessor_config.json").read_text())
  assert hf.architecture(out)[1] == hf.architecture(split.FOLDER)[1]


def test_a_run_in_one_square_says_so_in_its_export(tmp_path):
  train(split.config(tmp_path / "data", model=dict(vision=dict(split=False)), total_steps=1), tmp_path / "run")
  out = export.export(tmp_path / "run", tmp_path / "out")
  assert json.loads((out / "preprocessor_config.json").read_text())["do_image_splitting"] is False
  assert hf.architecture(out)[1]["vision.split"] is False


def test_rollouts_about_squares(tmp_path):
  """The policy that trains sees what the one that sampled saw: their ratio is 1 on the first step."""
  config = split.config(tmp_path / "data", seq_len=192)
  tiny.assert_on_policy(config, tmp_path / "run")
  page = (tmp_path / "run" / "samples" / "rollout-00000001.html").read_text()
  assert {picture.shape for picture in pictures(page)} == {(16, 16, 3)}


def test_a_plan_counts_the_squares_of_the_largest_image(tmp_path):
  """Nine squares and the whole, unless a row has no room for as many; and what the config says."""
  for seq_len, said, expected in ((256, None, 10), (31, None, 7), (256, 3, 3)):
    config, _ = program_lib.resolve(split.config(tmp_path, seq_len=seq_len, plan=dict(images_per_row=said)))
    program_lib.settle(config, "cpu")
    model = program_lib.make_model(config, config.model.vocab_size)
    assert program_lib.abstract_batch(config, model, 2)["images"].shape == (2, expected, 16, 16, 3)
    program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model),
                                       mesh_lib.make_mesh(config.mesh), ["rows"])
    assert estimate.model_flops_of(config, program) == program.flops_per_token(seq_len, expected)
