"""Which policy sampled which rollout, and which update trained on it first: `schedule.jsonl` of a workdir.

Where sampling and training go on at once, that is all that the clock decides; a run that follows it computes the same
bits (`rollout.schedule`). Free of JAX.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import ConfigError

# A line for each rollout when its training begins; of several with the same number the last one counts.
NAME = "schedule.jsonl"


class Sampled(NamedTuple):
  """By which policies a rollout is sampled.

  Attributes:
    version: the updates that the first has had.
    changes: [(look, the version from then on)]: before which chunk of its decoding steps, from 1 on, another took over.
    kept: rows that were held when it began, in which completions of the rollout before go on; 0: none was.
  """

  version: int
  changes: Sequence[tuple[int, int]] = ()
  kept: int = 0


class Policies:
  """The policies of a rollout that is being sampled, one after another.

  Args:
    params, version: of the first.
    newer: `newer(look, version)`: (parameters, version) of one to go on with, or None. None: there never is one.
    kept: how many rows are held, as a schedule says; None: those that are there.

  Attributes:
    params, version: of the one that samples now.
    changes: see `Sampled`.
    tokens: how many each version has sampled.
  """

  def __init__(self, params: Any, version: int, newer: Callable[[int, int], tuple[Any, int] | None] | None = None,
               kept: int | None = None):
    self.params, self.version, self.kept, self._newer, self._looks = params, version, kept, newer, 0
    self.changes: list[tuple[int, int]] = []
    self.tokens: Counter[int] = Counter()

  def look(self) -> Any:
    """What a sampler asks before each chunk (`Request.newer`)."""
    self._looks += 1
    found = self._newer and self._newer(self._looks, self.version)
    if found is None:
      return None
    self.params, self.version = found
    self.changes.append((self._looks, self.version))
    return self.params

  def staleness(self, first_step: int) -> dict[str, float]:
    """Metrics of the tokens, whose training begins after so many updates, where policies change."""
    total = sum(self.tokens.values())
    return {} if self._newer is None or not total else {
        "rollout/token_staleness": sum((first_step - version) * n for version, n in self.tokens.items()) / total,
        "rollout/max_token_staleness": float(first_step - min(self.tokens)),
        "rollout/policy_changes": float(len(self.changes))}


def write(workdir: Path, number: int, sampled: Sampled, first_step: int) -> None:
  """Notes that rollout `number` is trained on after `first_step` updates, and by which policies it was sampled."""
  line: dict[str, Any] = {"rollout": number, "policy": sampled.version, "update": first_step + 1}
  if sampled.changes:
    line["changes"] = list(sampled.changes)
  if sampled.kept:
    line["kept"] = sampled.kept
  with (workdir / NAME).open("a", encoding="utf-8") as file:
    file.write(json.dumps(line) + "\n")


def read(path: str | Path, max_staleness: int, in_flight: bool = True) -> dict[int, Sampled]:
  """{number of a rollout: what sampled it}.

  Raises:
    ConfigError: there is no such file, or it holds what cannot be, or older policies than `max_staleness` allows, or
      changes of the policy within a rollout though not `in_flight`.
  """
  found = {}
  try:
    text = Path(path).expanduser().read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as e:
    raise ConfigError(f"rollout.schedule is {str(path)!r}, which cannot be read ({e}). Give the {NAME} in the workdir "
                      "of a run with rollout.max_staleness.") from e
  for place, line in enumerate(text.splitlines(), 1):
    try:
      row = json.loads(line)
      number, version, first = (int(row[key]) for key in ("rollout", "policy", "update"))
      changes, kept = [(int(look), int(newer)) for look, newer in row.get("changes", ())], int(row.get("kept", 0))
    except (ValueError, KeyError, TypeError) as e:
      raise ConfigError(f"rollout.schedule {path}:{place}: {line[:80]!r} is no line of a {NAME}, such as "
                        '{"rollout": 3, "policy": 2, "update": 4}.') from e
    if not 0 <= first - 1 - version <= max_staleness:
      raise ConfigError(f"rollout.schedule {path}:{place}: update {first} trains on what the policy after {version} "
                        f"updates sampled, and rollout.max_staleness is {max_staleness}. Use the one of the run that "
                        "wrote it.")
    looks, versions = [0, *(look for look, _ in changes)], [version, *(newer for _, newer in changes)]
    if any(sorted(set(part)) != part for part in (looks, versions)) or versions[-1] >= first:
      raise ConfigError(f"rollout.schedule {path}:{place}: found policy {version} with the changes {changes}, for "
                        f"update {first}; chunks and policies grow, and a policy is of fewer updates.")
    if (changes or kept) and not in_flight:
      what = "its policy changes within a rollout" if changes else "texts go on in rows that were held"
      raise ConfigError(f"rollout.schedule {path}:{place}: {what}. Use --config.rollout.in_flight=True.")
    found[number] = Sampled(version, changes, kept)
  return found
