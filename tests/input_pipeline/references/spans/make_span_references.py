"""Makes spans.json and the small tokenizers beside it: ids by transformers, weights by looking for known markers.

    python tests/input_pipeline/references/spans/make_span_references.py

Needs `pip install transformers`; it was run with transformers 5.23. The tests read the files alone. Nothing of this
project but the template files is used, so that two independent computations are compared: here a conversation is
rendered and tokenised as a whole, and what is trained lies between two strings that the format is known to write.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
TEMPLATES = HERE.parents[3] / "input_pipeline" / "chat" / "templates"


def call(name, arguments, id):
  return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather at a place", "parameters": {
        "type": "object", "required": ["city"], "properties": {"city": {"type": "string", "description": "Größe"}}}}}
SYSTEM = {"role": "system", "content": "Be brief & kind."}
ONE = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello, you!"}]
TWO = [*ONE, {"role": "user", "content": "Wie geht's, 日本?"}, {"role": "assistant", "content": "Gut.\n\nUnd dir? 🏳️"}]
OPEN = [*TWO, {"role": "user", "content": "And then?"}]
CALLS = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "reasoning_content": "I should look.",
     "tool_calls": [call("weather", {"city": "Köln"}, "abcdef123")]},
    {"role": "tool", "content": "sunny, 20 degrees", "tool_call_id": "abcdef123"},
    {"role": "assistant", "reasoning_content": "So it is sunny.", "content": "It is sunny."}]
MORE_CALLS = [*CALLS, {"role": "user", "content": "Thanks!"}, {"role": "assistant", "content": "Welcome."}]
THINKING = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "reasoning_content": "Yes.\nI am.", "content": "Quite sure."}]
TALK = {"one": dict(messages=ONE), "turns": dict(messages=TWO), "system": dict(messages=[SYSTEM, *TWO]),
        "ends with the user": dict(messages=OPEN)}


def without_thoughts(messages):
  return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


TOOLS = {"call": dict(messages=without_thoughts(CALLS), tools=[TOOL]),
         "calls and turns": dict(messages=without_thoughts([SYSTEM, *MORE_CALLS]), tools=[TOOL])}
THOUGHTS = {"call": dict(messages=CALLS, tools=[TOOL]),
            "calls and turns": dict(messages=[SYSTEM, *MORE_CALLS], tools=[TOOL]),
            "thinking": dict(messages=THINKING), "thinking, system": dict(messages=[SYSTEM, *THINKING]),
            "not thinking": dict(messages=ONE, chat_template_kwargs=dict(enable_thinking=False))}

# The format's name: the markers around what the model says, special tokens, BOS, EOS, PAD, cases, whether only
# the answers to the last question are shown as they were given (always, or with tools or a system message).
FORMATS = {
    "chatml": (r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
               None, "<|im_end|>", "<|endoftext|>", TALK, "never"),
    "llama3": (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
               ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
               "<|begin_of_text|>", "<|end_of_text|>", None, TALK | TOOLS, "never"),
    "qwen3": (r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
              None, "<|im_end|>", "<|endoftext|>", TALK | THOUGHTS, "always"),
    "gemma": (r"<start_of_turn>model\n(.*?<end_of_turn>)", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
              "<bos>", "<eos>", "<eos>", TALK, "never"),
    "mistral": (r"(?:\[/INST\]|\[/TOOL_RESULTS\])(.*?</s>)",
                ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "<s>", "</s>", "</s>", TALK | TOOLS, "system or tools"),
}


def make_tokenizer(name) -> Path:
  """A small tokenizer of the family's kind: byte-level, or with a sign for spaces and bytes for what it lacks."""
  _, specials, bos, eos, pad, cases, _ = FORMATS[name]
  text = [json.dumps([c["messages"] for c in cases.values()], ensure_ascii=False)] * 2
  if name in ("gemma", "mistral"):
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if name == "gemma":
      backend.normalizer = normalizers.Replace(" ", "▁")
      backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\"{}:,]"), "isolated")
    else:  # a space before the first word of a text
      backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False, limit_alphabet=50, special_tokens=["<unk>"])
    backend.train_from_iterator(text, trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    vocab = spec["model"]["vocab"]
    vocab |= {token: len(vocab) + i for i, token in enumerate(byte_tokens)}
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
  else:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet,
                                                          show_progress=False))
  backend.add_special_tokens(specials)
  backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
  folder = HERE / name
  folder.mkdir(exist_ok=True)
  backend.save(str(folder / "tokenizer.json"), pretty=False)
  named = dict(bos_token=bos, eos_token=eos, pad_token=pad)
  (folder / "tokenizer_config.json").write_text(json.dumps(
      dict(tokenizer_class="PreTrainedTokenizerFast", **{k: v for k, v in named.items() if v}), indent=1) + "\n")
  return folder


def beginnings(messages):
  """The conversation up to each of the user's questions but the first, and all of it."""
  questions = [i for i, m in enumerate(messages) if m["role"] == "user"]
  return [messages[:i] for i in questions[1:]] + [messages]


def reference(tokenizer, name, case):
  pattern, _, _, _, _, _, rewritten = FORMATS[name]
  messages, tools = case["messages"], case.get("tools")
  per_question = rewritten == "always" or rewritten != "never" and (tools or messages[0]["role"] == "system")
  examples = []
  for shown in beginnings(messages) if per_question else [messages]:
    if shown[-1]["role"] == "user" and per_question:
      continue  # nobody answers
    text = tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, **case.get("chat_template_kwargs", {}))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [m.span(1) for m in re.finditer(pattern, text, re.DOTALL)]
    if per_question:  # answers after the last question
      last = max(i for i, m in enumerate(shown) if m["role"] == "user")
      spans = spans[-sum(m["role"] == "assistant" for m in shown[last:]):]
    if case.get("chat_template_kwargs"):  # the prompt has the empty thoughts
      spans = [(start + len("<think>\n\n</think>\n\n"), end) for start, end in spans]
    weights = [int(any(start <= a and b <= end for start, end in spans)) for a, b in encoded["offset_mapping"]]
    examples.append(dict(ids=encoded["input_ids"], weights=weights, text=text,
                         trained=[text[start:end] for start, end in spans]))
  return examples


def main():
  references = {}
  for name, (*_, cases, _) in FORMATS.items():
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(name))
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    references[name] = {key: dict(row=case, examples=reference(tokenizer, name, case)) for key, case in cases.items()}
  content = json.dumps(references, indent=1, ensure_ascii=False)
  content = re.sub(r"\[[\d,\s]+\]", lambda ids: re.sub(r"\s+", " ", ids.group()), content)  # ids on one line
  (HERE / "spans.json").write_text(content + "\n", "utf-8")


if __name__ == "__main__":
  main()
