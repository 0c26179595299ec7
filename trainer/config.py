"""Every config key, with its default and its meaning.

A config file has `get_config(arg=None) -> ConfigDict`. It starts from `defaults()`, changes what it
needs, and returns it; the command line may then override any key (`--config.optimizer.b2=0.99`).
What is given is then checked by trainer/config_checks.py.
"""

import importlib
from collections.abc import Mapping

from ml_collections import ConfigDict, config_dict


def _unset(kind: type) -> config_dict.FieldReference:
  """A key of that type with no value yet. (A new one each time: ml_collections ties together keys that share one.)"""
  return config_dict.placeholder(kind)


DURATION_UNITS = ("steps", "examples", "tokens", "epochs", "percent")


class ConfigError(ValueError):
  """A config that cannot be run; the message says what was found, what is allowed, what to type."""


def duration(prefix: str, **given: float) -> dict:
  """The keys `{prefix}_{steps,examples,tokens,epochs,percent}`, of which one may be set.

  None or a negative number means "not given" (the command line cannot spell None); 0 means never.
  Examples are packed rows, tokens are row positions (rows × seq_len), percent (0 to 100) is of the
  whole run.
  """
  keys = {
      f"{prefix}_{unit}": _unset(int if unit in ("steps", "examples", "tokens") else float)
      for unit in DURATION_UNITS
  }
  for unit, value in given.items():
    keys[f"{prefix}_{unit}"] = value
  return keys


def source(**changed) -> ConfigDict:
  """One data source, `input.sources.<name>`: where documents come from."""
  c = ConfigDict()
  # text | jsonl | parquet | arrayrecord | tfds | python_stdlib | python_docstrings (signatures and their docstrings) |
  # python_docstring_pairs (each with its own docstring, chosen, and another's, rejected)
  c.type = "text"
  # A file, a folder (searched recursively) or a glob; several are separated by commas.
  c.path = _unset(str)
  # jsonl, parquet, tfds, arrayrecord (if its records are JSON): the field that holds the text.
  c.text_key = "text"
  # text: what one document is: file | line | paragraph (blank-line separated).
  c.documents = "file"
  # tfds: the dataset's name (`name[/config][:version]`) and its own split; `path` is its data_dir.
  c.dataset = _unset(str)
  c.dataset_split = "train"
  # all | train | validation. The two parts are disjoint; a document belongs to one of them by a hash of
  # its name or content, whatever the order of files.
  c.split = "all"
  # Share of documents that make up `validation`.
  c.validation_fraction = 0.05
  # Use at most this many documents, evenly spaced over the source (for quick evaluations).
  c.max_documents = _unset(int)
  # Share in the mixture, relative to the other sources' weights.
  c.weight = 1.0
  c.update(changed)
  return c


def evaluator(**changed) -> ConfigDict:
  """One evaluator, `evals.<name>`. `type` is loss, samples, generate, preference, or the dotted path of your class."""
  c = ConfigDict()
  c.type = "loss"
  # When it runs, besides step 0 and the end. Default: the five units unset = 10 percent.
  c.update(duration("eval"))
  c.at_start = True
  c.at_end = True
  # stop: a failing evaluator stops the run. warn: it is reported, counted and the run goes on.
  c.on_error = "stop"
  # loss, generate, preference: the sources evaluated, as in `input.sources`; empty: the training sources …
  c.sources = ConfigDict()
  # … with this split in place of their own.
  c.split = "validation"
  # loss, preference: rows per evaluation batch (the value does not depend on it). Default: that of a micro-batch.
  # samples, generate: texts generated at a time. Default: 32.
  c.batch_size = _unset(int)
  # loss, generate, preference: at most this many documents per source, evenly spaced over it.
  c.max_documents = _unset(int)
  # loss: compressors whose bits per byte on the same text are shown beside the model's: gzip, xz.
  c.baselines = ()
  # samples: texts to continue.
  c.prompts = ()
  # samples, generate: new tokens for each at most, softmax temperature (0: most likely token).
  c.max_new_tokens = 64
  c.temperature = 0.8
  # generate: of a distribution truncated to the top_k most likely tokens (0: all), to those that make up top_p,
  # to those at least min_p times as likely as the most likely one.
  c.top_k = 0
  c.top_p = 1.0
  c.min_p = 0.0
  # generate: completions of each prompt, and the k of `pass@k`, each at most that many.
  c.num_samples = 1
  c.pass_at = (1,)
  # generate: columns that hold the prompt and the right answer, both strings. Default: as in fine-tuning, where what
  # the assistant says last is the answer.
  c.prompt_key = _unset(str)
  c.answer_key = _unset(str)
  # generate: a regex whose last match (its first group, if it has one) is the answer, in completions and in answers;
  # GSM8K: r"####\s*(-?[\d,.]+)". Default: all of the text.
  c.extract = _unset(str)
  c.update(changed)
  return c


STRATEGIES = {
    # Next-token cross-entropy over documents (pretraining).
    "seq": dict(
        # Mass moved from the target to the uniform distribution over the vocabulary.
        label_smoothing=0.0,
        # Coefficient of log(Z)², which keeps the softmax normaliser near 1 (PaLM, section 5).
        z_loss=0.0,
    ),
    # Next-token cross-entropy over the parts of conversations that `config.chat` says (fine-tuning).
    "sft": dict(
        # token: the mean over the trained tokens of a step; sequence: the mean over its conversations of their means.
        normalize="token",
        # Weight each token's loss by its own probability, without a gradient (DFT, arXiv 2508.05629).
        dft=False,
        label_smoothing=0.0,
        z_loss=0.0,
    ),
    # Preferences between two completions of a prompt (docs/dpo.md).
    "dpo": dict(
        # {name: weight} of the losses that are added up: sigmoid (DPO), hinge, ipo, sigmoid_norm, robust, exo_pair,
        # nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, discopop, sft; without a reference:
        # simpo, orpo, cpo.
        loss={"sigmoid": 1.0},
        # How dear it is to leave the reference: rewards are beta * log-ratio. simpo wants 2 or more.
        beta=0.1,
        # Share of pairs whose labels are wrong: sigmoid, robust, exo_pair, aot, aot_unpaired, simpo, cpo.
        label_smoothing=0.0,
        # reverse_kl | forward_kl | js | alpha: the divergence from the reference; `alpha` is of the last one.
        f_divergence="reverse_kl",
        alpha=0.5,
        # Weight of tokens beyond the length of the pair's shorter completion (LD-DPO, arXiv 2409.06411); 1: off.
        ld_alpha=1.0,
        # Weigh pairs by how likely the policy is to write them (WPO, arXiv 2406.11827).
        wpo=False,
        # simpo: by how much the chosen one's reward should be higher.
        simpo_gamma=0.5,
        # cpo: weight of sft within it.
        cpo_alpha=1.0,
        discopop_tau=0.05,
        # What the policy is compared with. start: the parameters the run began with; a path: a workdir, a checkpoint
        # or a Hugging Face folder; none.
        reference="start",
        # Compute the reference's log-probs of all pairs before the first step, and keep them beside the token cache.
        precompute=False,
        # Every reference_ema_steps steps the reference moves by that share towards the policy (TR-DPO, arXiv
        # 2404.09656); 0: never.
        reference_ema=0.0,
        reference_ema_steps=512,
        # Neither dropout nor noise in the policy; there is none in the reference.
        disable_dropout=True,
    ),
    # Completions that were judged one by one as desirable or not.
    "kto": dict(
        # kto | apo_zero_unpaired (without the estimate of the divergence that kto subtracts from rewards)
        loss="kto",
        beta=0.1,
        # Factors on the losses of desirable and undesirable completions.
        desirable_weight=1.0,
        undesirable_weight=1.0,
        # These as for dpo.
        reference="start",
        precompute=False,
        reference_ema=0.0,
        reference_ema_steps=512,
        disable_dropout=True,
    ),
}


def defaults() -> ConfigDict:
  """Every top-level key of a config. Values here suit a small model on a laptop."""
  c = ConfigDict()
  # Parameters, data order, dropout and samples are pure functions of this number and the step.
  c.seed = 0
  # What is optimised: `name` and that strategy's own keys (STRATEGIES above).
  c.strategy = ConfigDict(dict(name="seq", **STRATEGIES["seq"]))

  # The model: one Transformer whose keys span Llama, Qwen, Mistral, Mixtral, Gemma and GPT-2.
  c.model = m = ConfigDict()
  m.name = "transformer"
  # The folder of a Hugging Face checkpoint: the keys that describe the architecture then have the values of its
  # config.json (those changed here win, and are shown), and the parameters are its own (see init_from).
  m.hf = _unset(str)
  # Default: the tokenizer's size rounded up to a multiple of `vocab_multiple`.
  m.vocab_size = _unset(int)
  m.vocab_multiple = 128
  m.num_layers = 4
  m.hidden_size = 128
  # Width of the MLP's hidden layer.
  m.intermediate_size = 512
  m.num_heads = 4
  # Key/value heads; fewer than num_heads: grouped-query attention. Default: num_heads.
  m.num_kv_heads = _unset(int)
  # Default: hidden_size / num_heads.
  m.head_dim = _unset(int)
  # rmsnorm | layernorm; `norm_eps` is added to the variance.
  m.norm = "rmsnorm"
  m.norm_eps = 1e-6
  # Scales are stored as offsets from one (Gemma).
  m.norm_scale_plus_one = False
  m.norm_bias = False
  # pre: before attention and MLP. post: after them (OLMo 2). sandwich: both (Gemma 2 and 3).
  m.norm_position = "pre"
  # gated: swiglu | geglu (tanh GELU) | geglu_exact; plain: gelu (tanh) | gelu_exact | relu | relu2 | silu
  m.activation = "swiglu"
  # rope | learned (needs `max_positions`) | none
  m.positions = "rope"
  m.max_positions = _unset(int)
  m.rope_theta = 10_000.0
  # Base frequency of sliding-window layers where it differs (Gemma 3).
  m.rope_local_theta = _unset(float)
  # Share of each head that is rotated.
  m.rope_fraction = 1.0
  # Longer contexts than the model was trained on; not for local layers that have a base of their own.
  # none | linear | dynamic | llama3 | yarn; `factor`: how many times longer.
  m.rope_scaling = r = ConfigDict(dict(type="none", factor=1.0))
  # Length before scaling; needed by dynamic, llama3 and yarn.
  r.original_positions = _unset(int)
  # llama3: wavelengths above original_positions / low are scaled, those below original_positions / high not.
  r.low_frequency_factor = 1.0
  r.high_frequency_factor = 4.0
  # yarn: rotations within the original length between which scaling fades in, and whether the dimensions where
  # that happens are rounded to whole ones; factor on cosines and sines, default 0.1 ln(factor) + 1.
  r.beta_fast = 32.0
  r.beta_slow = 1.0
  r.truncate = True
  r.attention_factor = _unset(float)
  m.tie_embeddings = True
  # Multiply embeddings by sqrt(hidden_size) (Gemma).
  m.scale_embeddings = False
  # Biases of the query/key/value projections, the attention output and the MLP.
  m.qkv_bias = False
  m.attention_out_bias = False
  m.mlp_bias = False
  # Normalise queries and keys per head (Qwen 3, Gemma 3).
  m.qk_norm = False
  # Scores are multiplied by this. Default: head_dim ** -0.5.
  m.attention_scale = _unset(float)
  # cap * tanh(x / cap) on attention scores and on logits (Gemma 2); unset: none.
  m.attention_logit_cap = _unset(float)
  m.final_logit_cap = _unset(float)
  # Tokens visible to a `local` layer, itself included; `layer_pattern` is repeated over the depth,
  # e.g. ("local",) for Mistral, ("local", "global") for Gemma 2.
  m.window = _unset(int)
  m.layer_pattern = ("global",)
  # Mixture of experts in place of the MLP; 0 experts: none. Nothing is dropped, whatever the router chooses.
  m.moe = e = ConfigDict(dict(num_experts=0, experts_per_token=2))
  # Width of each expert. Default: intermediate_size.
  e.expert_size = _unset(int)
  # Width of the expert that every token passes through, 0: none; `shared_gate`: times sigmoid(x @ w) (Qwen2-MoE).
  e.shared_size = 0
  e.shared_gate = False
  # before_topk: weights are the chosen entries of the softmax over all experts; after_topk: softmax of the chosen.
  e.softmax = "before_topk"
  # Divide the chosen weights by their sum.
  e.normalize_weights = True
  # Coefficients, in training: load balancing within each document (DeepSeek-V3, eq. 17), and the mean squared
  # log-normaliser of the router (ST-MoE, eq. 5).
  e.balance_loss = 0.0
  e.z_loss = 0.0
  # Adapters (LoRA): `rank` above 0 freezes everything but low-rank updates x @ A @ B * scale of the kernels whose
  # path matches one of `targets`; scale = alpha / rank, or alpha / sqrt(rank) with `rslora`.
  m.lora = a = ConfigDict(dict(rank=0, alpha=16.0, targets=(r"blocks/(attn|mlp)/\w+/kernel",)))
  a.rslora = False
  # On the adapters' input; training only.
  a.dropout = 0.0
  # A folder in PEFT's format to start the adapters from.
  a.peft = _unset(str)
  # Uniform noise on the embeddings in training, of size alpha / sqrt(document length * hidden_size) (NEFTune,
  # arXiv 2310.05914); 0: none.
  m.neftune_alpha = 0.0
  # Dropout on the embeddings and on each residual branch; training only.
  m.dropout = 0.0
  # Standard deviation of the initial weights (output projections: divided by sqrt(2 * num_layers)).
  # Default: fan_in ** -0.5 for matrices, 0.02 for embeddings.
  m.init_std = _unset(float)
  # Run the layers as one scanned loop (compiles fast, whatever the depth) or unrolled.
  m.scan_layers = True
  # auto | blocked: attention's implementation; `attention_block` is the blocked one's query block.
  m.attention = "auto"
  m.attention_block = 128
  # Cross-entropy and log-probs hold logits of at most this many vocabulary entries at a time.
  m.vocab_chunk = 2048

  c.tokenizer = t = ConfigDict()
  # bytes | bpe (byte-level, trained here on the training sources) | hf (a tokenizer.json, or its folder) |
  # auto: hf with the tokenizer of model.hf where that is set, else bytes
  t.type = "auto"
  t.path = _unset(str)
  # bpe: size of the vocabulary with special tokens, and how much text to train it on.
  t.vocab_size = 1024
  t.train_megabytes = 32.0
  # Begin and end every document with the tokenizer's BOS and EOS, where it has them.
  t.add_bos = True
  t.add_eos = True

  # Conversations, for strategies that train on them: how they become tokens, and which of these are trained.
  c.chat = h = ConfigDict()
  # Default: the tokenizer's own. Or a name of input_pipeline/templates (chatml, llama3, …), or a .jinja file.
  h.template = _unset(str)
  # What a template sees as today: data must not depend on the day they are made.
  h.date = "2025-01-01"
  # completion | assistant | last_assistant | all | auto (completion for prompts with completions, assistant for
  # messages, all for plain text), or `roles` in its place, e.g. ("assistant", "tool").
  h.train_on = "auto"
  h.roles = ()
  # Templates of thinking models show earlier turns differently once later ones follow. split: an example for each
  # trained turn, with the history as the template shows it then; last: only the last trained turn; error.
  h.on_rewritten_history = "split"
  # ((ours, theirs), …) for columns with other names: (("messages", "dialogue"),).
  h.fields = ()

  c.input = i = ConfigDict()
  # Named sources, each made by `source()`; several form a mixture.
  i.sources = ConfigDict()
  # concat: documents laid end to end and cut every seq_len. best_fit: whole documents packed so that
  # none is cut, except those longer than a row. none: one document (or piece) a row. auto: concat for texts,
  # best_fit for conversations. Documents sharing a row never attend to one another.
  i.packing = "auto"
  # Documents longer than a row: split (cut into pieces that overlap by one token) | truncate_end | truncate_start |
  # drop | error. auto: split for texts, truncate_end for conversations.
  i.over_long = "auto"
  # The share of a source's documents that may be truncated or dropped for their length; more is an error.
  i.max_over_long = 0.1
  # Mixture weights count rows ("examples") or trained tokens ("tokens").
  i.mixture_by = "examples"
  # The data end when the first source has been seen once, when all have, or never.
  i.stop = "never"
  # Weights that change: ((step, {source: weight, …}), …) from that step on; before it, source.weight.
  i.weight_stages = ()
  # Batch sizes that grow: ((step, batch_size), …) from that step on; each a multiple of the first
  # micro-batch, whose size stays: later steps take more micro-batches.
  i.batch_size_stages = ()
  # Tokenised sources are kept here and reused. Default: <workdir>/cache.
  i.cache_dir = _unset(str)
  # Batches prepared ahead of the step, and the threads that prepare them.
  i.prefetch = 2
  i.workers = 1

  # Rows per optimizer step over all devices; each step is computed in this many micro-batches.
  c.batch_size = 8
  c.grad_accum_steps = 1
  # Tokens per row.
  c.seq_len = 256
  c.update(duration("total", steps=1000))

  c.optimizer = o = ConfigDict()
  # adamw | adafactor | muon (matrices; adamw for the rest) | lion | sgd
  o.name = "adamw"
  # Peak learning rate; `schedule` shapes it over time.
  o.learning_rate = 3e-4
  # adamw, lion; muon: of its adamw part.
  o.b1 = 0.9
  o.b2 = 0.95
  o.eps = 1e-8
  # Decoupled: each step subtracts learning_rate * weight_decay * parameter.
  o.weight_decay = 0.1
  # ((regex, factor), …) on weight decay; first match wins, others get 1. By default
  # only matrices and not embeddings, norms or biases decay.
  o.wd_mults = ((".*(scale|bias|embedding)$", 0.0),)
  # ((regex, factor), …) on the learning rate.
  o.lr_mults = ()
  # Regexes of parameters that are not trained: no gradient, no optimizer memory.
  o.freeze = ()
  # ((regex, steps), …): these parameters warm up over that many steps instead of schedule's warm-up.
  o.group_warmup = ()
  # Clip the gradient's global norm; 0: no clipping.
  o.clip_norm = 1.0
  # sgd and muon.
  o.momentum = 0.95
  o.nesterov = True
  # muon: Newton–Schulz iterations. Its updates are scaled to AdamW's RMS (0.2 * sqrt(max(fan_in, fan_out))),
  # so that learning_rate and weight_decay mean the same for both parts.
  o.muon_steps = 5
  # adafactor: second-moment decay is 1 - step ** -decay_exponent; matrices smaller than
  # min_dim_size_to_factor keep the full second moment.
  o.decay_exponent = 0.8
  o.min_dim_size_to_factor = 128
  # Decay of the exponential moving average of the trained parameters; 0: none kept.
  o.ema_decay = 0.0
  # A step whose loss or gradient is not finite changes nothing; so many in a row stop the run.
  o.max_nonfinite_steps = 10

  c.schedule = s = ConfigDict()
  # constant | linear | cosine | wsd | sgdr | rsqrt
  s.name = "cosine"
  s.update(duration("warmup", percent=2.0))
  # The lowest value after warm-up, as a share of the peak.
  s.floor = 0.1
  # wsd: length of the final decay, and its shape (linear | sqrt | cosine).
  s.update(duration("decay"))
  s.decay_shape = "linear"
  # sgdr: length of the first cycle, and the factor from one cycle's length to the next.
  s.update(duration("cycle"))
  s.t_mult = 2.0
  # rsqrt: lr ∝ 1 / sqrt(1 + steps since the peak / timescale).
  s.timescale = 10_000

  # Mesh axes and sizes, -1: the devices that remain. Batches are split over data and fsdp.
  c.mesh = ConfigDict(dict(data=-1, fsdp=1, tensor=1))
  # ((regex over parameter paths, (axis or None per dimension)), …), before the built-in table of
  # trainer/mesh.py; first match wins. Optimizer state follows its parameter.
  c.sharding_rules = ()

  c.precision = p = ConfigDict()
  p.params = "float32"
  # Of parameters that are not trained: float32 | bfloat16 | int8 | nf4 (matrices of the blocks, quantised) | auto
  # (bfloat16 under LoRA on TPU and GPU, else as params).
  p.frozen = "auto"
  # float32 | bfloat16 | auto (bfloat16 on TPU and GPU, float32 on CPU). Logits and losses are float32.
  p.compute = "auto"
  # What the backward pass recomputes: none | full | dots (keep matrix products) |
  # dots_no_batch (keep products with weights) | a name of jax.checkpoint_policies.
  c.remat = "none"

  # name: evaluator(…)
  c.evals = ConfigDict()
  # name: dict(type="dotted.path.Class", **its arguments); called after the built-in ones.
  c.callbacks = ConfigDict()
  # Metrics rows.
  c.update(duration("log", steps=10))
  # Rolling checkpoints (`keep_last` of them stay) and permanent ones. A final one is always saved.
  c.update(duration("ckpt", percent=20.0))
  c.update(duration("keep"))
  c.keep_last = 2
  # Keep the best checkpoint by this metric, e.g. "eval/val/loss"; `keep_best_mode`: min | max.
  c.keep_best = _unset(str)
  c.keep_best_mode = "min"
  # Write a profiler trace of `num_steps` steps from `start_step` on; 0 steps: none.
  c.profile = ConfigDict(dict(start_step=10, num_steps=0))

  # Where parameters come from. `path`: another run (a workdir or a checkpoint), with `remap` ((regex, replacement),
  # …) from its parameter names to ours and `ignore`, regexes of our parameters that keep their fresh values. `hf`: a
  # Hugging Face folder, which is also model.hf if that is not set. Neither: model.hf if set, else fresh ones, as
  # with `fresh` in any case.
  c.init_from = ConfigDict(dict(path=_unset(str), remap=(), ignore=(), hf=_unset(str), fresh=False))
  # Continue another run (parameters, optimizer, step, data position) in this workdir.
  c.resume = _unset(str)
  # Write a Hugging Face folder at the end: `path` (relative: inside the workdir), and its dtype (float32 | bfloat16 |
  # float16; default: precision.params). At any time: python -m trainer.export.
  c.export = ConfigDict(dict(path=_unset(str), dtype=_unset(str)))
  # Continue a workdir although its config differs in keys that change the training.
  c.allow_config_changes = False
  return c


def load_class(name: str, key: str, built_in: Mapping[str, str] | None = None) -> type:
  """The class that a config key names: one of `built_in` ({name: dotted path}), or the user's own by dotted path.

  Raises:
    ConfigError: if there is no such class.
  """
  module, _, attribute = (built_in or {}).get(name, name).rpartition(".")
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as e:
    known = f"{', '.join(built_in)}, or " if built_in else ""
    raise ConfigError(f"{key}: found {name!r}, which could not be imported ({e}). Allowed: {known}the dotted path of a "
                      "class of yours, importable from where you run, e.g. my_package.my_module.MyClass.") from e
