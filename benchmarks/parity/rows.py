"""What both sides of benchmarks/parity read: rows, and, for a run that needs no files of others, a tiny random Llama.

Rows are conversations of one question: {"prompt": […], "completion": […]} for sft, with a label for kto, and "chosen"
and "rejected" for dpo, and a margin for reward; texts for seq; for grpo see `rollouts`. What is rejected, or labelled
false, is the answer to the question after the next. No two questions are the same, so that the order in which rows are
trained can be told from their texts.
"""

import json
import random
from pathlib import Path

import numpy as np

# Longest question and answer together, in characters: no row is cut, on either side.
LONGEST = 360
TINY = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
# Responses to a prompt of grpo.
GROUP = 4
# Of adapters.
RANK, ALPHA = 8, 16
# As that of SmolLM2: ChatML, a newline behind each message.
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
            " + '<|im_end|>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def questions(source: Path | None, count: int) -> list[tuple[str, str]]:
  """(question, answer), `count` of them: of a JSON Lines file with these columns, or sums in words.

  Raises:
    ValueError: the file has too few that are short enough and unlike the others.
  """
  found: dict[str, str] = {}
  if source is None:
    rng = random.Random(0)
    while len(found) < count:
      a, b, c = (rng.randrange(len(WORDS)) for _ in range(3))
      found[f"What is {WORDS[a]} plus {WORDS[b]} plus {WORDS[c]}?"] = f"{a} + {b} + {c} = {a + b + c}."
    return list(found.items())
  answers: set[str] = set()
  for line in source.read_text("utf-8").splitlines():
    row = json.loads(line)
    question, answer = row["question"], row["answer"]
    if len(question) + len(answer) <= LONGEST and question not in found and answer not in answers:
      found[question] = answer
      answers.add(answer)
    if len(found) == count:
      return list(found.items())
  raise ValueError(f"{source} has {len(found)} rows of at most {LONGEST} characters; {count} are needed.")


def rows(part: str, asked: list[tuple[str, str]]) -> list[dict]:
  """The rows of a part; two for each question for kto, one otherwise."""
  def said(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]

  made = []
  for i, (question, answer) in enumerate(asked):
    other = asked[(i + 2) % len(asked)][1]
    prompt, right, wrong = said("user", question), said("assistant", answer), said("assistant", other)
    if part in ("dpo", "reward"):
      margin = {"margin": i % 3 / 4} if part == "reward" else {}
      made.append({"prompt": prompt, "chosen": right, "rejected": wrong, **margin})
    elif part == "kto":
      label = i % 2 == 0
      made.append({"prompt": prompt, "completion": right if label else wrong, "label": label})
    elif part == "seq":
      made.append({"text": f"{question} {answer}"})
    else:
      made.append({"prompt": prompt, "completion": right})
  return made


def rollouts(asked: list[tuple[str, str]], model: Path) -> list[dict]:
  """A row for each question, as token ids: its answer and those of the next three, with made-up rewards."""
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

  def ids(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids

  made = []
  for i, (question, _) in enumerate(asked):
    answers = [asked[(i + j) % len(asked)][1] for j in range(GROUP)]
    made.append({"prompt": ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"),
                 "responses": [ids(f"{answer}<|im_end|>") for answer in answers],
                 "rewards": [1.0, *((i + j) % 3 / 4 for j in range(1, GROUP))]})
  return made


def write_tiny_model(folder: Path) -> None:
  """A Hugging Face folder of a Llama with random weights and a tokenizer whose tokens are bytes.

  The weights are those of NumPy's RandomState, whose stream is frozen: the same on every machine, for years.
  """
  from safetensors.numpy import save_file
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  folder.mkdir(parents=True, exist_ok=True)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(dict(
      tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE)))
  config = dict(
      TINY, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=len(vocab), hidden_act="silu",
      rms_norm_eps=1e-5, max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=False,
      attention_dropout=0.0, mlp_bias=False, bos_token_id=1, eos_token_id=2, pad_token_id=3, dtype="float32",
      rope_parameters=dict(rope_type="default", rope_theta=10000.0))
  (folder / "config.json").write_text(json.dumps(config, indent=1))
  draw = np.random.RandomState(0)
  save_file({name: np.ones(shape, np.float32) if len(shape) == 1 else
             draw.standard_normal(shape).astype(np.float32) * 0.08
             for name, shape in _shapes(config).items()}, folder / "model.safetensors", metadata={"format": "pt"})


def write_scorer(model: Path, folder: Path) -> Path:
  """A copy of a model with a new head that scores sequences, in the place of that for tokens; its folder."""
  from safetensors.numpy import load_file, save_file

  if (folder / "config.json").exists():
    return folder.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  for file in model.glob("*.json"):
    (folder / file.name).write_bytes(file.read_bytes())
  for file in model.glob("*.jinja"):
    (folder / file.name).write_bytes(file.read_bytes())
  tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
  tensors.pop("lm_head.weight", None)
  config = json.loads((model / "config.json").read_text())
  draw = np.random.RandomState(2)
  tensors["score.weight"] = draw.standard_normal((1, config["hidden_size"])).astype(np.float32) * 0.02
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  (folder / "model.safetensors.index.json").unlink(missing_ok=True)
  config |= dict(architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
  (folder / "config.json").write_text(json.dumps(config, indent=1))
  return folder.resolve()


def write_adapter(model: Path, folder: Path) -> None:
  """An adapter in PEFT's format for all matrices of a model's layers, as PEFT begins one: A random, B zero.

  One that is there stays: trl_peer.py puts PEFT's own in its place.
  """
  from safetensors.numpy import save_file

  if (folder / "adapter_config.json").exists():
    return
  folder.mkdir(parents=True, exist_ok=True)
  shapes = {name.removesuffix(".weight"): shape for name, shape in
            _shapes(json.loads((model / "config.json").read_text())).items() if "_proj" in name}
  (folder / "adapter_config.json").write_text(json.dumps(dict(
      peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none",
      target_modules=sorted({name.rpartition(".")[2] for name in shapes}), base_model_name_or_path=str(model))))
  draw, tensors = np.random.RandomState(1), {}
  for name, (outs, ins) in shapes.items():
    tensors[f"base_model.model.{name}.lora_A.weight"] = draw.uniform(-1, 1, (RANK, ins)).astype(np.float32) / ins**0.5
    tensors[f"base_model.model.{name}.lora_B.weight"] = np.zeros((outs, RANK), np.float32)
  save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _shapes(t: dict) -> dict[str, tuple[int, ...]]:
  """Of each tensor of a Llama with these entries of config.json, PyTorch's [out, in]."""
  vocab = t["vocab_size"]
  hidden, ffn = t["hidden_size"], t["intermediate_size"]
  heads, kv_heads = t["num_attention_heads"] * t["head_dim"], t["num_key_value_heads"] * t["head_dim"]
  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
  for layer in range(t["num_hidden_layers"]):
    of = f"model.layers.{layer}."
    shapes |= {f"{of}input_layernorm.weight": (hidden,), f"{of}self_attn.q_proj.weight": (heads, hidden),
               f"{of}self_attn.k_proj.weight": (kv_heads, hidden), f"{of}self_attn.v_proj.weight": (kv_heads, hidden),
               f"{of}self_attn.o_proj.weight": (hidden, heads), f"{of}post_attention_layernorm.weight": (hidden,),
               f"{of}mlp.gate_proj.weight": (ffn, hidden), f"{of}mlp.up_proj.weight": (ffn, hidden),
               f"{of}mlp.down_proj.weight": (hidden, ffn)}
  return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
