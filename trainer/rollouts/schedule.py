"""Which policy sampled which rollout, and which update trained on it first: `schedule.jsonl` of a workdir.

Where sampling and training go on at once, that is all that the clock decides; a run that follows it computes the same
bits (`rollout.schedule`). Free of JAX.
"""

import json
from pathlib import Path

from trainer.errors import ConfigError

# A line for each rollout when its training begins; of several with the same number the last one counts.
NAME = "schedule.jsonl"


def write(workdir: Path, number: int, version: int, first_step: int) -> None:
  """Notes that rollout `number`, of the policy after `version` updates, is trained on after `first_step` updates."""
  line = {"rollout": number, "policy": version, "update": first_step + 1}
  with (workdir / NAME).open("a", encoding="utf-8") as file:
    file.write(json.dumps(line) + "\n")


def read(path: str | Path, max_staleness: int) -> dict[int, int]:
  """{number of a rollout: updates that the policy had had that sampled it}.

  Raises:
    ConfigError: there is no such file, or it holds what cannot be, or older policies than `max_staleness` allows.
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
    except (ValueError, KeyError, TypeError) as e:
      raise ConfigError(f"rollout.schedule {path}:{place}: {line[:80]!r} is no line of a {NAME}, such as "
                        '{"rollout": 3, "policy": 2, "update": 4}.') from e
    if not 0 <= first - 1 - version <= max_staleness:
      raise ConfigError(f"rollout.schedule {path}:{place}: update {first} trains on what the policy after {version} "
                        f"updates sampled, and rollout.max_staleness is {max_staleness}. Use the one of the run that "
                        "wrote it.")
    found[number] = version
  return found
