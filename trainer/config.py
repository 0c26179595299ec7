"""Every config key, with its default and its meaning.

A config file has `get_config(arg=None) -> ConfigDict`. It starts from `defaults()`, changes what it
needs, and returns it; the command line may then override any key (`--config.optimizer.b2=0.99`).
What is given is then checked by trainer/config_checks.py.
"""

import importlib
from collections.abc import Mapping

from ml_collections import ConfigDict

from trainer.config_sections import (
  DURATION_UNITS,
  STRATEGIES,
  ConfigError,
  duration,
  evaluator,
  images,
  plan,
  reward,
  rollout,
  source,
  strategy,
  unset,
)

__all__ = ["DURATION_UNITS", "STRATEGIES", "ConfigError", "defaults", "duration", "evaluator", "load_class", "reward",
           "source", "strategy"]


def defaults() -> ConfigDict:
  """Every top-level key of a config. Values here suit a small model on a laptop."""
  c = ConfigDict()
  # Parameters, data order, dropout and samples are pure functions of this number and the step.
  c.seed = 0
  # What is optimised: `name` and that strategy's own keys (STRATEGIES above).
  c.strategy = strategy("seq")

  # The model: one Transformer whose keys span Llama, Qwen, Mistral, Mixtral, Gemma and GPT-2.
  c.model = m = ConfigDict()
  m.name = "transformer"
  # The folder of a Hugging Face checkpoint: the keys that describe the architecture then have the values of its
  # config.json (those changed here win, and are shown), and the parameters are its own (see init_from).
  m.hf = unset(str)
  # Default: the tokenizer's size rounded up to a multiple of `vocab_multiple`.
  m.vocab_size = unset(int)
  m.vocab_multiple = 128
  m.num_layers = 4
  m.hidden_size = 128
  # Width of the MLP's hidden layer.
  m.intermediate_size = 512
  m.num_heads = 4
  # Key/value heads; fewer than num_heads: grouped-query attention. Default: num_heads.
  m.num_kv_heads = unset(int)
  # Default: hidden_size / num_heads.
  m.head_dim = unset(int)
  # rmsnorm | layernorm; `norm_eps` is added to the variance.
  m.norm = "rmsnorm"
  m.norm_eps = 1e-6
  # Scales are stored as offsets from one (Gemma).
  m.norm_scale_plus_one = False
  m.norm_bias = False
  # pre: before attention and MLP. post: after them (OLMo 2). sandwich: both (Gemma 2 and 3).
  m.norm_position = "pre"
  # gated: swiglu | geglu (tanh GELU) | geglu_exact; plain: gelu (tanh) | gelu_exact | quick_gelu | relu | relu2 | silu
  m.activation = "swiglu"
  # rope | learned (needs `max_positions`) | none
  m.positions = "rope"
  m.max_positions = unset(int)
  m.rope_theta = 10_000.0
  # Base frequency of sliding-window layers where it differs (Gemma 3).
  m.rope_local_theta = unset(float)
  # Share of each head that is rotated.
  m.rope_fraction = 1.0
  # Longer contexts than the model was trained on; not for local layers that have a base of their own.
  # none | linear | dynamic | llama3 | yarn; `factor`: how many times longer.
  m.rope_scaling = r = ConfigDict(dict(type="none", factor=1.0))
  # Length before scaling; needed by dynamic, llama3 and yarn.
  r.original_positions = unset(int)
  # llama3: wavelengths above original_positions / low are scaled, those below original_positions / high not.
  r.low_frequency_factor = 1.0
  r.high_frequency_factor = 4.0
  # yarn: rotations within the original length between which scaling fades in, and whether the dimensions where
  # that happens are rounded to whole ones; factor on cosines and sines, default 0.1 ln(factor) + 1.
  r.beta_fast = 32.0
  r.beta_slow = 1.0
  r.truncate = True
  r.attention_factor = unset(float)
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
  m.attention_scale = unset(float)
  # cap * tanh(x / cap) on attention scores and on logits (Gemma 2); unset: none.
  m.attention_logit_cap = unset(float)
  m.final_logit_cap = unset(float)
  # Tokens visible to a `local` layer, itself included; `layer_pattern` is repeated over the depth,
  # e.g. ("local",) for Mistral, ("local", "global") for Gemma 2.
  m.window = unset(int)
  m.layer_pattern = ("global",)
  # Mixture of experts in place of the MLP; 0 experts: none. Nothing is dropped, whatever the router chooses.
  m.moe = e = ConfigDict(dict(num_experts=0, experts_per_token=2))
  # Width of each expert. Default: intermediate_size.
  e.expert_size = unset(int)
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
  # Images: a tower (siglip | clip; none: a model of text alone) whose features, projected, take the places of some
  # tokens' embeddings, after `scale_embeddings`. Square images of image_size pixels in patches of patch_size.
  m.vision = v = ConfigDict(dict(tower="none", image_size=224, patch_size=14))
  v.num_layers = 4
  v.hidden_size = 128
  v.intermediate_size = 512
  v.num_heads = 4
  # A plain activation, and what is added to the variance in the tower's norms and in the projector's.
  v.activation = "gelu"
  v.norm_eps = 1e-6
  # Pixels are (x / 255 - mean) / std for each of red, green and blue. Default: those of the tower's family.
  v.mean = ()
  v.std = ()
  # Which features are taken: -1: the last layer's, after the final norm; -2: what enters the last layer, without the
  # final norm (LLaVA); -3: what enters the one before; and so on. CLIP's class token is dropped. All num_layers and the
  # final norm are parameters in any case, so that a checkpoint is written back whole.
  v.feature_layer = -1
  # False: with feature_layer = -1, the last layer's features as they are (LLaVA with SigLIP).
  v.final_norm = True
  # linear (PaliGemma) | mlp: linear, `projector_activation`, linear (LLaVA) | pool: mean of neighbours down to
  # tokens_per_image, RMSNorm, linear without bias (Gemma 3). `projector_bias` is that of linear and mlp.
  v.projector = "linear"
  v.projector_activation = "gelu_exact"
  v.projector_bias = True
  # Features of an image. Default: one for each patch; fewer only with pool, a square number.
  v.tokens_per_image = unset(int)
  # Factor on the projected features. The embeddings whose place they take are scaled already.
  v.feature_scale = 1.0
  # What tokens see beside those before them: causal: nothing; image: tokens of one image see each other (Gemma 3), in
  # local layers no further back than the window; prefix: image and prompt see each other (PaliGemma).
  v.attention = "causal"
  # The id of the token that holds an image feature's place.
  v.image_token = unset(int)
  # Adapters (LoRA): `rank` above 0 freezes everything but low-rank updates x @ A @ B * scale of the kernels whose
  # path matches one of `targets` (the tower's begin with vision/); scale = alpha / rank, or alpha / sqrt(rank) with
  # `rslora`.
  m.lora = a = ConfigDict(dict(rank=0, alpha=16.0, targets=(r"^blocks/(attn|mlp)/\w+/kernel",)))
  a.rslora = False
  # On the adapters' input; training only.
  a.dropout = 0.0
  # A folder in PEFT's format to start the adapters from.
  a.peft = unset(str)
  # Uniform noise on the embeddings in training, of size alpha / sqrt(document length * hidden_size) (NEFTune,
  # arXiv 2310.05914); 0: none.
  m.neftune_alpha = 0.0
  # Dropout on the embeddings and on each residual branch; training only.
  m.dropout = 0.0
  # Standard deviation of the initial weights (output projections: divided by sqrt(2 * num_layers)).
  # Default: fan_in ** -0.5 for matrices, 0.02 for embeddings.
  m.init_std = unset(float)
  # Run the layers as one scanned loop (compiles fast, whatever the depth) or unrolled.
  m.scan_layers = True
  # auto | blocked | splash (the kernel for TPUs, which auto takes there; elsewhere it is interpreted, which is slow):
  # how attention is computed; `attention_block` is the query block of blocked.
  m.attention = "auto"
  m.attention_block = 128
  # Cross-entropy and log-probs hold logits of at most this many vocabulary entries at a time.
  m.vocab_chunk = 2048

  c.tokenizer = t = ConfigDict()
  # bytes | bpe (byte-level, trained here on the training sources) | hf (a tokenizer.json, or its folder) |
  # auto: hf with the tokenizer of model.hf where that is set, else bytes
  t.type = "auto"
  t.path = unset(str)
  # bpe: size of the vocabulary with special tokens, and how much text to train it on.
  t.vocab_size = 1024
  t.train_megabytes = 32.0
  # Begin and end every document with the tokenizer's BOS and EOS, where it has them.
  t.add_bos = True
  t.add_eos = True

  # Conversations, for strategies that train on them: how they become tokens, and which of these are trained.
  c.chat = h = ConfigDict()
  # Default: the tokenizer's own. Or a name of input_pipeline/templates (chatml, llama3, …), or a .jinja file.
  h.template = unset(str)
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
  # Images (docs/images.md): what stands for one in texts; texts around an image's tokens (default: those of Gemma 3 for
  # the projector pool, else none); without a template: bos (before BOS) | text (at the marker, else before the text) |
  # auto (bos for model.vision.attention="prefix"); what stands between prefix and suffix.
  h.image_marker = "<image>"
  h.image_before = unset(str)
  h.image_after = unset(str)
  h.images_at = "auto"
  h.prefix_end = "\n"

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
  i.cache_dir = unset(str)
  # Batches prepared ahead of the step, and the threads that prepare them.
  i.prefetch = 2
  i.workers = 1
  i.images = images()

  # Completions to train on that are sampled from the policy and scored (docs/grpo.md).
  c.rollout = rollout()

  # Rows per optimizer step over all devices; each step is computed in this many micro-batches.
  # With rollouts a step takes as many rows as its completions need: a multiple of batch_size / grad_accum_steps.
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

  # Mesh axes and sizes, the slowest links first; -1: the devices that remain. Rows are split over slice, data, fsdp and
  # expert, their length over context; parameters over fsdp, expert and context (ZeRO-3), and tensor (docs/scaling.md).
  c.mesh = ConfigDict(dict(slice=1, data=-1, fsdp=1, expert=1, context=1, tensor=1))
  # ((regex over parameter paths, (axis or None per dimension)), …), before the built-in table of
  # trainer/mesh.py; first match wins. Optimizer state follows its parameter.
  c.sharding_rules = ()
  # ((name of an activation's dimension, mesh axis, axes or None), …), before the built-in table of trainer/mesh.py:
  # ("stream", "context") turns sequence parallelism off.
  c.activation_rules = ()

  # Several processes (docs/processes.md), in seconds: to find one another; without a word from one, which is then taken
  # for dead; without a move while steps are taken, and within what may take long (compiling, a checkpoint, an
  # evaluation, a rollout), after which a process is taken to hang (0: no limit). The others then end and name it.
  c.processes = ConfigDict(dict(join_seconds=300.0, heartbeat_seconds=60.0, hang_seconds=600.0, phase_seconds=3600.0))

  # Numbers in fewer bits, and what is not kept on the device (docs/precision.md).
  c.precision = p = ConfigDict()
  # float32 | bfloat16: parameters that are trained.
  p.params = "float32"
  # Updates of bfloat16 parameters are rounded up or down at random, so that small ones count on average; without it,
  # bfloat16 needs a learning rate of at least 1e-4.
  p.stochastic_rounding = False
  # Of parameters that are not trained: float32 | bfloat16 | int8 | nf4 (matrices of the blocks, quantised) | auto
  # (bfloat16 under LoRA on TPU and GPU, else as params).
  p.frozen = "auto"
  # float32 | bfloat16 | auto (bfloat16 on TPU and GPU, float32 on CPU). Logits and losses are float32.
  p.compute = "auto"
  # The optimizer's moments: float32 | bfloat16 | int8, rounded at random; second moments (Adam's) default to the same.
  p.moments = "float32"
  p.second_moments = unset(str)
  # The optimizer's state stays in the host's memory and is on the device only while it is updated.
  p.offload_optimizer = False
  # Products with the blocks' kernels: none (in `compute`) | int8 | fp8. `matmul_gradients`: which products of the
  # backward pass, too: none | inputs (dx) | all (dx, dw). `matmul_skip`: regexes of kernels that are left out, besides
  # routers and shared gates.
  p.matmul = "none"
  p.matmul_gradients = "inputs"
  p.matmul_skip = ()
  # What the backward pass recomputes (models/remat.py): none | full (keep what enters a layer) | attention (also
  # queries, keys, values, attention's output) | attention_mlp (also the MLP's hidden layer) | offload,
  # offload_attention (full, attention, with what enters a layer in the host's memory) | dots (keep matrix products) |
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
  c.keep_best = unset(str)
  c.keep_best_mode = "min"
  # Write a profiler trace of `num_steps` steps from `start_step` on; 0 steps: none.
  c.profile = ConfigDict(dict(start_step=10, num_steps=0))

  # Where parameters come from. `path`: another run (a workdir or a checkpoint), with `remap` ((regex, replacement),
  # …) from its parameter names to ours and `ignore`, regexes of our parameters that keep their fresh values. `hf`: a
  # Hugging Face folder, which is also model.hf if that is not set. Neither: model.hf if set, else fresh ones, as
  # with `fresh` in any case.
  c.init_from = ConfigDict(dict(path=unset(str), remap=(), ignore=(), hf=unset(str), fresh=False))
  # Continue another run (parameters, optimizer, step, data position) in this workdir.
  c.resume = unset(str)
  # Write a Hugging Face folder at the end: `path` (relative: inside the workdir), and its dtype (float32 | bfloat16 |
  # float16; default: precision.params). At any time: python -m trainer.export.
  c.export = ConfigDict(dict(path=unset(str), dtype=unset(str)))
  # Continue a workdir although its config differs in keys that change the training.
  c.allow_config_changes = False
  c.plan = plan()
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
