"""The regex idiom: first match wins, and a rule without effect is an error that helps."""

import pytest

from trainer import tree as tree_lib
from trainer.errors import ConfigError

PATHS = [
    "embed/embedding",
    "blocks/attn/q/kernel",
    "blocks/attn/q/bias",
    "blocks/mlp/up/kernel",
    "final_norm/scale",
]


def test_flatten_and_unflatten_are_inverse():
  tree = {"a": {"b": 1, "c": {"d": (2, 3)}}, "e": None}
  flat = tree_lib.flatten(tree)
  assert flat == {"a/b": 1, "a/c/d": (2, 3), "e": None}
  assert tree_lib.unflatten(flat) == tree
  assert tree_lib.flatten({"a": {}, "b": {"c": {}}}) == {}
  assert list(tree_lib.flatten({"b": 1, "a": {"d": 2, "c": 3}})) == ["a/c", "a/d", "b"]


@pytest.mark.parametrize("tree", [{"a/b": 1}, {1: 2}, {"": 3}])
def test_flatten_refuses_keys_that_would_make_paths_ambiguous(tree):
  with pytest.raises(ValueError, match="cannot be part of a path"):
    tree_lib.flatten(tree)


@pytest.mark.parametrize("flat", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}])
def test_unflatten_refuses_a_leaf_that_is_also_a_folder(flat):
  with pytest.raises(ValueError, match="leaf"):
    tree_lib.unflatten(flat)


def test_first_match_wins_and_the_rest_get_the_default():
  values = tree_lib.match((("attn/.*kernel", 1), ("kernel$", 2)), PATHS, "k", default=0)
  assert values == dict(zip(PATHS, [0, 1, 0, 2, 0], strict=True))


def test_a_pattern_that_matches_nothing_names_key_pattern_near_misses_and_existing_paths():
  with pytest.raises(ConfigError) as error:
    tree_lib.match((("blocks/atn/.*", 1),), PATHS, "optimizer.lr_mults")
  message = str(error.value)
  assert "optimizer.lr_mults" in message and "'blocks/atn/.*'" in message
  assert "'attn' instead of 'atn'" in message
  assert "embed/embedding" in message
  with pytest.raises(ConfigError, match="Nearest: blocks/mlp/up/kernel"):
    tree_lib.select(("^blocks/mlp/up/kernels$",), PATHS, "optimizer.freeze")


def test_a_shadowed_rule_names_the_rule_that_takes_its_paths():
  with pytest.raises(ConfigError, match=r"'attn/q' has no effect.*earlier 'blocks'"):
    tree_lib.match((("blocks", 1), ("attn/q", 2)), PATHS, "k")


def test_built_in_rules_need_no_effect():
  table = (("blocks", 1), ("attn", 2), ("nowhere", 3))
  assert tree_lib.match(table, PATHS, "k", must_match=False)["blocks/attn/q/bias"] == 1
  user = (("scale", 9),)
  assert tree_lib.match(user + table, PATHS, "k", optional={p for p, _ in table})["final_norm/scale"] == 9
  with pytest.raises(ConfigError, match="nowhere else"):
    tree_lib.match((("nowhere else", 9), *table), PATHS, "k", optional={p for p, _ in table})


def test_an_invalid_regex_shows_the_position():
  with pytest.raises(ConfigError, match=r"unterminated subpattern at position 7:\n.*\n {9}\^"):
    tree_lib.match((("blocks/(attn", 1),), PATHS, "k")


def test_select_is_a_union_and_patterns_may_overlap():
  assert tree_lib.select(("attn", "attn/q", "scale"), PATHS, "k") == {PATHS[1], PATHS[2], PATHS[4]}
  assert tree_lib.select((), PATHS, "k") == frozenset()


@pytest.mark.parametrize("rules", ["blocks", ("blocks",), (("blocks", 1, 2),), ((1, 2),), (3,)])
def test_malformed_rules_show_what_is_wanted(rules):
  with pytest.raises(ConfigError, match="regex, value"):
    tree_lib.match(rules, PATHS, "k")


def test_select_refuses_a_bare_string_and_other_types():
  with pytest.raises(ConfigError, match=r"write a tuple of patterns: \('blocks',\)"):
    tree_lib.select("blocks", PATHS, "k")
  with pytest.raises(ConfigError, match="patterns are strings"):
    tree_lib.select((3,), PATHS, "k")
