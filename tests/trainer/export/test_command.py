"""Exported folders: the numbers of the run, whatever mesh saved them, with all the files that others need."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import tokenizers
from jax.sharding import AxisType

from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from models import hf
from models.hf import files
from models.hf.errors import HFError
from tests import tiny
from trainer import tree as tree_lib
from trainer import workdir as workdir_lib
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.errors import CheckpointError, ConfigError
from trainer.export import command as export

REAL = 258  # entries of the bytes tokenizer; the model pads them to 264
TOKENS = np.random.default_rng(0).integers(0, REAL, (2, 16)).astype(np.int32)


def write_run(workdir, params, steps=(4,), mesh=None, **model):
  """A workdir as a run leaves it, with checkpoints in which parameters are multiples of `params`."""
  config = config_checks.resolve(tiny.config(workdir / "corpus", tokenizer=dict(type="bytes"), model=model))
  workdir.mkdir()
  (workdir / "config.json").write_text(config_checks.to_json(config))
  BytesTokenizer().save(workdir / "tokenizer.json")
  if mesh is not None:
    params = jax.device_put(params, mesh_lib.param_shardings(params, mesh)[0])
  checkpoints = Checkpoints(workdir / "checkpoints", keep_last=9)
  for step in steps:
    state = {"step": np.int32(step), "params": jax.tree.map(lambda x, n=step: x * n, params),
             "ema": jax.tree.map(lambda x: x + 1, params), "opt": {"mu": params}}
    checkpoints.save(step, state, {"step": step})
  checkpoints.close()
  return workdir


def small(**changed):
  from models import api
  config = tiny.config(None, model=changed)
  return api.make_model(config.model, vocab_size=REAL, params_dtype="float32", compute_dtype="float32")


def values(seed=0, **changed):
  """Parameters with no two values alike."""
  leaves = tree_lib.flatten(small(**changed).abstract_params())
  rng = np.random.default_rng(seed)
  arrays = {path: rng.standard_normal(leaf.shape, np.float32) / 8 for path, leaf in leaves.items()}
  return jax.tree.map(jnp.asarray, tree_lib.unflatten(arrays))


def test_the_padding_is_cut_behind_the_placeholder_of_images(tmp_path):
  """An id that is no token's, whose embedding others look up before features take its place."""
  vision = dict(tower="siglip", image_size=8, patch_size=4, num_layers=1, hidden_size=8, intermediate_size=8,
                num_heads=2, projector="mlp", final_norm=False, image_token=REAL)
  changed = dict(vision=vision, norm_position="pre", qk_norm=True)
  out = export.export(write_run(tmp_path / "run", values(**changed), **changed), tmp_path / "out")
  assert hf.load(out)[1]["embed"]["embedding"].shape[0] == REAL + 1
  assert files.read_config(out)["image_token_index"] == REAL


def flat(tree):
  return {path: np.asarray(leaf) for path, leaf in tree_lib.flatten(tree).items()}


def cut(params):
  """What is exported of parameters: without the padding of the vocabulary."""
  leaves = flat(params)
  leaves["embed/embedding"] = leaves["embed/embedding"][:REAL]
  if "unembed/kernel" in leaves:
    leaves["unembed/kernel"] = leaves["unembed/kernel"][:, :REAL]
  return leaves


def assert_bitwise(one, other):
  assert one.keys() == other.keys()
  for path in one:
    assert one[path].dtype == other[path].dtype and one[path].tobytes() == other[path].tobytes(), path


@pytest.fixture(scope="module")
def params():
  return values()


@pytest.fixture(scope="module")
def workdir(params, tmp_path_factory):
  return write_run(tmp_path_factory.mktemp("run") / "workdir", params, steps=(1, 4))


def test_a_trained_run_is_what_is_loaded(tmp_path):
  from trainer.main import train
  config = tiny.config(tiny.write_corpus(tmp_path / "corpus"), total_steps=3, evals={})
  run = train(config, tmp_path / "run")
  out = export.export(tmp_path / "run", tmp_path / "out")
  model, loaded = hf.load(out)
  assert_bitwise(flat(loaded), cut(run.state["params"]))
  np.testing.assert_allclose(jax.jit(model.logits)(loaded, TOKENS),
                             jax.jit(run.model.logits)(run.state["params"], TOKENS)[..., :REAL],
                             rtol=1e-6, atol=1e-6)
  hf.save(model, loaded, tmp_path / "again")
  assert (tmp_path / "again" / files.SINGLE).read_bytes() == (out / files.SINGLE).read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_is_cut(tmp_path, tied):
  params = values(tie_embeddings=tied)
  out = export.export(write_run(tmp_path / "run", params, (1,), tie_embeddings=tied), tmp_path / "out")
  model, loaded = hf.load(out)
  assert_bitwise(flat(loaded), cut(params))
  assert files.read_config(out)["vocab_size"] == REAL == model.vocab_size
  np.testing.assert_allclose(jax.jit(model.logits)(loaded, TOKENS),
                             small(tie_embeddings=tied).logits(params, TOKENS)[..., :REAL], rtol=1e-6, atol=1e-6)


@pytest.mark.devices(8)
def test_the_mesh_of_the_checkpoint_does_not_matter(tmp_path, workdir, params):
  mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), devices=jax.devices()[:4],
                       axis_types=(AxisType.Auto,) * 3)
  other = write_run(tmp_path / "sharded", params, mesh=mesh)
  for source, out in ((workdir, "one"), (other, "four")):
    export.export(source, tmp_path / out)
  names = sorted(p.name for p in (tmp_path / "one").iterdir())
  assert names == sorted(p.name for p in (tmp_path / "four").iterdir())
  for name in names:
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "four" / name).read_bytes(), name


def test_newest_or_chosen_step_average_and_dtype(tmp_path, workdir, params):
  def exported(name, **options):
    return flat(hf.load(export.export(workdir, tmp_path / name, **options), dtype=None)[1])

  assert_bitwise(exported("newest"), cut(jax.tree.map(lambda x: x * 4, params)))
  assert_bitwise(exported("first", step=1), cut(params))
  assert_bitwise(exported("ema", ema=True), cut(jax.tree.map(lambda x: x + 1, params)))
  half = cut(jax.tree.map(lambda x: np.asarray(x * 4).astype("bfloat16"), params))
  assert_bitwise(exported("half", dtype="bfloat16"), half)
  assert files.read_config(tmp_path / "half")["torch_dtype"] == "bfloat16"


def test_several_files_hold_the_same(tmp_path, workdir, params):
  out = export.export(workdir, tmp_path / "out", step=1, max_shard_bytes=5000)
  assert (out / files.INDEX).is_file() and not (out / files.SINGLE).exists()
  assert_bitwise(flat(hf.load(out)[1]), cut(params))


def test_the_tokenizer_and_the_ids_that_end_a_text_come_along(tmp_path, workdir):
  out = export.export(workdir, tmp_path / "out")
  assert load_tokenizer(out).fingerprint == load_tokenizer(workdir / "tokenizer.json").fingerprint
  assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
  # Texts were trained behind BOS: whoever encodes one by the file alone has it there, too.
  assert tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab").ids == [256, 97, 98]
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation["eos_token_id"] == 257 and generation["bos_token_id"] == 256
  config = files.read_config(out)
  assert config["eos_token_id"] == 257 and config["bos_token_id"] == 256
  assert config["max_position_embeddings"] == tiny.config(None).seq_len


@pytest.mark.parametrize("theirs", [16, 4096])
def test_positions_of_a_model_that_was_changed_are_bounded_by_the_longer_rows(tmp_path, params, workdir, theirs):
  """Those of this run, or what its folder says."""
  source = files.read_config(export.export(workdir, tmp_path / "first"))
  run = write_run(tmp_path / "run", params, (1,), hf="somewhere", vocab_size=264)
  BytesTokenizer().save(run / "hf" / "tokenizer.json")
  hf.write_json(run / "hf" / files.CONFIG, {**source, "vocab_size": 264, "rms_norm_eps": 0.5,
                                             "max_position_embeddings": theirs})
  written = files.read_config(export.export(run, tmp_path / "out"))["max_position_embeddings"]
  assert written == max(theirs, tiny.config(None).seq_len)


def test_what_was_frozen_stands_beside_the_averages(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  params = {"frozen": jnp.ones(2), "trained": jnp.zeros(3)}
  checkpoints.save(1, {"params": params, "ema": {"trained": jnp.full(3, 2.0)}}, {})
  checkpoints.close()
  leaves = export.StoredLeaves(tmp_path / "1", "ema")
  assert {path: leaves.read(path, ()).tolist() for path in leaves.shapes} == {"frozen": [1, 1], "trained": [2, 2, 2]}


def test_what_the_run_started_from_is_kept(tmp_path, params):
  source = files.read_config(export.export(write_run(tmp_path / "plain", params, (1,)), tmp_path / "first"))
  workdir = write_run(tmp_path / "run", params, (1,), hf="somewhere", vocab_size=264)
  original = workdir / "hf"
  BytesTokenizer().save(original / "tokenizer.json")
  hf.write_json(original / files.CONFIG, {**source, "vocab_size": 264, "use_cache": False, "eos_token_id": 7})
  hf.write_json(original / "generation_config.json", {"eos_token_id": [9, 3], "top_p": 0.5})
  (original / "chat_template.jinja").write_text("{{ messages }}")
  out = export.export(workdir, tmp_path / "out")
  config = files.read_config(out)
  assert config["use_cache"] is False and config["eos_token_id"] == 7 and config["vocab_size"] == 264
  assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation["eos_token_id"] == [9, 3, 7, 257] and generation["top_p"] == 0.5
  assert_bitwise(flat(hf.load(out)[1]), flat(params))  # all entries are real
  # With another tokenizer in the run, the original's files and ids mean nothing.
  tokenizer = json.loads((original / "tokenizer.json").read_text())
  tokenizer["model"]["merges"] = [["a", "b"]]
  tokenizer["model"]["vocab"]["ab"] = 258
  (original / "tokenizer.json").write_text(json.dumps(tokenizer))
  out = export.export(workdir, tmp_path / "other")
  assert load_tokenizer(out).fingerprint == load_tokenizer(workdir / "tokenizer.json").fingerprint
  assert not (out / "chat_template.jinja").exists()
  assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 257
  assert files.read_config(out)["eos_token_id"] == 257 and files.read_config(out)["use_cache"] is False


@pytest.mark.parametrize("own", [True, False])
def test_conversations_look_as_they_were_trained_wherever_a_reader_looks(tmp_path, params, own):
  """Of the original's old template nothing is left but what the run trained with."""
  source = files.read_config(export.export(write_run(tmp_path / "plain", params, (1,)), tmp_path / "first"))
  original = tmp_path / "base"
  BytesTokenizer().save(original / "tokenizer.json")
  hf.write_json(original / files.CONFIG, {**source, "vocab_size": 264})
  old = "OLD {{ messages[0].content }}<|eos|>"
  listed = [{"name": "default", "template": old}, {"name": "tool_use", "template": f"TOOLS {old}"}]
  hf.write_json(original / "tokenizer_config.json",
                {**files.read_json(original / "tokenizer_config.json"), "chat_template": listed})
  mine = tmp_path / "mine.jinja"
  mine.write_text("MINE {{ messages[0].content }}<|eos|>")
  workdir = write_run(tmp_path / "run", params, (1,), hf=str(original), vocab_size=264)
  config = config_checks.resolve(tiny.config(
      workdir / "corpus", tokenizer=dict(type="bytes"), strategy=dict(name="sft"), model=dict(hf=str(original)),
      chat=dict(template=None if own else str(mine))))
  tokenizer = load_tokenizer(original)
  tokenizer.save(workdir / "tokenizer.json")
  workdir_lib.save_config(config, workdir, tokenizer)

  text = mine.read_text()
  mine.write_text("LATER {{ messages[0].content }}<|eos|>")  # what the config named counts as it was then
  out = export.export(workdir, tmp_path / "out")
  alone = json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
  assert alone == (listed if own else text)
  assert (out / "chat_template.jinja").read_text() == (old if own else text)
  tools = out / "additional_chat_templates" / "tool_use.jinja"
  assert tools.read_text() == f"TOOLS {old}" if own else not tools.exists()
  assert own or not any("OLD" in file.read_text() for file in (*out.glob("*.json"), *out.glob("**/*.jinja")))


@pytest.mark.parametrize("same", [True, False])
def test_the_tokenizer_s_files_come_along_where_the_run_has_that_tokenizer(tmp_path, same):
  original = tmp_path / "run" / "hf"
  BytesTokenizer().save(original / "tokenizer.json")
  tokenizer = load_tokenizer(original)
  hf.write_json(original / files.CONFIG, {})
  named = files.read_json(original / "tokenizer_config.json")
  hf.write_json(original / "tokenizer_config.json", {**named, "model_max_length": 77})
  if not same:
    content = json.loads((original / "tokenizer.json").read_text())
    content["model"]["vocab"]["ab"], content["model"]["merges"] = 258, [["a", "b"]]
    (original / "tokenizer.json").write_text(json.dumps(content))
  config = config_checks.resolve(tiny.config(tmp_path))
  (tmp_path / "out").mkdir()
  came_along, _ = export._write_texts(config, tokenizer, tmp_path / "run", tmp_path / "out")
  told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
  assert came_along == same == ("model_max_length" in told)
  assert load_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint


def test_a_template_is_exported_as_it_was_when_the_run_began(tmp_path):
  mine = tmp_path / "mine.jinja"
  mine.write_text("MINE {{ messages[0].content }}<|eos|>")
  config = config_checks.resolve(tiny.config(tmp_path, strategy=dict(name="sft"), chat=dict(template=str(mine))))
  BytesTokenizer().save(tmp_path / "run" / "tokenizer.json")
  workdir_lib.save_config(config, tmp_path / "run", load_tokenizer(tmp_path / "run"))
  mine.write_text("LATER {{ messages[0].content }}<|eos|>")
  template, stop_ids = export._chat(config, load_tokenizer(tmp_path / "run"))
  assert template.source.startswith("MINE") and stop_ids


@pytest.mark.parametrize("options, message", [
    (dict(step=3), "no checkpoint of step 3; there are: 1, 4"),
    (dict(dtype="int8"), "dtype is 'int8'; allowed: float32, bfloat16, float16"),
    (dict(max_shard_bytes=0), "0 bytes"),
    (dict(adapter="apart"), "export's adapter is 'apart'; allowed: merged, peft"),
    (dict(adapter="peft"), "holds no adapters: its run had model.lora.rank=0. Export without --adapter=peft"),
])
def test_wrong_options_are_told(tmp_path, workdir, options, message):
  with pytest.raises(ConfigError, match=message):
    export.export(workdir, tmp_path / "out", **options)


def test_folders_that_are_wrong_or_taken(tmp_path, workdir, params):
  with pytest.raises(ConfigError, match="holds no config.json"):
    export.export(tmp_path, tmp_path / "out")
  out = export.export(workdir, tmp_path / "out")
  with pytest.raises(HFError, match="already holds model.safetensors"):
    export.export(workdir, out)
  (out / "chat_template.jinja").write_text("of another model")
  (out / "README.md").write_text("mine")
  export.export(workdir, out, overwrite=True, step=1)
  assert not (out / "chat_template.jinja").exists() and (out / "README.md").exists()
  assert_bitwise(flat(hf.load(out)[1]), cut(params))


def test_no_average_is_told(tmp_path, params):
  workdir = write_run(tmp_path / "run", params, (1,))
  state = {"step": np.int32(2), "params": params}
  checkpoints = Checkpoints(workdir / "checkpoints", keep_last=9)
  checkpoints.save(2, state, {})
  checkpoints.close()
  with pytest.raises(ConfigError, match="optimizer.ema_decay=0"):
    export.export(workdir, tmp_path / "out", ema=True)


def test_a_damaged_checkpoint_is_told(tmp_path, params):
  workdir = write_run(tmp_path / "a run", params, (1,))
  export.export(workdir, tmp_path / "whole")
  for file in (workdir / "checkpoints" / "1" / "state").rglob("d/*"):
    file.write_bytes(file.read_bytes()[:100])
  with pytest.raises(CheckpointError, match=r"checkpoints/1 is damaged: .* has 100 bytes of"):
    export.export(workdir, tmp_path / "out")
  assert not list((tmp_path / "out").glob("*"))


def test_a_model_that_no_family_has_is_told(tmp_path):
  changed = dict(rope_fraction=0.5, qk_norm=True)
  workdir = write_run(tmp_path / "run", values(**changed), (1,), **changed)
  with pytest.raises(HFError, match="no family .* nearest is qwen3, which cannot express model.rope_fraction = 0.5"):
    export.export(workdir, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def bytes_read():
  metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
  return sum(value["value"] for metric in metrics for value in metric["values"])


def test_reading_layer_by_layer_reads_each_chunk_once(tmp_path, monkeypatch):
  params = {"a": np.random.default_rng(0).standard_normal((16, 128, 128), np.float32), "b": np.ones(3, np.float32)}
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(1, {"step": jnp.int32(1), "params": jax.tree.map(jnp.asarray, params)}, {})
  checkpoints.close()
  monkeypatch.setattr(export, "CACHE_BYTES", 0)
  stored = export.StoredLeaves(tmp_path / "checkpoints" / "1")
  assert {path: leaf.shape for path, leaf in stored.shapes.items()} == {"a": (16, 128, 128), "b": (3,)}
  before = bytes_read()
  for layer in range(16):
    np.testing.assert_array_equal(stored.read("a", (layer, slice(0, 128), slice(5, 9))), params["a"][layer, :, 5:9])
  assert 0.5 * params["a"].nbytes < bytes_read() - before < 1.5 * params["a"].nbytes
  np.testing.assert_array_equal(stored.read("b", (slice(0, 2),)), [1, 1])


def test_the_command(tmp_path, workdir, params):
  def run(*arguments):
    return subprocess.run([sys.executable, "-m", "trainer.export", *arguments], cwd=tiny.ROOT, capture_output=True,
                          text=True, timeout=120, env=tiny.environment(1), check=False)

  done = run(f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--step=1", "--max_shard_gb=0.000005")
  assert done.returncode == 0, done.stderr
  assert f"{tmp_path / 'out'}: llama" in done.stdout
  assert_bitwise(flat(hf.load(tmp_path / "out")[1]), cut(params))
  refused = run(f"--workdir={workdir}", f"--out={tmp_path / 'out'}")
  assert refused.returncode == 1 and "already holds" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("max_shard_bytes", [files.MAX_SHARD_BYTES, 5000])
def test_transformers_computes_the_same_logits(tmp_path, workdir, max_shard_bytes):
  transformers = pytest.importorskip("transformers")
  torch = pytest.importorskip("torch")
  out = export.export(workdir, tmp_path / "out", max_shard_bytes=max_shard_bytes)
  theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
  assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
  model, loaded = hf.load(out)
  np.testing.assert_allclose(jax.jit(model.logits)(loaded, TOKENS), expected, rtol=1e-5, atol=1e-5)
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  text = "Grüße, 世界!\n\t end"
  assert tokenizer(text, add_special_tokens=False)["input_ids"] == load_tokenizer(out).encode_batch([text])[0].tolist()
  assert tokenizer.eos_token_id == 257 and theirs.generation_config.eos_token_id == 257


@pytest.mark.parametrize("generation, source, stop_ids, bos, expected", [
    ({}, {}, (), None, ({}, None)), ({}, {}, (2,), 1, ({"bos_token_id": 1, "eos_token_id": 2}, 2)),
    # Its own first, in its order, which says what ends a text for other programs; then the others by number.
    ({"eos_token_id": [9, 3], "top_k": 4, "bos_token_id": 7}, {"eos_token_id": 8}, (5, 3), 1,
     ({"eos_token_id": [9, 3, 5, 8], "top_k": 4, "bos_token_id": 7}, [9, 3, 5, 8])),
    ({"eos_token_id": 4}, {"eos_token_id": [4]}, (4,), None, ({"eos_token_id": 4}, 4))])
def test_what_ends_a_text_is_named_once_and_what_was_there_stays(generation, source, stop_ids, bos, expected, tmp_path):
  if generation:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
  assert export._generation(tmp_path, source, bos, stop_ids) == expected


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_saves_nothing_is_exported_from_a_checkpoint_that_is_removed_again(saves, tmp_path, monkeypatch):
  calls, at_end = [], export.export_at_end

  class Saver:
    def __init__(self, directory):
      calls.append(("open", directory.name))
      directory.mkdir()

    def save(self, step, state, meta):
      calls.append(("save", step, state, meta))

    def close(self):
      calls.append(("close",))

  monkeypatch.setattr(export.checkpoint, "Checkpoints", Saver)
  monkeypatch.setattr(export, "export", lambda workdir, out, folder, **more: calls.append(
      ("export", out, folder and folder.relative_to(workdir).parts, more)))
  run = types.SimpleNamespace(
      saves_last=saves, workdir=tmp_path, step=9, pinned={"base": "f"}, state="whole",
      checkpoints=types.SimpleNamespace(split=lambda state: ({"params": 1, "step": 9, "opt": 2}, {})))
  at_end(run, None)
  assert calls == []
  at_end(run, "out", dtype="bfloat16")
  if saves:
    assert calls == [("export", "out", None, {"dtype": "bfloat16"})]
  else:
    saved = ("save", 9, {"params": 1, "step": 9}, {"step": 9, "pinned": {"base": "f"}})
    assert calls == [("open", "for_export"), saved, ("close",),
                     ("export", "out", ("for_export", "9"), {"dtype": "bfloat16"})]
  assert not (tmp_path / "for_export").exists()


@pytest.mark.parametrize("mtp, layers", [(True, 2), (False, 0)])
def test_modules_that_predict_further_ahead_are_written_unless_they_are_not_asked_for(
    tmp_path, workdir, params, monkeypatch, mtp, layers):
  class Told(Exception):
    pass

  def config_json(keys, *rest):
    raise Told(keys["mtp_layers"])

  monkeypatch.setattr(export.hf, "keys_of", lambda *_: {"mtp_layers": 2, "max_positions": 8})
  monkeypatch.setattr(export.hf, "config_json", config_json)
  with pytest.raises(Told, match=str(layers)):
    export.export(workdir, tmp_path / "out", mtp=mtp)
