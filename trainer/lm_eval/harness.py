"""A model of ours as lm-evaluation-harness sees models: `lm_eval.api.model.LM`, without PyTorch.

Imported only where the package lm_eval is there (trainer/lm_eval/command.py). Texts become tokens as they do in
training: BOS where the run's texts begin with one, and no special token recognised in a text, unless it is what a chat
template has written. Log-probs are those of the trainer (trainer/strategies/logprobs.py): no array [B, T, V].

B rows, T tokens of a row, K targets of a row.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from input_pipeline.batches import check_ids
from trainer.distributed.mesh import batch_sharding, check_batch, place
from trainer.errors import ConfigError
from trainer.generate import image_tokens
from trainer.generate.buckets import bucket, power
from trainer.generate.command import Loaded
from trainer.generate.sampler import Sampler
from trainer.generate.slots import MIN_LENGTH
from trainer.generate.stop_strings import StopStrings
from trainer.strategies import logprobs

# What a task may say of how texts are generated; the first of those that mean the same counts.
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_GENERATION = (*_NEW_TOKENS, "until", "do_sample", "temperature", "top_k", "top_p", "min_p")


class Harness(TemplateLM):
  """Scores and generates with the parameters that it is given.

  Args:
    loaded: the model; its `origin` is its name in what lm_eval keeps.
    mesh: that the parameters are on.
    head: ids that texts begin with: BOS, say, or none.
    max_length: of what the model sees, in tokens; longer texts lose their beginning.
    batch_size: texts at a time.

  Raises:
    ConfigError: a batch size that the mesh does not divide, a tokenizer with neither BOS nor EOS.
  """

  max_gen_toks = 256

  def __init__(self, loaded: Loaded, mesh: Any, *, head: Sequence[int], max_length: int, batch_size: int):
    super().__init__()
    model, tokenizer = loaded.model, loaded.tokenizer
    check_batch(mesh, batch_size, "batch_size")
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
      raise ConfigError("the tokenizer has neither a BOS nor an EOS token: there is nothing that a text without a "
                        "context could follow.")
    self.params, self.name, self.max_length, self.batch_size = loaded.params, loaded.origin, max_length, batch_size
    self._model, self._texts, self._prompter, self._mesh = model, tokenizer, loaded.prompter, mesh
    self._head = list(head)
    self._in_chat, self._layout = False, image_tokens.layout_of(model)
    self._sharding = batch_sharding(mesh)
    self._score = jax.jit(functools.partial(_score, model), out_shardings=NamedSharding(mesh, PartitionSpec()))
    self._sampler: Sampler | None = None

  # ---------------------------------------------------------------- texts and tokens

  @property
  def eot_token_id(self) -> int:
    return self._texts.bos_id if self._texts.eos_id is None else self._texts.eos_id

  @property
  def prefix_token_id(self) -> int:
    """What a text without a context follows."""
    return self.eot_token_id if self._texts.bos_id is None else self._texts.bos_id

  @property
  def tokenizer_name(self) -> str:
    return self._texts.fingerprint.replace("/", "_")

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
    """Ids; with BOS where the run's texts have it, or as `add_special_tokens` says."""
    if self._in_chat:
      ids = self._texts.encode_rendered(string).tolist()
      begins = bool(ids) and ids[0] == self._texts.bos_id  # the template has written it
      return ids if begins or add_special_tokens is False else self._head + ids
    return ([] if add_special_tokens is False else self._head) + self._texts.encode_batch([string])[0].tolist()

  def chat_template(self, chat_template: bool | str = False) -> str:
    if isinstance(chat_template, str):
      raise ConfigError(f"the chat template {chat_template!r} is asked for by name; give --template.")
    return self._prompter.template.source if chat_template and self._prompter.template else ""

  def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """The text of a conversation that the assistant is to go on with; from now on all texts are such.

    Args:
      add_generation_prompt: False: the last message is the beginning of the assistant's answer.
    """
    self._in_chat = True
    if add_generation_prompt:
      return self._prompter.messages(chat_history).text
    return self._prompter.messages(chat_history[:-1]).text + chat_history[-1]["content"]

  # ---------------------------------------------------------------- log-probs

  def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False,
                            **kwargs: Any) -> list[tuple[float, bool]]:
    """(Σ log p of the continuation's tokens, whether each is the likeliest) of (texts, context, continuation)."""
    found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)  # of no token
    # Options of one token have the same input, which is run once.
    rows: dict[tuple, list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
      if not context:
        raise ConfigError(f"request {number} has no context token; lm_eval gives at least one.")
      if len(continuation) > self.max_length:
        raise ConfigError(f"request {number} scores {len(continuation)} tokens, more than max_length="
                          f"{self.max_length}. Raise --max_length.")
      if continuation:
        joined = (*context, *continuation)[-(self.max_length + 1):]
        rows.setdefault((joined[:-1], len(continuation)), []).append(number)
    order = sorted(rows, key=lambda key: (-len(key[0]), -len(rows[key])))
    bar = tqdm(total=len(requests), desc="log-probs", disable=disable_tqdm or jax.process_index() > 0)
    for begin in range(0, len(order), self.batch_size):
      part = order[begin:begin + self.batch_size]
      last = [[requests[number][2][-1] for number in rows[key]] for key in part]
      for key, values in zip(part, self._run(part, last), strict=True):
        for number, (total, greedy) in zip(rows[key], values, strict=True):
          found[number] = total, greedy
        bar.update(len(rows[key]))
    bar.close()
    for (texts, _, _), answer in zip(requests, found, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, answer)
    return found

  def _run(self, part: list[tuple], last: list[list[int]]) -> Iterator[list[tuple[float, bool]]]:
    """Of each (input, tokens that are scored), with each of its last targets."""
    B, K = self.batch_size, power(max(map(len, last)), 1)
    T = min(bucket(len(part[0][0]), MIN_LENGTH), self.max_length)
    shown = [image_tokens.of_text(self._layout, ids, (), len(ids) + 1 - count, "a request") for ids, count in part]
    batch = image_tokens.batch_of_texts(self._layout, B, T, self._texts.pad_id, [ids for ids, _ in part], shown)
    targets_BxT, last_BxK = np.zeros((B, T), np.int32), np.zeros((B, K), np.int32)
    for row, ((ids, count), some) in enumerate(zip(part, last, strict=True)):
      size = len(ids)
      batch["loss_weights"][row, size - count:size] = 1
      targets_BxT[row, :size - 1], last_BxK[row, :len(some)] = ids[1:], some
    batch = check_ids(batch, self._model.vocab_size) | dict(targets=targets_BxT, last_targets=last_BxK)
    values_BxKx2 = np.asarray(self._score(self.params, place(batch, self._sharding)), np.float64)
    for values_Kx2, some in zip(values_BxKx2, last, strict=False):
      yield [(float(total), bool(greedy > 0.5)) for total, greedy in values_Kx2[:len(some)]]

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
    """Log-prob of each whole text, behind one BOS (or EOS), in windows of at most max_length tokens."""
    windows, owners = [], []
    for number, (text,) in enumerate(request.args for request in requests):
      for window in utils.get_rolling_token_windows(
          self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length, 1):
        windows.append((None, *utils.make_disjoint_window(window)))
        owners.append(number)
    totals = [0.0] * len(requests)
    for number, (total, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
      totals[number] += total
    for request, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return totals

  # ---------------------------------------------------------------- generation

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """What the model says after each context, up to the first of the strings `until` or the end of the text."""
    if self._sampler is None:
      self._sampler = Sampler(self._model, self._mesh, rows=self.batch_size)
    groups: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
      groups.setdefault(repr(request.args[1]), []).append(number)
    texts = [""] * len(requests)
    for numbers in groups.values():
      options, until, new = _options(requests[numbers[0]].args[1], self.max_gen_toks)
      if new >= self.max_length:
        raise ConfigError(f"a task generates {new} tokens, but max_length is {self.max_length}. Raise --max_length, or "
                          "lower --gen_kwargs=max_gen_toks=…")
      said = self._generate([requests[number].args[0] for number in numbers], options, until, new)
      for number, text in zip(numbers, said, strict=True):
        texts[number] = text
        self.cache_hook.add_partial("generate_until", requests[number].args, text)
    return texts

  def _generate(self, contexts: list[str], options: dict[str, Any], until: tuple[str, ...], new: int) -> list[str]:
    stop = StopStrings(self._texts, until, keep=True)
    # The same context several times (`repeats`) is to be answered in different ways.
    times = collections.defaultdict(itertools.count)
    samples = [[next(times[context])] for context in contexts]
    prompts = [self.tok_encode(context)[-(self.max_length - new):] or [self.prefix_token_id] for context in contexts]
    completions = self._sampler.generate(self.params, prompts, samples=samples, max_new_tokens=new,
                                         stop_ids=self._prompter.stop_ids, **stop.options, **options)
    texts = []
    for completion in completions:
      text = stop.text(completion)
      texts.append(text[:min([place for stop in until if (place := text.find(stop)) >= 0], default=len(text))])
    return texts


def _options(given: Mapping[str, Any], usual: int) -> tuple[dict[str, float], tuple[str, ...], int]:
  """(the sampler's options, strings that end a text, new tokens) of what a task says."""
  if unknown := sorted(given.keys() - set(_GENERATION)):
    logging.warning("Of what the task says on generation, %s is not used.", ", ".join(unknown))
  until = given.get("until") or []
  until = (until,) if isinstance(until, str) else tuple(until)
  new = next((int(given[key]) for key in _NEW_TOKENS if given.get(key) is not None), usual)
  temperature = float(given.get("temperature") or 0.0) if given.get("do_sample", True) else 0.0
  if given.get("do_sample") and given.get("temperature") is None:
    temperature = 1.0
  options = dict(temperature=temperature)
  if temperature > 0:
    options |= {key: given[key] for key in ("top_k", "top_p", "min_p") if given.get(key) is not None}
  return options, tuple(stop for stop in until if stop), new


def _score(model: Any, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
  """[B, K, 2]: for each of the last targets, Σ of the log-probs of the targets that count, and whether each of these is
  the likeliest token."""
  hidden_BxTxD, weights_BxT = model.apply(params, batch).hidden, batch["loss_weights"]
  ends_BxT = jnp.cumsum(batch["segment_ids"] > 0, axis=1) == jnp.sum(batch["segment_ids"] > 0, axis=1)[:, None]
  ends_BxT = ends_BxT & (batch["segment_ids"] > 0)

  def of_last(last_B: jax.Array) -> jax.Array:
    targets_BxT = jnp.where(ends_BxT, last_B[:, None], batch["targets"])
    stats = logprobs.token_stats(
        hidden_BxTxD, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
        num_real_vocab=model.num_real_vocab, want=("logprob", "is_top"), counts_BxT=weights_BxT > 0)
    counted_BxT = weights_BxT > 0
    total_B = jnp.sum(jnp.where(counted_BxT, stats.logprob, 0.0), axis=1)
    return jnp.stack([total_B, jnp.all(jnp.where(counted_BxT, stats.is_top > 0, True), axis=1)], axis=1)

  return jnp.moveaxis(jax.lax.map(of_last, batch["last_targets"].T), 0, 1)
