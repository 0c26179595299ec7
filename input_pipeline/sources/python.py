"""Readers of what every machine with Python has: the sources of its standard library, and the docstrings in them."""

import ast
import hashlib
import io
import json
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from absl import logging
from ml_collections import ConfigDict

from input_pipeline.files import File, Record, Tally, read_bytes, walk
from input_pipeline.sources.made import as_chat, asks_chats
from trainer.errors import DataError


class PythonStdlibReader:
  """The sources of the running Python's standard library: real text that every machine has."""

  by_name = True
  text_key, identity = "text", ["python_stdlib"]
  # Not part of the library proper, or packaged separately by some distributions.
  skipped = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})

  def __init__(self, cfg: ConfigDict, source: str):
    self._source = source

  def files(self) -> list[File]:
    folder = sysconfig.get_paths()["stdlib"]
    found = (File(Path(os.path.relpath(p, folder)).as_posix(), Path(p)) for p in walk(folder, self.skipped))
    files = sorted(f for f in found if f.name.endswith(".py"))
    if not files:
      raise DataError(
          f"source {self._source!r}: this Python has no library sources in {folder!r} (a zipped or embedded Python?). "
          "Use type='text' with a path."
      )
    return files

  def read(self, tally: Tally) -> Iterator[Record]:
    for name, path in self.files():
      raw = read_bytes(path, tally)
      try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
      except (SyntaxError, UnicodeDecodeError, LookupError) as e:
        tally.undecodable += 1
        logging.info("%s: skipped, its encoding is not readable: %s", path, e)
      else:
        yield Record(name, str(path), {"text": text})


class PythonDocstringsReader:
  """Functions of the standard library: signatures as prompts, the first paragraphs of their docstrings as completions.

  With `dataset="chat"`, "Document def name(arguments)" is asked by a user, and a function is in the same split here and
  among the pairs below.
  """

  def __init__(self, cfg: ConfigDict, source: str):
    self._sources, self.chat = PythonStdlibReader(cfg, source), asks_chats(cfg, source)
    self.by_name, self.text_key, self.files = self.chat, "text", self._sources.files
    self.identity = ["python_docstrings", 1, *(["chat"] if self.chat else [])]

  def read(self, tally: Tally) -> Iterator[Record]:
    for name, where, node, paragraph in _documented(self._sources, tally):
      signature = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
      function = f"{signature} {node.name}({ast.unparse(node.args)})"
      # As it stands in a file, where a model that has read such files goes on with the docstring.
      fields = as_chat(f"Document {function}", completion=paragraph) if self.chat else {
          "prompt": f'{function}:\n    """', "completion": paragraph}
      yield Record(name, where, fields)


class PythonDocstringMatchesReader:
  """Docstrings of the standard library's functions as queries, the functions without them as what they look for."""

  by_name, text_key, identity = False, "text", ["python_docstring_matches", 1]

  def __init__(self, cfg: ConfigDict, source: str):
    self._sources = PythonStdlibReader(cfg, source)
    self.files = self._sources.files

  def read(self, tally: Tally) -> Iterator[Record]:
    for name, where, node, paragraph in _documented(self._sources, tally):
      node.body = node.body[1:] or [ast.Pass()]
      yield Record(name, where, {"query": paragraph, "positive": ast.unparse(node)})


def _documented(sources: PythonStdlibReader, tally: Tally
                ) -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
  """(name, where, the function, its docstring's first paragraph) of each function that has one."""
  for name, path, fields, *_ in sources.read(tally):
    try:
      with warnings.catch_warnings(action="ignore"):  # of old escapes in those sources
        tree = ast.parse(fields["text"])
    except (SyntaxError, ValueError) as e:
      tally.undecodable += 1
      logging.info("%s: skipped, not Python of this version: %s", path, e)
      continue
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in sorted(functions, key=lambda node: node.lineno):
      docstring = (ast.get_docstring(node) or "").strip()
      if docstring:
        yield f"{name}:{node.lineno}", f"{path}:{node.lineno}", node, " ".join(docstring.split("\n\n")[0].split())


class PythonDocstringPairsReader:
  """Preferences: a function's signature as prompt, its docstring chosen, that of another function rejected.

  In the order of a hash, each function is given the docstring of the next that has a different one. So every docstring
  is rejected about as often as it is chosen, and says by itself nothing about which of the two it is.
  """

  def __init__(self, cfg: ConfigDict, source: str):
    self._docstrings = PythonDocstringsReader(cfg, source)
    self.by_name, self.text_key, self.files = self._docstrings.by_name, "text", self._docstrings.files
    self.identity = ["python_docstring_pairs", 1, *(["chat"] if self._docstrings.chat else [])]

  def read(self, tally: Tally) -> Iterator[Record]:
    records = list(self._docstrings.read(tally))
    texts = [record.fields["completion"] for record in records]
    keys = (json.dumps(list(record.fields.values())).encode() if self._docstrings.chat else
            "\0".join(record.fields.values()).encode() for record in records)
    digests = [hashlib.blake2b(key, digest_size=8).digest() for key in keys]
    order, count = sorted(range(len(records)), key=digests.__getitem__), len(records)
    place = {number: at for at, number in enumerate(order)}
    for number, (name, where, fields, *_) in enumerate(records):
      following = (texts[order[(place[number] + i) % count]] for i in range(1, count))
      rejected = next((text for text in following if text != texts[number]), None)
      if rejected is not None:
        yield Record(name, where, {"prompt": fields["prompt"], "chosen": texts[number], "rejected": rejected})
