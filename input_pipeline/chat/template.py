"""Chat templates: a conversation as the text a model was trained on, equal to transformers' apply_chat_template.

    template = load_template(folder)
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)

Templates run in the sandbox of `sandbox.py`. The same conversation gives the same text on every day and machine.
"""

import functools
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date as Date
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, meta
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from input_pipeline.chat.budget import LimitError, Limits, RefusalError
from input_pipeline.chat.plain import messages_of, plain, records
from input_pipeline.chat.sandbox import Sandbox
from input_pipeline.files import printable
from input_pipeline.sources.sources import utf8
from input_pipeline.tokenizer import hf_folder, special_tokens
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import DataError

# The longest template in use has a quarter of this.
MAX_SOURCE = 1 << 17
# A folder's files that may hold templates, in this order, and the folder of those with a name.
FILES, MORE = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"), "additional_chat_templates"
# Ends the final message while a text that goes on with it is rendered; the space tells whether the template trims.
_CONTINUE = chr(special_tokens.NONCHARACTERS[-1]) + " "


@dataclass(frozen=True)
class Rendered:
  """A rendered conversation.

  `generated`: (start, end) of the characters that the template's generation blocks rendered, in order.
  `inert`: characters of `text` at which no special token begins, since they came with the conversation;
  for `Tokenizer.encode_rendered`.
  """

  text: str
  generated: tuple[tuple[int, int], ...] = ()
  inert: tuple[int, ...] = ()


class _Request(NamedTuple):
  """What is to be rendered, and how; see `ChatTemplate.render` and `render_spans`."""

  messages: Iterable[Mapping]
  tools: Iterable[Mapping] | None
  documents: Iterable[Mapping] | None
  add_generation_prompt: bool
  continue_final_message: bool
  inert_tokens: tuple[str, ...]
  variables: Mapping[str, Any]


class ChatTemplate:
  """A chat template, compiled once. Rendering is safe from several threads, one at a time.

  Args:
    special_tokens: variables of the template, `bos_token`, `eos_token`, ….
    date: the day that strftime_now tells. Without one, a template that asks for it is an error: data must not depend
      on the day on which they are read.
    where: names the template in errors, usually its file.
    tool_use: the template to use in its place when tools are given.
    limits: what one rendering may use.

  Raises:
    DataError: the template is too long or not valid; names file and line.
  """

  def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, *, date: Date | None = None,
               where: str = "chat template", tool_use: "ChatTemplate | None" = None,
               limits: Limits = Limits()):  # noqa: B008 (it is frozen)
    self.source, self.special_tokens, self.date = source, dict(special_tokens or {}), date
    self.where, self.tool_use = where, tool_use
    if len(source) > MAX_SOURCE:
      raise DataError(f"{where}: a template of {len(source)} characters; at most {MAX_SOURCE} are read.")
    self._lock, self._environment = threading.Lock(), Sandbox(limits)
    try:
      code = self._environment.compile(source, filename=where)
      self._template = Template.from_code(self._environment, code, self._environment.make_globals(None))
    except Exception as e:
      raise self._error(e) from e

  def render(self, messages: Iterable[Mapping], tools: Iterable[Mapping] | None = None,
             documents: Iterable[Mapping] | None = None, add_generation_prompt: bool = False,
             continue_final_message: bool = False, **variables) -> str:
    """The text of a conversation.

    Args:
      messages: what has been said, each with the keys that the template reads, usually `role` and `content`. Keys
        whose value is None are left out, and reasoning is found under each of its usual names, as in transformers.
      tools: JSON schemas of what the model may call.
      documents: texts the model may refer to.
      add_generation_prompt: end with what precedes the model's next message.
      continue_final_message: end within the last message, so that the model goes on with it.
      **variables: more of the template's variables, `enable_thinking` say; they win over special tokens.

    Raises:
      DataError: the template refuses the conversation, fails, or wants more than its limits; or the conversation has
        something that is not plain data. Names file and line, and the reason.
    """
    return self._render(_Request(messages, tools, documents, add_generation_prompt, continue_final_message, (),
                                 variables))[0]

  def render_spans(self, messages, tools=None, documents=None, add_generation_prompt: bool = False,
                   continue_final_message: bool = False, inert_tokens: Iterable[str] = (), **variables) -> Rendered:
    """Like `render`, with what is known about the text's parts.

    Args:
      inert_tokens: strings that are tokens only where the template writes them, usually the tokenizer's
        `special_tokens`. Where one begins within a string of the conversation, its first character is rendered as a
        stand-in and put back, so that its place is known; the end of a string that could begin one counts.
        A template that looks for these strings in a message does not find them.
    """
    text, blocks, inert = self._render(_Request(messages, tools, documents, add_generation_prompt,
                                                continue_final_message, tuple(inert_tokens), variables))
    if any(not found for _, _, found in blocks):
      raise DataError(f"{self.where}: a generation block stands in a macro, call or set block, so that its place in "
                      "the text is unknown. Move it out, or use `render`.")
    return Rendered(text, tuple((start, min(end, len(text))) for start, end, _ in blocks if start < len(text)), inert)

  def _render(self, request: _Request):
    """(text, (start, end, whether it is there) of each generation block, positions of inert characters)."""
    if request.tools is not None and self.tool_use is not None:
      return self.tool_use._render(request)
    try:
      return self._render_with(False, request)
    except DataError as error:
      # DeepSeek's put arguments in a string with `+`. That is found for each conversation anew: what one is rendered
      # as depends on no other.
      if not isinstance(error.__cause__, TypeError) or not any(m.get("tool_calls") for m in request.messages):
        raise
      try:
        return self._render_with(True, request)
      except DataError:
        raise error from error.__cause__

  def _render_with(self, written: bool, request: _Request):
    """See `_render`; `written`: the arguments of calls are strings of JSON."""
    given = {"messages": messages_of(request.messages, written), "tools": records(request.tools, "tools"),
             "documents": records(request.documents, "documents")}
    marks = _Marks(request.inert_tokens)
    if request.inert_tokens or request.continue_final_message:
      given = {key: marks.mark(value, key) for key, value in given.items()}
    content = None
    if request.continue_final_message:
      if request.add_generation_prompt:
        raise DataError("continue_final_message and add_generation_prompt exclude each other. Set one of them.")
      content = _open_final_message(given["messages"], self.where)
    text, generated = self._run({**self.special_tokens, **plain(request.variables, "variables"), **given,
                                 "add_generation_prompt": request.add_generation_prompt})
    blocks = [(start, start + len(block), text.startswith(block, start)) for start, block in generated]
    if content is not None:
      text = self._cut(text, content)
    text, inert = marks.restore(text, self.where)
    return text, blocks, inert

  def _run(self, given: dict) -> tuple[str, list[tuple[int, str]]]:
    """(text, [(position, text) of each generation block])."""
    env = self._environment
    with self._lock:
      env.start(self.date)
      pieces = []
      try:
        for piece in self._template.root_render_func(self._template.new_context(given)):
          pieces.append(piece)
          env.position += len(piece)
          if env.position > env.limits.characters:
            raise LimitError(f"its text has more than {env.limits.characters:,} characters")
      except Exception as e:
        raise self._error(e) from e
      text = "".join(pieces)
      utf8(text, f"{self.where}: in what it renders")
      return text, env.generated

  def _cut(self, text: str, content: str) -> str:
    """`text` up to the end of the final message's content, where the mark is."""
    mark = _CONTINUE.strip()
    at = text.rfind(mark)
    if at < 0 or content.strip() not in text:
      raise DataError(f"{self.where}: continue_final_message is set, but the template does not render the final "
                      "message as it is. Use a template that does, or leave it unset.")
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()

  def _error(self, error: Exception) -> DataError:
    """An error of the template, with its file, line and reason."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
      template = trace.tb_frame.f_globals.get("__jinja_template__")
      if template is not None:
        line = template.get_corresponding_lineno(trace.tb_lineno)
      trace = trace.tb_next
    where = f"{self.where}:{line}" if line else self.where
    said = printable(str(getattr(error, "message", None) or error)[:1000])
    if isinstance(error, RefusalError):
      return DataError(f"{where}: the template refuses the conversation: {said}")
    if isinstance(error, LimitError):
      return DataError(f"{where}: the template was stopped: {said}. Use another template, or raise the limit.")
    if isinstance(error, SecurityError):
      return DataError(f"{where}: the template reaches for what is none of its business: {said}.")
    if isinstance(error, UndefinedError):
      return DataError(f"{where}: the template needs what the conversation does not have: {said}.")
    if isinstance(error, TemplateSyntaxError):
      return DataError(f"{where}: not a valid template: {said}")
    if isinstance(error, RecursionError):
      return DataError(f"{where}: the template, or what it is given, is nested too deeply.")
    reason = said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
    return DataError(f"{where}: the template cannot be rendered: {reason}.")


def load_template(path: str | Path, name: str | None = None, *, special_tokens: Mapping[str, str] | None = None,
                  date: Date | None = None) -> ChatTemplate | None:
  """The chat template of a Hugging Face folder, or in a file; None for a folder without one.

  In a folder these are looked for: chat_template.jinja and additional_chat_templates/NAME.jinja; `chat_template` of
  tokenizer_config.json, a string or a list of names and templates; chat_template.json.

  Args:
    path: the folder, or a template's file.
    name: of several templates, this one. Default: "default", and "tool_use" when tools are given.
    special_tokens: the template's `bos_token` and so on. Default: those of the tokenizer beside it.
    date: see ChatTemplate.

  Raises:
    DataError: an unknown name, files that cannot be read, or a template that is not valid.
  """
  path = Path(path)
  folder = path if path.is_dir() else path.parent
  if path.is_dir():
    names = [*FILES, *(f"{MORE}/{file.name}" for file in sorted((path / MORE).glob("*.jinja")))]
    found = _find_templates({n: hf_folder.read_text(path / n) for n in names if (path / n).is_file()}, f"{path}/")
  elif path.is_file():
    found = {"default": (str(path), hf_folder.read_text(path))}
  else:
    raise DataError(f"chat template: {str(path)!r} does not exist. Name a template's file or a Hugging Face folder.")
  if special_tokens is None:
    special_tokens = hf_folder.special_tokens(folder)
  return _choose(found, name, special_tokens, date, str(path))


def template_of(tokenizer: Tokenizer, date: Date | None = None) -> ChatTemplate | None:
  """The chat template in the folder that a tokenizer came from, found as in `load_template`; None without one."""
  return _choose(_find_templates(tokenizer.files, "tokenizer: "), None, tokenizer.named_tokens, date, "tokenizer")


def _choose(found: dict[str, tuple[str, str]], name: str | None, special_tokens: Mapping[str, str] | None,
            date: Date | None, where: str) -> ChatTemplate | None:
  """One of the templates that `_find_templates` gave; see `load_template`."""
  if not found and name is None:
    return None
  wanted = name or "default"
  if wanted not in found:
    raise DataError(f"{where}: has no chat template {wanted!r}, only {', '.join(map(repr, sorted(found))) or 'none'}. "
                    "Give the name of one.")

  def make(key: str, tool_use: ChatTemplate | None) -> ChatTemplate:
    where, source = found[key]
    template = ChatTemplate(source, special_tokens, date=date, where=where, tool_use=tool_use)
    if special_tokens is None:
      undeclared = meta.find_undeclared_variables(template._environment.parse(source))
      asked = sorted(undeclared & set(hf_folder.NAMED_TOKENS))
      if asked:
        raise DataError(f"{where}: the template uses {', '.join(asked)}, and there is no tokenizer beside it to say "
                        f"what they are. Give special_tokens={{{asked[0]!r}: …}}, or the tokenizer's folder.")
    return template

  tool_use = make("tool_use", None) if name is None and "tool_use" in found else None
  return make(wanted, tool_use)


def _find_templates(files: Mapping[str, str], where: str) -> dict[str, tuple[str, str]]:
  """{name: (where, source)} of the templates in a folder's files; `where` precedes their names in messages."""
  found = {}
  if FILES[0] in files:
    found["default"] = (where + FILES[0], files[FILES[0]])
  for name in sorted(files):
    if name.startswith(MORE + "/"):
      found[Path(name).stem] = (where + name, files[name])
  for name in FILES[1:]:
    if found or name not in files:
      continue
    entry = hf_folder.parse_json(files[name], where + name).get("chat_template")
    if isinstance(entry, str):
      found["default"] = (where + name, entry)
    elif isinstance(entry, list) and all(
        isinstance(e, dict) and isinstance(e.get("name"), str) and isinstance(e.get("template"), str) for e in entry):
      found |= {e["name"]: (f"{where}{name}[{e['name']}]", e["template"]) for e in entry}
    elif entry is not None:
      raise DataError(f"{where}{name}: chat_template is {str(entry)[:100]!r}; expected a string, or a list of objects "
                      "with name and template.")
  return found


def _open_final_message(messages: list[dict], where: str) -> str:
  """Appends the mark to the last message's content; returns that content."""
  final = messages[-1]
  content = final.get("content")
  if isinstance(content, str):
    final["content"] = content + _CONTINUE
    return content
  for block in reversed(content if isinstance(content, list) else ()):
    if isinstance(block, dict) and isinstance(block.get("text"), str):
      text = block["text"]
      block["text"] = text + _CONTINUE
      return text
  raise DataError(f"{where}: continue_final_message is set, but messages[{len(messages) - 1}] has no text in its "
                  "content.")


@functools.lru_cache(maxsize=8)
def _literal(tokens: tuple[str, ...]) -> tuple[re.Pattern, frozenset[str], int]:
  """(where one of `tokens` begins, the beginnings of tokens, the longest's length)."""
  pattern = special_tokens.pattern(tokens, overlapping=True)
  return pattern, frozenset(t[:n] for t in tokens for n in range(1, len(t))), max(map(len, tokens))


class _Marks:
  """Stand-ins for the first characters of special tokens' literals in what a conversation says."""

  def __init__(self, tokens: Iterable[str]):
    self._tokens = tuple(filter(None, tokens))
    self._literal = _literal(self._tokens) if self._tokens else None
    firsts = sorted({token[0] for token in self._tokens})
    free = special_tokens.NONCHARACTERS[:-1]
    if len(firsts) > len(free):
      raise DataError(f"inert_tokens: begin with {len(firsts)} different characters; at most {len(free)} can be told "
                      "apart.")
    self._stand_in = {first: chr(code) for first, code in zip(firsts, free, strict=False)}
    self._used = False

  def mark(self, value: Any, where: str) -> Any:
    """`value` with stand-ins in its strings; a dict's keys, which templates look for, stay."""
    if isinstance(value, str):
      special_tokens.refuse_noncharacters(value, where)
      return self._mark(value)
    if isinstance(value, list):
      return [self.mark(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
      return {k: self.mark(v, f"{where}[{k!r}]") for k, v in value.items()}
    return value

  def _mark(self, text: str) -> str:
    if not self._literal:
      return text
    pattern, beginnings, longest = self._literal
    places = {match.start() for match in pattern.finditer(text)}
    # What follows this string in the text could complete a token.
    places.update(len(text) - n for n in range(1, min(longest, len(text) + 1)) if text[-n:] in beginnings)
    if not places:
      return text
    self._used = True
    chars = list(text)
    for at in places:
      chars[at] = self._stand_in[chars[at]]
    return "".join(chars)

  def restore(self, text: str, where: str) -> tuple[str, tuple[int, ...]]:
    """(text with the first characters back in their places, those places)."""
    if not self._used:
      return text, ()
    back = {stand_in: first for first, stand_in in self._stand_in.items()}
    if any(f"\\u{ord(char):04x}" in text for char in back):
      raise DataError(f"{where}: the template writes the characters of a message as numbers (ensure_ascii), among them "
                      "a special token, whose place is then unknown. Take the special token out of the message.")
    places = tuple(i for i, char in enumerate(text) if char in back)
    return "".join(back.get(char, char) for char in text), places
