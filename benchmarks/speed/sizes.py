"""What is timed, for Weft and for its peers alike: a model, and for each case how much a step trains on.

Which size it is says the environment variable WEFT_SPEED_SIZE, which programs started by `python -m benchmarks.speed`
take over. The peers read this file alone: it imports nothing of Weft.
"""

import os
from typing import NamedTuple


class Size(NamedTuple):
  """A Llama-type model with untied embeddings, and its rows.

  Attributes:
    vocab, hidden, layers, heads, kv_heads, head_dim, ffn: of the model.
    precision: float32; mixed: products in bfloat16, parameters and moments in float32; bfloat16: all of it, and what
      enters a layer is all that is kept of it for the backward pass.
    batch, seq: rows of one document each, all of whose tokens are trained.
    pairs, pair_seq: pairs whose sides share a prompt that is half of them.
    prompts, group, prompt_len, new: prompts, completions of each, tokens of a prompt and of a completion.
    roll_prompts, roll_group, roll_rows, roll_new, roll_stops: of rollouts whose completions end by themselves: prompts,
      completions of each, how many at a time, the most tokens of each, and how many entries at the end of the
      vocabulary end it. Fresh parameters draw all entries alike, so that with a 64th of them a completion has 63 tokens
      on average.
  """

  vocab: int
  hidden: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn: int
  precision: str
  batch: int
  seq: int
  pairs: int
  pair_seq: int
  prompts: int
  group: int
  prompt_len: int
  new: int
  roll_prompts: int
  roll_group: int
  roll_rows: int
  roll_new: int
  roll_stops: int

  def tokens(self, case: str) -> int:
    """That a step of a case counts: trained ones, or generated ones."""
    if case in ("seq", "sft"):
      return self.batch * self.seq
    return 2 * self.pairs * self.pair_seq if case == "dpo" else self.prompts * self.group * self.new


SIZES = {
    # For CPUs.
    "small": Size(8192, 256, 8, 4, 4, 64, 768, "float32", 8, 512, 4, 256, 8, 4, 64, 64, 16, 8, 32, 256, 128),
    # 1.5 billion parameters, for a GPU with 80 GB.
    "1b": Size(128_256, 2048, 16, 16, 8, 128, 8192, "mixed", 8, 4096, 8, 1024, 16, 8, 256, 256, 32, 8, 64, 1024, 501),
    # Llama 3 8B, for one with 141 GB.
    "8b": Size(128_256, 4096, 32, 32, 8, 128, 14_336, "bfloat16", 4, 4096, 4, 1024, 8, 8, 256, 256, 16, 8, 64, 1024,
               501),
    # Does what the two before do, anywhere and within a minute; its times mean nothing.
    "tiny": Size(512, 64, 2, 4, 2, 16, 128, "mixed", 2, 64, 2, 32, 2, 2, 8, 8, 2, 2, 4, 16, 32),
}
# The first, as one trains on a CPU with instructions for bfloat16 (AMX).
SIZES["small_mixed"] = SIZES["small"]._replace(precision="mixed")
CHOSEN = SIZES[os.environ.get("WEFT_SPEED_SIZE", "small")]

LEARNING_RATE, WEIGHT_DECAY, B1, B2, CLIP = 3e-4, 0.1, 0.9, 0.95, 1.0
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# The first steps, which compile, are left out; those that are timed; those of rollouts.
WARMUP, STEPS, ROLL_STEPS = 2, 6, 3


def words() -> list[str]:
  """The vocabulary: each word is a token."""
  return [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), CHOSEN.vocab))]


def text(rng, n: int) -> str:
  """`n` words; `rng` is a `random.Random`."""
  return " ".join(f"w{rng.randrange(len(SPECIAL), CHOSEN.vocab)}" for _ in range(n))


def reward(tokens) -> float:
  """The share of different tokens, so that completions of a prompt differ."""
  return len(set(tokens)) / max(len(tokens), 1)
