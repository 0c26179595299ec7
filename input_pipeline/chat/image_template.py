"""Where images stand in what chat templates render."""

import bisect
import re
from collections.abc import Iterable
from functools import cached_property

from input_pipeline.chat.image_placeholders import IMAGE, ImageFormat, as_parts, parts_of
from input_pipeline.chat.template import ChatTemplate, Rendered
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import DataError


class ImageTemplate:
  """A chat template whose output has IMAGE where its images belong, whatever it writes there itself.

  Templates that know parts of messages write a mark of their own for an image, which is found by trying; others are
  given strings.

  Args:
    template: renders conversations.
    tokenizer: whose special tokens are recognised.
    images: what is known about images.
  """

  def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, images: ImageFormat):
    self._template, self._specials, self._images = template, tuple(tokenizer.special_tokens), images
    ids = tokenizer.encode_rendered_batch(list(self._specials)) if self._specials else []
    self._own = next((s for s, i in zip(self._specials, ids, strict=True) if i.tolist() == [images.token]), None)
    self.where = template.where

  def render_spans(self, messages, tools=None, documents=None, add_generation_prompt: bool = False,
                   continue_final_message: bool = False, inert_tokens: Iterable[str] = (), **variables) -> Rendered:
    """As `ChatTemplate.render_spans`; images are parts {"type": "image"} of the messages.

    Raises:
      DataError: the template leaves out an image, or shows one twice; and see there.
    """
    messages = [dict(message) for message in messages]
    count = sum(part.get("type") == "image" for message in messages for part in parts_of(message))
    if count or self._parts_only:
      messages = [self._shaped(message) for message in messages]
    marks = (self._marker,) if count and self._marker else ()
    rendered = self._template.render_spans(
        messages, tools, documents, add_generation_prompt, continue_final_message, (*inert_tokens, *marks), **variables)
    if not count:
      return rendered
    if self._marker:
      rendered = _replaced(rendered, self._marker)
    if (found := rendered.text.count(IMAGE)) != count:
      raise DataError(f"{self.where} shows {found} of the conversation's {count} images. Use another template "
                      "(chat.template).")
    return rendered

  def _shaped(self, message: dict) -> dict:
    """A message with its content as the template takes it."""
    content = message.get("content")
    if self._marker:
      shown = not self._parts_only or not isinstance(content, str)
      return message if shown else {**message, "content": as_parts(content)}
    if not any(part.get("type") == "image" for part in parts_of(message)):
      return message
    return {**message, "content": "".join(
        IMAGE if part.get("type") == "image" else part.get("text") or "" for part in content)}

  @cached_property
  def _marker(self) -> str | None:
    """What the template writes for a part that is an image; None: it is given strings."""
    text = {"type": "text", "text": "a"}
    try:
      seen, unseen = (self._try(parts) for parts in ([{"type": "image"}, text], [text]))
    except DataError:
      return None
    if "'type'" in seen or '"type"' in seen:  # it has written the list itself
      return None
    # What this pipeline itself puts around an image is not to stand there twice.
    framed = self._own and f"{self._images.before}{self._own}{self._images.after}"
    for token in (framed, self._own, self._images.marker, *self._specials):
      # Counted, since a template may write the text around an image otherwise (SmolVLM: no space before one).
      if token and seen.count(token) > unseen.count(token):
        return token
    start = next((i for i, (a, b) in enumerate(zip(seen, unseen, strict=False)) if a != b), len(unseen))
    return seen[start:start + len(seen) - len(unseen)].strip() or None

  @cached_property
  def _parts_only(self) -> bool:
    """Whether the template shows parts, but no strings."""
    if not self._marker:
      return False
    try:
      return self._try("a") == self._try("b")
    except DataError:
      return True

  def _try(self, content: str | list[dict]) -> str:
    return self._template.render([{"role": "user", "content": content}])


def _replaced(rendered: Rendered, marker: str) -> Rendered:
  """The same with IMAGE for each marker that the template itself wrote."""
  inert, starts, pieces, end = set(rendered.inert), [], [], 0
  for match in re.finditer(re.escape(marker), rendered.text):
    if match.start() not in inert:
      pieces += [rendered.text[end:match.start()], IMAGE]
      starts.append(match.start())
      end = match.end()
  text = "".join([*pieces, rendered.text[end:]])
  shorter = len(marker) - len(IMAGE)
  return Rendered(text, (), tuple(at - shorter * bisect.bisect_left(starts, at) for at in rendered.inert))
