"""The accuracy of visual question answering, and the form in which its answers are compared (Antol et al. 2015).

Ten people have answered each question. An answer is worth min(1, how many of them gave it / 3), averaged over leaving
out each of the ten in turn (Goyal et al. 2017, and https://visualqa.org/evaluation.html, which says how answers are
normalised). Two things differ from the program published there: both sides are always normalised, also where all
answers are the same; and contractions that are other words without their apostrophe (its, were, well) stay as they are.
"""

import re
from collections.abc import Sequence

NUMBER_WORDS = {word: str(number) for number, word in enumerate(
    "zero one two three four five six seven eight nine ten".split())} | {"none": "0"}
ARTICLES = frozenset({"a", "an", "the"})
CONTRACTIONS = {word.replace("'", ""): word for word in (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how's i'm i've isn't "
    "it'd let's mightn't mustn't needn't she's should've shouldn't somebody's someone's that's there's they'd they're "
    "they've wasn't we've weren't what's where's who's why's won't would've wouldn't y'all you'd you'll you're "
    "you've").split()}
# Of people who must agree for an answer to count fully.
ENOUGH = 3


def normalize(text: str) -> str:
  """Lower case; number words up to ten as digits; without articles, commas between digits, and points that are not of a
  number; other punctuation but apostrophes and colons as spaces; contractions with their apostrophe."""
  text = re.sub(r"(?<=\d),(?=\d)", "", text.lower().replace("\u2019", "'"))
  text = re.sub(r"\.(?!\d)", "", text)
  words = re.sub(r"[^\w\s.':]|_", " ", text).split()
  words = [CONTRACTIONS.get(word, NUMBER_WORDS.get(word, word)) for word in words]
  return " ".join(word for word in words if word not in ARTICLES)


def accuracy(said: str, answers: Sequence[str]) -> float:
  """What an answer is worth, 0 to 1; both sides as `normalize` gives them.

  With fewer than four answers all the others count as enough; a single one must be met.
  """
  if len(answers) == 1:
    return float(said == answers[0])
  enough, matching = min(ENOUGH, len(answers) - 1), sum(said == answer for answer in answers)
  # Leaving out one that matches leaves one less.
  without_one, without_another = min(1.0, (matching - 1) / enough), min(1.0, matching / enough)
  return (matching * without_one + (len(answers) - matching) * without_another) / len(answers)
