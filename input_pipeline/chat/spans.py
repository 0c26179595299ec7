"""Which characters of a rendered conversation are trained, found by rendering its beginnings.

What the model says in turn t is what `messages[:t + 1]` renders beyond `messages[:t]` with the generation prompt: the
content and the token that ends the turn, without the header of the role and without what the prompt supplies. So no
template needs marks or is searched for strings. Each rendering must begin with the one before, up to the end of the
turn; a template that shows earlier turns differently later on (thinking models) gives several examples.
"""

import bisect
import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

from input_pipeline import once
from input_pipeline.chat.image_parts import text_of
from input_pipeline.chat.image_template import ImageTemplate
from input_pipeline.chat.schema import REASONING, Conversation
from input_pipeline.chat.segments import Segment
from input_pipeline.chat.spans_shown import beginning, contents, holds
from input_pipeline.chat.template import ChatTemplate, Rendered
from input_pipeline.remarks import CHANGED, PROMPT, Remark
from input_pipeline.tokenizer import special_tokens
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import DataError

POLICIES = ("split", "last", "error")
_ASKED, _SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_PROBES: tuple[list[dict], ...] = ([_ASKED, _SAID], [{"role": "system", "content": "c"}, _ASKED, _SAID],
           [_ASKED, {**_SAID, "reasoning_content": "d"}],
           [{**_ASKED, "content": [{"type": "text", "text": "a"}]}, _SAID])


class Turn(NamedTuple):
  """A message in its rendering: characters start to end, the token that ends it (None: there is none), its weight."""

  index: int
  rendered: Rendered
  start: int
  end: int
  token: str | None
  weight: float
  remarks: tuple[Remark, ...] = ()


class SpanFinder:
  """Finds the turns of conversations under one template.

  Args:
    tokenizer: whose special tokens are recognised.

  Attributes:
    stop_ids: ids that end a turn: the tokenizer's, and what the template writes at the end of a made-up one.
    problem: why a model could not learn to stop, as far as that turn shows; None: it can.
  """

  def __init__(self, template: ChatTemplate | ImageTemplate, tokenizer: Tokenizer):
    self.template, self._specials = template, tokenizer.special_tokens
    self._pattern = special_tokens.pattern(tuple(self._specials))
    self._id = {s: int(i[0]) for s, i in zip(self._specials, tokenizer.encode_rendered_batch(list(self._specials)),
                                             strict=True) if len(i) == 1}
    self.stop_ids = tuple(tokenizer.stop_ids)
    self.problem: DataError | None = None
    # Whether the template has a generation prompt; None: not known yet.
    self._prompts: bool | None = None
    self._shown: set = set()
    self._try(tokenizer)

  def _try(self, tokenizer: Tokenizer) -> None:
    """Looks at made-up conversations, to know what ends a turn before there are data. Errors of theirs say nothing:
    templates may refuse what is made up and render what people have."""
    for messages in _PROBES:
      try:
        whole, header = self._render(messages), self._header(messages[:-1], messages[-1])
      except DataError:
        continue
      begin = len(_common(header, whole.text))
      end, token = self._end(whole, begin)
      if token is None:
        self.problem = self._endless(whole.text[begin:], "tried with an assistant who says 'b'")
      else:
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, self._id[token]]))
        logging.info("%s: the assistant's turn ends with %s (id %d), which is trained.", self.template.where, token,
                     self._id[token])
        self._compare_marks(whole, self._start(Conversation("", messages, [], 0), len(messages) - 1, whole)[0], end)
        self._prompts = None  # rows tell it
      bos = tokenizer.named_tokens.get("bos_token")
      if bos and tokenizer.bos_id not in self.stop_ids and bos not in whole.text:
        once.warning("%s: writes no %s, though the tokenizer has one. Conversations are trained without it, as they "
                     "will be served with this template.", self.template.where, bos)
      return

  def _compare_marks(self, whole: Rendered, start: int, end: int) -> None:
    """Generation blocks are not needed and not used; where they say something else, people should know."""
    if whole.generated and whole.generated[-1] != (start, end):
      marked = slice(*whole.generated[-1])
      once.warning("%s: its generation block marks %r; trained is %r.", self.template.where, whole.text[marked],
                   whole.text[start:end])

  def _endless(self, text: str, what: str) -> DataError:
    return DataError(
        f"{what}: {self.template.where} ends the turn with {text[-30:]!r}, in which no token of the tokenizer ends a "
        "text, so that the model would never learn to stop. Use a template that fits the tokenizer (chat.template; "
        "'plain' ends turns with EOS), or add its tokens to the tokenizer as special.")

  def turns(self, conversation: Conversation, weights: Sequence[float], policy: str) -> list[list[Segment]]:
    """The conversation's examples, in which messages have these weights and all else has none.

    Args:
      weights: one a message; those with 0 are not looked for.
      policy: what to do where the history is rewritten: one of POLICIES.

    Raises:
      DataError: the template and the conversation do not fit; names the message.
    """
    runs: list[list[Turn]] = []
    for index, weight in enumerate(weights):
      if weight:
        turn = self._locate(conversation, index)._replace(weight=weight)
        if runs and _continues(runs[-1][-1], turn):
          runs[-1].append(turn)
        else:
          runs.append([turn])
    if len(runs) > 1 and policy == "error":
      raise DataError(f"messages[{runs[0][-1].index}] is rendered differently once messages[{runs[1][0].index}] "
                      "follows, and chat.on_rewritten_history is 'error'. Set it to 'split' (an example for each "
                      "turn, with the history as it is shown then) or 'last' (only the last turn is trained).")
    if len(runs) > 1 and policy == "last":
      runs = [[runs[-1][-1]]]
    rendered = [self._text(run[-1], conversation if run is runs[-1] else None) for run in runs]
    self.check_shown(conversation, [turn for run in runs for turn in run], rendered)
    return [self._segments(run, text) for run, text in zip(runs, rendered, strict=True)]

  def whole(self, conversation: Conversation, weights: Sequence[float]) -> list[Segment]:
    """The conversation as one example in which every token is trained, those of a message with its factor."""
    rendered = self._of_all(conversation)
    turns = []
    for index, weight in enumerate(weights):
      if weight != 1:
        turn = self._locate(conversation, index)._replace(weight=weight)
        if rendered.text[:turn.end] != turn.rendered.text[:turn.end]:
          raise DataError(f"messages[{index}] has a weight, but is rendered differently once more messages follow, so "
                          "that its place is unknown. Leave the weight out, or do not set chat.train_on='all'.")
        turns.append(turn)
    said = [Turn(i, rendered, 0, 0, None, 1.0) for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    self.check_shown(conversation, said, [rendered])
    return self._segments(turns, rendered, outside=1.0)

  def behind(self, messages: list[dict], answer: str, added: list[dict], tools: list[dict] | None,
             variables: dict, ended: bool = True) -> tuple[str | None, Segment]:
    """(the token that ends the assistant's answer to `messages`, what is rendered behind it) when `added` follow it
    and it is to speak again. Of an answer that is not `ended`: (None, the same with all that ends it).

    It does not depend on the answer, whose end is found as the place where the renderings of two answers differ.

    Raises:
      DataError: the template refuses the conversation, or does not show the answer once more messages follow.
    """
    def render(answer: str) -> Rendered:
      said = {"role": "assistant", "content": answer}
      return self._render([*messages, said, *added], Conversation("", [], [], 0, tools, variables), gen=True)

    try:
      rendered, other = render(answer), render(f"{answer.rstrip()}a")
    except DataError:  # what a model says may be what the template refuses
      rendered, other = render("a"), render("b")
    if not ended:  # these are alike in nothing of the answer
      rendered, other = render("a"), render("b")
    same = len(_common(rendered.text[::-1], other.text[::-1]))
    if same == len(rendered.text):
      raise DataError(f"{self.template.where} does not show what the assistant says once more messages follow. Use "
                      "another template (chat.template).")
    end, token = self._end(rendered, len(rendered.text) - same)
    if token is None:
      raise DataError(f"{self.template.where} does not end what the assistant says once more messages follow. Use "
                      "another template (chat.template).")
    begin = end if ended else len(rendered.text) - same
    return token if ended else None, Segment(rendered.text[begin:], _between(rendered.inert, begin, len(rendered.text)))

  def _locate(self, conversation: Conversation, index: int) -> Turn:
    """Where a message is in the rendering that ends with it."""
    messages = conversation.messages
    said = messages[index]["role"] == "assistant"
    try:
      rendered, ends = self._render(messages[:index + 1], conversation), True
    except DataError:
      if index + 1 == len(messages):
        raise
      # It refuses to end there; the whole conversation has the turn, too.
      rendered, ends = self._of_all(conversation), False
    start, remarks = self._start(conversation, index, rendered)
    end, token = self._end(rendered, start)
    if said and token is None:
      raise self._endless(rendered.text[start:], f"messages[{index}]")
    behind = rendered.text[end:] if self._pattern is None else self._pattern.sub("", rendered.text[end:])
    if ends and behind.strip():
      raise DataError(f"messages[{index}]: {self.template.where} writes {behind.strip()[:60]!r} behind {token}, where "
                      "a model stops. Use another template (chat.template), or correct the tokenizer's stop ids "
                      "(eos_token_id in generation_config.json).")
    changed = [(CHANGED, key) for key in ("content", *REASONING) if said and not holds(
        rendered.text[:end], text_of(messages[index].get(key, "")))]
    return Turn(index, rendered, start, end, token, 1.0, (*remarks, *changed))

  def _start(self, conversation: Conversation, index: int, rendered: Rendered) -> tuple[int, tuple[Remark, ...]]:
    """Where in its rendering what a message says begins, behind all that whoever speaks is given."""
    messages = conversation.messages
    if messages[index]["role"] == "assistant" and index:
      try:
        before = self._render(messages[:index], conversation, gen=True).text
      except DataError:  # it answers nobody there, and shows the answer all the same
        before = None
      if before is not None and not rendered.text.startswith(before):
        return self._parted(conversation, index, rendered, before)
      if before is not None and self._prompts is None:
        self._prompts = self._has_prompt(conversation, index, before)
      if before is not None and self._prompts:
        return len(before), ()
    return len(_common(self._header(messages[:index], messages[index], conversation), rendered.text)), ()

  def _parted(self, conversation: Conversation, index: int, rendered: Rendered, prompt: str
              ) -> tuple[int, tuple[Remark, ...]]:
    """The same where the turn does not begin with the prompt that the model answers."""
    messages = conversation.messages
    try:
      without = self._render(messages[:index], conversation).text
    except DataError:
      without = prompt
    at = len(_common(prompt, rendered.text))
    if rendered.text.startswith(without):
      return at, ((PROMPT, prompt[at:][-60:]),)
    # What was said before is shown differently once there is an answer. The turn begins behind its own prompt.
    own = prompt[len(_common(prompt, without)):]
    header = _common(self._header(messages[:index], messages[index], conversation), rendered.text)
    found = header.rfind(own) if own else -1
    return (len(header) if found < 0 else found + len(own)), ((PROMPT, prompt[at:][:60]),)

  def _has_prompt(self, conversation: Conversation, index: int, prompt: str) -> bool:
    """Whether the template has a generation prompt, or writes no header that one would hold."""
    messages = conversation.messages
    try:
      without = self._render(messages[:index], conversation).text
      if prompt != without:
        return True
      header = self._header(messages[:index], messages[index], conversation)[len(without):]
    except DataError:  # it refuses what nobody asked for
      return True
    if header.strip():
      once.warning("%s: add_generation_prompt changes nothing, though the assistant's turn begins with %r. That is not "
                   "trained; whoever serves the model must write it.", self.template.where, header)
    return not header.strip()

  def _end(self, rendered: Rendered, start: int) -> tuple[int, str | None]:
    """(where the turn ends, with which token): the first that stops a model, else the last with nothing behind it."""
    found = [(start + m.end(), m.group()) for m in self._tokens(rendered, start, len(rendered.text))]
    stops = [f for f in found if self._id.get(f[1]) in self.stop_ids]
    if stops:
      return stops[0]
    if found and not rendered.text[found[-1][0]:].strip() and found[-1][1] in self._id:
      return found[-1]
    return max(start, len(rendered.text.rstrip())), None

  def _tokens(self, rendered: Rendered, start: int, end: int) -> list[re.Match]:
    """The special tokens that the template wrote in text[start:end]."""
    if self._pattern is None:
      return []
    text, inert = rendered.text[start:end], _between(rendered.inert, start, end)
    if inert:
      chars = list(text)
      for at in inert:
        chars[at] = "\0"
      text = "".join(chars)
    return list(self._pattern.finditer(text))

  def _header(self, before: list[dict], message: dict, conversation: Conversation | None = None) -> str:
    """What is rendered up to a message's content: what others in its place have in common with one another."""
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "reasoning_content", "reasoning", "thinking")}
    texts = []
    for others in ([{**kept, "content": content} for content in "ab"], [beginning(message, char) for char in "ab"]):
      try:
        texts += [self._render([*before, other], conversation).text for other in others]
      except DataError as e:
        error = e
    if not texts:
      raise DataError(f"messages[{len(before)}]: where it begins could not be found under {self.template.where}, which "
                      "renders no other text in its place. Use another template (chat.template).") from error
    return functools.reduce(_common, texts)

  def _text(self, last: Turn, conversation: Conversation | None) -> Rendered:
    """The rendering of an example that ends with that turn; with what follows it, if that changes nothing before."""
    if conversation is not None and last.index + 1 < len(conversation.messages):
      rendered = self._of_all(conversation)
      if rendered.text[:last.end] == last.rendered.text[:last.end]:
        return rendered
    return last.rendered

  def _of_all(self, conversation: Conversation) -> Rendered:
    return self._render(conversation.messages, conversation)

  def _segments(self, turns: list[Turn], rendered: Rendered, outside: float = 0.0) -> list[Segment]:
    """An example: its text, of which each turn has its weight."""
    spans = tuple((turn.start, turn.end, turn.weight) for turn in turns)
    remarks = tuple(remark for turn in turns if turn.weight for remark in turn.remarks)
    return [Segment(rendered.text, rendered.inert, spans, outside, remarks)]

  def check_shown(self, conversation: Conversation, turns: list[Turn], rendered: list[Rendered]) -> None:
    """Raises DataError if the template leaves out something of the conversation that a model should see or say.

    That is so if it renders the same text for another conversation in its place. Others that it refuses say nothing.
    """
    texts = [r.text for r in rendered]
    for what, kind, needle, upto, others in contents(conversation, {turn.index for turn in turns}):
      found = any(needle.strip() in text for text in texts)
      # Short strings are found by chance: what is of a new kind is looked at more closely.
      if not needle.strip() or kind in self._shown and found:
        continue
      given, same = conversation._replace(messages=conversation.messages[:upto]), None
      for other, more in itertools.product(others, dict.fromkeys([upto, len(conversation.messages)])):
        rest = conversation.messages[upto:more]
        try:
          both = [self._of_all(c._replace(messages=[*c.messages, *rest])).text for c in (other, given)]
        except DataError:
          continue
        same = both[0] == both[1]
        break
      if same:
        raise DataError(f"{what} is left out by {self.template.where}. Use a template that knows it (chat.template), "
                        "or take it out of the row.")
      if same is None and not found:
        self._of_all(conversation)  # an error of the template itself, as of its sandbox, is raised
        once.warning("%s: whether it shows %s could not be tried: it renders nothing else in its place.",
                     self.template.where, what)
      self._shown.add(kind)

  def _render(self, messages: list[dict], conversation: Conversation | None = None, gen: bool = False) -> Rendered:
    tools, variables = (None, {}) if conversation is None else (conversation.tools, conversation.variables)
    return self.template.render_spans(messages, tools=tools, add_generation_prompt=gen, inert_tokens=self._specials,
                                      **variables)


def _continues(earlier: Turn, later: Turn) -> bool:
  """Whether the later rendering holds the earlier turn, and all before it, as it was."""
  return later.start >= earlier.end and later.rendered.text[:earlier.end] == earlier.rendered.text[:earlier.end]


def _common(a: str, b: str) -> str:
  """The longest common beginning."""
  low, high = 0, min(len(a), len(b))
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
  return a[:low]


def _between(places: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
  """Those from start to end, counted from start."""
  return tuple(at - start for at in places[bisect.bisect_left(places, start) : bisect.bisect_left(places, end)])
