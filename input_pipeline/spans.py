"""Which characters of a rendered conversation are trained, found by rendering its beginnings.

What the model says in turn t is what `messages[:t + 1]` renders beyond `messages[:t]` with the generation prompt: the
content and the token that ends the turn, without the header of the role and without what the prompt supplies. So no
template needs marks or is searched for strings. Each rendering must begin with the one before, up to the end of the
turn; a template that shows earlier turns differently later on (thinking models) gives several examples.
"""

import bisect
import re
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

from input_pipeline import special_tokens
from input_pipeline.chat import ChatTemplate, Rendered
from input_pipeline.files import DataError
from input_pipeline.image_texts import ImageTemplate, text_of, with_more
from input_pipeline.segments import Segment
from input_pipeline.shapes import REASONING, Conversation
from input_pipeline.tokenizer import Tokenizer

POLICIES = ("split", "last", "error")
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class Turn(NamedTuple):
  """A message in its rendering: characters start to end, the token that ends it (None: there is none), its weight."""

  index: int
  rendered: Rendered
  start: int
  end: int
  token: str | None
  weight: float


class SpanFinder:
  """Finds the turns of conversations under one template.

  Args:
    template: renders them.
    tokenizer: whose special tokens are recognised.

  Raises:
    DataError: the template ends the assistant's turn with no token, so that a model could not learn to stop.
  """

  def __init__(self, template: ChatTemplate | ImageTemplate, tokenizer: Tokenizer):
    self.template, self._specials = template, tokenizer.special_tokens
    self._pattern = special_tokens.pattern(tuple(self._specials))
    self._id = {s: int(i[0]) for s, i in zip(self._specials, tokenizer.encode_rendered_batch(list(self._specials)),
                                             strict=True) if len(i) == 1}
    # Ids that end a turn: the tokenizer's, and what the template writes there.
    self.stop_ids = tuple(tokenizer.stop_ids)
    self._prompt_suffices = True
    self._shown: set = set()
    self._check(tokenizer)

  def _check(self, tokenizer: Tokenizer) -> None:
    """Tries the template on one turn, so that what is wrong with it shows before the data are read."""
    for system in ([], [{"role": "system", "content": "c"}]):
      messages = [*system, *_PROBE]
      try:
        without, prompt = (self._render(messages[:-1], gen=gen) for gen in (False, True))
        whole, header = self._render(messages), self._header(messages[:-1], messages[-1])
      except DataError:
        continue  # it wants other messages, or refuses what will be said with the row that has it
      # A template that has no generation prompt but writes a header: what is trained begins after that.
      self._prompt_suffices = prompt.text != without.text or not header[len(without.text):].strip()
      if not self._prompt_suffices:
        logging.warning("%s: add_generation_prompt changes nothing, though the assistant's turn begins with %r. That "
                        "is not trained; whoever serves the model must write it.", self.template.where,
                        header[len(without.text):])
      try:
        turn = self._locate(Conversation("", messages, [], 0), len(messages) - 1)
      except DataError as e:
        raise DataError(f"the template was tried with a user who says 'a' and an assistant who says 'b'. {e}") from e
      self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, self._id[turn.token]]))
      logging.info("%s: the assistant's turn ends with %s (id %d), which is trained.", self.template.where, turn.token,
                   self._id[turn.token])
      self._compare_marks(whole, turn)
      bos = tokenizer.named_tokens.get("bos_token")
      if bos and tokenizer.bos_id not in self.stop_ids and bos not in whole.text:
        logging.warning("%s: writes no %s, though the tokenizer has one. Conversations are trained without it, as they "
                        "will be served with this template.", self.template.where, bos)
      return

  def _compare_marks(self, whole: Rendered, turn: Turn) -> None:
    """Generation blocks are not needed and not used; where they say something else, people should know."""
    if whole.generated and whole.generated[-1] != (turn.start, turn.end):
      start, end = whole.generated[-1]
      logging.warning("%s: its generation block marks %r; trained is %r.", self.template.where, whole.text[start:end],
                      whole.text[turn.start:turn.end])

  def turns(self, conversation: Conversation, weights: Sequence[float], policy: str) -> list[list[Segment]]:
    """The conversation's examples, in which messages have these weights and all else has none.

    Args:
      conversation: what was said.
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
      raise DataError(f"{self._of(runs[0][-1].index)} is rendered differently once messages[{runs[1][0].index}] "
                      "follows, and chat.on_rewritten_history is 'error'. Set it to 'split' (an example for each "
                      "turn, with the history as it is shown then) or 'last' (only the last turn is trained).")
    if len(runs) > 1 and policy == "last":
      runs = [[runs[-1][-1]]]
    rendered = [self._text(run[-1], conversation if run is runs[-1] else None) for run in runs]
    self._check_shown(conversation, [turn for run in runs for turn in run], rendered)
    return [self._segments(run, text) for run, text in zip(runs, rendered, strict=True)]

  def whole(self, conversation: Conversation, weights: Sequence[float]) -> list[Segment]:
    """The conversation as one example in which every token is trained, those of a message with its factor."""
    rendered = self._of_all(conversation)
    turns = []
    for index, weight in enumerate(weights):
      if weight != 1:
        turn = self._locate(conversation, index)._replace(weight=weight)
        if rendered.text[:turn.end] != turn.rendered.text[:turn.end]:
          raise DataError(f"{self._of(index)} has a weight, but is rendered differently once more messages follow, so "
                          "that its place is unknown. Leave the weight out, or do not set chat.train_on='all'.")
        turns.append(turn)
    said = [Turn(i, rendered, 0, 0, None, 1.0) for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    self._check_shown(conversation, said, [rendered])
    return self._segments(turns, rendered, outside=1.0)

  def behind(self, messages: list[dict], added: list[dict], tools: list[dict] | None, variables: dict) -> Segment:
    """What is rendered behind the assistant's answer to `messages` when `added` follow it and it is to speak again.

    It does not depend on the answer, which is found as the place where the renderings of two answers differ.

    Raises:
      DataError: the template refuses the conversation, or does not show the answer once more messages follow.
    """
    def render(answer: str) -> Rendered:
      said = {"role": "assistant", "content": answer}
      return self._render([*messages, said, *added], Conversation("", [], [], 0, tools, variables), gen=True)

    rendered, other = render("a"), render("b")
    same = len(_common(rendered.text[::-1], other.text[::-1]))
    if same == len(rendered.text):
      raise DataError(f"{self.template.where} does not show what the assistant says once more messages follow. Use "
                      "another template (chat.template).")
    end, token = self._end(rendered, len(rendered.text) - same)
    if token is None:
      raise DataError(f"{self.template.where} does not end what the assistant says once more messages follow. Use "
                      "another template (chat.template).")
    return Segment(rendered.text[end:], _between(rendered.inert, end, len(rendered.text)))

  def _locate(self, conversation: Conversation, index: int) -> Turn:
    """Where a message is in the rendering that ends with it."""
    messages = conversation.messages
    said = messages[index]["role"] == "assistant"
    rendered = self._render(messages[:index + 1], conversation)
    if said and index and self._prompt_suffices:
      before = self._render(messages[:index], conversation, gen=True).text
      if not rendered.text.startswith(before):
        at = len(_common(before, rendered.text))
        raise DataError(
            f"{self._of(index)}: the prompt that the model answers ends with {before[at:][-60:]!r}, where the rendered "
            f"turn has {rendered.text[at:][:60]!r}: {self.template.where} does not render this turn as a model would "
            "write it. Use a template made for training (chat.template), or give the row the chat_template_kwargs, or "
            "the reasoning, that the template wants.")
      start = len(before)
    else:
      start = len(_common(self._header(messages[:index], messages[index], conversation), rendered.text))
    end, token = self._end(rendered, start)
    if said and token is None:
      raise DataError(
          f"{self._of(index)}: {self.template.where} ends the turn with {rendered.text[start:][-30:]!r}, in which no "
          "token of the tokenizer ends a text, so that the model would never learn to stop. Use a template that fits "
          "the tokenizer (chat.template; 'plain' ends turns with EOS), or add its tokens to the tokenizer as special.")
    behind = rendered.text[end:] if self._pattern is None else self._pattern.sub("", rendered.text[end:])
    if behind.strip():
      raise DataError(f"{self._of(index)}: {self.template.where} writes {behind.strip()[:60]!r} behind {token}, where "
                      "a model stops. Use another template (chat.template), or correct the tokenizer's stop ids "
                      "(eos_token_id in generation_config.json).")
    return Turn(index, rendered, start, end, token, 1.0)

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
    """What is rendered up to a message's content: what two different contents have in common."""
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "reasoning_content", "reasoning", "thinking")}
    return _common(*(self._render([*before, {**kept, "content": content}], conversation).text for content in "ab"))

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
    """Cuts an example where its turns begin: what a model writes is tokenised apart from what it answers."""
    segments = []

    def add(start: int, stop: int, **given) -> None:
      if start < stop:
        segments.append(Segment(rendered.text[start:stop], _between(rendered.inert, start, stop), **given))

    starts = [turn.start for turn in turns] + [len(rendered.text)]
    add(0, starts[0], weight=outside)
    for turn, following in zip(turns, starts[1:], strict=True):
      if turn.token is None:
        add(turn.start, turn.end, weight=turn.weight)
        add(turn.end, following, weight=outside)
      else:
        count = sum(m.group() == turn.token for m in self._tokens(rendered, turn.start, turn.end))
        add(turn.start, following, weight=turn.weight, end=self._id[turn.token], count=count, rest=outside)
    return segments

  def _check_shown(self, conversation: Conversation, turns: list[Turn], rendered: list[Rendered]) -> None:
    """Raises DataError if the template leaves out something of the conversation that a model should see or say."""
    texts = [r.text for r in rendered]
    for what, kind, needle, upto, changed in _contents(conversation, turns):
      # Short strings are found by chance: what is of a new kind is looked at more closely.
      if not needle.strip() or kind in self._shown and any(needle.strip() in text for text in texts):
        continue
      given = conversation._replace(messages=conversation.messages[:upto])
      if self._of_all(changed).text == self._of_all(given).text:
        raise DataError(f"{what} is left out by {self.template.where}. Use a template that knows it (chat.template), "
                        "or take it out of the row.")
      self._shown.add(kind)

  def _render(self, messages: list[dict], conversation: Conversation | None = None, gen: bool = False) -> Rendered:
    tools, variables = (None, {}) if conversation is None else (conversation.tools, conversation.variables)
    return self.template.render_spans(messages, tools=tools, add_generation_prompt=gen, inert_tokens=self._specials,
                                      **variables)

  def _of(self, index: int) -> str:
    return f"messages[{index}]"


def _contents(conversation: Conversation, turns: list[Turn]):
  """(what it is, its kind, its text, messages to render, these with it changed) of all that should be shown."""

  def changed(i: int, **given) -> Conversation:
    return conversation._replace(messages=[*conversation.messages[:i], {**conversation.messages[i], **given}])

  trained = {turn.index for turn in turns}
  for i, message in enumerate(conversation.messages[:max(trained) + 1] if trained else conversation.messages):
    if message["role"] == "assistant" and i not in trained:
      continue
    content, where = message.get("content", ""), f"messages[{i}]"
    content, other = text_of(content), changed(i, content=with_more(content, " a"))
    if i in trained:
      yield f"{where}.content", (message["role"], "tool_calls" in message), content, i + 1, other
    else:
      other = other._replace(messages=other.messages + conversation.messages[i + 1:])
      yield (f"{where}, of the role {message['role']!r},", (message["role"], i == 0), content,
             len(conversation.messages), other)
    for key in REASONING:
      if key in message and i in trained:
        yield f"{where}.{key}", key, message[key], i + 1, changed(i, **dict.fromkeys(REASONING, f"{message[key]} a"))
    for call in message.get("tool_calls", ()) if i in trained else ():
      yield f"{where}.tool_calls", "tool_calls", call["function"]["name"], i + 1, changed(i, tool_calls=[])
  for tool in conversation.tools or ():
    name = tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None
    if isinstance(name, str):
      yield f"the tool {name!r}", "tools", name, len(conversation.messages), conversation._replace(tools=None)


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
