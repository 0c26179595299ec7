"""configs/paligemma.py on a tiny PaliGemma folder: it trains, leaves frozen what it says, answers, and exports."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from configs import paligemma
from models import hf
from tests import tiny
from tests.evaluators import digits
from tests.trainer.report.test_pages import pictures
from trainer import train
from trainer import tree as tree_lib
from trainer.errors import ConfigError

REFERENCE = tiny.ROOT / "tests/models/hf/image_references/paligemma"
WORDS = ["<pad>", "<bos>", "<eos>", *"caption en a red blue boat \n".split(" "), *map(str, range(49)), "<image>",
         "<seg>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The tiny model with a tokenizer of words, and rows about pictures."""
  path = tmp_path_factory.mktemp("paligemma")
  for name in ("config.json", "model.safetensors"):
    shutil.copy(REFERENCE / name, path)
  tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<bos>", "<eos>", "<image>", "<seg>")])
  tokenizer.save(str(path / "tokenizer.json"))
  (path / "tokenizer_config.json").write_text(json.dumps(
      dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")))
  digits.write(path / "rows.jsonl", [
      dict(image=digits.encoded(digits.picture(n)), prefix="caption en", suffix=f"a {('red', 'blue')[n % 2]} boat")
      for n in range(12)])
  return path


def run(folder, workdir, arg=None):
  c = paligemma.get_config(arg)
  c.model.hf = str(folder)
  c.input.sources.main.update(path=str(folder / "rows.jsonl"), validation_fraction=0.3)
  c.input.images.workers = 0
  c.update(seq_len=48, batch_size=8, grad_accum_steps=1, total_steps=2, total_epochs=-1.0, log_steps=1)
  c.optimizer.learning_rate = 1e-2
  c.schedule.warmup_percent = 0.0
  c.evals.answers.max_new_tokens = 4
  c.export.dtype = "float32"
  return train(c, workdir)


def test_a_frozen_tower_stays_the_rest_learns_and_the_export_is_read_again(folder, tmp_path):
  _, before = hf.load(folder)
  done = run(folder, tmp_path / "w", "frozen")
  first, last = (tree_lib.flatten(tree) for tree in (before, done.state["params"]))
  for path, leaf in last.items():
    assert np.array_equal(leaf, first[path]) == path.startswith("vision/"), path
  assert not any("vision/" in path for path in tree_lib.flatten(done.state["opt"]))
  _, exported = hf.load(tmp_path / "w" / "export")
  for path, leaf in tree_lib.flatten(exported).items():
    np.testing.assert_array_equal(leaf, last[path], err_msg=path)
  lines = (tmp_path / "w" / "samples" / "answers-2.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert rows and all(row["answer"] in ("a red boat", "a blue boat") for row in rows)
  assert len(pictures((tmp_path / "w" / "samples" / "answers-2.html").read_text())) == len(rows)


def test_the_tower_learns_slowly_or_like_the_rest(folder):
  assert paligemma.get_config("slow").optimizer.lr_mults == ((r"^vision/", 0.1),)
  assert paligemma.get_config().optimizer.lr_mults == paligemma.get_config().optimizer.freeze == ()
  with pytest.raises(ConfigError, match="configs/paligemma.py:fast: found 'fast', allowed: frozen, slow"):
    paligemma.get_config("fast")
