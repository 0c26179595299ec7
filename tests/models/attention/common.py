"""Attention with its options by name, as tests have them."""

from models.attention import dispatch
from models.attention.mask import QKV, Rule, TokenIds


def attention(q, k, v, *, segment_ids, block_ids=None, prompt_ids=None, sinks_H=None, impl="auto", block=128, **rule):
  """`dispatch.attention`; `rule`: the fields of `mask.Rule`."""
  tokens = TokenIds(segment_ids, block_ids, prompt_ids)
  return dispatch.attention(QKV(q, k, v, sinks_H), tokens, Rule(**rule), impl=impl, block=block)
