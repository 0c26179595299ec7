"""Makes chat.json and the folder tiny: what transformers makes of the templates and of a small tokenizer.

    python tests/input_pipeline/references/make_chat_references.py

Needs `pip install transformers`; it was run with transformers 5.23. The tests read the files alone.
"""

import datetime
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]")
# Recognised in any text, as in the vocabularies of thinking models.
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEXTS = ["", "Hello, world!", "naïve café 日本語 🏳️‍🌈",
         "a  b\n\n c\td ", "<|im_start|>user\nhi<|im_end|>\n",
         "x<think>y</think>z", "[INST] a [/INST]", "<|im_", "end|>", " <|begin|> "]


class FixedDay(datetime.datetime):
  @classmethod
  def now(cls, tz=None):
    return cls(2025, 3, 9, 12, 0, 0)


def call(name, arguments, id="abcdef123"):
  return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather at a place & time, \"now\" if not given.", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Größe <egal>"},
            "when": {"type": "object", "properties": {"day": {"type": "integer"}, "at": {}}}}}}}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
ONE = [{"role": "user", "content": "Hi there "}]
TURNS = [*ONE, {"role": "assistant", "content": " Hello!\n"},
         {"role": "user", "content": "Wie geht's, ägyptische 日本?"},
         {"role": "assistant", "content": "Gut."}]
CALLS = [*ONE, {"role": "assistant", "tool_calls": [call("weather", {"city": "Köln"})]},
         {"role": "tool", "content": "{\"sun\": true}", "name": "weather"}, {"role": "assistant", "content": "Sunny."}]
TWO_CALLS = [*ONE, {"role": "assistant", "content": None, "tool_calls": [call("a", {}), call("b", "{\"x\": 1}")]},
             {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
THINKING = [*ONE, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
            {"role": "user", "content": "Sure?"}, {"role": "assistant", "reasoning": "let me see\n", "content": "No."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"},
                                      {"type": "text", "text": "here"}]}]
ODD = [{"role": "user", "content": "a\tb\nc d e"}, {"role": "note", "content": "unseen"},
       {"role": "assistant", "content": "fine"}, {"role": "user", "content": "f"},
       {"role": "stop", "content": "unseen"}]
CASES = {
    "one": dict(messages=ONE), "prompt": dict(messages=ONE, add_generation_prompt=True), "turns": dict(messages=TURNS),
    "system": dict(messages=[SYSTEM, *TURNS]),
    "system prompt": dict(messages=[SYSTEM, *ONE], add_generation_prompt=True),
    "tools": dict(messages=ONE, tools=[TOOL, TOOL], add_generation_prompt=True),
    "no tools": dict(messages=ONE, tools=[]),
    "calls": dict(messages=CALLS, tools=[TOOL]), "two calls": dict(messages=TWO_CALLS),
    "thinking": dict(messages=THINKING),
    "not thinking": dict(messages=ONE, add_generation_prompt=True, enable_thinking=False),
    "parts": dict(messages=PARTS), "odd": dict(messages=ODD, documents=[{"title": "T", "text": "t"}], tools=[TOOL]),
    "continue": dict(messages=TURNS, continue_final_message=True),
    "continue trimmed": dict(messages=[*ONE, {"role": "assistant", "content": "So far  "}],
                             continue_final_message=True),
    "another bos": dict(messages=ONE, bos_token="<|eot_id|>", date_string="1 May 1999"),
    "bad roles": dict(messages=[TURNS[1], *ONE, *ONE]),
}


def make_tokenizer() -> Path:
  """A byte-level BPE of 256 bytes, 44 merges and the special tokens, with all that could add tokens unasked."""
  folder = HERE / "tiny"
  backend = Tokenizer(models.BPE())
  backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                show_progress=False)
  backend.train_from_iterator([json.dumps(CASES, ensure_ascii=False)], trainer)
  backend.add_special_tokens(list(SPECIAL))
  backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
  backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 300)])
  folder.mkdir(exist_ok=True)
  backend.save(str(folder / "tokenizer.json"))
  config = dict(
      tokenizer_class="PreTrainedTokenizerFast",
      bos_token={"__type": "AddedToken", "content": "<|begin|>"},
      eos_token="<|im_end|>", pad_token="<pad>",
      added_tokens_decoder={"315": dict(content="<pad>", special=True, normalized=False, lstrip=False, rstrip=False,
                                        single_word=False)})
  (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
  return folder


def main():
  chat_template_utils.datetime = FixedDay
  folder = make_tokenizer()
  tokenizer = AutoTokenizer.from_pretrained(folder)
  references = dict(date="2025-03-09", cases=CASES, templates={}, texts=[])
  for text in TEXTS:
    plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    references["texts"].append(dict(text=text, plain=plain, ids=ids, decoded=decoded))
  references["tokenizer"] = dict(
      bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id,
      size=max(tokenizer.get_vocab().values()) + 1)
  for file in sorted((HERE / "templates").glob("*.jinja")):
    results = references["templates"][file.stem] = {}
    source = file.read_text("utf-8")
    for name, case in CASES.items():
      try:
        text = tokenizer.apply_chat_template(chat_template=source, conversation=case["messages"], tokenize=False,
                                             **{k: v for k, v in case.items() if k != "messages"})
      except Exception as e:  # a template may refuse
        results[name] = dict(error=str(e))
        continue
      ids = tokenizer(text, add_special_tokens=False)["input_ids"]
      results[name] = dict(text=text, ids=ids)
      if not case.get("continue_final_message"):
        spans = chat_template_utils.render_jinja_template(
            [[{k: v for k, v in m.items() if v is not None} for m in case["messages"]]], chat_template=source,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **{k: v for k, v in case.items() if k != "messages"}})[1][0]
        results[name]["generated"] = spans
  content = json.dumps(references, indent=1, ensure_ascii=False)
  content = re.sub(r"\[[\d,\s]+\]", lambda ids: re.sub(r"\s+", " ", ids.group()), content)  # ids on one line
  (HERE / "chat.json").write_text(content + "\n", "utf-8")


if __name__ == "__main__":
  main()
