"""The token microscope: every token of a batch with the numbers that its loss is made of (docs/observability.md).

They come from the functions that the loss comes from, with the dropout of the update, so that what is summed over
tokens is what was logged. Nothing of the size of the logits is made: the vocabulary is gone through in chunks.

B rows, T places of a row, D hidden size, V vocabulary, C chunks of W entries.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from markupsafe import Markup

from input_pipeline.examples import roles
from models import cpu
from trainer import strategies, update
from trainer.generate import image_tokens
from trainer.modes import inspect
from trainer.report import pages
from trainer.strategies import logprobs, sequences
from trainer.telemetry.row_losses import Rows

# Rows of the page, and tokens on it at most, so that a phone can open it.
MOST_ROWS, MOST_TOKENS = 20, 20_000


class Microscope:
  """Looks at the tokens of batches as the strategy of a run does, in its micro-batches and with its dropout.

  Args:
    run: the run (trainer/run.py); its parameters at the time of each call are those that are used.
  """

  def __init__(self, run: Any, rows: Rows):
    config = run.config
    self._run, self._rows = run, rows
    micro, seed = run.program.options.micro_batch_size, run.program.options.seed

    def look(params, batch, step, *reference):
      def of_micro(part, index):
        return of_tokens(run.model, params, part, update.step_key(seed, step, index), config.strategy, *reference)

      return update.of_micro_batches(of_micro, batch, micro)

    self._look = jax.jit(look, out_shardings=NamedSharding(run.mesh, PartitionSpec()))

  def look(self, batch: dict[str, np.ndarray], step: int) -> dict[str, np.ma.MaskedArray]:
    """Numbers of each token [B, T] in update `step`, by name; masked where a token has none.

    logprobs, entropies, ranks (1: the most likely), top_tokens: of every token that is `predicted`. ref_logprobs,
    ref_log_ratios: with a reference; where its log-probs were computed ahead, of trained tokens alone.
    Of grpo's trained tokens: old_logprobs, ratios (before they are bounded), advantages, clipped (1: a bound took the
    ratio's place), and of sampled ones behavior_logprobs. Of ppo's also old_values and returns.
    """
    found = {name: np.asarray(values) for name, values in self._rows.call(self._look, batch, step).items()}
    read_BxT = np.asarray(predicted(batch)) > 0
    trained_BxT = np.asarray(sequences.completion_mask(batch)) > 0
    where = dict.fromkeys(found, read_BxT) | dict.fromkeys(_OF_TRAINED, trained_BxT)
    if "ref_logprobs" in batch:
      where |= dict.fromkeys(("ref_logprobs", "ref_log_ratios"), trained_BxT)
    return {name: np.ma.array(values, mask=~where[name]) for name, values in found.items()}

  def page(self, title: str, batch: dict[str, np.ndarray], numbers: Mapping[str, np.ma.MaskedArray],
           losses_B: np.ndarray, order: Sequence[int], notes: Sequence[str]) -> str:
    """The page of the first rows of `order`, MOST_ROWS and about MOST_TOKENS at most; says what it leaves out."""
    there = [row for row in order if np.any(batch["segment_ids"][row] > 0)]
    values: list[dict[str, list[Any]]] = []
    left, shown = MOST_TOKENS, []
    for row in there[:MOST_ROWS]:
      if left <= 0:
        break
      part = self._row(batch, numbers, row, float(losses_B[row]), left, values)
      shown.append(part)
      left = MOST_TOKENS - sum(len(one["weights"]) for one in values)
    out = f"The {len(shown)} row(s) with the highest loss of {len(there)}"
    notes = [*notes, f"{out}; all of them are in the file beside this one." if len(shown) < len(there) else
             f"All {len(there)} row(s), the highest loss first.",
             "Underlined: trained. The numbers are those of the loss, before the update was taken."]
    header = pages.tag("header", pages.tag("h1", pages.visible(title)),
                       *(pages.tag("p", pages.visible(note)) for note in notes))
    return pages.page(title, header, *shown, columns=columns(numbers, values))

  def _row(self, batch: Mapping[str, np.ndarray], numbers: Mapping[str, np.ma.MaskedArray], row: int, loss: float,
           most: int, values: list[dict[str, list[Any]]]) -> Markup:
    """A row and its segments, a pair's side by side; adds their numbers to `values`."""
    strategy, layout = strategies.of(self._run.config), image_tokens.layout_of(self._run.model)
    pictures = inspect.row_images(batch, row, layout)
    images_T = image_tokens.images_of(layout, batch, row)[1]
    weights_T = np.where(np.asarray(sequences.completion_mask(batch))[row] > 0, batch["loss_weights"][row], 0.0)
    segments: dict[int, Markup] = {}
    for number in dict.fromkeys(batch["segment_ids"][row][batch["segment_ids"][row] > 0].tolist()):
      places = np.flatnonzero(batch["segment_ids"][row] == number)
      shown = places[:most]
      most -= len(shown)
      of_image = dict(zip(dict.fromkeys(images_T[places][images_T[places] > 0].tolist()), pictures.get(number, ()),
                          strict=False))
      found = {name: pages.listed(column[row][shown]) for name, column in numbers.items() if name != "top_tokens"}
      found["weights"] = pages.listed(weights_T[shown])
      values.append(found)
      instead = [self._text(i) for i in pages.listed(numbers["top_tokens"][row][shown])]
      # Of the segment alone: half a character at another's end is no part of it.
      ids = batch["tokens"][row][shown].tolist()
      tokens = token_box(inspect.token_texts(ids, self._run.tokenizer), images_T[shown].tolist(), of_image, found,
                         f"row {row}, segment {number}", where=f"segment {number} · row {row}", ids=ids,
                         positions=batch["positions"][row][shown].tolist(), instead=list(map(pages.visible, instead)))
      label, left = _label(strategy.data, batch, row, number), len(places) - len(shown)
      segments[number] = pages.tag(
          "article", pages.tag("h3", f"segment {number}{label and ' · '}{label}"),
          pages.pairs(_sums(numbers, row, places, weights_T[places]), "facts"), tokens,
          pages.dim(f"… {left:,} more token(s) of this segment") if left else "")
    size = strategy.sequences_each(self._run.config.strategy)
    shared = set(batch["prompt_ids"][row].tolist()) if "prompt_ids" in batch else set()
    others = [segment for number, segment in segments.items() if number not in shared]
    groups = [[segments[number]] for number in segments if number in shared]
    groups += [others[i:i + size] for i in range(0, len(others), size)]
    source = self._rows.source(batch, row)
    return pages.section(f"row-{row}", pages.visible(f"row {row}{f' · {source}' if source else ''} · loss {loss:.4f}"),
                         *(pages.tag("div", *group, class_="pair") for group in groups))

  def _text(self, token: int | None) -> str:
    return "" if token is None else self._run.tokenizer.decode(np.array([token]), skip_special=False)


# ----------------------------------------------------------------------------------------------
# The numbers.

_OF_TRAINED = ("old_logprobs", "behavior_logprobs", "ratios", "advantages", "clipped", "old_values", "returns")


def predicted(batch: Mapping[str, Any]) -> jax.Array:
  """1.0 for every token that the ones before it in its segment predict, [B, T]: those that a log-prob can be asked of.

  Not the first of a segment, not an image's, and not one that the token before it sees: of prefixes that are read in
  both directions.
  """
  segments_BxT = jnp.asarray(batch["segment_ids"])
  predicted_BxT = (segments_BxT > 0) & (segments_BxT == jnp.roll(segments_BxT, 1, axis=1))
  if "image_index" in batch:
    predicted_BxT &= jnp.asarray(batch["image_index"]) == 0
  if "block_ids" in batch:
    blocks_BxT = jnp.asarray(batch["block_ids"])
    predicted_BxT &= (blocks_BxT == 0) | (blocks_BxT != jnp.roll(blocks_BxT, 1, axis=1))
  return predicted_BxT.astype(jnp.float32).at[:, 0].set(0.0)


def of_tokens(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array, cfg: Any,
              reference: Any = None) -> dict[str, jax.Array]:
  """See `Microscope.look`; [B, T] each, meaningless where that masks them. The arguments are those of a loss."""
  rng = None if "disable_dropout" in cfg and cfg.disable_dropout else rng
  # The functions of the losses, told that every token is of a completion.
  temperature, everywhere = strategies.temperature(cfg), batch | {"loss_weights": predicted(batch)}
  stats, out = sequences.token_stats(model, params, everywhere, rng, ("logprob", "entropy"), temperature)
  of_next = ranks(out.hidden, model.unembedding(params), jnp.roll(batch["tokens"], -1, axis=1),
                  chunk=model.vocab_chunk, num_real_vocab=model.num_real_vocab)
  rank_BxT, top_BxT = (jnp.roll(values, 1, axis=1) for values in of_next)
  found = {"logprobs": stats.logprob, "entropies": stats.entropy, "ranks": rank_BxT, "top_tokens": top_BxT}
  if strategies.needs_reference(cfg):
    found["ref_logprobs"] = sequences.reference_logprobs(model, everywhere, reference, temperature)
    found["ref_log_ratios"] = stats.logprob - found["ref_logprobs"]
  more = strategies.find(cfg.name).token_numbers
  return found if more is None else found | more(batch, stats.logprob, cfg)


def ranks(hidden_BxTxD: jax.Array, kernel_DxV: jax.Array, targets_BxT: jax.Array, *, chunk: int,
          num_real_vocab: int | None) -> tuple[jax.Array, jax.Array]:
  """(1 + how many entries are likelier than the target, the likeliest entry), int32 [B, T].

  A cap on the logits or a temperature would change neither. The arguments are those of `logprobs.token_stats`; chunks
  are the same, so that a kernel that is split over the vocabulary stays where it is.
  """
  V = kernel_DxV.shape[1]
  C = logprobs.num_chunks(V, chunk)
  kernel_DxV = jnp.pad(kernel_DxV, ((0, 0), (0, -V % C)))
  kernel_DxWxC = kernel_DxV.reshape(kernel_DxV.shape[0], -1, C)
  ids_W = jnp.arange(kernel_DxWxC.shape[1]) * C
  real = V if num_real_vocab is None else min(V, num_real_vocab)

  def logits(c):
    kernel_DxW = jax.lax.dynamic_index_in_dim(kernel_DxWxC, c, axis=2, keepdims=False).astype(hidden_BxTxD.dtype)
    z_BxTxW = cpu.einsum("btd,dw->btw", hidden_BxTxD, kernel_DxW)
    return jnp.where(ids_W + c < real, z_BxTxW, -jnp.inf)

  def find(carry, c):
    (top, top_id, target), z_BxTxW = carry, logits(c)
    here = jnp.max(z_BxTxW, axis=-1)
    top_id = jnp.where(here > top, jnp.argmax(z_BxTxW, axis=-1) * C + c, top_id)
    mine = ids_W + c == targets_BxT[..., None]
    return (jnp.maximum(top, here), top_id, jnp.max(jnp.where(mine, z_BxTxW, target[..., None]), axis=-1)), None

  def count(above_BxT, c):
    above_BxTxW = (logits(c) > target_BxT[..., None]) & (ids_W + c != targets_BxT[..., None])
    return above_BxT + jnp.sum(above_BxTxW, axis=-1, dtype=jnp.int32), None

  lowest = jnp.full(targets_BxT.shape, -jnp.inf)
  zeros, chunks = jnp.zeros(targets_BxT.shape, jnp.int32), jnp.arange(C)
  (_, top_BxT, target_BxT), _ = jax.lax.scan(find, (lowest, zeros, lowest), chunks)
  above_BxT, _ = jax.lax.scan(count, zeros, chunks)
  return 1 + above_BxT, top_BxT


# ----------------------------------------------------------------------------------------------
# What the page says of them.


def _label(data: str, batch: Mapping[str, np.ndarray], row: int, segment: int) -> str:
  """What a segment is."""
  users = batch["segment_ids"][row][batch["prompt_ids"][row] == segment] if "prompt_ids" in batch else np.zeros(0, int)
  if prompt := inspect.prompt_of(users.tolist()):
    return prompt
  name = roles.NAMES.get(int(batch["segment_roles"][row, segment - 1]), "") if "segment_roles" in batch else ""
  return f"pair {(segment + 1) // 2}, {name}" if data == "pairs" else name


def _sums(numbers: Mapping[str, np.ma.MaskedArray], row: int, places: np.ndarray,
          weights: np.ndarray) -> list[tuple[str, str]]:
  """(what, value) of a segment: what strategies make of its trained tokens."""
  trained = places[weights > 0]
  facts = [("tokens", f"{len(places):,}"), ("trained", f"{len(trained):,}")]
  if not len(trained):
    return facts
  logps = numbers["logprobs"][row][trained].astype(np.float64)
  facts += [("mean −log p", f"{-np.sum(weights[weights > 0] * logps) / np.sum(weights):.4f}"),
           ("Σ log p", f"{np.sum(logps):.4f}")]
  if "ref_log_ratios" in numbers:
    facts.append(("Σ log p/p_ref", f"{np.sum(numbers['ref_log_ratios'][row][trained].astype(np.float64)):+.4f}"))
  if "advantages" in numbers:
    facts.append(("advantage", f"{numbers['advantages'][row][trained[0]]:+.4f}"))
  return [(what, value.replace("-", "−")) for what, value in facts]


def token_box(texts: Sequence[str], images: Sequence[int], pictures: Mapping[int, np.ndarray],
              values: Mapping[str, Sequence[Any]], label: str, where: str, **lists: Sequence[Any]) -> Markup:
  """The tokens of a segment (pages.tokens), of which those of one image are one. `images`: the image's number, or 0."""
  shown = [i for i, image in enumerate(images) if not image or i == 0 or images[i - 1] != image]
  elements = [pages.token(texts[i], values["weights"][i] > 0) if not images[i] else pages.tag(
      "i", pages.picture(pictures[images[i]]) if images[i] in pictures else "",
      f"⟨image: {images.count(images[i])} tokens⟩", class_="image") for i in shown]
  numbers = {key: [column[i] for i in shown] for key, column in values.items()}
  return pages.tokens(elements, numbers, f"tokens of {label}", where=where,
                      **{key: [one[i] for i in shown] for key, one in lists.items()})


# What can be coloured: key, label, kind (high: the more the stronger; low: the lower below 0; signed: around 0; ratio:
# around 1; rank: above 1), what the two ends of the scale are.
COLUMNS = (
    ("logprobs", "log p", "low", ("certain", "unlikely")),
    ("weights", "weight", "high", ("not trained", "most")),
    ("ref_logprobs", "log p, reference", "low", ("certain", "unlikely")),
    ("ref_log_ratios", "log p/p_ref", "signed", ("less likely", "more likely")),
    ("behavior_logprobs", "log p, sampled", "low", ("certain", "unlikely")),
    ("old_logprobs", "log p, old", "low", ("certain", "unlikely")),
    ("ratios", "ratio p/p_old", "ratio", ("less likely", "more likely")),
    ("advantages", "advantage", "signed", ("worse", "better")),
    ("old_values", "value, old", "signed", ("worse", "better")),
    ("returns", "return", "signed", ("worse", "better")),
    ("clipped", "bounded", "high", ("no", "yes")),
    ("entropies", "entropy", "high", ("certain", "open")),
    ("ranks", "rank", "rank", ("most likely", "far down")),
)
# Log-probs of one page share a scale, to be compared; the largest value of these, however rare, has the full colour.
_SHARED = ("logprobs", "ref_logprobs", "behavior_logprobs", "old_logprobs")
_WHOLE = ("weights", "advantages", "old_values", "returns", "clipped")
# Scales end no earlier: rounding is not to look like a difference.
_LEAST = {"logprobs": 1.0, "entropies": 0.1, "ranks": math.log(2), "ratios": 0.02, "ref_log_ratios": 0.02}
# Colours are full from this quantile of the page's values on, so that one odd token does not pale the others.
_FULL = 0.98


def columns(keys: Collection[str], values: Sequence[Mapping[str, Sequence[Any]]]) -> list[dict[str, Any]]:
  """What the page can colour, with the value (of ratios and ranks its logarithm) where the colour is full."""
  found: list[dict[str, Any]] = [
      dict(key=key, label=label, kind=kind, says=says, scale=_scale(key, kind, values))
      for key, label, kind, says in COLUMNS if key == "weights" or key in keys]
  shared = max((column["scale"] for column in found if column["key"] in _SHARED), default=1.0)
  return [column | {"scale": shared} if column["key"] in _SHARED else column for column in found]


def _scale(key: str, kind: str, values: Sequence[Mapping[str, Sequence[Any]]]) -> float:
  numbers = [x for part in values for x in part.get(key, ()) if isinstance(x, int | float)]
  if kind in ("ratio", "rank"):
    numbers = [math.log(max(x, 1e-30)) for x in numbers]
  sizes = np.abs(np.array(numbers or [0.0], np.float64))
  most = sizes.max() if key in _WHOLE else np.quantile(sizes, _FULL)
  return float(f"{max(most, _LEAST.get(key, 1e-6)):.4g}")
