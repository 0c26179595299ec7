"""Special tokens are found as a plain alternation finds them, also among many that begin alike."""

import random
import re
import time

from input_pipeline.tokenizer import special_tokens


def test_the_pattern_finds_what_an_alternation_finds():
  rng = random.Random(0)
  matches = 0
  for _ in range(500):
    tokens = tuple("".join(rng.choices("ab<|.", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 6)))
    text = "".join(rng.choices("ab<|.c", k=30))
    longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    expected = [m.span() for m in re.finditer(longest_first, text)]
    assert [m.span() for m in special_tokens.pattern(tokens).finditer(text)] == expected, tokens
    begins = [m.start() for m in re.finditer(f"(?={longest_first})", text)]
    assert [m.start() for m in special_tokens.pattern(tokens, overlapping=True).finditer(text)] == begins, tokens
    matches += len(begins)
  assert matches > 1000
  assert special_tokens.pattern(()) is None and special_tokens.pattern(("",)) is None


def test_many_tokens_take_no_longer_than_few():
  text = "no token in <here> " * 5000
  few, many = (special_tokens.pattern(tuple(f"<|reserved_{i}|>" for i in range(n)), True) for n in (2, 2000))

  def seconds(pattern):
    start = time.process_time()
    assert not list(pattern.finditer(text))
    return time.process_time() - start

  assert min(seconds(many) for _ in range(3)) < 10 * min(seconds(few) for _ in range(3)) + 0.01
