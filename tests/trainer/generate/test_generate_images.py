"""Prompts and conversations about images from the command line: each image is where it was shown."""

import jax
import numpy as np
import pytest
from PIL import Image

from input_pipeline.examples.prompts import Prompter
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests.evaluators import digits
from tests.models.initial import initial
from trainer.config import checks as config_checks
from trainer.errors import DataError
from trainer.generate import command as generate
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  config = digits.config(tmp_path_factory.mktemp("data"), [])
  config.chat.template = "plain"
  config = config_checks.resolve(config)
  model = digits.model(config)
  params = jax.tree.map(lambda p: 3 * p, initial(model))
  prompter = Prompter(config, BytesTokenizer())
  return generate.Loaded(model, params, BytesTokenizer(), prompter, "", generate._prefix_end(config))


@pytest.fixture
def files(tmp_path):
  paths = [str(tmp_path / f"{n}.png") for n in range(2)]
  for n, path in enumerate(paths):
    Image.fromarray(digits.picture(n)).save(path)
  return paths


class Silent:
  """A sampler that keeps what it is asked, and says yes."""

  def __init__(self):
    self.asked = []

  def stream(self, params, prompts, request):
    self.asked.append((prompts[0], [image.tolist() for image in (request.images or [()])[0]]))
    yield Completion(0, 0, np.array([*b"yes", 257], np.int32), np.zeros(4), np.zeros(4), "stop")


def test_a_prompt_is_about_all_images_and_ends_as_in_training(loaded, files, capsys):
  prompt = generate.text_prompt(loaded, "what?", "prompt 0", files)
  assert prompt.ids.tolist() == [258] * 8 + [256, *b"what?\n"]
  assert [image.tolist() for image in prompt.images] == [digits.picture(n).tolist() for n in range(2)]
  assert generate.text_prompt(loaded, "what?", "prompt 0").ids.tolist() == [256, *b"what?"]
  options = dict(max_new_tokens=5, stop_ids=loaded.prompter.stop_ids, seed=1, num_samples=1)
  said = []
  for paths in (files, files[::-1]):
    generate.complete(loaded, Sampler(loaded.model), [generate.text_prompt(loaded, "what?", "", paths)], options)
    said.append(capsys.readouterr().out)
  assert said[0] != said[1]


@pytest.mark.host_patches
def test_a_conversation_shows_each_image_with_what_is_said_next(loaded, files, capsys, monkeypatch):
  lines = iter(["first", f"/image {files[1]}", "second", "/image nowhere.png", "third", "fourth", "/new", "fifth",
                "/image"])

  def typed(prompt):
    try:
      return next(lines)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr("builtins.input", typed)
  sampler = Silent()
  generate.converse(loaded, sampler, dict(max_new_tokens=3), None, files[:1])
  one, two = (digits.picture(n).tolist() for n in range(2))
  assert [images for _, images in sampler.asked] == [[one], [one, two], [one, two], [], []]
  assert "/image" in loaded.tokenizer.decode(sampler.asked[4][0])  # without a file it is something that is said
  text = loaded.tokenizer.decode(sampler.asked[2][0])
  assert [word in text for word in ("first", "second", "third", "fourth")] == [True, True, False, True]
  ids = sampler.asked[1][0].tolist()
  begins = [i for i, token in enumerate(ids) if token == 258 and ids[i - 1] != 258]
  assert len(begins) == 2 and bytes(ids[begins[1] + 4:begins[1] + 10]) == b"second"
  assert "ImageError" in capsys.readouterr().out


def test_an_image_that_is_not_there_is_named(loaded):
  with pytest.raises(DataError, match="prompt 3: image 0: 'nowhere.png' cannot be read"):
    generate.text_prompt(loaded, "what?", "prompt 3", ["nowhere.png"])
