"""A cache in pages: its size, and attention's work, are those of the texts there are, and not of rows as long as the
longest (Kwon et al. 2023).

The token of position p stands in slot p % PAGE of its row's page p // PAGE. Attention reads each page once, with the
query of the row that has it, whatever the order of pages, and adds up what a row's pages give.

B rows, Q pages of PAGE slots, J of a row.
"""

from typing import Any, NamedTuple

import jax

# Slots of a page.
PAGE = 64


class Table(NamedTuple):
  """Whose the pages are. Who decodes sees to it that rows have pages for all their tokens and the next one."""

  # int32: of each row its pages in their order; a number beyond the last page for those that it does not have.
  pages_BxJ: Any
  # int32: of each page its row, a number beyond the last if it has none, and the position of its first slot.
  owners_Q: Any
  firsts_Q: Any

  def per_page(self, of_rows: jax.Array) -> jax.Array:
    """[B, …] as [Q, …]: to each page what its row has."""
    return of_rows.at[self.owners_Q].get(mode="clip")

  def per_row(self, of_pages: jax.Array, fill: float) -> jax.Array:
    """[Q, …] as [B, J, …], in the order of each row's pages, so that sums of them do not depend on where they lie."""
    return of_pages.at[self.pages_BxJ].get(mode="fill", fill_value=fill)


class Seen(NamedTuple):
  """What the newest token of each row sees in one layer, itself included; with a table by page in place of row."""

  keys_BxGxSxK: jax.Array
  values_BxGxSxK: jax.Array
  # Whether the slot holds a token that it sees.
  seen_BxS: jax.Array
  table: Table | None = None

  @property
  def positions(self) -> int:
    """How many a text of a layer that sees all may have."""
    return self.seen_BxS.shape[1] * (1 if self.table is None else self.table.pages_BxJ.shape[1])
