"""Generation on the mesh that trains, with the parameters that are trained: prompts in, token ids and log-probs out.

    sampler = Sampler(model, mesh, rows=64)
    completions = sampler.generate(params, prompts, num_samples=4, max_new_tokens=256, stop_ids=tokenizer.stop_ids)

A batch of `rows` texts is decoded in chunks of steps; between chunks rows that have ended are given to prompts that
wait, so that one long answer does not keep the others' places empty; prompts may also come later (`Request.more`), as
the next turns of conversations do. A prompt is run once for all of its samples. When none waits any more, rows become
fewer as texts end; and the cache grows with the texts, in pages where these may become long
(models/attention/pages.py), so that a step reads little that is not used. Shapes come from few sizes, so that programs
are compiled once for many prompts.

Long prompts may be run in chunks, between which rows go on (trainer/generate/prefill.py), and texts may be kept, so
that of a prompt that begins with one only the rest is run (trainer/generate/kept.py). What prompts that come together
have in common at their beginnings may be run once for them (trainer/generate/beginnings.py).

Prompts may hold images, where the model has a tower for them: `images=[[image, …], …]`, and in the ids the placeholder
tokens that their features take the place of.

What is drawn is a function of (seed, the prompt's ids and images, number of the sample, place in the completion,
parameters): the random bits exactly, whatever the other prompts, their order, `rows`, or the mesh; the logits to
rounding. So a completion that is left off, whoever reads the stream having enough, may go on later as it would have
(`Request.begun`), by other parameters as well.

B rows, N prompts, T tokens of a prompt, M completions begun at a time, C steps of a chunk; L layers with experts, of
which each token goes through k.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import api
from models.sharding import logical_axes
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import beginnings, decoding, image_tokens
from trainer.generate.buckets import power
from trainer.generate.completion import Completion, More, Request, collect, joined
from trainer.generate.decoding import Chunk, State
from trainer.generate.kept import Held, Kept, KeptText
from trainer.generate.prefill import Prefill
from trainer.generate.sampling import Options
from trainer.generate.slots import MIN_SLOTS, NO_ROWS, Rows, Sizes, Texts, Waiting
from trainer.generate.stop_strings import NOTHING, Automaton, StopStrings

# Rows that would take less are not in pages: a model of 0.1 million parameters took 1.25 times as long with them.
MIN_PAGED_BYTES = 2 ** 26


class Sampler:
  """Generates with one model on one mesh.

  With several processes all call `generate` with the same arguments, and all get every completion.

  Args:
    model: see `models.api.Generative`.
    mesh: None: the first device.
    rows: texts decoded at a time; their cache takes rows × (longest prompt + max_new_tokens) × layers × key/value
      heads × head size × 2 numbers. Rounded up to what the mesh divides evenly.
    chunk: the most decoding steps between two looks of the host, which comes sooner if enough rows have ended.
    prefill_tokens: prompts are run together up to so many tokens, padding included.
    prefill_chunk: longer prompts are run so many tokens at a time, between chunks of decoding steps where rows have
      texts; 0: all are run at once.
    record: completions come with the experts of their tokens, if the model has any.

  Attributes:
    compilations: programs compiled so far.
    paged: whether the cache of texts that may become long has pages, so that a step reads as much as they have.
  """

  def __init__(self, model: Any, mesh: Mesh | None = None, *, rows: int = 32, chunk: int = 32,
               prefill_tokens: int = 16384, prefill_chunk: int = 0, record: bool = False):
    if min(rows, chunk, prefill_tokens, prefill_chunk + 1) < 1:
      raise ValueError(f"Sampler: found rows={rows}, chunk={chunk}, prefill_tokens={prefill_tokens}, all at least 1, "
                       f"prefill_chunk={prefill_chunk}, at least 0")
    if not api.generates(model):
      raise ConfigError(f"{type(model).__name__} cannot generate texts: it has no extend() and decode(). Add what "
                        "models/api.py lists under Generative, or remove the evaluators that generate.")
    if mesh is None:
      mesh = mesh_lib.make_mesh({}, jax.devices()[:1])
    self.model, self.mesh, self.chunk = model, mesh, chunk
    self.prefill_tokens, self.prefill_chunk = prefill_tokens, prefill_chunk
    self.compilations, self._record = 0, record and getattr(model, "routing", None) is not None
    self._placement = mesh_lib.make_placement(mesh, sampling=True)
    self._shards = logical_axes.size_of(mesh, self._placement.rules["batch"])
    self.rows = -(-rows // self._shards) * self._shards
    # Measured on CPU alone; on a mesh a row's pages would have to lie where the row does.
    self.paged = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    self._programs: dict[tuple, Callable] = {}

  def generate(self, params: Any, prompts: Sequence[Sequence[int] | np.ndarray], **options: Any) -> list[Completion]:
    """All completions, those of a prompt one after another; `options` are the attributes of a `Request`."""
    return collect(self.stream(params, prompts, Request(**options)))

  def stream(self, params: Any, prompts: Sequence[Sequence[int] | np.ndarray], request: Request
             ) -> Iterator[Completion]:
    """Parts of completions as they are generated; the last of each has a finish_reason, the others "".

    Args:
      params: the model's parameters, wherever they lie.
      prompts: token ids, at least one each. Equal prompts (with equal images) get equal completions.

    Raises:
      ConfigError: values out of range, an empty prompt, ids beyond the vocabulary, texts longer than the model can
        generate; images that do not fit the placeholders or the model.
    """
    how = Options(float(request.temperature), int(request.top_k), float(request.top_p), float(request.min_p))
    how.check()
    if request.kept is not None:
      request.kept.begin()
    texts, stop = self._texts(prompts, request), request.stop
    if not texts.prompts:
      return
    if request.beginnings is not None:
      self._share(texts, params, request.beginnings, request.kept)
    waiting, shards = Waiting(texts, request.in_order, self.prefill_chunk), self._shards
    prefill = Prefill(self._program, image_tokens.layout_of(self.model), params, waiting, self.prefill_tokens, shards,
                      request.kept)
    state, rows = self._first_rows(texts, waiting, request.held)
    if request.held is not None:
      request.held.clear()
    stop_ids = sorted(set(request.stop_ids))
    stops = np.full(power(max(len(stop_ids), 1), 8), -1, np.int32)
    stops[:len(stop_ids)] = stop_ids
    automaton = NOTHING if stop is None else stop.automaton
    numbers = np.array([how.temperature or 1.0, how.top_p, how.min_p], np.float32)
    kind = (how.temperature == 0, how.truncated)
    read = self._program("prepare")(params)
    of_prompts: dict[int, np.ndarray] = {}  # their experts, where these are recorded
    sampled: dict[tuple[int, int], list[Completion]] = {}  # parts of texts that are to be kept
    while not request.until():
      if (len(waiting) or any(rows.owners)) and (newer := request.newer()) is not None:
        read, prefill.params = self._program("prepare")(newer), newer
      more, before = More(), rows.sizes
      if request.more is not None:
        more = request.more(not len(waiting) and not any(rows.owners))
      if len(more.prompts):
        texts = self._texts(more.prompts, dataclasses.replace(request, **more.options))
        waiting.add(texts)
        rows.add(texts)
        rows.grow(len(waiting), self.rows)
        if rows.sizes != before:
          state = self._program("resize", before, rows.sizes)(state, *rows.grown(before))
      while len(waiting) and None in rows.owners:
        if prefill.ready(len(rows.owners)):
          state = self._begin(state, waiting, rows, automaton, of_prompts)
        elif any(rows.owners):  # which do not wait for the next chunk of a long prompt
          break
      if not any(rows.owners):
        if more.coming:
          continue
        return
      before = rows.sizes
      *kept, enough = rows.fit(bool(len(waiting)), more.coming)
      if rows.sizes != before:
        state = self._program("resize", before, rows.sizes)(state, *kept)
      state, chunk = self._program("decode", rows.sizes, (len(stops), automaton.moves_SxC.shape, *kind))(
          read, state, (stops, numbers, np.int32(how.top_k), np.int32(enough)), automaton, rows.table)
      chunk = Chunk(*(None if part is None else np.asarray(part) for part in chunk))
      for row in rows.busy():
        part = self._part(chunk, row, rows, waiting, stops, stop, of_prompts)
        if request.kept is not None and waiting.keep[part.prompt]:
          sampled.setdefault(rows.owners[row], []).append(part)
          if part.finish_reason:
            parts = sampled.pop(rows.owners[row])
            if request.kept.takes(part.finish_reason):
              self._keep(request.kept, state, rows, row, waiting, joined(parts))
        yield part
        rows.counts[row] = chunk.counts_B[row]
        if part.finish_reason:
          rows.end(row)
    if request.held is not None and any(rows.owners):
      request.held.put(state, rows, {waiting.name(*rows.owners[row], rows.counts[row]): row for row in rows.busy()})

  def _texts(self, prompts: Sequence[Sequence[int] | np.ndarray], request: Request) -> Texts:
    """What is asked for, checked; see `stream`."""
    prompts = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    limits = np.broadcast_to(np.asarray(request.max_new_tokens, np.int32), len(prompts))
    if request.num_samples < 1 or min(limits, default=1) < 1:
      raise ConfigError(f"found num_samples={request.num_samples}, max_new_tokens={request.max_new_tokens}; allowed: 1 "
                        "or more.")
    begun = [0] * len(prompts) if request.begun is None else list(request.begun)
    self.check(prompts, limits - np.array(begun, np.int32))
    shown = image_tokens.shown(image_tokens.layout_of(self.model), prompts, request.images, request.prefixes,
                               request.sampled)
    samples = [range(request.num_samples)] * len(prompts) if request.samples is None else list(request.samples)
    seeds = [request.seed] * len(prompts) if isinstance(request.seed, int | str) else list(request.seed)
    kept = [request.kept and request.kept.find(ids, part.digest, self.model.beginning_of_cache)
            for ids, part in zip(prompts, shown, strict=True)]
    keep = [True] * len(prompts) if request.keep is None else list(request.keep)
    return Texts(prompts, shown, samples, limits.tolist(), seeds, begun, kept, keep)

  def _first_rows(self, texts: Texts, waiting: Waiting, held: Held | None) -> tuple[State, Rows]:
    """Rows to begin with; those that are held and have a text of this request have it already."""
    units = {} if held is None else waiting.known(held.names)
    if not units:
      rows = Rows(min(self.rows, power(len(waiting), self._shards)), self._shards, texts, self.chunk,
                  self._in_pages(len(waiting), texts.longest))
      return self._program("empty", rows.sizes)(), rows
    state, rows = held.state, held.rows
    before, busy = rows.sizes, rows.busy()
    rows.go_on(texts, units)
    rows.grow(len(waiting), self.rows)
    if rows.sizes != before or len(units) < len(busy):
      kept, pages = rows.grown(before)
      free = np.array([owner is None for owner in rows.owners])
      state = self._program("resize", before, rows.sizes)(state, np.where(free, before.rows, kept), pages)
    return state, rows

  def _share(self, texts: Texts, params: Any, shared: beginnings.Beginnings, kept: Kept | None) -> None:
    """Runs what prompts that go on from no text have in common; they go on from there. None of them has images."""
    alone = [i for i, text in enumerate(texts.kept) if text is None and texts.shown[i].causal]
    for length, members in beginnings.groups([texts.prompts[i] for i in alone], shared.least):
      one = alone[members[0]]
      ids, shown = texts.prompts[one][:length], texts.shown[one]
      waiting = Waiting(Texts([ids], [shown], [range(1)], [1], [0], [0], [None], [False]), chunk=self.prefill_chunk)
      prefill = Prefill(self._program, image_tokens.layout_of(self.model), params, waiting, self.prefill_tokens,
                        self._shards, None)
      while not prefill.ready(1):
        pass
      _, (_, slots), _, cache, experts = waiting.prefilled
      text = KeptText(ids, shown.digest, cache, slots, *experts)
      for member in members:
        texts.kept[alone[member]] = text
      shared.saved += length * (len(members) - 1)
      if kept is not None:  # which counts each prompt that goes on from there
        kept.run, kept.reused = kept.run + length, kept.reused - length

  def _in_pages(self, count: int, longest: int) -> bool:
    """Whether pages are worth it: rows as long as the longest text would take more than processors keep at hand."""
    make = functools.partial(self.model.empty_cache, min(self.rows, count), longest)
    return self.paged and sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(
        jax.eval_shape(make))) >= MIN_PAGED_BYTES

  def _begin(self, state: State, waiting: Waiting, rows: Rows, automaton: Automaton,
             of_prompts: dict[int, np.ndarray]) -> State:
    """Gives free rows to the next completions that wait, as many as were prefilled; keeps their prompts' experts."""
    free = [row for row, owner in enumerate(rows.owners) if owner is None]
    count = len(rows.owners)
    chosen, sizes, last_NxD, begun, experts = waiting.prefilled
    units = waiting.take(len(free))
    of_prompts |= dict(zip(chosen, experts, strict=False))
    # As many as there are rows, or as are given away at a time.
    M = power(len(units), min(count, power(max(1, count // 8), self._shards)))
    # Rows beyond the last take what there is no completion for.
    rows_M, sources_M, keys_Mx2 = np.full(M, count, np.int32), np.zeros(M, np.int32), np.zeros((M, 2), np.uint32)
    (limits_M, counts_M, strings_M), before = np.zeros((3, M), np.int32), rows.sizes
    for m, (unit, row) in enumerate(zip(units, free, strict=False)):
      rows_M[m], sources_M[m], keys_Mx2[m] = row, chosen.index(unit[0]), waiting.key(*unit)
      limits_M[m], counts_M[m] = waiting.limits[unit[0]], waiting.begun[unit[0]]
      ids = waiting.prompts[unit[0]]
      strings_M[m] = automaton.after(ids[len(ids) - counts_M[m]:])
      rows.begin(row, unit)
    if rows.sizes != before:
      state = self._program("resize", before, rows.sizes)(state, *rows.grown(before))
    begin = self._program("begin", rows.sizes, (*sizes, M))
    return begin(state, last_NxD, begun, (rows_M, sources_M, keys_Mx2, limits_M, counts_M, strings_M), rows.table)

  def _part(self, chunk: Chunk, row: int, rows: Rows, waiting: Waiting, stops: np.ndarray, stop: StopStrings | None,
            of_prompts: dict[int, np.ndarray]) -> Completion:
    """What a chunk of decoding steps has added to the text of a row."""
    drawn = chunk.counts_B[row] - rows.counts[row]
    ids = chunk.tokens_BxC[row, :drawn]
    reason, string = "" if not chunk.done_B[row] else "stop" if ids[-1] in stops else "length", None
    if reason == "length" and stop is not None and chunk.strings_B[row] >= stop.automaton.found:
      reason, string = "stop", stop.strings[chunk.strings_B[row] - stop.automaton.found]
    logprobs, full_logprobs = (part[row, :drawn] for part in (chunk.logprobs_BxC, chunk.full_logprobs_BxC))
    experts = None
    if self._record:
      before_it = () if rows.counts[row] else (of_prompts[rows.owners[row][0]],)
      experts = np.concatenate([*before_it, chunk.experts_BxCxLxk[row, :drawn]])
    return Completion(*rows.owners[row], ids, logprobs, full_logprobs, reason, string, experts,
                      waiting.reused[rows.owners[row][0]])

  def _keep(self, kept: Kept, state: State, rows: Rows, row: int, waiting: Waiting, completion: Completion) -> None:
    """Keeps the text of a row whose completion has ended."""
    prompt = completion.prompt
    # What ended it was drawn, but not run.
    ids = np.concatenate([waiting.prompts[prompt], completion.ids[:-1]])
    slots = power(len(ids), MIN_SLOTS)
    cache = self._program("keep", rows.sizes, (slots,))(state, np.array([row], np.int32), rows.table)
    experts, shown = None if completion.experts is None else completion.experts[:len(ids)], waiting.shown[prompt]
    beginnings = shown.causal and self.model.has_beginnings(len(ids))
    kept.add(KeptText(ids, shown.digest, cache, slots, experts, beginnings))

  def check(self, prompts: Sequence[np.ndarray], max_new_tokens: int | np.ndarray, where: str = "") -> None:
    """Refuses prompts that cannot be completed; `where` precedes the name of the key `max_new_tokens`.

    Raises:
      ConfigError: an empty prompt, ids beyond the vocabulary, texts longer than the model can generate.
    """
    for number, ids in enumerate(prompts):
      if not len(ids):
        raise ConfigError(f"prompt {number} has no tokens; give at least one, e.g. the tokenizer's BOS.")
      if min(ids) < 0 or max(ids) >= self.model.vocab_size:
        raise ConfigError(f"prompt {number} has ids from {min(ids)} to {max(ids)}; the model's vocabulary ends at "
                          f"{self.model.vocab_size - 1}. Use the tokenizer it was trained with.")
    bound, limits = self.model.max_length, np.broadcast_to(max_new_tokens, len(prompts)).tolist()
    new, longest = max(((n, len(ids)) for n, ids in zip(limits, prompts, strict=True)), key=sum, default=(0, 0))
    if bound is not None and longest + new > bound:
      raise ConfigError(
          f"{where}max_new_tokens is {new}, and the longest prompt has {longest} tokens: together more than "
          f"the {bound} that this model can generate. Use at most {max(bound - longest, 0)}, or shorter prompts.")

  # ---------------------------------------------------------------- programs

  def _program(self, name: str, of: Sizes = NO_ROWS, sizes: tuple = ()) -> Callable:
    """The compiled function of that name for a state of these sizes, and further ones."""
    key = (name, *of, sizes)
    with logical_axes.placed(self._placement):
      if key not in self._programs:
        self.compilations += 1
        self._programs[key] = self._jitted(name, of, sizes)

    def call(*args: Any) -> Any:
      with logical_axes.placed(self._placement):
        return self._programs[key](*args)

    return call

  def _jitted(self, name: str, of: Sizes, sizes: tuple) -> Callable:
    if name == "prepare":
      # A program gives copies even of what it gives as it was.
      changes = jax.make_jaxpr(self.model.decoding_params)(self.model.abstract_params()).jaxpr.eqns
      return jax.jit(self.model.decoding_params) if changes else self.model.decoding_params
    if name in ("prefill", "extend"):
      placed = (None, None, NamedSharding(self.mesh, PartitionSpec())) if self._record else None
      run = functools.partial(getattr(decoding, name), self.model, record=self._record)
      return jax.jit(run, donate_argnums=(1, 2) if name == "extend" else (), out_shardings=placed)
    if name == "join":
      return jax.jit(self.model.copied_cache, donate_argnums=0)
    if name == "keep":
      return jax.jit(functools.partial(decoding.keep, self.model, *sizes))
    if name == "room":
      return jax.jit(functools.partial(decoding.room, self.model, *sizes))
    empty = functools.partial(decoding.empty, self.model, *(sizes if name == "resize" else of))
    # Every program lays a state out alike, so that none is compiled anew for another's.
    placed = jax.tree.map(self._sharding, jax.eval_shape(empty))
    if name == "empty":
      return jax.jit(empty, out_shardings=placed)
    if name == "begin":
      return jax.jit(functools.partial(decoding.begin, self.model), donate_argnums=0, out_shardings=placed)
    if name == "resize":
      return jax.jit(functools.partial(decoding.resized, self.model, sizes[1]), out_shardings=placed)
    *_, greedy, truncated = sizes
    options = decoding.DecodeOptions(self.chunk, greedy, truncated, self._record)
    decode = functools.partial(decoding.decode, self.model, options)
    # What the host reads is on every device, so that each process has it.
    return jax.jit(decode, donate_argnums=1, out_shardings=(placed, NamedSharding(self.mesh, PartitionSpec())))

  def _sharding(self, leaf: Any) -> NamedSharding:
    """Keys and values are split by row and head, everything else is on every device."""
    names = (None, "batch", "kv_heads", None, None) if leaf.ndim == 5 else (None,) * leaf.ndim
    return NamedSharding(self.mesh, self._placement.spec(names, leaf.shape))
