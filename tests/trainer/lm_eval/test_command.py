"""Our models in lm-evaluation-harness give what its own model (PyTorch) gives, and what the trainer computes."""

import json
import random
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests import tiny
from tests.trainer.lm_eval_reference import MAX_LENGTH, answers, write_tasks
from trainer import train
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import command as generate
from trainer.lm_eval import command as ours

TASKS = ("weft_colours", "weft_words", "weft_says")
REFERENCE = tiny.ROOT / "tests" / "trainer" / "lm_eval_tasks" / "reference.json"


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(ConfigError, match=r"pip install 'weft\[lm-eval\]'"):
    ours.require()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  pytest.importorskip("lm_eval")
  return tiny.hf_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def lm(folder):
  return ours.from_folder(folder, max_length=MAX_LENGTH, batch_size=8)


def asked(*arguments):
  return SimpleNamespace(args=arguments)


def test_the_answers_are_those_of_the_harness_own_model(lm, tasks):
  results = ours.evaluate(lm, TASKS, include_path=str(tasks), log_samples=True, bootstrap_iters=0)
  found, reference = answers(results), json.loads(REFERENCE.read_text(encoding="utf-8"))
  assert found.keys() == reference["answers"].keys() == set(TASKS)
  compared = 0
  for task in TASKS:
    for mine, theirs in zip(found[task], reference["answers"][task], strict=True):
      for (request, answer), (their_request, their_answer) in zip(mine, theirs, strict=True):
        assert request == their_request
        if task == "weft_says":
          assert list(answer) == their_answer
        else:
          answer = list(answer) if isinstance(answer, (tuple, list)) else [answer]
          assert answer[0] == pytest.approx(their_answer[0], abs=1e-4) and answer[1:] == their_answer[1:]
        compared += 1
  assert compared == 9 + 3 + 3
  for task in TASKS:
    for metric, value in reference["results"][task].items():
      if isinstance(value, float) and metric.endswith(",none"):
        assert results["results"][task][metric] == pytest.approx(value, rel=1e-4), (task, metric)


@pytest.mark.devices(8)
def test_a_log_prob_is_the_sum_of_the_trainers_own_on_the_joined_tokens(lm, folder):
  """By the logits of the whole row, without batches, buckets or chunks."""
  loaded = generate.load_folder(folder, mesh_lib.make_mesh(dict(data=1, fsdp=-1)))
  pairs = [("The sky is", " blue"), ("The sky is ", "blue"), ("a", "b"), ("", "ab"), ("x" * 40, "y" * 20)]
  found = lm.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
  for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
    ids = np.array([[256, *(context + continuation).encode()]], np.int32)  # BOS, and bytes
    logp_TxV = np.asarray(jax.nn.log_softmax(loaded.model.logits(loaded.params, ids)[0, :, :lm._model.num_real_vocab]))
    count = len(continuation.encode()) + len(context) - len(context.rstrip())  # lm_eval scores spaces at the end
    targets, rows = ids[0, -count:], logp_TxV[-count - 1:-1]
    assert total == pytest.approx(float(rows[np.arange(count), targets].astype(np.float64).sum()), abs=1e-4)
    assert greedy == bool((rows.argmax(-1) == targets).all())


def test_values_do_not_depend_on_batches_or_neighbours(lm, folder):
  alone = ours.from_folder(folder, max_length=MAX_LENGTH, batch_size=16)
  requests = [asked("What? " * n, option) for n in range(1, 6) for option in ("a", "b", "c", "a b c")]
  together = lm.loglikelihood(requests, disable_tqdm=True)
  for request, (total, greedy) in zip(requests, together, strict=True):
    ((other, same),) = alone.loglikelihood([request], disable_tqdm=True)
    assert other == pytest.approx(total, abs=1e-5) and same == greedy


def test_what_is_likeliest_is_called_greedy(lm):
  """Against generation: what it says next, token by token, is greedy, and no other token is."""
  (said,) = lm.generate_until([asked("Which?", dict(max_gen_toks=1))])
  options = [chr(n) for n in range(32, 127)]
  greedy = [option for option, (_, top) in zip(options, lm.loglikelihood(
      [asked("Which?", option) for option in options], disable_tqdm=True), strict=True) if top]
  assert greedy == ([said] if said in options else [])


def test_options_of_one_token_share_their_input(lm, monkeypatch):
  calls, score = [], lm._score

  def noting(params, batch):
    calls.append(batch["last_targets"].shape)
    return score(params, batch)

  monkeypatch.setattr(lm, "_score", noting)
  found = lm.loglikelihood([asked("A question", option) for option in "abcde"], disable_tqdm=True)
  assert calls == [(8, 8)] and len(set(found)) == 5


def test_few_shapes_are_compiled(folder):
  lm = ours.from_folder(folder, max_length=MAX_LENGTH, batch_size=8)
  lm.loglikelihood([asked("x" * n, "yy") for n in range(1, 60)], disable_tqdm=True)
  assert lm._score._cache_size() <= 4


def test_texts_longer_than_the_model_lose_their_beginning(lm):
  long, short = lm.loglikelihood([asked("a" * 200, "bc"), asked("a" * 100, "bc")], disable_tqdm=True)
  assert long == short and np.isfinite(long[0])
  with pytest.raises(ConfigError, match="scores 65 tokens, more than max_length=64"):
    lm.loglikelihood([asked("a", "b" * 65)])


def test_nothing_scores_nothing(lm):
  assert lm.loglikelihood([asked("a", "")], disable_tqdm=True) == [(0.0, True)]
  assert lm.loglikelihood_rolling([asked("")], disable_tqdm=True) == [0.0]


def test_what_stops_a_text_is_not_in_it(lm):
  (whole,) = lm.generate_until([asked("Which?", dict(max_gen_toks=24))])
  assert len(whole) > 4
  for stop in (whole[3], whole[2:5]):  # of one token, and of several
    (said,) = lm.generate_until([asked("Which?", dict(max_gen_toks=24, until=[stop, "never said"]))])
    assert said == whole[:whole.index(stop)]


def test_repeats_of_a_context_are_drawn_anew(lm):
  options = dict(max_gen_toks=16, do_sample=True, temperature=1.0)
  said = lm.generate_until([asked("Which?", options)] * 3 + [asked("Which?", dict(max_gen_toks=16))] * 2)
  assert len(set(said[:3])) == 3 and said[3] == said[4]
  assert lm.generate_until([asked("Which?", options)] * 3) == said[:3]  # and the same each time


def test_a_chat_template_is_applied_and_its_tokens_are_tokens(folder):
  lm = ours.from_folder(folder, template="plain", max_length=MAX_LENGTH, batch_size=8)
  text = lm.apply_chat_template([dict(role="user", content="hi")])
  assert text.startswith("<|bos|>") and "hi" in text
  begun = lm.apply_chat_template([dict(role="user", content="hi"), dict(role="assistant", content="Well,")], False)
  assert begun == text + "Well,"
  assert "bos_token" in lm.chat_template(True) and lm.chat_template(False) == "" and "/" not in lm.tokenizer_name
  # A special token of the tokenizer is one where a template has written it, and BOS is not doubled.
  assert lm.tok_encode("<|bos|>a") == [256, 97] and lm.tok_encode("a<|eos|>") == [256, 97, 257]
  plain = ours.from_folder(folder, max_length=MAX_LENGTH, batch_size=8)
  assert plain.tok_encode("a<|eos|>") == [256, *b"a<|eos|>"]


def test_unknown_tasks_are_told_with_their_neighbours(lm, tasks):
  with pytest.raises(ConfigError, match="--tasks has 'weft_color', .* near it: weft_colours"):
    ours.evaluate(lm, ["weft_color"], include_path=str(tasks))


def test_sizes_that_cannot_be_are_told(folder):
  with pytest.raises(ConfigError, match="max_length is 1; allowed: 2 to"):
    ours.from_folder(folder, max_length=1)


def test_the_command_scores_a_checkpoint(tasks, tmp_path):
  pytest.importorskip("lm_eval")
  corpus = tiny.write_corpus(tmp_path / "corpus")
  run = train(tiny.config(corpus, total_steps=4, ckpt_steps=2, evals={}), tmp_path / "w")
  out = tmp_path / "results.json"
  command = [sys.executable, "-m", "trainer.lm_eval", f"--workdir={tmp_path / 'w'}", "--tasks=weft_colours",
             f"--include_path={tasks}", "--log_samples", f"--out={out}"]
  done = tiny.run(command, HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
  assert done.returncode == 0, done.stderr
  assert "|weft_colours|" in done.stdout and "texts of up to 32 tokens" in done.stderr
  saved = json.loads(out.read_text())
  assert saved["n-shot"] == {"weft_colours": 0} and saved["model_name"].endswith("checkpoints/4")
  # The same by the run's own parameters, which are those of that checkpoint.
  ids = np.array([[256, *b"1 + 1 =\nAnswer: 2"]], np.int32)
  logp = jax.nn.log_softmax(run.model.logits(run.state["params"], ids)[0, :, :run.model.num_real_vocab or None])
  wanted = float(logp[-2, ids[0, -1]] + logp[-3, ids[0, -2]])
  (sample,) = [s for s in saved["samples"]["weft_colours"] if s["doc_id"] == 2]
  assert float(sample["filtered_resps"][0][0]) == pytest.approx(wanted, abs=1e-4)
  bad = tiny.run([*command[:4], "--tasks=none_such"])
  assert bad.returncode == 1 and "ConfigError: --tasks has 'none_such'" in bad.stderr and "Traceback" not in bad.stderr


def test_as_an_evaluator_it_gives_what_the_command_gives(tasks, tmp_path):
  pytest.importorskip("lm_eval")
  corpus = tiny.write_corpus(tmp_path / "corpus")
  config = tiny.config(corpus, total_steps=2, evals={})
  config.evals.harness = dict(type="evaluators.lm_eval.LmEval", tasks=("weft_colours", "weft_words"),
                              include_path=str(tasks), at_start=False)
  random.seed(3)
  expected = random.Random(3).random()
  run = train(config, tmp_path / "w")
  assert random.random() == expected  # lm_eval seeds the process's generators
  values = {key.removeprefix("eval/harness/"): value for key, value in run.last_eval[1].items() if "harness" in key}
  assert values.keys() == {"weft_colours/acc", "weft_colours/acc_norm", "weft_words/word_perplexity",
                           "weft_words/byte_perplexity"}
  lm = ours.from_run(tmp_path / "w", batch_size=8)
  results = ours.evaluate(lm, ["weft_words"], include_path=str(tasks), bootstrap_iters=0)["results"]["weft_words"]
  assert values["weft_words/byte_perplexity"] == pytest.approx(results["byte_perplexity,none"], rel=1e-6)

  config.evals.harness.tasks = ("weft_word",)
  with pytest.raises(ConfigError, match="evals.harness.tasks has 'weft_word', .*near it: weft_words"):
    train(config, tmp_path / "other")


# ----------------------------------------------------------------------------------------------
# Without the package.


class Manager:
  """The tasks that lm_eval knows, as far as it is asked."""

  all_tasks = ["arc_easy", "arc_challenge", "my_words"]

  def match_tasks(self, asked):
    return [task for task in self.all_tasks for pattern in asked if task == pattern or pattern == "arc"
            and task.startswith("arc")]


@pytest.fixture
def package(monkeypatch):
  called = []
  lm_eval = SimpleNamespace(simple_evaluate=lambda **given: called.append(given) or {"results": {}})
  monkeypatch.setattr(ours, "require", lambda: lm_eval)
  monkeypatch.setattr(ours, "_manager", lambda include_path: called.append(include_path) or Manager())
  return called


def test_tasks_are_those_that_lm_eval_knows(package):
  assert ours.known(["arc", "my_words"], "folder") == ["arc_easy", "arc_challenge", "my_words"]
  assert package == ["folder"]
  with pytest.raises(ConfigError, match="^evals.x.tasks has 'arc_eazy', which lm_eval does not know; near it: arc_easy"
                                        ".* It knows 3; your own are found by include_path, a folder.$"):
    ours.known(["my_words", "arc_eazy"], None, "evals.x.tasks")
  with pytest.raises(ConfigError, match="^--?tasks has 'zzzzqq', which lm_eval does not know. It knows 3"):
    ours.known(["zzzzqq"], None, "--tasks")


def test_what_is_evaluated_is_what_was_asked_for(package):
  assert ours.evaluate("lm", ["arc"], include_path="folder", limit=5) == {"results": {}}
  manager = package[-1].pop("task_manager")
  assert isinstance(manager, Manager) and package[-1] == dict(
      model="lm", tasks=["arc_easy", "arc_challenge"], log_samples=False, limit=5)
  ours.evaluate("lm", ["arc"], log_samples=True)
  assert package[-1]["log_samples"] is True


@pytest.mark.parametrize("bound, asked, usual, length", [
    (None, None, 512, 512), (128, None, 512, 128), (1024, None, 512, 512), (None, 700, 512, 700), (128, 128, 512, 128),
    (128, 2, 512, 2), (None, 1, 512, None), (128, 129, 512, None)])
def test_texts_are_as_long_as_the_model_sees(package, monkeypatch, capsys, bound, asked, usual, length):
  made = []
  monkeypatch.setitem(sys.modules, "trainer.lm_eval.harness", SimpleNamespace(
      Harness=lambda *given, **named: made.append((given, named)) or "lm"))
  monkeypatch.setattr(ours.mesh_lib, "batch_shards", lambda mesh: 4)
  loaded = SimpleNamespace(model=SimpleNamespace(max_length=bound), origin="step 3 of w")
  if length is None:
    with pytest.raises(ConfigError, match=f"^max_length is {asked}; allowed: 2 to {bound or 'any'}.$"):
      ours._harness(loaded, "mesh", (1,), asked, usual, 6)
    return
  assert ours._harness(loaded, "mesh", (1,), asked, usual, 6) == "lm"
  assert made == [((loaded, "mesh"), dict(head=(1,), max_length=length, batch_size=8))]
  assert capsys.readouterr().err == f"step 3 of w, texts of up to {length} tokens\n"


@pytest.mark.parametrize("said, bos, usual, head", [
    (dict(max_position_embeddings=512), 5, 512, (5,)), (dict(n_positions=256), None, 256, ()), ({}, 0, 2048, (0,)),
    (dict(max_position_embeddings=131072), 5, 2048, (5,)),
    (dict(text_config=dict(max_position_embeddings=300), max_position_embeddings=9), 5, 300, (5,))])
def test_a_folder_says_how_long_texts_are_and_begins_with_bos(package, monkeypatch, tmp_path, said, bos, usual, head):
  (tmp_path / "config.json").write_text(json.dumps(said))
  made, loaded = [], SimpleNamespace(tokenizer=SimpleNamespace(bos_id=bos))
  monkeypatch.setattr(ours.mesh_lib, "make_mesh", lambda sizes: made.append(sizes) or "mesh")
  monkeypatch.setattr(ours.generate, "load_folder", lambda *given, **named: made.append((given, named)) or loaded)
  monkeypatch.setattr(ours, "_harness", lambda *given: given)
  found = ours.from_folder(tmp_path, template="chatml", max_length=7, batch_size=3, tensor=2)
  assert found == (loaded, "mesh", head, 7, usual, 3)
  assert made == [dict(data=1, fsdp=-1, tensor=2), ((tmp_path, "mesh"), dict(template="chatml"))]


def test_a_run_says_how_long_texts_are_and_how_they_begin(package, monkeypatch, tmp_path):
  (tmp_path / "config.json").write_text("{}")
  loaded, asked = SimpleNamespace(tokenizer="its tokenizer"), []
  config = SimpleNamespace(tokenizer="section", seq_len=96)
  monkeypatch.setattr(ours.mesh_lib, "make_mesh", lambda sizes: asked.append(sizes) or "mesh")
  monkeypatch.setattr(ours.generate, "load_run", lambda *given, **named: asked.append((given, named)) or loaded)
  monkeypatch.setattr(ours.config_checks, "resolve", lambda given: config)
  monkeypatch.setattr(ours, "begins_with", lambda *given: given)
  monkeypatch.setattr(ours, "_harness", lambda *given: given)
  found = ours.from_run(tmp_path, step=4, template="t", batch_size=3)
  assert found == (loaded, "mesh", ("section", "its tokenizer"), None, 96, 3)
  assert asked == [dict(data=1, fsdp=-1, tensor=1), ((tmp_path, "mesh"), dict(step=4, template="t"))]
