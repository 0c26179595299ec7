"""What is timed, for Weft and for its peers alike: one model, and for each case how much a step trains on."""

VOCAB, HIDDEN, LAYERS, HEADS, FFN = 8192, 256, 8, 4, 768
LEARNING_RATE, WEIGHT_DECAY, B1, B2, CLIP = 3e-4, 0.1, 0.9, 0.95, 1.0
# Rows of one document each, all of whose tokens are trained.
BATCH, SEQ = 8, 512
# Pairs whose sides share a prompt that is half of them.
PAIRS, PAIR_SEQ = 4, 256
# Prompts, completions of each, tokens of a prompt and of a completion.
PROMPTS, GROUP, PROMPT_LEN, NEW = 8, 4, 64, 64
# Tokens that a step of a case counts: trained ones, or generated ones.
TOKENS = {"seq": BATCH * SEQ, "sft": BATCH * SEQ, "dpo": 2 * PAIRS * PAIR_SEQ, "grpo": PROMPTS * GROUP * NEW,
          "generate": PROMPTS * GROUP * NEW}
# Rollouts whose completions end by themselves: prompts, completions of each, how many at a time, the most tokens of
# each, and how many entries at the end of the vocabulary end it. Fresh parameters draw all entries alike, so that a
# completion has 63 tokens on average. Steps that are timed.
ROLL_PROMPTS, ROLL_GROUP, ROLL_ROWS, ROLL_NEW, ROLL_STOPS, ROLL_STEPS = 16, 8, 32, 256, VOCAB // 64, 3
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WARMUP, STEPS = 2, 6


def words() -> list[str]:
  """The vocabulary: each word is a token."""
  return [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]


def text(rng, n: int) -> str:
  """`n` words; `rng` is a `random.Random`."""
  return " ".join(f"w{rng.randrange(len(SPECIAL), VOCAB)}" for _ in range(n))


def reward(tokens) -> float:
  """The share of different tokens, so that completions of a prompt differ."""
  return len(set(tokens)) / max(len(tokens), 1)
