"""What a family of models is: how its config.json and tensor names correspond to config.model and our parameters.

A family is data, used in both directions; those that exist are in models/hf/families, one file each, built from the
rules of models/hf/keys.py and models/hf/rope.py. docs/huggingface.md tells how to add one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from models.hf import quantised
from models.hf.canonical import NEUTRAL, canonical, made_of
from models.hf.errors import HFError
from models.hf.keys import Head, Rule
from models.hf.source import DEEPEST, DROPOUT, Source, check_kind
from models.spec import Spec

# Entries of config.json that say nothing about the function from tokens to logits: about files, generation, the Python
# interface, fresh initial values, heads of other tasks, losses. `max_position_embeddings` bounds nothing where
# positions are rotary; where it matters (models/hf/rope.py), it is read.
INERT = frozenset("""
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_llama_config keys_to_ignore_at_inference label2id
    length_penalty mask_token_id max_length max_new_tokens max_position_embeddings max_sequence_length min_length
    model_max_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split())


@dataclass(frozen=True)
class Tensor:
  """One of a family's tensors, or one for each layer or expert: theirs = concat([swap(ours_i[layer][expert])…], axis).

  Args:
    theirs: its name without the family's prefix; placeholders {layer} and {expert} or {head} stand for numbers, which
      index the leading dimensions of ours.
    ours: path of our parameter; several: theirs is their concatenation.
    transpose: their last two dimensions are ours swapped. A Linear of torch is [out, in], our kernels are [in, out].
    axis: of the concatenation, in their layout.
    prefixed: False: the name stands without the prefix even where others have it.
    form: patches: theirs is the weight [D, 3, P, P] of a convolution over patches, ours the matrix [P * P * 3, D], and
      `transpose` is set. videos: the same over patches of two frames, [D, 3, 2, P, P] and [2 * P * P * 3, D]. row:
      theirs is [D] or [E, D], ours [1, D] or [1, D, E]. taps: theirs is the weight [C, 1, W] of a convolution of each
      channel, ours [W, C], and `transpose` is set. alternating: along their last axis, entries of ours take turns.
      bound: theirs may be infinite, ours is then UNBOUNDED (models/spec_vision.py). None: none of these.
    groups: theirs is in groups along its first axis, of which each has its share of every one of ours. Our key that
      says how many there are; once laid over a model (`Family.tensors`), the number.
    layers: numbers of the layers that have it, once laid over a model; None: all.
  """

  theirs: str
  ours: str | tuple[str, ...]
  transpose: bool = False
  axis: int = 0
  prefixed: bool = True
  form: str | None = None
  groups: str | int | None = None
  layers: tuple[int, ...] | None = None


# What all families call the head that scores a sequence.
SCORE = Tensor("score.weight", "score/kernel", transpose=True, prefixed=False)


@dataclass(frozen=True)
class Ahead:
  """Modules that predict tokens further ahead (models/mtp.py), as a family's folders have them.

  Args:
    counts: entries of config.json that say how many there are; the first is written.
    table: their tensors. Those with the family's prefix are numbered on from the model's last layer.
    copies: tensors of each module that hold what the model has elsewhere: they are written, and must be equal to that.
    names: a regex that all their tensors match; "": those of every layer that has one whose name ends with `mark`.
    mark: see `names`.
  """

  counts: tuple[str, ...]
  table: tuple[Tensor, ...]
  copies: tuple[Tensor, ...] = ()
  names: str = ""
  mark: str = ""

  def of(self, names: Iterable[str]) -> tuple[str, ...]:
    """Regexes that all tensors of modules match that are among these names; none if there are no modules."""
    if self.names:
      return (self.names,) if any(re.search(self.names, name) for name in names) else ()
    return tuple("^" + re.escape(name.removesuffix(self.mark) + ".") for name in names if name.endswith(self.mark))

  def copied(self, model: Mapping[str, Any], paths: Iterable[str]) -> list[Tensor]:
    """The `copies` of parameters of these paths, one for each of the model's modules."""
    layers_ = range(model["num_layers"], model["num_layers"] + model["mtp_layers"])
    return [replace(copy, theirs=copy.theirs.format(layer=i)) for i in layers_ for copy in self.copies
            if str(copy.ours) in paths]


class Attempt(NamedTuple):
  """A config.json as near as a family comes to a model, and how the two differ; `readable`: it is a model at all."""

  content: dict[str, Any]
  problems: list[str]
  readable: bool = True


@dataclass(frozen=True, eq=False)
class Family:
  """A family of models; see the module's docstring.

  Args:
    model_types: values of model_type in config.json; the first is written.
    architectures: values of architectures[0]; the first is written.
    keys: the rules for config.json, in the order in which they are read.
    table: all tensors that members of the family may have. Several may hold the same of our parameters: the first
      whose names are present is read, the first is written.
    fixed: our keys that have one value in the whole family and are not those of NEUTRAL.
    prefixes: spellings of what tensor names begin with; the first is written.
    ignored: regexes of tensors that are no parameters.
    inert: entries of config.json without effect on logits, beyond INERT.
    ahead: modules that predict tokens further ahead; None: folders of the family have none.
    in_memory: what the names of modules begin with where a program has loaded the model, if not as in files; `table`
      then has the tensors under these names, too.
    classifier: the architecture with a head that scores; "": named after the first of `architectures`; None: there is
      none in transformers.
    body: the architecture without a head, which embeddings are made of; "": named after the first of `architectures`.
    name: what messages call it; "": the first of `model_types`.
  """

  model_types: tuple[str, ...]
  architectures: tuple[str, ...]
  keys: tuple[Rule, ...]
  table: tuple[Tensor, ...]
  fixed: Mapping[str, Any] = field(default_factory=dict)
  prefixes: tuple[str, ...] = ("model.", "")
  ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
  inert: frozenset[str] = frozenset()
  ahead: Ahead | None = None
  in_memory: str | tuple[str, ...] = ""
  classifier: str | None = ""
  body: str = ""
  name: str = ""

  def __post_init__(self):
    object.__setattr__(self, "name", self.name or self.model_types[0])

  def __repr__(self) -> str:
    return f"<family {self.name}>"

  def read(self, config: Mapping[str, Any], where: str, ignored: Iterable[str] = ()) -> dict[str, Any]:
    """{dotted key of config.model: value} for the whole architecture, in the form of `canonical`.

    Args:
      ignored: names of entries that are known to have no effect (`model.hf_ignore`).

    Raises:
      HFError: the model cannot be represented, or an entry could change the result and is not known.
    """
    return self.read_source(Source(config, where, ignored))

  def read_source(self, source: Source) -> dict[str, Any]:
    """As `read`."""
    where = source.where
    self._check_architecture(source)
    if options := source.get("quantization_config", dict, None, None):
      quantised.check(options, where)
    check_kind(source)
    model = {**NEUTRAL, **self.fixed, **self._head.read(source, {})}
    for rule in self.keys:
      model.update(rule.read(source, model))
    if (layers_ := max(model["num_layers"], model["vision.num_layers"])) > DEEPEST:
      raise HFError(f"{where} asks for {layers_:,} layers; at most {DEEPEST:,} are taken for meant. Fetch it again.")
    if not (model.get("head_dim") or model["latent.kv_rank"]) and model["hidden_size"] < model["num_heads"]:
      raise HFError(f"{where} has {model['num_heads']:,} heads for a hidden size of {model['hidden_size']:,}, and no "
                    "head_dim that says how wide they are. Fetch it again.")
    source.check_all_read(INERT | DROPOUT | self.inert, f"the family {self.name}")
    return canonical(model)

  def write(self, model: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for {dotted key of config.model: value}, in the layout of transformers 4, which 5 reads too.

    Raises:
      HFError: naming the keys that this family cannot express.
    """
    attempt = self.attempt(model)
    if attempt.problems:
      raise HFError(f"the family {self.name} cannot express " + "; ".join(attempt.problems) + ".")
    return attempt.content

  def attempt(self, model: Mapping[str, Any]) -> Attempt:
    """As `write`, but tells problems instead of raising."""
    wanted = canonical({**NEUTRAL, **model})
    # With rotary positions, ours is a limit on rows that has no place in `canonical`, but one in config.json.
    given = {**wanted, "max_positions": model.get("max_positions")}
    content: dict[str, Any] = {"architectures": [self.architectures[0]], "model_type": self.model_types[0]}
    try:
      content |= self._head.write(given)
      for rule in self.keys:
        content.update(rule.write(given))
      read = self.read(content, "its config.json")
    except HFError as e:
      return Attempt(content, [f"this model ({e})"], readable=False)
    return Attempt(content, [f"model.{key} = {wanted[key]!r} (nearest: {value!r})" for key, value in read.items()
                             if wanted.get(key) != value])

  def tensors(self, model: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of this architecture; several may hold the same of our parameters."""
    model = canonical({**NEUTRAL, **model})
    modules, (spec, paths) = () if self.ahead is None else self.ahead.table, made_of(tuple(model.items()))
    return [_laid_over(model, spec, t) for t in (*self.table, SCORE, *modules)
            if paths.issuperset((t.ours,) if isinstance(t.ours, str) else t.ours)]

  def passed_over(self, model: Mapping[str, Any]) -> tuple[str, ...]:
    """Regexes of tensors that a folder of this architecture may have, and that are not read."""
    return self.ignored

  def kept(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json to write for a model that `config` describes."""
    return {key: value for key, value in config.items() if key != "quantization_config"}

  def with_modules(self, config: Mapping[str, Any], number: int) -> dict[str, Any]:
    """config.json of a model with so many modules that predict tokens further ahead."""
    counts = () if self.ahead is None else self.ahead.counts
    said = {key: number for i, key in enumerate(counts) if key in config or number and not i}
    return {**config, **said}

  def renewed(self, config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """`written`, with what `config` says beyond the function from tokens to logits."""
    kept = INERT | DROPOUT | self.inert
    return {**{key: value for key, value in config.items() if key in kept}, **written}

  def notes(self, config: Mapping[str, Any], where: str = "config.json", ignored: Iterable[str] = ()) -> list[str]:
    """Sentences on entries that have no effect here but may have had one where the model was trained; see `read`."""
    return self.notes_on(Source(config, where, ignored))

  def notes_on(self, source: Source) -> list[str]:
    """As `notes`."""
    config, where = source.content, source.where
    self.read_source(source)
    notes = [f"{where}: {key} is {config[key]}; it acts in training alone, where model.dropout is used here."
            for key in sorted(DROPOUT) if config.get(key)]
    if config.get("quantization_config"):
      notes.append(f"{where}: what is stored as {config['quantization_config'].get('quant_method')} is read as the "
                   "numbers it stands for, and exported as such, not quantised.")
    if config.get("router_aux_loss_coef"):
      notes.append(f"{where}: router_aux_loss_coef is {config['router_aux_loss_coef']}; for a balancing loss in "
                  "training set model.moe.balance_loss.")
    return notes + [note for rule in self.keys for note in rule.notes(source)] + source.notes(
        INERT | DROPOUT | self.inert)

  @property
  def _head(self) -> Head:
    named = self.architectures[0]
    stem = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", named)
    whole = stem == named  # the text model of a model of images, which no architecture has alone
    scored = self.classifier is not None and not named.endswith("ForConditionalGeneration")
    scorer = self.classifier or (f"{stem}ForSequenceClassification" if scored and not whole else None)
    return Head(scorer, None if whole else self.body or f"{stem}Model")

  def _check_architecture(self, source: Source) -> None:
    found, allowed = source.get("architectures", list, None, None), list(self.architectures)
    allowed += [name for name in (self._head.scorer, self._head.body) if name]
    if found and found[0] not in allowed:
      raise source.error("architectures", f"[{', '.join(map(repr, allowed))}] for model_type {self.model_types[0]!r}; "
                         "other heads are not read")


def _laid_over(model: Mapping[str, Any], spec: Spec, tensor: Tensor) -> Tensor:
  """With the number of its groups, and of the layers that have it where not all do."""
  if isinstance(tensor.groups, str):
    tensor = replace(tensor, groups=model[tensor.groups])
  first = tensor.ours if isinstance(tensor.ours, str) else tensor.ours[0]
  if first.startswith("mtp/"):
    behind = range(spec.num_layers, spec.num_layers + spec.mtp_layers)
    return replace(tensor, layers=tuple(behind)) if tensor.prefixed else tensor
  has = spec.layers_with(first.split("/")[1 if first.startswith("blocks/") else 0])
  return tensor if len(has) == spec.num_layers else replace(tensor, layers=tuple(has))
