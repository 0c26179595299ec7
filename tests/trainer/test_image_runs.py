"""Whole runs on rows with images, by strategy: what is trained, and I1, I2, I5."""

import jax
import numpy as np
import pytest

from tests.evaluators import digits
from trainer import train, tree
from trainer.config import strategy
from trainer.telemetry.writers import read_rows

PICTURES = [digits.encoded(digits.picture(n)) for n in range(9)]
ROWS = {
    "seq": [dict(image=image, text=f"picture {n}, and more of it") for n, image in enumerate(PICTURES)],
    "sft": [dict(image=image, prefix="what?", suffix=f"it is {n}") for n, image in enumerate(PICTURES)],
    "dpo": [dict(image=image, prompt="<image> what?", chosen=f"it is {n}", rejected="no")
            for n, image in enumerate(PICTURES)],
}


def config(folder, name, **changed):
  c = digits.config(folder, ROWS[name], batch_size=8, total_steps=4, log_steps=1, ckpt_steps=2)
  c.input.sources.main.split = "all"
  c.input.images.workers = 0
  c.input.images.augment.color = 0.3
  c.strategy = strategy(name)
  c.optimizer.name, c.optimizer.learning_rate = "sgd", 1e-2
  c.update(changed)
  return c


def rows_of(workdir, *keys):
  return [[row[key] for key in keys] for row in read_rows(workdir / "metrics.jsonl") if keys[0] in row]


@pytest.fixture(scope="module", params=list(ROWS))
def straight(request, tmp_path_factory):
  """(strategy, folder, workdir, run) of four steps in one go, on one device."""
  folder = tmp_path_factory.mktemp(request.param)
  return request.param, folder, folder / "w", train(config(folder, request.param), folder / "w")


def test_every_picture_counts_and_no_token_of_it_is_trained(straight):
  name, _, _, run = straight
  batch = run.data.batch(0)
  images = {part.tobytes() for part in batch["images"].reshape(-1, 4, 4, 3) if part.any()}
  assert len(images) > 1 and np.any(batch["image_index"] > 0)
  assert not np.any(batch["loss_weights"][batch["image_index"] > 0])
  trained = batch["loss_weights"].sum() / np.sum((batch["segment_ids"] > 0) & (batch["image_index"] == 0))
  assert trained > 0.9 if name == "seq" else trained < 0.8


@pytest.mark.parametrize("mesh", [
    pytest.param(dict(), id="the same"),
    pytest.param(dict(data=1, fsdp=2, context=2, tensor=2), id="three axes",
                 marks=[pytest.mark.slow, pytest.mark.devices(8)])])
def test_micro_batches_and_other_meshes_change_nothing(straight, tmp_path, mesh):
  """I1 and I2: in four micro-batches, and on another mesh."""
  name, folder, workdir, run = straight
  flat = tree.flatten(run.state["params"])
  other = train(config(folder, name, mesh=mesh, grad_accum_steps=4), tmp_path / "w")
  np.testing.assert_allclose(rows_of(tmp_path / "w", "loss", "grad_norm"), rows_of(workdir, "loss", "grad_norm"),
                             rtol=2e-5)
  for path, leaf in tree.flatten(other.state["params"]).items():
    np.testing.assert_allclose(leaf, flat[path], rtol=2e-5, atol=2e-6, err_msg=path)


def test_stopped_and_continued_it_is_the_same_run(straight, tmp_path):
  """I5: between two checkpoints."""
  name, folder, workdir, run = straight
  c = config(folder, name)
  c.callbacks.stop = dict(type="tests.trainer.export.test_hugging_face.StopAt", step=3)
  assert train(c, tmp_path).step == 3
  c.callbacks = {}
  again = train(c, tmp_path)
  for a, b in zip(jax.tree.leaves(again.state), jax.tree.leaves(run.state), strict=True):
    np.testing.assert_array_equal(a, b)
  assert rows_of(tmp_path, "loss", "grad_norm") == rows_of(workdir, "loss", "grad_norm")
