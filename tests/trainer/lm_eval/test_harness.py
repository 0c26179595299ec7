"""The model as lm-evaluation-harness sees it; where the package is not installed, a class without methods stands in the
place of its base. Log-probs are those of full logits in float64."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

from tests import tiny
from tests.models.initial import initial
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate.completion import Completion

BOS, EOS = 0, 1


class Letters:
  """A letter a token, a is 2; BOS and EOS where they are given."""

  pad_id, fingerprint, token_bytes = 0, "a/b", tuple(bytes([95 + i]) for i in range(24))

  def __init__(self, bos=BOS, eos=EOS):
    self.bos_id, self.eos_id = bos, eos

  def encode_batch(self, texts):
    return [np.array([ord(c) - 95 for c in text], np.int32) for text in texts]

  def encode_rendered(self, text):
    return np.array([BOS if c == "^" else ord(c) - 95 for c in text], np.int32)

  def decode(self, ids, skip_special=True):
    return "".join(chr(95 + i) for i in ids if i > 1)


def windows(ids, prefix, size, overlap):
  """Those of lm_eval's `get_rolling_token_windows` for an overlap of 1: (what is seen, what is scored)."""
  found = []
  for begin in range(0, len(ids), size):
    before = [prefix, *ids][max(0, begin - (size - len(ids[begin:begin + size]))):begin + 1]
    found.append((before + ids[begin:begin + size][:-1], ids[begin:begin + size]))
  return found


@pytest.fixture(scope="module")
def harness():
  """The module; its base class is there, or a bare one."""
  stubs = {}
  try:
    import lm_eval.api.model  # noqa: F401
  except ImportError:
    utils = ModuleType("lm_eval.utils")
    utils.get_rolling_token_windows = windows
    utils.make_disjoint_window = lambda pair: (pair[0][:len(pair[0]) - len(pair[1]) + 1], pair[1])
    whole, api, model = ModuleType("lm_eval"), ModuleType("lm_eval.api"), ModuleType("lm_eval.api.model")
    whole.utils, model.TemplateLM = utils, type("TemplateLM", (), {})
    stubs = {"lm_eval": whole, "lm_eval.utils": utils, "lm_eval.api": api, "lm_eval.api.model": model}
  with pytest.MonkeyPatch.context() as patch:
    for name, module in stubs.items():
      patch.setitem(sys.modules, name, module)
    from trainer.lm_eval import harness
    yield harness
  if stubs:
    del sys.modules["trainer.lm_eval.harness"]


@pytest.fixture(scope="module")
def made():
  model = tiny.model()
  return model, initial(model)


def lm_of(harness, made, tokenizer=None, head=(BOS,), max_length=8, batch_size=2):
  prompter = SimpleNamespace(template=None, stop_ids=(EOS,), messages=lambda said: SimpleNamespace(
      text="^" + "".join(m["content"] for m in said)))
  loaded = SimpleNamespace(model=made[0], params=made[1], tokenizer=tokenizer or Letters(), prompter=prompter,
                           origin="o")
  lm = harness.Harness(loaded, mesh_lib.make_mesh({}, jax.devices()[:1]), head=head, max_length=max_length,
                       batch_size=batch_size)
  lm.cache_hook = SimpleNamespace(kept=[], add_partial=lambda *what: lm.cache_hook.kept.append(what))
  return lm


@pytest.fixture(scope="module")
def expected(made):
  model, params = made
  logits_of = jax.jit(model.logits)

  def of(context, continuation):
    ids = [*context, *continuation]
    batch = {"tokens": np.pad(ids, (0, 12 - len(ids)))[None].astype(np.int32),
             "segment_ids": (np.arange(12) < len(ids))[None].astype(np.int32), "positions": np.arange(12)[None]}
    logits = np.asarray(logits_of(params, batch), np.float64)[0, len(context) - 1:len(ids) - 1, :24]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = logp[np.arange(len(continuation)), continuation]
    return float(picked.sum()), bool((logits.argmax(-1) == continuation).all()), logits
  return of


def test_log_probs_are_those_of_the_continuations_tokens(harness, made, expected):
  lm = lm_of(harness, made)
  best = int(expected([5, 6], [7])[2].argmax())
  asked = [([5, 6], [7, 8]), ([5, 6], [best]), ([5, 6], [9]), ([2], [3, 4, 5]), ([7], []), ([5, 6], [10])]
  found = lm._loglikelihood_tokens([(("a", str(n)), *pair) for n, pair in enumerate(asked)], disable_tqdm=True)
  assert found[4] == (0.0, True)
  for (context, continuation), (total, greedy) in zip(asked, found, strict=True):
    if continuation:
      wanted, likeliest, _ = expected(context, continuation)
      assert total == pytest.approx(wanted, abs=1e-5) and greedy == likeliest
  assert found[1][1] and not found[2][1]
  assert lm.cache_hook.kept == [("loglikelihood", ("a", str(n)), answer) for n, answer in enumerate(found)]
  # Longer texts lose their beginning: 8 tokens are seen before the last.
  (cut, _), = lm._loglikelihood_tokens([(None, [2] * 4 + [5, 6, 7, 8, 9], [10, 11])], disable_tqdm=True)
  assert cut == pytest.approx(expected([2, 2, 5, 6, 7, 8, 9], [10, 11])[0], abs=1e-5) and len(lm.cache_hook.kept) == 6
  for request, message in (((None, [], [5]), "request 0 has no context token"),
                           ((None, [5], [6] * 9), "scores 9 tokens, more than max_length=8")):
    with pytest.raises(ConfigError, match=message):
      lm._loglikelihood_tokens([request], disable_tqdm=True)


def test_whole_texts_follow_what_begins_a_text(harness, made, expected):
  lm = lm_of(harness, made)
  (short,) = lm.loglikelihood_rolling([SimpleNamespace(args=("abc",))], disable_tqdm=True)
  assert short == pytest.approx(expected([BOS], [2, 3, 4])[0], abs=1e-5)
  assert lm.cache_hook.kept == [("loglikelihood_rolling", ("abc",), short)]
  text = "abcdefghij"  # 8 tokens, and the last two behind 7 of them
  _, whole = lm.loglikelihood_rolling([SimpleNamespace(args=("a",)), SimpleNamespace(args=(text,))], disable_tqdm=True)
  ids = [ord(c) - 95 for c in text]
  assert whole == pytest.approx(expected([BOS], ids[:8])[0] + expected(ids[1:8], ids[8:])[0], abs=1e-5)


def test_texts_begin_as_in_training_and_conversations_as_their_template_says(harness, made):
  lm = lm_of(harness, made)
  assert lm.tok_encode("ab") == [BOS, 2, 3] and lm.tok_encode("ab", add_special_tokens=False) == [2, 3]
  assert lm.tok_encode("ab", add_special_tokens=True) == [BOS, 2, 3] and lm.tokenizer_name == "a_b"
  said = [dict(role="user", content="a"), dict(role="assistant", content="b")]
  assert lm.apply_chat_template(said[:1]) == "^a" and lm.apply_chat_template(said, add_generation_prompt=False) == "^ab"
  assert lm.tok_encode("^ab") == [BOS, 2, 3] and lm.tok_encode("ab") == [BOS, 2, 3]  # once
  assert lm.tok_encode("ab", add_special_tokens=False) == [2, 3]
  assert lm.chat_template(True) == ""
  lm._prompter.template = SimpleNamespace(source="T")
  assert (lm.chat_template(True), lm.chat_template(False)) == ("T", "")
  with pytest.raises(ConfigError, match="'x' is asked for by name; give --template"):
    lm.chat_template("x")
  for bos, eos, end, prefix in ((BOS, EOS, EOS, BOS), (BOS, None, BOS, BOS), (None, EOS, EOS, EOS)):
    lm = lm_of(harness, made, Letters(bos, eos))
    assert (lm.eot_token_id, lm.prefix_token_id) == (end, prefix)
  with pytest.raises(ConfigError, match="neither a BOS nor an EOS"):
    lm_of(harness, made, Letters(None, None))


@pytest.mark.parametrize("said, options, until, new", [
    ({}, dict(temperature=0.0), (), 256), (dict(until="x", max_gen_toks=5), dict(temperature=0.0), ("x",), 5),
    (dict(until=["x", "", "y"], max_new_tokens=6, max_tokens=7), dict(temperature=0.0), ("x", "y"), 6),
    (dict(do_sample=True), dict(temperature=1.0), (), 256), (dict(temperature=0.5), dict(temperature=0.5), (), 256),
    (dict(do_sample=False, temperature=0.5, top_k=3), dict(temperature=0.0), (), 256),
    (dict(do_sample=True, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125),
     dict(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125), (), 256)])
def test_what_tasks_say_of_generation(harness, said, options, until, new):
  assert harness._options(said, 256) == (options, until, new)


def test_generated_texts_end_before_what_ends_them(harness, made):
  asked, says = [], {0: "dxe", 1: "de", 2: "xe"}

  def generate(params, prompts, **options):
    asked.append((prompts, options))
    return [Completion(n, 0, np.array([ord(c) - 95 for c in says[n]], np.int32), np.zeros(3), np.zeros(3), "length")
            for n in range(len(prompts))]

  lm = lm_of(harness, made)
  lm._sampler = SimpleNamespace(generate=generate)
  one, other = dict(until=["x"], max_gen_toks=3), dict(max_gen_toks=2, do_sample=True, temperature=0.5)
  requests = [SimpleNamespace(args=given) for given in (
      ("ab", one), ("cdefghij", one), ("c", other), ("ab", one))]
  assert lm.generate_until(requests, disable_tqdm=True) == ["d", "de", "dxe", ""]
  (first, options), (second, more) = asked
  assert first == [[BOS, 2, 3], [7, 8, 9, 10, 11], [BOS, 2, 3]] and second == [[BOS, 4]]  # 5 and 3 new are 8
  assert options["samples"] == [[0], [0], [1]] and options["stop_ids"] == (EOS,) and options["max_new_tokens"] == 3
  assert (options["temperature"], more["temperature"], more["max_new_tokens"]) == (0.0, 0.5, 2)
  assert [what[1][0] for what in lm.cache_hook.kept] == ["ab", "cdefghij", "ab", "c"]
  with pytest.raises(ConfigError, match="a task generates 8 tokens, but max_length is 8"):
    lm.generate_until([SimpleNamespace(args=("a", dict(max_gen_toks=8)))], disable_tqdm=True)
