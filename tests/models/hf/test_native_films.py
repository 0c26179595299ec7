"""Films in Qwen2-VL, 2.5, Qwen3-VL and 3.5 against transformers: native_references/*/films.npz comes of
make_native_film_references.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, tiles
from tests.models.hf.test_images import assert_close
from tests.models.hf.test_native import REFERENCES, theirs
from trainer import tree as tree_lib

CASES = sorted(path.parent.name for path in REFERENCES.glob("*/films.npz"))
# Whose gradients are compared by default, too: times that are not those of frames, windows in most layers.
GRADIENTS = ("qwen2_5_vl",)


@dataclasses.dataclass
class Case:
  """A reference, and what Weft makes of it."""

  name: str
  model: object
  params: dict
  reference: dict[str, np.ndarray]


# Of experts the tower and positions are those of the model without.
@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.slow if name.endswith("moe") else ()) for name in CASES])
def case(request):
  model, params = hf.load(REFERENCES / request.param, dtype="float32")
  with np.load(REFERENCES / request.param / "films.npz") as opened:
    return Case(request.param, model, params, dict(opened))


def arrays(r: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The batch of the reference, in which the model itself finds the tiles' places."""
  real = np.arange(r["tokens"].shape[1]) < r["lengths"][:, None]
  return dict(tokens=r["tokens"], segment_ids=np.int32(real), images=r["images"], image_grid=r["grid"])


def index_of(case: Case) -> np.ndarray:
  held = np.isin(case.reference["tokens"], [case.model.vision.image_token, case.model.vision.video.token])
  return np.where(held, np.cumsum(held, axis=1), 0)


def test_positions(case):
  """Frames at their times, and texts behind the larger side of a frame, however long a film is."""
  r = case.reference
  batch = arrays(r)
  found = np.asarray(tiles.positions(jnp.asarray(r["grid"]), index_of(case), batch["segment_ids"]))
  np.testing.assert_array_equal(found * (batch["segment_ids"] > 0)[..., None], r["positions"])
  film = index_of(case)[0] > 6  # behind the image of 6 tiles
  times, rows = (len(np.unique(r["positions"][0, film, axis])) for axis in (0, 1))
  assert (times, rows) == ((3, 2) if case.name.startswith("qwen2") else (3, 6))
  if case.name == "qwen2_5_vl":  # beyond the text behind it
    assert r["positions"][0, film, 0].max() > r["positions"][0, -1].max()


def test_logits(case):
  """Row 0 has an image and a film, row 1 a film of other frames, and padding; two frames of a patch differ."""
  r = case.reference
  halves = r["images"][..., :3], r["images"][..., 3:]
  assert np.array_equal(halves[0][0, :6], halves[1][0, :6]) and not np.array_equal(halves[0][1], halves[1][1])
  batch = arrays(r)
  assert_close(np.asarray(jax.jit(case.model.logits)(case.params, batch)) * (batch["segment_ids"] > 0)[..., None],
               r["logits"], 1e-5)


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=() if name in GRADIENTS else pytest.mark.slow) for name in CASES], indirect=True)
def test_loss_and_gradients(case):
  r, batch = case.reference, arrays(case.reference)
  weights = ((np.arange(r["tokens"].shape[1]) >= r["prefix"][:, None]) & (batch["segment_ids"] > 0))[:, 1:]

  def loss_of(params):
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(case.model.logits(params, batch)[:, :-1]),
                                    r["tokens"][:, 1:, None], axis=-1)[..., 0]
    return -(log_probs * weights).sum() / weights.sum()

  loss, gradients = jax.jit(jax.value_and_grad(loss_of))(case.params)
  np.testing.assert_allclose(loss, r["loss"], rtol=1e-5)
  flat = tree_lib.flatten(gradients)
  assert len(r["gradient_names"]) >= 8
  for i, name in enumerate(r["gradient_names"]):
    assert_close(theirs(str(name), flat), r[f"gradient_{i}"], 1e-5)


def test_packed_is_as_alone(case):
  """Both rows in one, in another order, their tiles behind one another and unused ones at the end."""
  r = case.reference
  sizes, counts = r["lengths"][::-1], (r["grid"][::-1, :, 0] > 0).sum(1)
  both = np.concatenate([r["tokens"][row, :r["lengths"][row]] for row in (1, 0)])
  more = r["grid"][1, :, 0].max()
  grid = np.concatenate([r["grid"][1, :counts[0]], r["grid"][0, :counts[1]] + [more, 0, 0, 0, 0, 0],
                         np.zeros((3, 6), np.int32)])
  images = np.concatenate([r["images"][1, :counts[0]], r["images"][0, :counts[1]],
                           np.full((3, *r["images"].shape[2:]), 9, np.uint8)])
  batch = dict(tokens=both[None], segment_ids=np.repeat([1, 2], sizes)[None].astype(np.int32), images=images[None],
               image_grid=grid[None].astype(np.int32))
  logits = np.asarray(jax.jit(case.model.logits)(case.params, batch))[0]
  for row, found in ((1, logits[:sizes[0]]), (0, logits[sizes[0]:])):
    assert_close(found, r["logits"][row, :r["lengths"][row]], 1e-5)


def test_decoding_is_as_teacher_forcing(case):
  """Behind a film, whose times may be beyond the text behind it: what is decoded goes on where that text does."""
  r, model, batch = case.reference, case.model, arrays(case.reference)
  cut = r["prefix"]
  prompt = dict(batch, segment_ids=np.int32(np.arange(batch["tokens"].shape[1]) < cut[:, None]))
  params = model.decoding_params(case.params)
  _, begun = jax.jit(model.extend)(case.params, prompt)
  cache = jax.jit(model.copied_cache)(model.empty_cache(2, 64), begun, jnp.arange(2), jnp.arange(2))
  step = jax.jit(model.decode)
  for n in range(4):
    tokens = jnp.asarray(batch["tokens"][np.arange(2), cut + n])
    hidden, cache = step(params, tokens, jnp.ones(2, bool), cache)
    logits = np.asarray(model.unembed(case.params, hidden[:, None]))[:, 0]
    assert_close(logits, r["logits"][np.arange(2), cut + n], 1e-5)


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
def test_an_image_is_a_film_of_one_frame_twice(case):
  """Given once, of three channels, or as two frames that are alike."""
  r, logits = case.reference, jax.jit(case.model.logits)
  batch = {key: value[:1] for key, value in arrays(r).items()}
  batch["segment_ids"] = np.int32(np.arange(r["tokens"].shape[1]) < 13)[None]  # the image alone
  used = (r["grid"][:1, :, 0] == 1)[..., None]
  alone = batch | dict(image_grid=np.where(used, r["grid"][:1], 0),
                       images=np.where(used[..., None, None], r["images"][:1], 0))
  twice, once = logits(case.params, alone), logits(case.params, alone | dict(images=alone["images"][..., :3]))
  np.testing.assert_array_equal(np.asarray(twice)[0, :13], np.asarray(once)[0, :13])


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
def test_frames_of_another_number_are_refused(case):
  batch = arrays(case.reference)
  with pytest.raises(ValueError, match="images: found 9 channels, allowed: 3, or 6, those of 2 frames"):
    case.model.logits(case.params, batch | dict(images=np.tile(batch["images"], 2)[..., :9]))
