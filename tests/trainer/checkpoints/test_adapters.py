"""A run on adapters of experts and tables, or on rows of these, goes on to the bit."""

import jax
import numpy as np
import pytest

from tests import tiny
from trainer import tree
from trainer.main import train

KINDS = {
    "experts and tables": dict(targets=("moe/experts/", "embed/")),
    "rows": dict(targets=("attn/q/",), trainable_token_indices=(101, 32, 97)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_continued_is_the_same_run(kind, tmp_path):
  corpus = tiny.write_corpus(tmp_path / "corpus")

  def config(**changed):
    made = tiny.config(corpus, total_steps=4, ckpt_steps=2, evals={}, **changed)
    made.tokenizer.type = "bytes"
    made.model.update(moe=dict(num_experts=4, expert_size=8), lora=dict(rank=2, **KINDS[kind]))
    return made

  straight = train(config(), tmp_path / "straight")
  stopped = config(callbacks=dict(crash=dict(type="tests.trainer.test_main.Crash", after=3)))
  with pytest.raises(KeyboardInterrupt):
    train(stopped, tmp_path / "stopped")
  continued = train(config(), tmp_path / "stopped")
  before = tree.flatten(jax.jit(straight.model.init)(jax.random.key(0)))
  for path, leaf in tree.flatten(straight.state["params"]).items():
    np.testing.assert_array_equal(tree.flatten(continued.state["params"])[path], leaf, err_msg=path)
    if path.endswith(("/lora_b", "/lora_rows")) and "embed" not in path:
      assert np.any(leaf != before[path]), path
