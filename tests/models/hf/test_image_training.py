"""DPO, adapters, freezing and packing of models of images and text: image_training/ is what transformers and PEFT make
of the same, in float64 (make_image_training_references.py)."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from input_pipeline.batches import Arrays, empty_batch
from models import hf
from models.hf import peft
from tests import native, split
from tests.models.hf import test_native
from tests.models.hf.test_images import assert_close
from tests.models.hf.test_peft import Case
from trainer import program as program_lib
from trainer import tree
from trainer.config import defaults, source, strategy
from trainer.generate import image_tokens
from trainer.strategies import dpo, sft

FOLDER = Path(__file__).parent / "image_training"
BETA, SHARE = 0.5, 0.9
# What the adapters of each case are on, as regexes of our paths.
TARGETS = {
    "smolvlm": (r"^(vision/)?blocks/attn/[qv]/kernel", r"^projector/linear/kernel"),
    "qwen2_vl": (r"^blocks/(attn/q|mlp/down)/kernel", r"^vision/blocks/attn/[qkv]/kernel"),
    "qwen2_5_vl": (r"^blocks/attn/v/kernel", r"^(vision/)?blocks/mlp/gate/kernel", r"^projector/up/kernel"),
    "qwen3_vl": (r"^blocks/attn/o/kernel", r"^vision/blocks/mlp/up/kernel", r"^projector/(deepstack/)?up/kernel"),
    "qwen3_5": (r"^blocks/attn/q/kernel", r"^blocks/delta/[qkv]/kernel", r"^vision/blocks/mlp/up/kernel",
                r"^projector/up/kernel"),
    "gemma4": (r"^blocks/per_layer/gate/kernel", r"^vision/blocks/(attn/q|mlp/gate)/kernel",
               r"^projector/linear/kernel"),
    "mistral3": (r"^blocks/attn/v/kernel", r"^vision/blocks/attn/o/kernel", r"^projector/merge/kernel"),
    "gemma4_local": (r"^vision/blocks/(attn/v|mlp/down)/kernel", r"^projector/linear/kernel"),
}


def base_of(name):
  return split.FOLDER if name == "smolvlm" else test_native.REFERENCES / name


@functools.cache
def reference(name):
  with np.load(FOLDER / name / "reference.npz") as opened:
    return dict(opened)


def packed(model, name, sides):
  """One row with prompts and completions, `sides`: (number of the prompt, name of the completion); and room behind."""
  held, layout, shown = reference(name), image_tokens.layout_of(model), []
  for i, side in sides:
    prompt, completion = held[f"prompt{i}"], held[f"{side}{i}"]
    images = [held[key] for key in sorted(held) if key.startswith(f"image{i}_")]
    ids = np.concatenate([prompt, completion])
    shown.append((ids, len(prompt), image_tokens.of_text(layout, ids, images, len(prompt), name)))
  batch = empty_batch(1, sum(len(ids) for ids, _, _ in shown) + 3, 0, Arrays(len(sides)))
  batch |= image_tokens.empty(layout, 1, batch["tokens"].shape[1], sum(len(part.images) for _, _, part in shown) + 1)
  begin = first = 0
  for segment, (ids, prefix, part) in enumerate(shown, 1):
    here = slice(begin, begin + len(ids))
    batch["tokens"][0, here], batch["positions"][0, here] = ids, np.arange(len(ids))
    batch["segment_ids"][0, here], batch["loss_weights"][0, begin + prefix:here.stop] = segment, 1
    batch["segment_roles"][0, segment - 1] = 2 - segment % 2  # chosen, rejected
    image_tokens.put(layout, batch, part, 0, begin, first)
    begin, first = here.stop, first + len(part.images)
  return batch


def bound_of(name):
  """A state that decays with each token, or norms on every branch: float32 is up to 1.8e-5 from float64 as tests
  compile, and within 1e-5 as users do."""
  return 2e-5 if name in ("qwen3_5", "gemma4") else 1e-5


def mean(terms):
  return sum(term.sum.sum() / term.weight.sum() for term in terms.values())


@pytest.mark.parametrize("name", TARGETS)
def test_dpo(name, tmp_path):
  """Loss and gradient of two pairs in one row, each side with the images of its prompt; against another reference."""
  model, params = hf.load(base_of(name), dtype="float32")
  flat = tree.flatten(params)  # of which some are buffers there
  other = tree.unflatten({path: leaf * np.float32(1 if re.search("layer_scale|/clip/|/standard/", path) else SHARE)
                          for path, leaf in flat.items()})
  batch = packed(model, name, [(0, "chosen"), (0, "rejected"), (1, "chosen"), (1, "rejected")])
  cfg = strategy("dpo")
  cfg.beta = BETA
  run = jax.jit(jax.value_and_grad(lambda p: mean(dpo.loss(model, p, batch, None, cfg, other)[0])))
  value, gradients = run(params)
  np.testing.assert_allclose(value, reference(name)["dpo"], rtol=1e-5)
  hf.save(model, gradients, tmp_path / "gradients")
  found = load_file(tmp_path / "gradients" / "model.safetensors")
  expected = {key.removeprefix("dpo:"): values for key, values in reference(name).items() if key.startswith("dpo:")}
  assert expected.keys() <= found.keys() and len(expected) > 25
  bound = bound_of(name)
  for key, values in expected.items():
    zero = "vision_model" in key and key.endswith("k_proj.bias")  # moves all keys alike, where none are turned
    scale = expected[key.removesuffix("bias") + "weight"] if zero else values
    assert np.abs(found[key] - values * (not zero)).max() <= bound * np.abs(scale).max(), key


def adapted(name):
  case = Case.__new__(Case)
  case.folder = FOLDER / name
  case.prepare(base_of(name), rank=2, alpha=6.0, dropout=0.1, targets=TARGETS[name])
  read = case.read()
  assert read.keys() == case.wanted.keys()
  return case, tree.unflatten(tree.flatten(hf.load(base_of(name), dtype="float32")[1]) | read)


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_compute_and_learn_as_in_peft(name):
  """In the text model, the tower and between them: logits, loss and gradients of two texts in one row, 1e-5."""
  case, params = adapted(name)
  held, batch = reference(name), packed(case.model, name, [(0, "chosen"), (1, "chosen")])
  logits = np.asarray(jax.jit(case.model.logits)(params, batch))[0]
  for i in (0, 1):
    assert_close(logits[batch["segment_ids"][0] == i + 1], held[f"adapted{i}"], 1e-5)
  cfg = strategy("sft")
  run = jax.jit(jax.value_and_grad(lambda p: mean(sft.loss(case.model, p, batch, None, cfg)[0])))
  value, gradients = run(params)
  np.testing.assert_allclose(value, held["sft"], rtol=1e-5)
  flat, names = tree.flatten(gradients), [key for key in held if key.startswith("sft:")]
  assert {path for path in flat if "/lora_" in path} == case.wanted.keys() and len(names) >= 10
  for key in names:
    assert_close(ours(key, flat), held[key], 1e-5 if name == "qwen3_5" else bound_of(name))


def ours(name, flat):
  """The gradient of PEFT's tensor, made of ours in another way than by the families' tables."""
  module, part = re.search(r"base_model\.model\.model\.(.+)\.lora_([AB])\.weight", name).groups()
  layer, leaf = int((re.findall(r"\.(\d+)\.", module) or ["0"])[0]), f"lora_{part.lower()}"
  if module.endswith("attn.qkv"):  # one A for the three
    three = [np.asarray(flat[f"vision/blocks/attn/{x}/{leaf}"][layer]).T for x in "qkv"]
    return sum(three) if part == "A" else np.concatenate(three)
  if module.endswith("in_proj_qkv"):  # of layers 0 and 2
    three = [np.asarray(flat[f"blocks/delta/{x}/{leaf}"][layer // 2]).T for x in "qkv"]
    return sum(three) if part == "A" else np.concatenate(three)
  if module.endswith("q_proj") and "blocks/delta/q/kernel" in flat:  # of layer 1 alone
    layer = 0
  if module.startswith(("vision_tower.transformer", "multi_modal_projector")):
    merging = module.endswith("merging_layer")
    return np.asarray(flat[f"projector/merge/{leaf}"] if merging else flat[f"vision/blocks/attn/o/{leaf}"][layer]).T
  if module.startswith(("vision_tower", "embed_vision")) or module.endswith("per_layer_input_gate"):
    path = re.sub(r".*self_attn\.(.)_proj.*", r"vision/blocks/attn/\1", module)
    path = re.sub(r".*mlp\.(\w+)_proj.*", r"vision/blocks/mlp/\1", path)
    path = {"embed_vision.embedding_projection": "projector/linear"}.get(path, path)
    found = np.asarray(flat[f"{'blocks/per_layer/gate' if path == module else path}/{leaf}"])
    return (found if path == "projector/linear" else found[layer]).T
  if module in ("visual.merger.mlp.0", "visual.merger.linear_fc1", "connector.modality_projection.proj"):
    path = "projector/linear" if module.startswith("connector") else "projector/up"
    return np.asarray(flat[f"{path}/{leaf}"]).T
  where = "vision/" if module.startswith("vis") else ""
  path = {"linear_fc1": "mlp/up"}.get(module.split(".")[-1], f"{module.split('.')[-2]}/{module.split('.')[-1][:-5]}")
  path = f"{where}blocks/{path.replace('self_attn', 'attn')}"
  return np.asarray(flat[f"projector/deepstack/up/{leaf}" if "deepstack" in module else f"{path}/{leaf}"][layer]).T


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_are_written_as_peft_wrote_them(name, tmp_path):
  """The same names and bits, and targets that PEFT finds the same modules by: difference 0.0."""
  case, _ = adapted(name)
  config, tensors = case.write(tmp_path / "out", case.read())
  original = load_file(case.folder / "adapters" / peft.TENSORS)
  assert tensors.keys() == original.keys()
  assert all(np.array_equal(tensors[key], original[key]) for key in original)
  modules = {re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key).group(1) for key in original}
  kernels = [key.removesuffix(".weight").split(".") for key in _names_in_memory(name)]
  every = {".".join(parts[:end]) for parts in kernels for end in range(1, len(parts) + 1)}  # with those around them
  targets = config["target_modules"]
  if isinstance(targets, str):
    found = {module for module in every if re.fullmatch(targets, module)}
  else:
    found = {module for module in every if any(module == t or module.endswith(f".{t}") for t in targets)}
  assert found == modules and config["r"] == 2 and config["lora_alpha"] == 6


def _names_in_memory(name):
  """Kernels by their names in transformers, of which PEFT's are made."""
  names = load_file(base_of(name) / "model.safetensors")
  if name == "mistral3":
    names = [re.sub(r"^(vision_tower|multi_modal|language_model)", r"model.\1",
                    key.replace("language_model.model.", "language_model.")) for key in names]
  if name in ("qwen2_vl", "qwen2_5_vl"):  # as published: the classes of transformers 5 say otherwise
    names = [re.sub(r"^visual", "model.visual", re.sub(r"^model\.(?!visual|language)", "model.language_model.", key))
             for key in names]
  return [key for key in names if key.endswith("weight")]


@pytest.mark.parametrize("part", ["vision", "projector", "blocks"])
@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl", "qwen3_5", "gemma4"])
def test_a_part_is_frozen_by_one_line(name, part, tmp_path):
  """freeze_vit and its like: `optimizer.freeze=("^vision/",)`. tests/trainer/test_native_runs.py has a run of it."""
  config = defaults()
  config.strategy.name, config.model.hf, config.optimizer.freeze = "sft", str(base_of(name)), (f"^{part}/",)
  if name != "smolvlm":
    config.model.hf = str(native.gemma4(tmp_path) if name == "gemma4" else native.folder(tmp_path, name))
  config.input.sources.rows = source(type="jsonl", path="none.jsonl")
  config, _ = program_lib.resolve(config)
  program_lib.settle(config, "cpu")
  model = program_lib.make_model(config, config.model.vocab_size)
  trained = program_lib.planned_optimizer(config, model).trainable
  every = set(tree.flatten(model.abstract_params()))
  assert trained == {path for path in every if not path.startswith(f"{part}/")} != every
