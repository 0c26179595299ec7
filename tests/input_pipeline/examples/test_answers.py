"""Answers are found in texts and compared in one form."""

import re
from decimal import Decimal

import pytest

from input_pipeline.examples.answers import compile_pattern, extract, last_number, normalize
from trainer.errors import ConfigError

GSM8K = r"####\s*(-?[\d,.]+)"


@pytest.mark.parametrize("text, wanted", [
    (" 1,000 ", "1000"), ("$3.50", "3.5"), ("-0.0", "0"), ("007", "7"), ("72.", "72"), ("+4", "4"), (".5", "0.5"),
    ("-1,234.50", "-1234.5"), ("1,2", "1,2"), ("12 apples", "12 apples"), ("1.2.3", "1.2.3"), ("", ""), ("²", "²"),
    ("123456789012345678901234567890123", "123456789012345678901234567890123")])
def test_numbers_are_normalised_and_texts_are_not(text, wanted):
  assert normalize(text) == wanted


def test_extraction_takes_the_last_match_and_its_first_group():
  assert extract("#### 1 then #### 2", re.compile(GSM8K)) == "2"
  assert extract("is 7 or 8", re.compile(r"\d")) == "8"
  assert extract("no", re.compile(r"\d")) is None
  assert extract(" all ", None) == "all"


@pytest.mark.parametrize("text, wanted", [
    ("first 3, then 4 apples", "4"), ("so it costs $1,250.50.", "1250.5"), ("that is 72.", "72"), ("12%", "12"),
    ("it is -7", "-7"), ("x = -$1,000", "-1000"), ("x = $-3", "-3"), ("(-2)", "-2"), ("\u22125", "-5"),
    ("10-4", "4"), ("f(2)-4", "4"), ("10 - 4", "4"), (".5", "0.5"), ("about...5", "5"), ("**72**", "72"),
    ("_72_", "72"), ("5km", "5"), ("7 for x2 and H20", "7"), ("8 in v1.2.3", "8"), ("12,34", "34"),
    ("1,234,567", "1234567"), ("1,2345", "2345"), ("1.5e-3", "0.0015"), ("\\boxed{41}", "41"), ("0007", "7"),
    ("12345678901234567890.12345678901234567890", "12345678901234567890.12345678901234567890")])
def test_the_last_number_of_a_text(text, wanted):
  assert last_number(text) == Decimal(wanted)


@pytest.mark.parametrize("text", ["", "none", "x2", "- . $ ,", "²"])
def test_a_text_without_a_number(text):
  assert last_number(text) is None


def test_a_pattern_that_is_no_regex_names_its_key():
  assert compile_pattern(None, "a.b") is None and compile_pattern(r"\d", "a.b").search("a1")
  with pytest.raises(ConfigError, match=r"a\.b: '\(' is no regex"):
    compile_pattern("(", "a.b")
