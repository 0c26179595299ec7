"""VQA accuracy: the mean over leaving out each person, and answers compared as the benchmark does."""

import numpy as np
import pytest

from evaluators import vqa


@pytest.mark.parametrize("text, expected", [
    ("A Dog.", "dog"), ("the red, old  boat!", "red old boat"), ("Two", "2"), ("none", "0"), ("1,000", "1000"),
    ("3.5 cm.", "3.5 cm"), ("u.s.a.", "usa"), ("dont know", "don't know"), ("don’t", "don't"), ("its", "its"),
    ("2:50 PM", "2:50 pm"), ("girl's", "girl's"), ("t-shirt", "t shirt"), ("yes\n", "yes"), ("", "")])
def test_answers_are_compared_in_a_plain_form(text, expected):
  assert vqa.normalize(text) == expected == vqa.normalize(expected)


@pytest.mark.parametrize("matching", range(11))
def test_it_is_the_mean_over_leaving_out_each_of_ten(matching):
  answers = ["yes"] * matching + ["no", "maybe", "so", "red", "on", "up", "in", "at", "by", "of"][: 10 - matching]
  left_out = [min(1, sum(a == "yes" for j, a in enumerate(answers) if j != i) / 3) for i in range(10)]
  np.testing.assert_allclose(vqa.accuracy("yes", answers), np.mean(left_out))


def test_fewer_answers_count_fully_when_all_agree():
  assert vqa.accuracy("a", ["a"]) == 1 and vqa.accuracy("b", ["a"]) == 0
  assert vqa.accuracy("a", ["a", "a"]) == 1 and vqa.accuracy("a", ["a", "b"]) == 0.5
  assert vqa.accuracy("c", ["a"] * 3) == 0
