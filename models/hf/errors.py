"""The one exception of Hugging Face folders."""

from trainer.errors import ConfigError


class HFError(ConfigError):
  """A Hugging Face folder that cannot be read or written exactly.

  The message names the file and the key or tensor, what was found, what is allowed, and what to type next.
  """
