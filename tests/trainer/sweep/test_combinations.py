"""The algebra of sweeps, values on the command line, and names of runs."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.sweep import combinations
from trainer.sweep.combinations import argument, chain, fixed, name_of, parsed, product, sweep, zipped

# ---------------------------------------------------------------------------------------------- the algebra


def test_the_algebra():
  a, b = sweep("a", [1, 2]), sweep("b.c", ["x", "y", "z"])
  assert product(a, b) == [{"a": i, "b.c": c} for i in (1, 2) for c in "xyz"]
  assert zipped(a, sweep("b", [3, 4])) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
  assert chain(a, b) == [{"a": 1}, {"a": 2}, {"b.c": "x"}, {"b.c": "y"}, {"b.c": "z"}]
  assert product(fixed({"m": "adamw", "n": 0}), a) == [{"m": "adamw", "n": 0, "a": 1}, {"m": "adamw", "n": 0, "a": 2}]
  assert product() == fixed({}) == [{}] and product(a, fixed({})) == a and product(a) == zipped(a) == chain(a) == a


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_sizes(sizes):
  sweeps = [sweep(f"k{n}", range(size)) for n, size in enumerate(sizes)]
  assert len(product(*sweeps)) == math.prod(sizes) and len(chain(*sweeps)) == sum(sizes)
  assert product(product(*sweeps[:2]), *sweeps[2:]) == product(*sweeps)  # associative


@pytest.mark.parametrize("make, words", [
    (lambda: sweep("learning rate", [1]), "a sweep's key is 'learning rate'"),
    (lambda: sweep("a", "xyz"), r"values of a are 'xyz'; they must be a list, as in sweep\('a', \['xyz'\]\)"),
    (lambda: sweep("a", 3), "they must be a list"),
    (lambda: sweep("a", []), "has no values"),
    (lambda: product(sweep("a", [1]), sweep("a", [2])), "a is set twice"),
    (lambda: zipped(sweep("a", [1]), sweep("b", [1, 2])), "one length; found 1, 2"),
    (lambda: product({"a": [1, 2]}), "in place of a sweep"),
    (lambda: chain([1, 2]), "in place of a sweep"),
])
def test_what_is_no_sweep_is_told(make, words):
  with pytest.raises(ConfigError, match=words):
    make()


@pytest.mark.parametrize("text, values", [
    ("a=1,2", [1, 2]), ("a=1e-3,0.5", [1e-3, 0.5]), ("config.a=x,y", ["x", "y"]), ("a=(1,2),(3,4)", [(1, 2), (3, 4)]),
    ("a='x,y',z", ["x,y", "z"]), ("a=True,False", [True, False]), ("a=v5e:16x16", ["v5e:16x16"]),
    ("a=(('.*',0.1),),()", [((".*", 0.1),), ()]), ("a= 1 , 2 ", [1, 2]), ("a=x=y", ["x=y"]),
])
def test_values_on_the_command_line(text, values):
  assert parsed(text) == [{"a": value} for value in values]


def test_a_dict_is_no_value_on_the_command_line():
  with pytest.raises(ConfigError, match="a is a dict in a combination; set its keys one by one, as in a.KEY"):
    argument("a", {"b": 1})


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1,,2", "a=(1,2", "a='x", "a=1)"])
def test_a_malformed_set_is_told(text):
  with pytest.raises(ConfigError, match="--set=|a sweep's key"):
    parsed(text)


# ---------------------------------------------------------------------------------------------- names


VALUES = st.one_of(st.integers(-10**9, 10**9), st.floats(allow_nan=False), st.booleans(), st.text(max_size=200),
                   st.tuples(st.text(max_size=5), st.floats(0, 1)))
KEYS = st.sampled_from(["a", "b", "x.a", "y.a", "x.y.a", "optimizer.name", "model.name", "config"])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=2, max_size=6))
def test_names_are_folders_and_no_two_are_alike(found):
  names = [name_of(combination) for combination in found]
  for name, combination in zip(names, found, strict=True):
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+\-]*", name) and len(name) <= combinations.LONGEST_NAME + 9
    assert name == name_of(dict(reversed(combination.items())))  # whatever the order of the keys
  exact = {tuple(sorted((key, repr(value)) for key, value in combination.items())) for combination in found}
  assert len({name.lower() for name in names}) == len(exact)


def test_names_are_short_and_say_what_is_what():
  assert name_of({}) == "base"
  assert name_of({"optimizer.learning_rate": 1e-3, "seed": 1}).startswith("learning_rate=0.001__seed=1-")
  assert name_of({"optimizer.name": "muon"}).startswith("optimizer.name=muon-")
  assert name_of({"a.rate": 1, "b.rate": 2}).startswith("a.rate=1__b.rate=2-")
  assert name_of({"model.hf": "/models/some/llama"}).startswith("hf=llama-")
  # For good: a run keeps its folder when the trainer changes.
  assert name_of({"seed": 1}) == "seed=1-adf5904f"
