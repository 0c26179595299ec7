"""Texts that are kept: which one a prompt goes on from, and which gives its place to another."""

import numpy as np

from trainer.generate.kept import Kept, KeptText


def text(*ids, shown=b""):
  return KeptText(np.array(ids, np.int32), shown, None, 0)


def test_the_longest_text_that_a_prompt_begins_with_is_found():
  kept = Kept(9)
  one, two, other = text(1, 2), text(1, 2, 3), text(1, 2, 3, shown=b"an image")
  for some in (one, two, other, text(9, 2, 3)):
    kept.add(some)
  assert kept.find(np.array([1, 2, 3, 4]), b"") is two
  assert kept.find(np.array([1, 2, 3]), b"") is one  # at least one token is to be run
  assert kept.find(np.array([1, 2, 3, 4]), b"an image") is other
  assert kept.find(np.array([1, 2, 3, 4]), b"another") is None
  assert kept.find(np.array([1, 3, 3, 4]), b"") is None and kept.find(np.array([1]), b"") is None
  kept.clear()
  assert kept.find(np.array([1, 2, 3, 4]), b"") is None


def beginning(*ids, **more):
  return KeptText(np.array(ids, np.int32), b"", "cache", 8, beginnings=True, **more)


def test_the_longest_beginning_that_a_prompt_has_in_common_with_a_text_is_found():
  kept = Kept(9, least=2)
  one, two = beginning(1, 2, 3, 4, experts=np.arange(4)), beginning(1, 2)
  for some in (one, two, text(1, 2, 3, 5, 6)):
    kept.add(some)

  def find(*ids, shown=b""):
    return kept.find(np.array(ids), shown, lambda cache, n: (cache, n))

  found = find(1, 2, 3, 9)
  assert found.ids.tolist() == [1, 2, 3] and found.cache == ("cache", 3) and found.of is one and kept.shared == 3
  assert found.experts.tolist() == [0, 1, 2] and found.slots == 8
  assert find(1, 2, 9) is two and kept.shared == 3  # as long as a beginning, and whole
  assert find(1, 9) is None and find(1, 9, 3, 9, 5) is None  # too little
  assert find(1, 2, 3, 9, shown=b"an image") is None
  assert find(1, 2, 3).of is one or find(1, 2, 3) is two  # one token is left to be run
  assert find(1, 2, 3, 5, 9).ids.tolist() == [1, 2, 3]  # of which the third text has no beginnings
  whole_only = Kept(9)
  whole_only.add(one)
  assert whole_only.find(np.array([1, 2, 3, 9]), b"") is None


def test_a_text_that_a_beginning_is_of_keeps_its_place_while_that_waits():
  kept = Kept(1, once=True, least=1)
  kept.add(beginning(1, 2, 3))
  found = kept.find(np.array([1, 2, 5]), b"", lambda cache, n: cache)
  again = kept.find(np.array([1, 2, 6]), b"", lambda cache, n: cache)  # though `once`: it may still go on
  assert found.of is again.of and not kept.takes("stop") and kept.given_up == 2
  kept.release(found)
  assert not kept.takes("stop")
  kept.release(again)
  assert kept.takes("stop")


def test_the_text_used_longest_ago_is_given_up():
  kept = Kept(2)
  kept.add(text(1))
  kept.add(text(2))
  kept.release(kept.find(np.array([1, 5]), b""))
  assert kept.given_up == 0 and kept.takes("stop") and kept.given_up == 1
  kept.add(text(3))
  assert kept.find(np.array([2, 5]), b"") is None
  one, other = kept.find(np.array([1, 5]), b""), kept.find(np.array([3, 5]), b"")
  assert not kept.takes("stop") and kept.given_up == 4  # both are still to be gone on from, and take their places
  kept.release(one)
  assert kept.takes("stop") and other is not None
  kept.begin()  # what another waits for was left off
  kept.add(text(4))
  assert kept.takes("stop") and kept.given_up == 4


def test_of_once_what_was_found_is_not_kept():
  kept = Kept(1, once=True)
  assert not kept.takes("length") and Kept(1, cut=True).takes("length")
  kept.add(text(1))
  found = kept.find(np.array([1, 5]), b"")
  assert kept.find(np.array([1, 5]), b"") is None and not kept.takes("stop")
  kept.release(found)
  assert kept.takes("stop") and kept.given_up == 1
