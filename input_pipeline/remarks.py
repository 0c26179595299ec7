"""What is counted of documents as they are made, and told at the start: one line for each kind, with the count."""

from collections import Counter
from collections.abc import Iterable

from input_pipeline import once

# (kind, what of it), of one document.
Remark = tuple[str, str]
LITERAL, ACROSS, PROMPT, CHANGED, CUT = "literal", "across", "prompt", "changed", "cut"
# Of each kind: the line, with the documents that have it; and whether people should look at them.
LINES = {
    LITERAL: "{documents} have the characters of special tokens in ordinary text ({details}). They stay ordinary text: "
             "special tokens are recognised only where a chat template writes them.",
    ACROSS: "in {documents} a token reaches over a border of what is trained ({details}). It is trained; a model "
            "whose prompt ends there writes other tokens.",
    PROMPT: "in {documents} the prompt that a model answers ends with what the rendered turn lacks ({details}). What "
            "is trained begins where the two part. Reasoning that such a prompt begins has to be in the turn: use a "
            "template that shows it (chat.template).",
    CHANGED: "in {documents} the template shows trained messages otherwise than the row has them ({details}). What it "
             "shows is trained, the rest is not; use a template that shows it (chat.template), if it matters.",
    CUT: "in {documents} a text is cut at its end to strategy.max_length ({details}). By default that is what lets all "
         "texts of a row fit into seq_len.",
}
SHOWN = 3


class Tally:
  """Counts remarks: `counts` is {kind: {"": documents, what: documents with it}}, for a file of JSON."""

  def __init__(self, counts: dict[str, dict[str, int]] | None = None):
    self.counts = {kind: Counter(some) for kind, some in (counts or {}).items()}

  def add(self, remarks: Iterable[Remark]) -> None:
    """Those of one document."""
    found: dict[str, set[str]] = {}
    for kind, what in remarks:
      found.setdefault(kind, set()).add(what)
    for kind, some in found.items():
      self.counts.setdefault(kind, Counter()).update(["", *sorted(some)])

  def say(self, name: str, documents: int) -> None:
    """One line for each kind that there is, once."""
    for kind, some in sorted(self.counts.items()):
      details = [(what, n) for what, n in Counter(some).most_common() if what]
      shown = ", ".join(f"{what!r} in {n:,}" for what, n in details[:SHOWN])
      more = f" and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
      line = LINES[kind].format(documents=f"{some['']:,} of {documents:,} documents", details=shown + more)
      once.warning("source %r: %s", name, line)
