"""Makes the tokenizers of this folder, one of each kind, and kinds.json: the ids that transformers gives conversations
and texts, and which of them are trained.

    python tests/input_pipeline/references/kinds/make_kind_references.py

Needs `pip install transformers`; it was run with transformers 5.24. The tests read the files alone. Nothing of this
project but the template files is used: conversations are rendered and tokenised as a whole, and a token is trained if
one of its characters (`return_offsets_mapping`) lies between two strings that the format is known to write.
"""

import json
import re
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
TEMPLATES = HERE.parents[3] / "input_pipeline" / "chat" / "templates"
TEXTS = ["Hello there, how are you? I am fine, thanks.", "What is 1 + 1?\nIt is 2.\n\nSure?", "user: assistant: system",
         "So long, and thanks for all the fish.", "Be brief & kind: [INST] <<SYS>> </user> |assistant| |user|"]
TURNS = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hello, how are you?"},
         {"role": "user", "content": " What is 1 + 1?\n"},
         {"role": "assistant", "content": "\n\nIt is 2, 日本 é.\nSure?"}]
CASES = {"one": TURNS[:2], "turns": TURNS, "system": [{"role": "system", "content": "Be brief."}, *TURNS]}
STRINGS = [("What is 1 + 1?", " It is 2."), ("Hello", "there"), ("user: Hello\nassistant: ", "I am fine")]
PLAIN = ["Hello there", " Hello", "", "\nHello there\n", "a  b", "日本"]

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system != false %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{- ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{- message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('user and assistant only') }}{% endif %}
{%- endfor %}"""

# Its name: its template (a name of ours, or the source), the markers around what the model says, more special tokens,
# the cases that it renders.
FORMATS = {
    "chatml": (None, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", ["<|im_start|>", "<|im_end|>"], CASES),
    "llama3": (None, r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
               ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], CASES),
    "gemma": (None, r"<start_of_turn>model\n(.*?<end_of_turn>)", ["<start_of_turn>", "<end_of_turn>"], CASES),
    "mistral": (None, r"\[/INST\](.*?</s>)", ["[INST]", "[/INST]"], {k: CASES[k] for k in ("one", "turns")}),
    "plain": (None, r"Assistant:(.*?</s>)", [], CASES),
    "zephyr": (ZEPHYR, r"<\|assistant\|>\n(.*?</s>)", [], CASES),
    "llama2": (LLAMA2, r"\[/INST\](.*?</s>)", [], CASES),
    "mistral 0.1": (MISTRAL, r"\[/INST\](.*?</s>)", [], {k: CASES[k] for k in ("one", "turns")}),
}
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
STRIPPED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                              decoders.Strip(" ", 1, 0)])


def metaspace(scheme, split=True):
  return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split), STRIPPED


# The kind: (normalizer, pre-tokenizer, decoder), what tokenizer_config.json says beside names.
FAST = "PreTrainedTokenizerFast"
KINDS = {
    "prepend": ((SPACES, None, STRIPPED), {"tokenizer_class": FAST}),
    "always": (metaspace("always"), {"tokenizer_class": FAST}),
    "always, whole": (metaspace("always", split=False), {"tokenizer_class": FAST}),
    "first": (metaspace("first"), {"tokenizer_class": FAST}),
    "never": (metaspace("never"), {"tokenizer_class": FAST}),
    "unigram": (metaspace("always"), {"tokenizer_class": FAST}),
    "bytes": ((None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
              {"tokenizer_class": FAST}),
    "bytes, space": ((None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
                     {"tokenizer_class": FAST}),
}
# Folders whose class changes what tokenizer.json says: the kind, tokenizer_config.json, config.json.
CLASSES = [
    ("bytes", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, None),
    ("bytes", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {"model_type": "gpt2"}),
    ("bytes, space", {"tokenizer_class": "GPT2Tokenizer"}, None),
    ("bytes, space", {"tokenizer_class": "GPTNeoXTokenizerFast", "add_prefix_space": False}, None),
    ("bytes", {"tokenizer_class": FAST, "add_prefix_space": True}, None),
    ("bytes", {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True}, {"model_type": "llama"}),
    ("prepend", {"tokenizer_class": "LlamaTokenizer"}, None),
    ("prepend", {"tokenizer_class": "LlamaTokenizer", "legacy": True}, {"model_type": "llama"}),
    ("prepend", {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}, {"model_type": "llama"}),
    ("prepend", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, {"model_type": "mistral"}),
    ("prepend", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, None),
    ("always", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, {"model_type": "mixtral"}),
    ("never", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True, "legacy": True}, None),
]
# Special tokens that tokenizer.json lacks.
LACKING = {"tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>",
           "sep_token": {"content": "<sep>", "lstrip": False, "normalized": False, "rstrip": True,
                         "single_word": False, "__type": "AddedToken"},
           "image_token": "<img>", "additional_special_tokens": ["<|start|>", "<x>"]}


def make_kind(name) -> str:
  """A small tokenizer.json, with special tokens <unk>, <s> and </s>."""
  (normalizer, before, decoder), _ = KINDS[name]
  specials, corpus = ["<unk>", "<s>", "</s>"], [*TEXTS, *(m["content"].replace("日本", "") for m in TURNS)] * 3
  lines = pre_tokenizers.Split("\n", "isolated")
  if name == "unigram":
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=specials, unk_token="<unk>", show_progress=False)
  elif name.startswith("bytes"):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
  else:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace()])
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials + byte_tokens, show_progress=False)
  backend.train_from_iterator(corpus, trainer)
  spec = json.loads(backend.to_str())
  spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in specials]
  backend = Tokenizer.from_str(json.dumps(spec))
  if normalizer is not None:
    backend.normalizer = normalizer
  backend.decoder = decoder
  spec = json.loads(backend.to_str())
  spec["pre_tokenizer"] = None
  if before is not None:
    backend.pre_tokenizer = before
    spec = json.loads(backend.to_str())
  return json.dumps(spec, ensure_ascii=False)


def load(serialized, named, model=None):
  """AutoTokenizer of a folder with these files."""
  with tempfile.TemporaryDirectory() as folder:
    for name, content in (("tokenizer.json", json.loads(serialized)), ("tokenizer_config.json", named),
                          ("config.json", model)):
      if content is not None:
        (Path(folder) / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return AutoTokenizer.from_pretrained(folder)


def with_specials(serialized, tokens) -> str:
  backend = Tokenizer.from_str(serialized)
  backend.add_special_tokens(tokens)
  return backend.to_str()


def conversation(tokenizer, pattern, messages):
  text = tokenizer.apply_chat_template(messages, tokenize=False)
  ids = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
  encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
  assert ids == encoded["input_ids"]
  spans = [m.span(1) for m in re.finditer(pattern, text, re.DOTALL)]
  weights = [int(any(start < b and a < end for start, end in spans)) for a, b in encoded["offset_mapping"]]
  question = tokenizer.apply_chat_template(messages[:-1], tokenize=True, add_generation_prompt=True)["input_ids"]
  return dict(ids=ids, weights=weights, prompt=question)


def main():
  references = dict(named={}, formats={}, conversations={}, strings={}, plain={}, classes=[], lacking={})
  references["formats"] = {name: dict(template=source, specials=specials, cases=cases)
                           for name, (source, _, specials, cases) in FORMATS.items()}
  made = {name: make_kind(name) for name in KINDS}
  for name, serialized in made.items():
    (HERE / f"{name.replace(', ', '_')}.json").write_text(serialized, "utf-8")
    named = references["named"][name] = dict(**KINDS[name][1], bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    references["conversations"][name] = {}
    for form, (source, pattern, specials, cases) in FORMATS.items():
      tokenizer = load(with_specials(serialized, specials), named)
      tokenizer.chat_template = source or (TEMPLATES / f"{form}.jinja").read_text("utf-8")
      references["conversations"][name][form] = {
          case: conversation(tokenizer, pattern, messages) for case, messages in cases.items()}
    tokenizer = load(serialized, named)
    both = [(prompt, completion, tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True))
            for prompt, completion in STRINGS]
    references["strings"][name] = [dict(prompt=p, completion=c, ids=e["input_ids"], weights=[
        int(b > len(p)) for _, b in e["offset_mapping"]]) for p, c, e in both]
    references["plain"][name] = [dict(text=t, ids=tokenizer(t, add_special_tokens=False)["input_ids"]) for t in PLAIN]
  for name, named, model in CLASSES:
    named = dict(named, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer = load(made[name], named, model)
    text = "Hello there<s>Hello</s>\nHello</s> I am"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    references["classes"].append(dict(kind=name, named=named, model=model, text=text, ids=ids,
                                      decoded=tokenizer.decode(ids, skip_special_tokens=True)))
  tokenizer, size = load(made["never"], LACKING), Tokenizer.from_str(made["never"]).get_vocab_size()
  references["lacking"] = dict(named=LACKING, added={k: v for k, v in tokenizer.get_vocab().items() if v >= size},
                               text="a<|start|>Hello<|end|>", ids=tokenizer("a<|start|>Hello<|end|>")["input_ids"])
  content = json.dumps(references, indent=1, ensure_ascii=False)
  content = re.sub(r"\[[\d,\s]+\]", lambda ids: re.sub(r"\s+", " ", ids.group()), content)  # ids on one line
  (HERE / "kinds.json").write_text(content + "\n", "utf-8")


if __name__ == "__main__":
  main()
