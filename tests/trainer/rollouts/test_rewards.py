"""Built-in rewards against values computed by hand; what cannot work is refused before anything runs."""

import doctest
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from tests import tiny
from trainer.config import reward
from trainer.config.checks import View
from trainer.errors import ConfigError, DataError
from trainer.rollouts import rewards
from trainer.rollouts.reward_pool import Group, Scorer

FUNCTIONS = "tests.trainer.reward_functions"
GSM8K = r"####\s*(-?[\d,.]+)"


def scores(section, completions, ids=None, **columns):
  """Of completions of one prompt; `columns` have one value for all."""
  made = rewards.make("mine", section)
  made.check_columns(columns, "a.jsonl:3")
  return made.function(**made.arguments("?", completions, ids or [[0]] * len(completions), columns))


def said(*texts):
  return [[{"role": "assistant", "content": text}] for text in texts]


def test_exact_match_compares_normalised_texts():
  section = reward(type="exact_match")
  assert scores(section, [" Paris\n", "paris", "Paris.", ""], answer="Paris") == [1.0, 0.0, 0.0, 0.0]
  assert scores(section, ["1,000", "1000.0", "$1000.", "1001"], answer=1000) == [1.0, 1.0, 1.0, 0.0]
  assert scores(section, ["0.5", ".50"], answer=0.5) == [1.0, 1.0]
  assert scores(section, ["a", "b"], answer=None) == [None, None]
  assert scores(reward(type="exact_match", answer_key="label"), ["b"], label="b", answer="a") == [1.0]


def test_exact_match_with_a_pattern_compares_what_it_extracts():
  section = reward(type="exact_match", pattern=r"<answer>(.*?)</answer>")
  completions = ["<answer>no</answer> <answer> yes </answer>", "yes", "<answer>no</answer>"]
  assert scores(section, completions, answer="yes") == [1.0, 0.0, 0.0]
  assert scores(section, completions, answer="so <answer>yes</answer>") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("completion, answer, wanted", [
    ("2 + 3 is 5.", "2 + 3 = 5\n#### 5", 1.0),
    ("#### 72", "48 / 2 = 24, 48 + 24 = 72\n#### 72", 1.0),
    ("First 24, then 72 clips", "#### 72", 1.0),
    ("72, no: 71", "#### 72", 0.0),
    ("It costs $1,250.50.", "#### 1250.5", 1.0),
    ("-3", "3", 0.0),
    ("-3", "it is -3", 1.0),
    ("\u22123", -3, 1.0),
    ("50%", "50", 1.0),
    ("0.30", 0.3, 1.0),
    ("72.", 72, 1.0),
    ("1e-3", 0.001, 1.0),
    ("no number", "#### 72", 0.0),
    ("", "#### 72", 0.0),
    ("72", "no number", None),
    ("72", None, None),
    ("5", "6 #### none", None),
])
def test_numeric_compares_the_last_number_with_the_answers(completion, answer, wanted):
  assert scores(reward(type="numeric"), [completion], answer=answer) == [wanted]


def test_numeric_with_a_pattern_looks_only_where_it_matches():
  section = reward(type="numeric", pattern=GSM8K)
  completions = ["#### 72, so 3", "72", "#### 7\n#### 72.0", "#### $72", "#### 72,000"]
  assert scores(section, completions, answer="#### 72") == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_regex_searches_and_format_wants_all_of_the_text():
  completions = ["a\n<b>1</b>", "<b>1</b>", "<b>1\n2</b>", "no"]
  assert scores(reward(type="regex", pattern="<b>.*</b>"), completions) == [1.0, 1.0, 0.0, 0.0]
  assert scores(reward(type="format", pattern="<b>.*</b>"), completions) == [0.0, 1.0, 1.0, 0.0]


def test_length_falls_linearly_on_both_sides():
  section = reward(type="length", min_length=4, max_length=20, cache_length=8)
  lengths = [0, 1, 3, 4, 12, 13, 16, 19, 20, 21, 100]
  wanted = [-1.0, -0.75, -0.25, 0.0, 0.0, -0.125, -0.5, -0.875, -1.0, -1.0, -1.0]
  assert scores(section, ["x"] * len(lengths), [[0] * n for n in lengths]) == wanted
  hard = reward(type="length", max_length=3)
  assert scores(hard, ["x"] * 4, [[0] * n for n in (0, 2, 3, 4)]) == [0.0, 0.0, 0.0, -1.0]
  assert scores(reward(type="length", min_length=2), ["x"] * 3, [[], [0], [0] * 99]) == [-1.0, -0.5, 0.0]


def test_repetition_is_the_share_of_repeated_ngrams():
  ids = [[1, 2, 1, 2, 1], [1, 2, 3, 4], [7] * 6, [1], []]
  # Pairs: 12 21 12 21 (2 of 4 repeat); 12 23 34; 77 five times (4 repeat); none; none.
  wanted = [-0.5 * 2, 0.0, -0.8 * 2, 0.0, 0.0]
  found = scores(reward(type="repetition", ngram=2, max_penalty=2.0), ["x"] * 5, ids)
  assert found == pytest.approx(wanted)
  assert scores(reward(type="repetition"), ["x"], [[1, 2, 3, 1, 2, 3]]) == [-0.25]  # 123 231 312 123


def test_of_conversations_the_last_thing_that_the_assistant_says_counts():
  section = reward(type="numeric")
  assert scores(section, said("5", "it is 6"), answer="5") == [1.0, 0.0]
  turns = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "5"},
           {"role": "assistant", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "7"}]},
           {"role": "tool", "content": "9"}]
  assert rewards.text_of(turns) == "17"
  silent = [{"role": "assistant", "content": None, "tool_calls": []}]
  assert scores(section, [turns, turns[1:2], silent], answer=17) == [1.0, 0.0, 0.0]


def test_a_missing_column_is_named_with_those_there_are():
  message = r"a\.jsonl:3: rollout\.rewards\.mine \(numeric\): no column 'answer'; found 'solution', 'level'"
  with pytest.raises(DataError, match=message):
    scores(reward(type="numeric"), ["1"], solution="1", level=2)
  with pytest.raises(DataError, match=r"the records: no column 'answer'; found 'x'"):
    rewards.numeric(["?"], ["1"], [[1]], answer_key="answer", x=["1"])
  with pytest.raises(DataError, match=r"rollout\.rewards\.mine \(tests.*only_named\): no column 'answer'; found none"):
    scores(reward(type=f"{FUNCTIONS}.only_named"), ["1"])


@pytest.mark.parametrize("kind", ["exact_match", "numeric"])
def test_an_answer_that_is_no_text_is_refused(kind):
  with pytest.raises(DataError, match="column 'answer' has a list where an answer must be text"):
    scores(reward(type=kind), ["1"], answer=["1"])
  with pytest.raises(DataError, match="column 'answer' has a bool"):
    scores(reward(type=kind), ["1"], answer=True)


def test_a_function_gets_the_arguments_that_it_names_and_its_options():
  section = reward(type=f"{FUNCTIONS}.echo", factor=3)
  assert scores(section, ["a", "b"], number=2, other="not for it") == [6, 6]
  assert scores(reward(type=f"{FUNCTIONS}.only_named"), ["a", "b"], answer="a", other=1) == [1.0, 0.0]
  assert scores(reward(type=f"{FUNCTIONS}.scale"), ["a"]) == [5.0]
  made = rewards.make("mine", reward(type=f"{FUNCTIONS}.wait", weight=2))
  assert made.is_async and made.weight == 2.0 and made.needs == ("log",)
  assert not rewards.make("mine", reward(type=f"{FUNCTIONS}.echo")).is_async


def graded(completions, *, answer, threshold, bonus=2.0):
  return [threshold * bonus + answer[0]] * len(completions)


async def awaited(prompts, threshold, **columns):
  return [threshold] * len(prompts)


def test_an_argument_without_a_default_is_a_column_unless_it_is_an_option():
  made = rewards.make("mine", reward(type=f"{__name__}.graded", threshold=3, weight=0.5))
  assert (made.name, made.kind, made.weight, made.options) == ("mine", f"{__name__}.graded", 0.5, {"threshold": 3})
  assert (made.needs, made.takes) == (("answer",), {"completions", "answer", "threshold", "bonus"})
  assert scores(reward(type=f"{__name__}.graded", threshold=3), ["a", "b"], answer=1, other=2) == [7.0, 7.0]
  assert scores(reward(type=f"{__name__}.graded", threshold=3, bonus=1), ["a"], answer=1) == [4.0]
  with pytest.raises(DataError, match="column 'threshold' has the name of an option of rollout.rewards.mine"):
    made.check_columns({"answer": 1, "threshold": 4}, "a.jsonl:3")
  other = rewards.make("other", reward(type=f"{__name__}.awaited"))
  assert (other.needs, other.takes, other.is_async, made.is_async) == (("threshold",), None, True, False)


def test_columns_whose_names_are_taken_are_refused():
  with pytest.raises(DataError, match="a.jsonl:3: column 'factor' has the name of an option of rollout.rewards.mine"):
    scores(reward(type=f"{FUNCTIONS}.echo", factor=3), ["a"], number=2, factor=4)
  assert scores(reward(type=f"{FUNCTIONS}.echo"), ["a"], number=2, factor=[4]) == [[[4], [4]]]  # not set: a column
  with pytest.raises(DataError, match="column 'completions' has the name of an argument"):
    rewards.make("mine", reward(type=f"{FUNCTIONS}.length")).check_columns({"completions": "a"}, "a.jsonl:3")
  assert scores(reward(type="numeric"), ["1"], answer=1, prompts="a", pattern="b") == [1.0]


@pytest.mark.parametrize("changed, message", [
    (dict(type="numerc"), "rollout.rewards.mine.type: found 'numerc'; did you mean 'numeric'"),
    (dict(type="zzz"), "found 'zzz'. Allowed: exact_match, regex"),
    (dict(type="no_such_module.f"), "found 'no_such_module.f', which could not be imported"),
    (dict(type=f"{FUNCTIONS}.nothing_here"), "could not be imported .AttributeError"),
    (dict(type=f"{FUNCTIONS}.Judge"), "is a class, not a function"),
    (dict(type=f"{FUNCTIONS}.not_callable"), "is of type int, not a function"),
    (dict(type=f"{FUNCTIONS}.only_position"), "takes completions by position only"),
    (dict(type=f"{FUNCTIONS}.only_named", colour="red"), r"mine.colour='red' is without effect: .*options answer"),
    (dict(type=f"{FUNCTIONS}.length", pattern="a"), "mine.pattern='a' is without effect"),
    (dict(type=f"{FUNCTIONS}.length", prompts="a"), "mine.prompts has the name of an argument"),
    (dict(weight=float("nan")), "mine.weight: found nan, allowed: finite"),
    (dict(weight=float("inf")), "mine.weight: found inf"),
    (dict(type="regex"), "type 'regex' needs a pattern"),
    (dict(type="format"), "type 'format' needs a pattern"),
    (dict(type="regex", pattern="("), r"mine.pattern: '\(' is no regex"),
    (dict(type="numeric", pattern="["), r"mine.pattern: '\[' is no regex"),
    (dict(type="regex", pattern="a", answer_key="b"), "answer_key='b' is without effect: regex has the options pat"),
    (dict(type="numeric", ngram=4), "ngram=4 is without effect: numeric has the options answer_key, pattern"),
    (dict(answer_key="prompts"), "mine.answer_key: found 'prompts'"),
    (dict(type="length"), "needs min_length or max_length"),
    (dict(type="length", max_length=0), "mine.max_length: found 0, allowed: whole numbers from 1"),
    (dict(type="length", max_length=8, cache_length=9), "found min_length=0, max_length=8, cache_length=9"),
    (dict(type="length", max_length=8, cache_length=4, min_length=5), "found min_length=5, max_length=8"),
    (dict(type="length", min_length=5, cache_length=4), "max_length=None, cache_length=4"),
    (dict(type="length", min_length=-1), "mine.min_length: found -1"),
    (dict(type="repetition", ngram=0), "mine.ngram: found 0, allowed: whole numbers from 1"),
    (dict(type="repetition", max_penalty=-1.0), "mine.max_penalty: found -1.0"),
    (dict(type="repetition", max_penalty=float("inf")), "mine.max_penalty: found inf"),
])
def test_what_cannot_work_is_refused(changed, message):
  with pytest.raises(ConfigError, match=message):
    rewards.make("mine", reward(**changed))


def test_every_built_in_type_passes_as_it_is_meant():
  for changed in (dict(), dict(type="regex", pattern="a"), dict(type="numeric", pattern=GSM8K),
                  dict(type="length", max_length=8, cache_length=8), dict(type="format", pattern="a"),
                  dict(type="repetition", ngram=1, weight=0.0)):
    rewards.make("mine", reward(**changed))
    rewards.make("mine", View(ConfigDict(reward(**changed))))


def test_a_section_within_a_section_becomes_a_dict():
  found = rewards.plain(View(reward(type="a.b", table=dict(a=dict(b=1)))))["table"]
  assert found == {"a": {"b": 1}} and type(found) is dict and type(found["a"]) is dict


def test_a_module_that_fails_to_import_says_how(tmp_path, monkeypatch):
  (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('no licence')\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ConfigError, match="could not be imported .RuntimeError: no licence"):
    rewards.make("mine", reward(type="broken_rewards.f"))


def test_rewards_are_imported_without_jax():
  code = ("import sys, trainer.rollouts.rewards, trainer.rollouts.reward_pool, trainer.rollouts.reward_worker; "
          "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')])")
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_documentation_says_what_it_shows(tmp_path, monkeypatch):
  page = tiny.ROOT / "docs" / "rewards.md"
  monkeypatch.chdir(tiny.ROOT)
  result = doctest.testfile(str(page), module_relative=False)
  assert result.attempted > 13 and result.failed == 0
  modules = re.findall(r"^```python\n# my_project/(\w+)\.py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
  for name, code in modules:
    (tmp_path / f"documented_{name}.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  sections = dict(polite=reward(type="documented_rewards.polite", word="thanks"), judge=reward(
      type="documented_judge.judge"))
  groups = [Group("2+3?", ["thanks, 5", "5", "6"], [[1]] * 3, {"answer": "5"}),
            Group("?", ["thanks"], [[1]], {"answer": None})]
  with Scorer(sections, 1, 60.0) as scorer:
    scores = scorer.score(groups)
  assert scores.values[0].tolist() == [[2.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
  assert scores.abstained[1].tolist() == [[True, False]] and scores.messages == []


def test_a_model_is_computed_elsewhere_and_needs_a_path():
  with pytest.raises(RuntimeError, match="^a reward of type 'model' is not computed in a process for rewards$"):
    rewards.model([], [], [], path="p")
  for path in (None, ""):
    with pytest.raises(ConfigError, match="^rollout.rewards.mine: type 'model' needs a path. Set rollout.rewards.mi"):
      rewards.make("mine", reward(type="model", path=path))


def test_a_function_written_in_c_gets_all_columns():
  made = rewards.make("mine", reward(type="builtins.max"))
  assert made.takes is None and made.needs == () and made.arguments("p", ["a"], [[0]], {"x": 1}) == dict(
      prompts=["p"], completions=["a"], completion_ids=[[0]], x=[1])
