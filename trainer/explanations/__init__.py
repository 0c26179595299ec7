"""What trainer/explain.py knows: each module has a GROUP and a TEXT of topics (topic.py says how they are written)."""

import functools

from trainer.explanations import (
  exactness,
  metrics,
  optimizers,
  pairs,
  pairs_parts,
  policy,
  policy_parts,
  tokens,
)
from trainer.explanations.topic import Topic, parse

_MODULES = (tokens, pairs, pairs_parts, policy, policy_parts, optimizers, exactness, metrics)


@functools.cache
def groups() -> dict[str, list[Topic]]:
  """{group: its topics}, in the order in which they are listed."""
  found = {}
  for module in _MODULES:
    found[module.GROUP] = parse(module.TEXT)
    for topic in found[module.GROUP]:
      if topic.like:
        notation, tests = module.LIKE[topic.like]
        topic.equation, topic.test = topic.equation + notation, [*topic.test, *tests]
  return found


@functools.cache
def topics() -> dict[str, Topic]:
  """{name: topic}, other names included.

  Raises:
    ValueError: two topics have one name.
  """
  found: dict[str, Topic] = {}
  for topic in (topic for group in groups().values() for topic in group):
    for name in (topic.name, *topic.aliases):
      if found.setdefault(name, topic) is not topic:
        raise ValueError(f"explanations: {found[name].name} and {topic.name} are both called {name}")
  return found
