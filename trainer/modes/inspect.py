"""What a run would train on, before it does: `python -m trainer --config=… --workdir=DIR --mode=inspect`.

Prints the data's statistics, the first rows of the first batch with each token's weight, segment and position, and
where each parameter would live; writes the same as WORKDIR/inspect.html, with a histogram of the documents' lengths.
Where completions are sampled, the rows are the first prompts, with what rewards are told of them. Trains nothing,
samples nothing and makes no parameter. The page shows images as they reach the model, resized and augmented.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from markupsafe import Markup
from ml_collections import ConfigDict

from input_pipeline import loader, prompt_data
from input_pipeline.batches import check_ids
from input_pipeline.examples import roles
from input_pipeline.tokenizer.tokenizer import Tokenizer, make_tokenizer
from models import api
from trainer import program as program_lib
from trainer import strategies, tree
from trainer import workdir as workdir_lib
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.generate import image_tokens
from trainer.report import pages
from trainer.rollouts import reward_pool
from trainer.telemetry import terminal
from trainer.telemetry.terminal import BOLD, DIM, OFF, PARTLY, TRAINED, say

ROWS = 3
# A token's text is found by decoding it after so many others: some tokenizers write the first of a text differently.
CONTEXT = 6
# A terminal shows so many of a row's segments; short documents are packed by the hundred.
SEGMENTS = 6
# Runs of at least so many equal tokens, an image's say, are shown as one.
RUN = 8


class Token(NamedTuple):
  """One place of a row. `weight`: of the loss of predicting it; `prompt`: the segment it sees besides its own, or 0;
  `role`: what its segment is, one of `roles.NAMES`, or ""."""

  text: str
  id: int
  weight: float
  segment: int
  position: int
  prompt: int = 0
  role: str = ""


class InspectedRows(NamedTuple):
  """What is to be seen: rows of tokens, each with a caption (or "") and the images of each of its segments, and what
  they are; all documents' lengths."""

  rows: list[list[Token]]
  captions: list[str]
  images: list[Mapping[int, Sequence[np.ndarray]]]
  lead: str
  stats: str
  lengths: np.ndarray


def inspect(config: Mapping, workdir: str | Path, rows: int = ROWS) -> Path:
  """Prints and writes what training with `config` in `workdir` would begin with; returns the page's path.

  Raises:
    ConfigError, DataError: as training would.
  """
  resolved, notes = program_lib.resolve(config)
  strategies.check(resolved)
  workdir = Path(workdir).expanduser().absolute()
  processes.join(resolved.processes)
  mesh = mesh_lib.training_mesh(resolved)
  program_lib.settle(resolved, jax.default_backend())
  workdir_lib.prepare(resolved, workdir)
  rolls_out = resolved.rollout.num_prompts > 0
  learns = strategies.learns(resolved)
  texts = prompt_data.prompt_texts(resolved) if rolls_out else loader.train_texts(resolved, learns)
  tokenizer = make_tokenizer(resolved.tokenizer, texts, workdir / "tokenizer.json", True)
  model = api.make_model(resolved.model, vocab_size=tokenizer.vocab_size, params_dtype=resolved.precision.params,
                         compute_dtype="float32", remat=resolved.remat)
  if rolls_out:
    shown = shown_prompts(resolved, tokenizer, rows)
  else:
    data = loader.make_train_data(resolved, tokenizer, learns=learns, workdir=workdir, progress=True,
                                  share_prompts=program_lib.shares_prompts(resolved, model, mesh))
    batch = check_ids(data.batch(0, slice(0, rows)), model.vocab_size)
    shown = InspectedRows([row_tokens(batch, row, tokenizer) for row in range(len(batch["tokens"]))],
                  [""] * len(batch["tokens"]),
                  [row_images(batch, row, image_tokens.layout_of(model)) for row in range(len(batch["tokens"]))],
                  "The first rows.", terminal.stats(data.stats()),
                  data.document_lengths())
  parameters = parameter_table(model.abstract_params(), mesh, resolved.sharding_rules)

  for note in (*notes, *model.reasons):
    print(note)
  print(f"\n{shown.stats}\n\n{histogram_text(shown.lengths, resolved.seq_len)}\n")
  say(f"{shown.lead} {TRAINED}trained{OFF} {PARTLY}trained with another weight than 1{OFF} {DIM}not trained{OFF}\n")
  for row, (tokens, caption) in enumerate(zip(shown.rows, shown.captions, strict=True)):
    say("\n".join([row_text(tokens, row), *([pages.visible(caption)] if caption else [])]))
  print(f"\n{token_table(shown.rows[0])}\n\n{parameters}")
  page = pages.save(workdir / "inspect.html", html_page(shown, parameters))
  print(f"\nThe same, with every token: {page}")
  return page


def shown_prompts(config: ConfigDict, tokenizer: Tokenizer, rows: int) -> InspectedRows:
  """The first prompts as the policy is asked them, captioned with the columns that rewards get.

  Raises:
    ConfigError, DataError: as rollouts would.
  """
  r = config.rollout
  prompts = prompt_data.make_prompt_data(config, tokenizer, True)
  reward_pool.make_scorer(config, prompts)
  items = [prompts.item(i) for i in range(min(rows, prompts.num_items or rows))]
  tokens = [[Token(text, int(i), 0.0, 1, place) for place, (text, i) in enumerate(
      zip(token_texts(item.prompt.ids.tolist(), tokenizer), item.prompt.ids, strict=True))] for item in items]
  captions = [f"{item.prompt.where}, columns for rewards: {json.dumps(item.columns, ensure_ascii=False)}"
              for item in items]
  judged = [*r.rewards, *[f"environment {r.environment}"] * (r.environment is not None)]
  lead = (f"The first prompts of the stream. A rollout takes {r.num_prompts} and samples {r.group_size} completions of "
          f"each, of at most {r.max_new_tokens} tokens, at temperature {r.temperature:g}; they are judged by "
          f"{', '.join(judged)} and serve {r.updates * r.epochs} step(s). What is sampled is trained, prompts are not.")
  lengths = np.array([len(item.prompt.ids) for item in prompts.every_item()])
  images = [{1: item.prompt.images} for item in items]
  return InspectedRows(tokens, captions, images, lead, terminal.stats(prompts.stats()), lengths)


def row_tokens(batch: Mapping[str, np.ndarray], row: int, tokenizer: Tokenizer) -> list[Token]:
  """The tokens of a row, without its padding."""
  segments, given = batch["segment_ids"][row], batch.get("segment_roles", np.zeros((row + 1, 0), int))[row]
  columns = [batch[key][row] for key in ("tokens", "loss_weights", "segment_ids", "positions")]
  columns.append(batch["prompt_ids"][row] if "prompt_ids" in batch else np.zeros_like(segments))
  columns = [column[segments > 0].tolist() for column in columns]
  called = {segment: roles.NAMES.get(int(role), "") for segment, role in enumerate(given, 1)}
  texts = token_texts(columns[0], tokenizer)
  return [Token(text, id, weight, segment, position, prompt, called.get(segment, ""))
          for text, id, weight, segment, position, prompt in zip(texts, *columns, strict=True)]


def row_images(batch: Mapping[str, np.ndarray], row: int,
               layout: image_tokens.Layout | None) -> dict[int, list[np.ndarray]]:
  """{segment: its images, uint8 [H, W, 3]} of a row, in their order."""
  images, numbers = image_tokens.images_of(layout, batch, row)
  places = sorted({(number, segment) for number, segment in
                   zip(numbers.tolist(), batch["segment_ids"][row].tolist(), strict=True) if number > 0})
  return {segment: [images[number - 1] for number, of in places if of == segment]
          for segment in sorted({of for _, of in places})}


def in_short(tokens: Sequence[Token]) -> list[Token]:
  """The tokens, with each run of RUN or more of one id, weight and segment as its first, which says how many it is."""
  shown: list[Token] = []
  for _, run in itertools.groupby(tokens, key=lambda token: (token.id, token.weight, token.segment)):
    same = list(run)
    shown += same if len(same) < RUN else [same[0]._replace(text=f"⟨{same[0].text or same[0].id} × {len(same)}⟩")]
  return shown


def token_texts(ids: list[int], tokenizer: Tokenizer) -> list[str]:
  """What each token adds to the text. Of a character that several tokens make up, the last one has it."""
  texts, begin = [], 0  # ids[begin:end] are decoded; earlier ones no longer matter
  for end in range(1, len(ids) + 1):
    before = tokenizer.decode(ids[begin:end - 1], skip_special=False)
    now = tokenizer.decode(ids[begin:end], skip_special=False)
    complete = before.rstrip("\ufffd")
    texts.append("" if now.endswith("\ufffd") and end < len(ids) else now[len(complete):])
    if end - begin > CONTEXT and not now.endswith("\ufffd"):
      begin = end - CONTEXT // 2
  return texts


def row_text(tokens: list[Token], row: int) -> str:
  """A row for a terminal: its first SEGMENTS segments one after another, coloured by weight."""
  lines, segments = [], list(dict.fromkeys(token.segment for token in tokens))
  for segment in segments[:SEGMENTS]:
    mine = [token for token in tokens if token.segment == segment]
    trained = sum(token.weight > 0 for token in mine)
    what = _called(segment, tokens)
    lines.append(f"{BOLD}row {row}, {what}: {len(mine)} tokens, {trained} trained{OFF}")
    lines.append("".join(f"{_colour(token.weight)}{pages.visible(token.text)}{OFF}" for token in in_short(mine)))
  if len(segments) > SEGMENTS:
    lines.append(f"… {len(segments) - SEGMENTS:,} more segments of row {row} are on the page.")
  return "\n".join(lines)


def _called(segment: int, tokens: list[Token]) -> str:
  """A segment by its number, and what it is in its document, or whose prompt, if it is one that others share."""
  role = next((t.role for t in tokens if t.segment == segment), "")
  label = prompt_of([t.segment for t in tokens if t.prompt == segment]) or role
  return f"segment {segment}{label and ', '}{label}"


def prompt_of(users: Iterable[int]) -> str:
  """What a segment is that these, each once or more, see as their prompt; "" if there are none."""
  numbers = sorted(set(users))
  return f"the prompt of segments {', '.join(map(str, numbers))}" if numbers else ""


def token_table(tokens: list[Token], limit: int = 48) -> str:
  """The first tokens of a row, one a line; beyond the first few, those around each change of weight or segment."""
  changes = [i for i in range(1, len(tokens))
             if (tokens[i].weight, tokens[i].segment) != (tokens[i - 1].weight, tokens[i - 1].segment)]
  around = (j for i in changes for j in range(i - 2, i + 2) if 0 <= j < len(tokens))
  chosen = sorted({*range(min(16, len(tokens))), *around})
  lines = [f"{'place':>6} {'segment':>7} {'position':>8} {'weight':>7} {'id':>7}  token"]
  previous = -1
  for i in chosen[:limit]:
    if i > previous + 1:
      lines.append(f"{'…':>6}")
    t, previous = tokens[i], i
    lines.append(f"{i:>6} {t.segment:>7} {t.position:>8} {t.weight:>7.3g} {t.id:>7}  {t.text!r}")
  if previous < len(tokens) - 1:
    lines.append(f"{'…':>6} {len(tokens) - 1 - previous} more in this row; all of them are on the page.")
  return "\n".join(lines)


def parameter_table(abstract: Any, mesh: Any, rules: Any) -> str:
  """Parameters × sharding: path, shape, dtype, axes, bytes on each device."""
  shardings, notes = mesh_lib.param_shardings(abstract, mesh, rules)
  placed, rows = tree.flatten(shardings), [("parameter", "shape", "dtype", "sharded over", "MB a device")]
  total = local = 0
  for path, leaf in tree.flatten(abstract).items():
    part = int(np.prod(placed[path].shard_shape(leaf.shape))) * leaf.dtype.itemsize
    axes = ", ".join("·" if axis is None else str(axis) for axis in placed[path].spec) or "·"
    rows.append((path, "×".join(map(str, leaf.shape)), leaf.dtype.name, axes, f"{part / 1e6:.3f}"))
    total, local = total + leaf.size, local + part
  mesh_shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
  whole = f"{total:,} parameters, {local / 1e6:.3f} MB on each of {mesh.size} device(s) ({mesh_shape})"
  return "\n".join([terminal.table(rows, left=range(4)), whole, *notes])


def histogram_bins(lengths: np.ndarray, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
  """(documents in each bin [count], edges [count + 1]) of the documents' lengths in tokens."""
  return np.histogram(lengths, bins=count, range=(0, int(lengths.max())))


def histogram_text(lengths: np.ndarray, seq_len: int) -> str:
  """The lengths' quantiles and their histogram, for a terminal."""
  quantiles = np.quantile(lengths, [0, 0.25, 0.5, 0.75, 0.95, 1]).round().astype(int)
  counts, edges = histogram_bins(lengths)
  lines = [f"document lengths in tokens: min {quantiles[0]}, quartiles {quantiles[1]}, {quantiles[2]}, {quantiles[3]}, "
           f"95% {quantiles[4]}, max {quantiles[5]}; longer than seq_len={seq_len}: {np.mean(lengths > seq_len):.1%}"]
  for count, left, right in zip(counts, edges, edges[1:], strict=False):
    lines.append(f"{left:>9,.0f} to {right:>9,.0f} {count:>9,} {'█' * round(40 * count / counts.max())}")
  return "\n".join(lines)


def html_page(shown: InspectedRows, parameters: str) -> str:
  """The page: every token with its numbers under the pointer and in a table."""
  counts, edges = histogram_bins(shown.lengths)
  lengths = pages.bars([(f"{left:,.0f} to {right:,.0f}", count, f"{count:,}") for count, left, right in
                        zip(counts.tolist(), edges, edges[1:], strict=False)], "tokens in a document")
  rows = [part for number in range(len(shown.rows)) for part in _row_elements(shown, number)]
  says = ("not trained", "trained")
  return pages.page("Weft: what is trained", pages.tag("h1", "What is trained"), pages.tag("pre", shown.stats), lengths,
                    pages.section("rows", "The first rows", pages.tag("p", f"{shown.lead} Point at a token for its "
                                                                      "numbers."), *rows),
                    pages.section("parameters", "Parameters", pages.tag("pre", parameters)),
                    columns=[dict(key="weights", label="weight", kind="high", says=says, scale=1.0)])


def _row_elements(shown: InspectedRows, number: int) -> list[Markup]:
  """A row of the page: its segments, its caption and its table."""
  tokens, parts = shown.rows[number], []
  for segment, some in itertools.groupby(in_short(tokens), key=lambda token: token.segment):
    mine, short = [token for token in tokens if token.segment == segment], list(some)
    parts += [pages.tag("h3", f"row {number}, {_called(segment, tokens)}: {len(mine)} tokens, "
                              f"{sum(token.weight > 0 for token in mine)} trained"),
              *map(pages.picture, shown.images[number].get(segment, ())),
              pages.tokens([pages.token(t.text, t.weight > 0) for t in short], {"weights": [t.weight for t in short]},
                           f"row {number}", where=f"segment {segment}", ids=[t.id for t in short],
                           positions=[t.position for t in short])]
  parts += [pages.tag("p", pages.visible(shown.captions[number]))] * bool(shown.captions[number])
  cells = [(i, t.segment, t.position, f"{t.weight:g}", t.id, repr(t.text)) for i, t in enumerate(tokens)]
  head = ("place", "segment", "position", "weight", "id", "token")
  return [*parts, pages.details("as a table", pages.table(head, cells, f"row {number}"))]


def _colour(weight: float) -> str:
  return TRAINED if weight == 1 else PARTLY if weight > 0 else DIM
