"""Small preference batches, laid out by hand."""

import functools

import jax
import numpy as np

from input_pipeline.examples.roles import CHOSEN, REJECTED
from trainer.strategies import STRATEGIES


class Options(dict):
  """A strategy's options as training code sees them."""

  __getattr__ = dict.__getitem__


def options(name="dpo", **changed):
  return Options(STRATEGIES[name].options | changed)


def examples(count, seed=0, vocab=24, longest=6):
  """`count` times (prompt, chosen, rejected), lists of random tokens of random lengths."""
  rng = np.random.default_rng(seed)

  def tokens(most):
    return rng.integers(0, vocab, rng.integers(1, most + 1)).tolist()

  return [(tokens(4), tokens(longest), tokens(longest)) for _ in range(count)]


def layout(rows, length, segments):
  """A batch of rows of segments (prompt, completion, its role)."""
  shape = (len(rows), length)
  batch = dict(tokens=np.zeros(shape, np.int32), positions=np.zeros(shape, np.int32),
               segment_ids=np.zeros(shape, np.int32), loss_weights=np.zeros(shape, np.float32),
               segment_roles=np.zeros((len(rows), segments), np.int32),
               source_ids=(np.arange(len(rows)) % 2).astype(np.int32))
  for row, parts in enumerate(rows):
    end = 0
    for number, (prompt, completion, role) in enumerate(parts):
      begin, middle, end = end, end + len(prompt), end + len(prompt) + len(completion)
      assert end <= length
      batch["tokens"][row, begin:end] = prompt + completion
      batch["positions"][row, begin:end] = np.arange(end - begin)
      batch["segment_ids"][row, begin:end] = number + 1
      batch["loss_weights"][row, middle:end] = 1
      batch["segment_roles"][row, number] = role
  return batch


def batch(rows, length=48, pairs=2):
  """A batch of rows of (prompt, chosen, rejected), each at most `pairs`."""
  sides = [[(x, y, role) for x, *both in row for y, role in zip(both, (CHOSEN, REJECTED), strict=True)] for row in rows]
  return layout(sides, length, 2 * pairs)


@functools.cache
def jitted_logits(model):
  return jax.jit(model.logits)


def token_logps(model, params, prompt, completion, vocab=24, room=16):
  """(log-probabilities of the completion's tokens, log of their distributions' summed squares), float64, from full
  logits of the sequence alone; padded to `room`, so that all lengths share a compiled program."""
  ids = np.zeros((1, room), np.int32)
  end = len(prompt) + len(completion)
  ids[0, :end] = prompt + completion
  logits = np.asarray(jitted_logits(model)(params, ids), np.float64)[0, :end, :vocab]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  at = np.arange(len(prompt), end)
  return logp[at - 1, ids[0, at]], np.log(np.exp(2 * logp[at - 1]).sum(-1))
