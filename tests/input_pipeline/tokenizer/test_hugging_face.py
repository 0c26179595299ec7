"""Tokenizers of every kind give conversations, strings and texts the ids that transformers gives them."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from input_pipeline.examples.conversations import ChatEncoder
from input_pipeline.examples.prompts import Prompter
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from trainer.config import defaults

HERE = Path(__file__).parents[1] / "references" / "kinds"
REFERENCES = json.loads((HERE / "kinds.json").read_text("utf-8"))
KINDS = list(REFERENCES["conversations"])
CASES = [(kind, form) for kind in KINDS for form in REFERENCES["formats"]]


def folder(path, kind, named, specials=(), model=None):
  """A Hugging Face folder with one of the tokenizers."""
  backend = Backend.from_file(str(HERE / f"{kind.replace(', ', '_')}.json"))
  backend.add_special_tokens(list(specials))
  for name, content in (("tokenizer", json.loads(backend.to_str())), ("tokenizer_config", named), ("config", model)):
    if content is not None:
      (path / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
  return path


def chat(tokenizer, path, form):
  config, template = defaults(), REFERENCES["formats"][form]["template"]
  config.chat.template = form
  if template is not None:
    (path / "t.jinja").write_text(template, "utf-8")
    config.chat.template = str(path / "t.jinja")
  return config, ChatEncoder(config, tokenizer)


@pytest.mark.parametrize("kind, form", CASES)
def test_conversations_have_the_ids_of_transformers(tmp_path, kind, form):
  """I13, T11: ids of the rendered text as a whole, weights by the places of characters; a prompt is a beginning."""
  given = REFERENCES["formats"][form]
  tokenizer = load_tokenizer(folder(tmp_path, kind, REFERENCES["named"][kind], given["specials"]))
  config, encoder = chat(tokenizer, tmp_path, form)
  for name, expected in REFERENCES["conversations"][kind][form].items():
    messages = given["cases"][name]
    (found,) = encoder.encode([Record("a", f"a:{name}", {"messages": messages})])
    assert found.ids.tolist() == expected["ids"], name
    assert found.weights.astype(int).tolist() == expected["weights"], name
    asked = Prompter(config, tokenizer).messages(messages[:-1])
    assert asked.ids.tolist() == expected["prompt"], name


@pytest.mark.parametrize("kind", KINDS)
def test_strings_and_texts_have_the_ids_of_transformers(tmp_path, kind):
  """T11: a prompt with its completion as one text (as TRL does it), a document between BOS and EOS, an answer that is
  scored behind its prompt."""
  tokenizer = load_tokenizer(folder(tmp_path, kind, REFERENCES["named"][kind]))
  config = defaults()
  config.tokenizer.add_bos = True
  encoder, prompter = ChatEncoder(config, tokenizer), Prompter(config, tokenizer)
  for case in REFERENCES["strings"][kind]:
    prompt, completion = case["prompt"], case["completion"]
    (found,) = encoder.encode([Record("a", "a:1", {"prompt": prompt, "completion": completion})])
    assert found.ids.tolist() == [tokenizer.bos_id, *case["ids"], tokenizer.eos_id]
    assert found.weights.tolist() == [0, *case["weights"], 1]
    ids, before = prompter.answered(prompter.text(prompt), completion)
    assert ids.tolist() == [tokenizer.bos_id, *case["ids"]] and before == 1 + case["weights"].index(1)
  texts = [case["text"] for case in REFERENCES["plain"][kind]]
  for ids, case in zip(tokenizer.encode_batch(texts), REFERENCES["plain"][kind], strict=True):
    assert ids.tolist() == case["ids"]
    assert prompter.text(case["text"]).ids.tolist() == [tokenizer.bos_id, *case["ids"]]


@pytest.mark.parametrize("kind, form", [(kind, form) for kind, form in CASES if form in ("zephyr", "llama2", "chatml")])
def test_a_conversation_that_is_continued_token_by_token_is_the_whole_one(tmp_path, kind, form):
  """T29: what stands behind a sampled answer is encoded as in the whole text."""
  given = REFERENCES["formats"][form]
  tokenizer = load_tokenizer(folder(tmp_path, kind, REFERENCES["named"][kind], given["specials"]))
  config, _ = chat(tokenizer, tmp_path, form)
  prompter, messages = Prompter(config, tokenizer), given["cases"]["turns"]
  expected, weights = (np.array(REFERENCES["conversations"][kind][form]["turns"][key]) for key in ("ids", "weights"))
  first = int(weights.argmax())
  sampled = expected[first:first + int(np.argmin(weights[first:]))]  # up to the token that ends the turn
  added, _ = prompter.added_messages(messages[:1], messages[1]["content"], messages[2:3])
  prompt = prompter.messages(messages[:3]).ids
  assert [*prompter.messages(messages[:1]).ids, *sampled, *added] == prompt.tolist()


@pytest.mark.parametrize("number", range(len(REFERENCES["classes"])))
def test_the_class_that_a_folder_names_counts_as_in_transformers(tmp_path, number):
  """add_prefix_space, and for Llama's class legacy; not where the type of the model has another class."""
  case = REFERENCES["classes"][number]
  hf = load_tokenizer(folder(tmp_path, case["kind"], case["named"], model=case["model"]))
  assert hf.encode_rendered(case["text"]).tolist() == case["ids"]
  assert hf.decode(case["ids"]) == case["decoded"]
  hf.save(tmp_path / "run" / "tokenizer.json")  # where there is no config.json
  kept = load_tokenizer(tmp_path / "run")
  assert kept.encode_rendered(case["text"]).tolist() == case["ids"] and kept.fingerprint == hf.fingerprint


def test_special_tokens_that_tokenizer_json_lacks_are_appended(tmp_path, caplog):
  case = REFERENCES["lacking"]
  hf = load_tokenizer(folder(tmp_path, "never", case["named"]))
  for token, number in case["added"].items():
    assert hf.encode_rendered(token).tolist() == [number]
    assert (hf.decode([number], skip_special=False), hf.decode([number])) == (token, "")  # special, all of them
  assert hf.encode_rendered(case["text"]).tolist() == case["ids"] and hf.eos_id == case["added"]["<|end|>"]
  assert hf.vocab_size == max(case["added"].values()) + 1
  assert hf.pad_id == 0  # those that are appended may have no row in the model's embedding
  assert caplog.text.count("they are appended, as transformers does: <|end|> is ") == 1
  hf.save(tmp_path / "run" / "tokenizer.json")
  assert load_tokenizer(tmp_path / "run").fingerprint == hf.fingerprint and caplog.text.count("are appended") == 2
