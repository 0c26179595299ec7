"""The interface: models by name or dotted path."""

import jax.numpy as jnp
import pytest

from models import api
from models.transformer import Transformer
from trainer.config import defaults
from trainer.errors import ConfigError


class MyModel(Transformer):
  """A user's own model."""

  @staticmethod
  def validate(cfg_model, seq_len):
    raise ConfigError(f"mine: {seq_len}")


def make(cfg_model):
  return api.make_model(cfg_model, vocab_size=30, params_dtype=jnp.float32, compute_dtype=jnp.float32)


def test_dotted_path_to_a_users_class():
  m = defaults().model
  m.name = f"{__name__}.MyModel"
  assert type(make(m)) is MyModel
  with pytest.raises(ConfigError, match="mine: 7"):
    api.validate(m, 7)


def test_who_generates_has_what_a_text_is_gone_on_with():
  class Scores:
    def apply(self, params, batch):
      return None

  assert api.generates(make(defaults().model)) and not api.generates(Scores())


@pytest.mark.parametrize("name", ["llama", "no_such_package.Model", "models.transformer.Missing", ""])
def test_unknown_names(name):
  m = defaults().model
  m.name = name
  with pytest.raises(ConfigError, match="Allowed: transformer, or the dotted path"):
    make(m)
