"""Generation from images: log-probs are the model's, draws depend on the images, and on nothing else beside."""

import functools

import jax
import numpy as np
import pytest

from tests.models.common import VOCAB, make, random_params
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import image_tokens
from trainer.generate.kept import Kept
from trainer.generate.sampler import Sampler
from trainer.strategies import logprobs

IMAGE_TOKEN = VOCAB + 1
VISION = dict(tower="siglip", image_size=8, patch_size=4, num_layers=1, hidden_size=8, intermediate_size=8, num_heads=2,
              image_token=IMAGE_TOKEN)
CASES = {
    "prefix": (dict(window=6, layer_pattern=("local", "global")), dict(attention="prefix")),
    "image": (dict(window=5, layer_pattern=("local",)), dict(attention="image")),
    "causal, CLIP": ({}, dict(attention="causal", tower="clip", feature_layer=-1, projector="mlp")),
    "tiles": (dict(window=3, layer_pattern=("local", "global"), per_layer_size=4), dict(
        attention="local_image", tower="gemma4", image_size=4, patch_size=2, projector="mean", activation="geglu",
        position_grid=140, max_pixels=70 * 16)),
}
SLOW = pytest.param("tiles", marks=pytest.mark.slow)
STOPS = (3, 4, 5, 6)


@functools.cache
def case(name):
  rest, vision = CASES[name]
  model = make(num_layers=2, vision=VISION | vision, **rest)
  return model, random_params(model)


def questions(counts=(1, 0, 2, 1)):
  """(prompts, images of each): as many images as `counts` says, each between ordinary tokens."""
  rng = np.random.default_rng(0)
  prompts, images = [], []
  for count in counts:
    parts = [rng.integers(0, VOCAB, 2)]
    for _ in range(count):
      parts += [np.full(4, IMAGE_TOKEN), rng.integers(0, VOCAB, 1 + count)]
    prompts.append(np.concatenate(parts).astype(np.int32))
    images.append([rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for _ in range(count)])
  return prompts, images


def teacher_forced(model, params, prompts, images, completions, prefixes=None, temperature=1.0):
  """The log-probs of each completion's ids after its prompt, a row each, from one `apply`."""
  layout = image_tokens.layout_of(model)
  texts = [np.concatenate([prompts[c.prompt], c.ids]) for c in completions]
  width = max(map(len, texts))
  prefixes = [*map(len, prompts)] if prefixes is None else prefixes
  parts = [image_tokens.of_text(layout, text, images[c.prompt], prefixes[c.prompt], "text")
           for c, text in zip(completions, texts, strict=True)]
  batch = image_tokens.empty(layout, len(texts), width, max(len(part.images) for part in parts))
  for row, part in enumerate(parts):
    image_tokens.put(layout, batch, part, row)
  batch["tokens"] = tokens = np.stack([np.pad(text, (0, width - len(text))) for text in texts])
  batch["segment_ids"] = np.stack([np.arange(width) < len(text) for text in texts]).astype(np.int32)
  hidden = jax.jit(model.apply)(params, batch).hidden
  stats = logprobs.token_stats(
      hidden[:, :-1], model.unembedding(params), tokens[:, 1:], chunk=16, logit_cap=model.final_logit_cap,
      num_real_vocab=model.num_real_vocab, temperature=temperature, want=("logprob",))
  return [np.asarray(stats.logprob)[row, n:n + len(c.ids)] for row, (c, n) in enumerate(
      (c, len(prompts[c.prompt]) - 1) for c in completions)]


@pytest.mark.parametrize("name", [*list(CASES)[:3], SLOW])
def test_logprobs_equal_teacher_forced_ones(name):
  """I9 with images: two in a prompt, one, and none, each prompt with its own."""
  model, params = case(name)
  prompts, images = questions()
  completions = Sampler(model, rows=3, chunk=4).generate(
      params, prompts, images=images, num_samples=2, max_new_tokens=9, temperature=0.8, stop_ids=STOPS, seed=1)
  assert [(c.prompt, c.sample) for c in completions] == [(p, s) for p in range(4) for s in range(2)]
  expected = teacher_forced(model, params, prompts, images, completions, temperature=0.8)
  for c, logprobs_n in zip(completions, expected, strict=True):
    np.testing.assert_allclose(c.logprobs, logprobs_n, atol=1e-5)


def test_the_images_decide_what_is_said_and_drawn():
  model, params = case("prefix")
  prompts, images = questions()
  options = dict(max_new_tokens=6, temperature=1.0, seed=7)
  base = Sampler(model, rows=4).generate(params, prompts, images=images, **options)
  darker = [[image // 2 for image in some] for some in images]
  other = Sampler(model, rows=4).generate(params, prompts, images=darker, **options)
  for one, two, some in zip(base, other, images, strict=True):
    assert (one.ids.tolist() == two.ids.tolist()) == (not some)
  # The random bits are others too, not the logits alone.
  from trainer.generate.slots import Texts, Waiting
  layout = image_tokens.layout_of(model)
  keys = [Waiting(Texts(prompts, image_tokens.shown(layout, prompts, some), [range(1)] * 4, [6] * 4, [7] * 4, [0] * 4,
                        [None] * 4, [True] * 4))
          for some in (images, darker)]
  assert [np.array_equal(*(key.key(p, 0) for key in keys)) for p in range(4)] == [not some for some in images]


@pytest.mark.devices(8)
def test_draws_do_not_depend_on_what_is_beside_or_on_the_mesh():
  model, params = case("prefix")
  prompts, images = questions()
  options = dict(max_new_tokens=6, stop_ids=STOPS, seed=7)
  base = Sampler(model, rows=4, chunk=4).generate(params, prompts, images=images, **options)
  alone = Sampler(model, rows=1).generate(params, prompts[3:], images=images[3:], **options)
  mesh = mesh_lib.make_mesh(dict(data=2, fsdp=2, tensor=2))
  sharded = jax.device_put(params, mesh_lib.param_shardings(params, mesh)[0])
  on_mesh = Sampler(model, mesh, rows=4).generate(sharded, prompts, images=images, **options)
  for one, two in zip([base[3], *base], [alone[0], *on_mesh], strict=True):
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


def test_what_follows_the_beginning_of_a_text_is_read_in_one_direction():
  """A further turn: as training has it, where the first answer may even hold the placeholder's id."""
  model, params = case("prefix")
  prompts, images = questions((1, 1))
  prefixes = [len(prompt) for prompt in prompts]
  longer = [np.concatenate([prompt, np.array([7, IMAGE_TOKEN, 8, 2], np.int32)]) for prompt in prompts]
  options = dict(max_new_tokens=5, seed=3)
  completions = Sampler(model).generate(params, longer, images=images, prefixes=prefixes, **options)
  expected = teacher_forced(model, params, longer, images, completions, prefixes)
  wrong = teacher_forced(model, params, longer, images, completions, [n + 1 for n in prefixes])
  for c, right, other in zip(completions, expected, wrong, strict=True):
    np.testing.assert_allclose(c.logprobs, right, atol=1e-5)
    assert np.abs(c.logprobs - other).max() > 1e-4
  with pytest.raises(ConfigError, match="prompt 0 has 1 image.s., for which it needs 4 tokens of the id 51 .4 each."):
    Sampler(model).generate(params, longer, images=images, **options)


@pytest.mark.parametrize("name", ["prefix", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "image", "causal, CLIP")), SLOW])
def test_texts_about_images_that_are_kept_go_on(name):
  """A further turn, in chunks; not from the same text about other images, nor from one that was read otherwise."""
  model, params = case(name)
  prompts, images = questions()
  sampler, kept, prefixes = Sampler(model, rows=3, chunk=4, prefill_chunk=2), Kept(9, cut=True), [*map(len, prompts)]
  options = dict(max_new_tokens=9, seed=1, stop_ids=STOPS)
  said = sampler.generate(params, prompts, images=images, prefixes=prefixes, kept=kept, **options)
  longer = [np.concatenate([prompts[c.prompt], c.ids, np.array([7, 8], np.int32)]) for c in said]
  found, again = (sampler.generate(params, longer, images=images, prefixes=prefixes, kept=some, **options)
                  for some in (kept, None))
  assert kept.reused == sum(len(prompt) + len(c.ids) - 1 for prompt, c in zip(prompts, said, strict=True))
  for one, two in zip(found, again, strict=True):
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
  layout = image_tokens.layout_of(model)
  darker, fewer = [[image // 2 for image in some] for some in images], [n - 1 for n in prefixes]
  for others, begin, same in ((images, prefixes, 4), (darker, prefixes, 1), (images, fewer, 4 * (name != "prefix"))):
    shown = image_tokens.shown(layout, longer, others, begin)
    assert sum(kept.find(ids, part.digest) is not None for ids, part in zip(longer, shown, strict=True)) == same


def test_numbers_of_images_are_rounded_up_so_that_few_programs_are_compiled():
  model, params = case("causal, CLIP")
  sampler = Sampler(model)
  for counts in ((1, 0), (0, 1), (1, 1)):
    prompts, images = questions(counts)
    sampler.generate(params, prompts, images=images, max_new_tokens=12)
  assert sampler.compilations == 5  # empty, prepare, prefill, begin, decode
  prompts, images = questions((2, 1))
  sampler.generate(params, prompts, images=images, max_new_tokens=12)
  assert sampler.compilations == 6


def test_images_for_a_model_of_texts_are_refused():
  model = make(num_layers=1)
  with pytest.raises(ConfigError, match="prompt 0 has 1 image.s., but the model has no tower for images"):
    Sampler(model).generate(random_params(model), [[1]], images=[[np.zeros((8, 8, 3), np.uint8)]], max_new_tokens=1)
