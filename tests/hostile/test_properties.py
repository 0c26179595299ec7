"""Whatever bytes or JSON a parser is given, it reads them or refuses them with an error of ours."""

import json
import os

import pytest
from hypothesis import HealthCheck, configuration, given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.hostile import parsers

# Where hypothesis keeps its tables of characters.
configuration.set_hypothesis_home_dir(os.environ["WEFT_TEST_CACHE"])
BOUNDS = settings(max_examples=50 if tiny.AS_IN_USERS_RUNS else 20, derandomize=True, deadline=None, database=None,
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
# The words of all formats, so that values of any type stand where the parsers look.
WORDS = sorted({word for seeds in parsers.SEEDS.values() for seed in seeds
                for word in ("".join(c if c.isalnum() or c in "_." else " " for c in seed.decode("latin-1"))).split()})
ODD = [float("nan"), float("inf"), 2**63, -(2**70), 10**400, 1e308, "\0", "\ud800", "\ufdd0", "a" * 5000, "../x", "(",
       "{{ a }}", -1, 0, "", None, True]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.sampled_from(WORDS),
                    st.text(max_size=5), st.sampled_from(ODD))
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), inner,
                                                 max_size=4)), max_leaves=8)
OF_JSON = sorted(name for name, seeds in parsers.SEEDS.items() if seeds[0][:1] in (b"{", b"[") and name != "template")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
  monkeypatch.setattr(parsers, "folder", lambda: tmp_path)


def parsed(name, data):
  """Runs a parser; anything but an error of ours fails the test with the input that did it."""
  try:
    parsers.PARSERS[name](data)
  except parsers.OURS as e:
    assert str(e)


@pytest.mark.parametrize("name", sorted(parsers.PARSERS))
def test_any_bytes_are_read_or_refused(name):
  seeds = parsers.SEEDS.get(name, [b"a"])

  @BOUNDS
  @given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")),
                   st.builds(lambda seed, at, with_: seed[:at % (len(seed) + 1)] + with_ + seed[at % (len(seed) + 1):],
                             st.sampled_from(seeds), st.integers(0, 500), st.binary(max_size=6))))
  def check(data):
    parsed(name, data)

  check()


@pytest.mark.parametrize("name", OF_JSON)
def test_any_json_is_read_or_refused(name):
  @BOUNDS
  @given(VALUES)
  def check(value):
    parsed(name, dumped(value))

  check()


@pytest.mark.parametrize("name", OF_JSON)
def test_any_value_may_stand_anywhere_in_what_is_well_formed(name):
  """Each value inside a seed in turn replaced by another one."""
  @BOUNDS
  @given(st.sampled_from([seed for seed in parsers.SEEDS[name] if b"\n" not in seed] or [b"{}"]), st.integers(0, 30),
         VALUES)
  def check(seed, at, value):
    parsed(name, dumped(with_value(json.loads(seed), at, value)))

  check()


def dumped(value):
  return json.dumps(value).encode("utf-8", "surrogatepass")


def with_value(tree, at, value):
  """The tree with its node number `at`, counted from the root around, replaced."""
  places = []

  def walk(node):
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
      places.append((node, key))
      walk(node[key])

  walk(tree)
  if not places:
    return value
  node, key = places[at % len(places)]
  node[key] = value
  return tree
