"""A model of a user's own."""

from models.transformer import Transformer


class Louder(Transformer):
  """Its hidden states are twice as large."""

  def apply(self, *args, **options):
    out = super().apply(*args, **options)
    return out._replace(hidden=2 * out.hidden)
