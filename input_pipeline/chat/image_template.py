"""Where images stand in what chat templates render."""

import bisect
import re
from collections.abc import Iterable
from functools import cached_property

from input_pipeline.chat.image_parts import IMAGE, IMAGE_KIND, KINDS, VIDEO_KIND, as_parts, parts_of
from input_pipeline.chat.image_placeholders import ImageFormat
from input_pipeline.chat.template import ChatTemplate, Rendered
from input_pipeline.images.videos import INTRODUCED
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import DataError


class ImageTemplate:
  """A chat template whose output has IMAGE where its images and videos belong, whatever it writes there itself.

  Templates that know parts of messages write a mark of their own for an image, which is found by trying; others are
  given strings.

  Args:
    tokenizer: whose special tokens are recognised.
    images: what is known about images.
  """

  def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, images: ImageFormat):
    self._template, self._specials, self._images = template, tuple(tokenizer.special_tokens), images
    ids = tokenizer.encode_rendered_batch(list(self._specials)) if self._specials else []
    self._own = {kind: next((s for s, i in zip(self._specials, ids, strict=True) if i.tolist() == [held]), None)
                 for kind, held in ((IMAGE_KIND, images.token), (VIDEO_KIND, images.video_token))}
    self.where = template.where

  def render_spans(self, messages, tools=None, documents=None, add_generation_prompt: bool = False,
                   continue_final_message: bool = False, inert_tokens: Iterable[str] = (), **variables) -> Rendered:
    """As `ChatTemplate.render_spans`; images and videos are parts of the messages of their kind alone.

    Raises:
      DataError: the template leaves out an image, shows one twice, or shows them in another order; and see there.
    """
    messages = [dict(message) for message in messages]
    kinds = [part["type"] for message in messages for part in parts_of(message) if part.get("type") in KINDS]
    if kinds or self._parts_only:
      messages = [self._shaped(message) for message in messages]
    marks = {kind: mark for kind in dict.fromkeys(kinds) if (mark := self._markers[kind])}
    rendered = self._template.render_spans(messages, tools, documents, add_generation_prompt, continue_final_message,
                                           (*inert_tokens, *({*marks.values()} - {IMAGE})), **variables)
    if not kinds:
      return rendered
    found = [IMAGE] * rendered.text.count(IMAGE)
    if marks:
      rendered, found = _replaced(rendered, {mark: kind for kind, mark in marks.items()})
    for kind in dict.fromkeys(kinds):
      shown = len(found) if not marks else found.count(kind)
      if shown != (wanted := len(kinds) if not marks else kinds.count(kind)):
        raise DataError(f"{self.where} shows {shown} of the conversation's {wanted} {kind}s. Use another "
                        "template (chat.template).")
    if marks and found != kinds:
      raise DataError(f"{self.where} shows images and videos in another order than the conversation has them. Use "
                      "another template (chat.template).")
    return rendered

  def _shaped(self, message: dict) -> dict:
    """A message with its content as the template takes it."""
    content = message.get("content")
    if self._markers[IMAGE_KIND]:
      if self._markers[VIDEO_KIND] == IMAGE and isinstance(content, list):
        content = [{"type": "text", "text": IMAGE} if part.get("type") == VIDEO_KIND else part for part in content]
        return {**message, "content": content}
      shown = not self._parts_only or not isinstance(content, str)
      return message if shown else {**message, "content": as_parts(content)}
    if not any(part.get("type") in KINDS for part in parts_of(message)):
      return message
    return {**message, "content": "".join(
        IMAGE if part.get("type") in KINDS else part.get("text") or "" for part in content)}

  @cached_property
  def _markers(self) -> dict[str, str | None]:
    """What the template writes for a part that is an image, and a video; None: it is given strings. Where a video is a
    text with images (SmolVLM), and the template passes over it, it is given as a text."""
    found = {kind: self._marker(kind, marker) for kind, marker in zip(KINDS, self._images.markers, strict=True)}
    sampling = self._images.videos
    if found[IMAGE_KIND] and not found[VIDEO_KIND] and sampling is not None and sampling.kind == INTRODUCED:
      found[VIDEO_KIND] = IMAGE
    return found

  def _marker(self, kind: str, marker: str) -> str | None:
    text = {"type": "text", "text": "a"}
    try:
      seen, unseen = (self._try(parts) for parts in ([{"type": kind}, text], [text]))
    except DataError:
      return None
    if "'type'" in seen or '"type"' in seen:  # it has written the list itself
      return None
    # What this pipeline itself puts around an image is not to stand there twice.
    own = self._own[kind]
    framed = own and f"{self._images.before}{own}{self._images.after}"
    for token in (framed, own, marker, *self._specials):
      # Counted, since a template may write the text around an image otherwise (SmolVLM: no space before one).
      if token and seen.count(token) > unseen.count(token):
        return token
    start = next((i for i, (a, b) in enumerate(zip(seen, unseen, strict=False)) if a != b), len(unseen))
    return seen[start:start + len(seen) - len(unseen)].strip() or None

  @cached_property
  def _parts_only(self) -> bool:
    """Whether the template shows parts, but no strings."""
    if not self._markers[IMAGE_KIND]:
      return False
    try:
      return self._try("a") == self._try("b")
    except DataError:
      return True

  def _try(self, content: str | list[dict]) -> str:
    return self._template.render([{"role": "user", "content": content}])


def _replaced(rendered: Rendered, kinds: dict[str, str]) -> tuple[Rendered, list[str]]:
  """The same with IMAGE for each marker that the template itself wrote; and of which kind these are, in their order.
  `kinds`: {marker: kind}."""
  inert, starts, shorter, found, pieces, end = set(rendered.inert), [], [0], [], [], 0
  for match in re.finditer("|".join(map(re.escape, sorted(kinds, key=len, reverse=True))), rendered.text):
    if match.start() not in inert:
      pieces += [rendered.text[end:match.start()], IMAGE]
      starts.append(match.start())
      shorter.append(shorter[-1] + len(match.group()) - len(IMAGE))
      found.append(kinds[match.group()])
      end = match.end()
  text = "".join([*pieces, rendered.text[end:]])
  return Rendered(text, (), tuple(at - shorter[bisect.bisect_left(starts, at)] for at in rendered.inert)), found
