"""What a folder's image processor says of pixels: what is taken over, and what is refused by its entry."""

import json

import pytest

from models.hf import pixels
from models.hf.errors import HFError

# {name: the keys of a model with such a tower}
MODELS = {
    "siglip": {"vision.tower": "siglip", "vision.projector": "mlp", "vision.patch_size": 14, "vision.image_size": 28},
    "qwen": {"vision.tower": "qwen2_vl", "vision.projector": "merge", "vision.patch_size": 14, "vision.image_size": 28},
    "smolvlm": {"vision.tower": "siglip", "vision.projector": "shuffle", "vision.patch_size": 14,
                "vision.image_size": 364},
    "pixtral": {"vision.tower": "pixtral", "vision.projector": "mlp", "vision.patch_size": 14, "vision.image_size": 28},
    "gemma4": {"vision.tower": "gemma4", "vision.projector": "mean", "vision.patch_size": 16, "vision.image_size": 48},
}


def read(folder, name, **said):
  (folder / "preprocessor_config.json").write_text(json.dumps(said))
  return pixels.read(folder, MODELS[name])


@pytest.mark.parametrize("name, said, found", [
    ("siglip", dict(image_mean=[0.1, 0.2, 0.3]), {"vision.mean": (0.1, 0.2, 0.3)}),
    ("siglip", dict(image_mean=[0.5] * 3, image_std=[0.5, 0.5, 0.25]), {"vision.std": (0.5, 0.5, 0.25)}),
    ("qwen", dict(min_pixels=100, max_pixels=200), {"vision.min_pixels": 100, "vision.max_pixels": 200}),
    ("qwen", dict(size=dict(shortest_edge=99, longest_edge=99)), {"vision.min_pixels": 99, "vision.max_pixels": 99}),
    ("smolvlm", dict(size=dict(longest_edge=728)), {"vision.longest_side": 728, "vision.split": True}),
    ("smolvlm", dict(do_image_splitting=False), {"vision.longest_side": 4 * 364, "vision.split": False}),
    ("pixtral", dict(size=dict(longest_edge=70)), {"vision.longest_side": 70}),
    ("gemma4", dict(max_soft_tokens=140), {"vision.max_pixels": 140 * 48**2}),
])
def test_what_is_taken_over(tmp_path, name, said, found):
  assert read(tmp_path, name, **said) == found
  assert pixels.read(tmp_path, MODELS[name] | {"vision.tower": "none"}) == {}
  assert pixels.read(tmp_path / "nowhere", MODELS[name]) == {}


@pytest.mark.parametrize("name, said, message", [
    ("siglip", dict(do_rescale=False), "do_rescale is False; allowed: true: pixels are divided by 255 and normalised"),
    ("siglip", dict(do_normalize=False), "do_normalize is False; allowed: true"),
    ("siglip", dict(rescale_factor=1.0), "rescale_factor is 1.0; allowed: 1/255"),
    ("siglip", dict(image_mean=[0.5, 0.5]), "image_mean is .*; allowed: three numbers"),
    ("siglip", dict(image_std=[0.5, 0.5, 0.0]), "image_std is .*; allowed: three numbers, .* above 0"),
    ("qwen", dict(min_pixels=201, max_pixels=200), "min_pixels is 201; allowed: up to max_pixels, 200"),
    ("qwen", dict(patch_size=16), "patch_size is 16; allowed: 14, as config.json says"),
    ("qwen", dict(merge_size=3), "merge_size is 3; allowed: 2, as config.json says"),
    ("smolvlm", dict(max_image_size=dict(longest_edge=512)), "max_image_size is .*; allowed: .'longest_edge': 364"),
    ("smolvlm", dict(size=dict(longest_edge=4097)), "size is .*; allowed: a longest_edge of 1 to 4096"),
    ("smolvlm", dict(size=dict(longest_edge=0)), "longest_edge is 0; allowed"),
    ("pixtral", dict(size=dict(height=70)), "size is .*; allowed: a longest_edge alone"),
    ("pixtral", dict(patch_size=dict(height=14, width=16)), "patch_size is .*; allowed: 14, as config.json says"),
    ("gemma4", dict(do_rescale=False), "do_rescale is False; allowed: true: pixels are divided by 255, and no more"),
    ("gemma4", dict(do_normalize=True, image_mean=[0.5] * 3), "do_normalize is True; allowed: false: pixels are"),
    ("gemma4", dict(rescale_factor=1.0), "rescale_factor is 1.0; allowed: 1/255"),
    ("gemma4", dict(pooling_kernel_size=2), "pooling_kernel_size is 2; allowed: 3, as config.json says"),
    ("gemma4", dict(max_soft_tokens=100), "max_soft_tokens is 100; allowed: 70, 140, 280, 560, 1120"),
])
def test_pixels_that_are_prepared_otherwise_are_refused(tmp_path, name, said, message):
  with pytest.raises(HFError, match=message) as error:
    read(tmp_path, name, **said)
  assert str(tmp_path / "preprocessor_config.json") in str(error.value)
