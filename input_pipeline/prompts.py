"""Prompts for generation: conversations, texts and records as the token ids that a completion follows."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.examples_chat import ChatEncoder
from input_pipeline.files import DataError
from input_pipeline.readers import Record
from input_pipeline.shapes import Conversation, ShapeReader
from input_pipeline.tokenizer import Tokenizer
from trainer.config import ConfigError


class Prompt(NamedTuple):
  """What is to be completed: its ids (int32 [n]), its text for people, the right answer if one is known, its place."""

  ids: np.ndarray
  text: str
  answer: str | None = None
  where: str = ""


class Prompter:
  """Makes prompts as fine-tuning makes the beginnings of its examples.

  Args:
    config: the whole config, of which `chat` and `tokenizer` count.
    tokenizer: what encodes.

  Attributes:
    template: the chat template, None if there is none.
    stop_ids: ids that end a completion: the tokenizer's, and with a template the one that ends a turn.

  Raises:
    ConfigError, DataError: see `ChatEncoder`.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer):
    encoder = ChatEncoder(config, tokenizer)
    self.template, self.stop_ids = encoder.template, encoder.stop_ids
    self._tokenizer = tokenizer
    self._bos = [tokenizer.bos_id] if config.tokenizer.add_bos and tokenizer.bos_id is not None else []
    self._shapes = ShapeReader(dict(config.chat.fields))

  def text(self, text: str, where: str = "prompt") -> Prompt:
    """A text to be continued, after BOS where the tokenizer has one. No special token is recognised in it.

    Raises:
      DataError: it has no tokens.
    """
    ids = np.concatenate([np.array(self._bos, np.int32), self._tokenizer.encode_batch([text])[0]])
    if not len(ids):
      raise DataError(f"{where}: the prompt is empty, and there is no BOS token to start from.")
    return Prompt(ids, text, where=where)

  def messages(self, messages: Iterable[Mapping], tools: Iterable[Mapping] | None = None, where: str = "prompt",
               **variables: Any) -> Prompt:
    """A conversation that the assistant is to go on with; special tokens only where the template writes them.

    Raises:
      ConfigError: there is no chat template.
      DataError: the template refuses the conversation.
    """
    if self.template is None:
      raise ConfigError(f"{where} is a conversation, but the tokenizer has no chat template. Name one with "
                        "--config.chat.template, e.g. chatml.")
    try:
      rendered = self.template.render_spans(messages, tools=tools, add_generation_prompt=True,
                                            inert_tokens=self._tokenizer.special_tokens, **variables)
    except DataError as e:
      raise DataError(f"{where}: {e}") from e
    return Prompt(self._tokenizer.encode_rendered(rendered.text, rendered.inert), rendered.text, where=where)

  def record(self, record: Record, prompt_key: str | None = None, answer_key: str | None = None) -> Prompt:
    """A record's prompt with its answer.

    Args:
      record: of one of the shapes of fine-tuning, unless columns are named.
      prompt_key: column of a question, which with a chat template becomes what the user says.
      answer_key: column of its answer.

    Raises:
      DataError: naming the record and what it lacks.
    """
    if prompt_key is not None:
      question, answer = (self._string(record, key) for key in (prompt_key, answer_key))
      if self.template is None:
        return self.text(question, record.where)._replace(answer=answer)
      return self.messages([dict(role="user", content=question)], where=record.where)._replace(answer=answer)
    row = self._shapes.read(record)
    if not isinstance(row, Conversation):
      if row.prompt is None:
        raise DataError(f"{record.where}: is a text, without a prompt and an answer. Name the columns that hold them: "
                        "prompt_key and answer_key of the evaluator.")
      return self.text(row.prompt, record.where)._replace(answer=row.completion)
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant" and message.get("content")]
    if not said or said[-1] == 0:
      raise DataError(f"{record.where}: the assistant answers nothing, so that there is no answer to compare with.")
    prompt = self.messages(row.messages[:said[-1]], row.tools, record.where, **row.variables)
    return prompt._replace(answer=row.messages[said[-1]]["content"])

  def _string(self, record: Record, key: str) -> str:
    if key not in record.fields:
      raise DataError(f"{record.where}: no key {key!r}; found {', '.join(map(repr, record.fields)) or 'none'}. Set "
                      "prompt_key and answer_key to columns that there are.")
    value = record.fields[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
      raise DataError(f"{record.where}: {key!r} must be a string or a number, found {type(value).__name__}.")
    return str(value)
