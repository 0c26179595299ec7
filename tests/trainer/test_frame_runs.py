"""Runs on videos whose frames are seen as images are, from a folder to a folder: tests/frames.py has folders and rows.

What is expected is transformers' own, in float64 (tests/input_pipeline/references/make_frame_references.py).
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline import loader
from input_pipeline.examples.prompts import Prompter
from input_pipeline.images.videos import Sampling
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from models import hf
from tests import frames, tiny
from tests.models.hf.test_images import assert_close
from trainer import program as program_lib
from trainer import train
from trainer import tree as tree_lib
from trainer.distributed import mesh as mesh_lib
from trainer.export import command as export
from trainer.generate.sampler import Sampler
from trainer.strategies import learns


@pytest.fixture(scope="module", params=frames.NAMES)
def name(request):
  return request.param


@pytest.fixture(scope="module")
def loaded(name):
  return hf.load(frames.FOLDER / name, dtype="float32")


@pytest.fixture
def theirs(monkeypatch, name):
  """Frames get the pixels that transformers' processor gave them, which rounds 1 value of 100 otherwise."""
  held = frames.reference(name)
  pixels = {}
  for key in (key for key in held if key.startswith("values")):
    which = key.removeprefix("values")
    shown = held[f"shown{which}"][held[f"taken{which}"]]
    pixels |= {frame.tobytes(): value for frame, value in zip(shown, held[key], strict=True)}
  monkeypatch.setattr(Sampling, "resized", lambda self, frame, size: pixels[np.asarray(frame).tobytes()])
  return held


def prepared(name, model, path, packing, rows, seq_len):
  """(the batch of all conversations, the loss of parameters on it)."""
  config, _ = program_lib.resolve(frames.config(
      name, path, seq_len=seq_len, batch_size=rows, input=dict(packing=packing)))
  data = loader.make_train_data(config, load_tokenizer(frames.FOLDER / name), learns=learns(config), workdir=path)
  batch = data.batch(0)
  program = program_lib.make_program(config, model, program_lib.planned_optimizer(config, model),
                                     mesh_lib.make_mesh(config.mesh), ["rows"])

  def loss(params):
    terms, _ = program.loss_fn(params, batch, jax.random.key(0))
    return sum(term.sum.sum() / term.weight.sum() for term in terms.values())

  return batch, loss


@pytest.mark.host_patches
def test_loss_and_logits_are_those_of_transformers(tmp_path, name, theirs, loaded):
  """Of all conversations in one row."""
  model, params = loaded
  batch, loss = prepared(name, model, tmp_path, "best_fit", 1, 1000)
  value, logits = jax.jit(lambda params: (loss(params), model.logits(params, batch)))(params)
  np.testing.assert_allclose(value, theirs["loss"], rtol=1e-6)
  texts = {theirs[f"ids{i}"].tobytes(): i for i in range(len(frames.conversations(name)))}
  segments = batch["segment_ids"][0]
  for s in range(1, segments.max() + 1):
    here = np.flatnonzero(segments == s)
    i = texts.pop(batch["tokens"][0][here].astype(np.int64).tobytes())
    before = here[:-1][batch["loss_weights"][0][here][1:] > 0]
    assert_close(logits[0, before], theirs[f"logits{i}"], 1e-5)
  assert not texts


@pytest.mark.slow
@pytest.mark.host_patches
@pytest.mark.parametrize(("packing", "rows", "seq_len"), [("best_fit", 1, 1000), ("none", None, 600)])
def test_gradients_are_those_of_transformers(packing, rows, seq_len, tmp_path, name, theirs, loaded):
  """Of all conversations in one row, and each in its own: 1e-5 of the largest entry of each gradient."""
  model, params = loaded
  _, loss = prepared(name, model, tmp_path, packing, rows or len(frames.conversations(name)), seq_len)
  hf.save(model, jax.jit(jax.grad(loss), compiler_options=tiny.AS_USERS)(params), tmp_path / "gradients")
  found = load_file(tmp_path / "gradients" / "model.safetensors")
  expected = {key.removeprefix("gradient:"): values for key, values in theirs.items() if key.startswith("gradient:")}
  assert len(expected) > 50 and expected.keys() <= found.keys()
  for key, values in expected.items():
    if key.endswith("k_proj.bias"):  # which moves all keys alike, so that its gradient is 0
      assert max(np.abs(found[key]).max(), np.abs(values).max()) < 1e-6 * np.abs(expected[key[:-4] + "weight"]).max()
    else:
      assert_close(found[key], values, 1e-5)


@pytest.mark.host_patches
def test_what_is_sampled_greedily_is_what_transformers_generates(tmp_path, name, theirs, loaded):
  model, params = loaded
  config, _ = program_lib.resolve(frames.config(name, tmp_path))
  prompt = Prompter(config, load_tokenizer(frames.FOLDER / name)).messages(frames.conversations(name)[0][:1])
  ids = theirs["ids0"][:theirs["prompt"]].astype(np.int32)
  (completion,) = Sampler(model, rows=1).generate(params, [ids], images=[list(prompt.images)], max_new_tokens=8,
                                                  temperature=0.0)
  np.testing.assert_array_equal(completion.ids, theirs["sampled"])


@pytest.mark.slow
def test_a_run_is_exported_and_loads_to_the_bit(tmp_path, name):
  """The export says how frames are taken, as the config has it."""
  changed = dict(max_frames=2) if name == "smolvlm" else dict(num_frames=2)
  config = frames.config(name, tmp_path / "data", seq_len=200 if name == "smolvlm" else 600)
  config.model.vision.video.update(changed)
  run = train(config, tmp_path / "run")
  out = export.export(tmp_path / "run", tmp_path / "out")
  before, after = tree_lib.flatten(run.state["params"]), tree_lib.flatten(hf.load(out)[1])
  assert before.keys() == after.keys()
  assert max(np.abs(np.asarray(before[path]) - after[path]).max() for path in before) == 0.0
  assert hf.architecture(out)[1] == hf.architecture(frames.FOLDER / name)[1] | {
      f"vision.video.{key}": value for key, value in changed.items()}
  if name == "smolvlm":  # in a file of its own, beside that of images
    told = json.loads((out / "video_preprocessor_config.json").read_text())
    assert (told["fps"], told["num_frames"], told["size"]) == (1, 2, {"longest_edge": 40})
    assert "video_sampling" not in told and told["do_sample_frames"] is True
  else:
    given, told = (json.loads((path / "processor_config.json").read_text())
                   for path in (frames.FOLDER / name, out))
    assert told["image_processor"] == given["image_processor"]
    assert told["video_processor"] == given["video_processor"] | dict(num_frames=2, fps=None, do_sample_frames=True)


@pytest.mark.slow
def test_rollouts_about_videos(tmp_path, name):
  """The policy that trains sees what the one that sampled saw: their ratio is 1 on the first step."""
  config = frames.config(name, tmp_path / "data")
  rows = [json.loads(line) for line in (tmp_path / "data" / "rows.jsonl").read_text().splitlines()]
  (tmp_path / "data" / "rows.jsonl").write_text("".join(
      json.dumps({"prompt": row["messages"][:1]}) + "\n" for row in rows[:-1]))
  tiny.assert_on_policy(config, tmp_path / "run")
