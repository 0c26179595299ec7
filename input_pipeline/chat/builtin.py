"""The chat templates that come with Weft, and the choice of one by the config."""

import datetime
from pathlib import Path

from ml_collections import ConfigDict

from input_pipeline.chat.template import ChatTemplate, load_template, template_of
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


def find_template(chat: ConfigDict, tokenizer: Tokenizer) -> ChatTemplate | None:
  """The template that the config's section `chat` names, else the tokenizer's own; None if it has none.

  Raises:
    ConfigError: no such template, or a date that is none.
    DataError: it is not valid.
  """
  try:
    date = datetime.date.fromisoformat(chat.date)
  except (TypeError, ValueError) as e:
    raise ConfigError(f"chat.date is {chat.date!r}; expected a day as '2025-01-01'.") from e
  if not chat.template:
    return template_of(tokenizer, date)
  path = Path(chat.template)
  if path.suffix != ".jinja":
    path = TEMPLATES / f"{chat.template}.jinja"
    if chat.template not in template_names():
      raise ConfigError(f"chat.template is {chat.template!r}; allowed: {', '.join(template_names())}, or the path of a "
                        ".jinja file.")
  elif not path.is_file():
    raise ConfigError(f"chat.template: {chat.template!r} does not exist. Give the path of a template's file, or one of "
                      f"{', '.join(template_names())}.")
  return load_template(path, special_tokens=tokenizer.named_tokens, date=date)


def template_names() -> list[str]:
  """The templates that come with Weft."""
  return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def no_template(what: str) -> ConfigError:
  """The error where `what` needs a chat template, and there is none."""
  return ConfigError(f"{what}, but the tokenizer has no chat template. Set --config.chat.template to one of "
                     f"{', '.join(template_names())} (plain needs no tokens but BOS and EOS), or to a .jinja file.")
