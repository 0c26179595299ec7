"""Every config key, with its default and its meaning.

A config file has `get_config(arg=None) -> ConfigDict`. It starts from `defaults()`, changes what it
needs, and returns it; the command line may then override any key (`--config.optimizer.b2=0.99`).
What is given is then checked by trainer/config/checks.py.
"""


from ml_collections import ConfigDict

from models.config import model
from trainer.config.sections import (
  DURATION_UNITS,
  duration,
  evaluator,
  images,
  plan,
  reward,
  rollout,
  source,
  spikes,
  strategy,
  unset,
)

__all__ = ["DURATION_UNITS", "defaults", "duration", "evaluator", "reward", "source", "strategy"]


def defaults() -> ConfigDict:
  """Every top-level key of a config. Values here suit a small model on a laptop."""
  c = ConfigDict()
  # Parameters, data order, dropout and samples are pure functions of this number and the step.
  c.seed = 0
  # Two runs are equal to the bit, on a GPU, too, on the same kind of it; a step that does not hold that is refused
  # (docs/exactness.md). False: XLA for GPU may take what adds in an order that is left to chance, and chooses kernels
  # by timing them, which is not the same choice each time.
  c.deterministic = True
  # What is optimised: `name` and that strategy's own keys (trainer/strategies). The name is seq, sft, dpo, kto,
  # grpo, ppo, distill, reward, contrastive, or the dotted path of a strategy of yours (docs/extending.md).
  c.strategy = strategy("seq")

  c.model = model()  # models/config.py

  c.tokenizer = t = ConfigDict()
  # bytes | bpe (byte-level, trained here on the training sources) | hf (a tokenizer.json, or its folder) |
  # auto: hf with `path`, or with the tokenizer of model.hf, where one of them is set, else bytes
  t.type = "auto"
  t.path = unset(str)
  # hf: texts that become tokens of their own, behind the others: found in every text, or, as special ones, only where a
  # chat template writes them. (text, words) begins as the mean of these words' embeddings, a text alone as that of all.
  t.new_tokens = ()
  t.new_special_tokens = ()
  # bpe: size of the vocabulary with special tokens, and how much text to train it on.
  t.vocab_size = 1024
  t.train_megabytes = 32.0
  # bpe: every digit is a token of its own, so that numbers are read digit by digit.
  t.split_digits = False
  # Begin every document with the tokenizer's BOS, where it has one. Default: with what other readers of a folder's
  # tokenizer write before a text, BOS or not; of a tokenizer that is made here, BOS.
  t.add_bos = unset(bool)
  # End every document with the tokenizer's EOS, where it has one.
  t.add_eos = True

  # Conversations, for strategies that train on them: how they become tokens, and which of these are trained.
  c.chat = h = ConfigDict()
  # Default: the tokenizer's own. Or a name of input_pipeline/chat/templates (chatml, llama3, …), or a .jinja file.
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
  # And for a film.
  h.video_marker = "<video>"
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
  # Rows that cannot be used (not readable, of no known shape, refused by the template, …): error: the first ten are
  # told, and the run stops | drop: they are left out, counted and told. Too many are an error all the same …
  i.on_bad_row = "error"
  # … namely more than this share of a source's rows.
  i.max_bad_rows = 0.1
  # Whether answers to one prompt that stand in one row share it (the sides of a preference, the completions of a
  # rollout), so that it is computed once for them all: always | never | auto: where the model can, but for TPUs, whose
  # attention kernel does not, and for rollouts whose rows are split over devices.
  i.share_prompts = "auto"
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
  # Length of the run.
  c.update(duration("total", steps=1000))

  c.optimizer = o = ConfigDict()
  # adamw | adafactor | muon (hidden matrices; adamw for the rest) | lion | sgd
  o.name = "adamw"
  # Peak learning rate; `schedule` shapes it over time.
  o.learning_rate = 3e-4
  # adamw, lion; muon: of its adamw part. Decay of the first and second moments, and what is added to the root of the
  # second (not lion).
  o.b1 = 0.9
  o.b2 = 0.95
  o.eps = 1e-8
  # Decoupled: each step subtracts learning_rate * weight_decay * parameter.
  o.weight_decay = 0.1
  # ((regex, factor), …) on weight decay; first match wins, others get 1. By default
  # only matrices and not embeddings, norms, biases, rates (A_log), sinks or activations decay.
  o.wd_mults = ((r".*(scale|bias|embedding|A_log|sinks|xielu/\w+|clip/\w+)$", 0.0),)
  # ((regex, factor), …) on the learning rate.
  o.lr_mults = ()
  # Regexes of parameters that are not trained: no gradient, no optimizer memory.
  o.freeze = ()
  # ((regex, steps), …): these parameters warm up over that many steps instead of schedule's warm-up.
  o.group_warmup = ()
  # Clip the gradient's global norm; 0: no clipping.
  o.clip_norm = 1.0
  # sgd and muon: momentum, and whether it is Nesterov's.
  o.momentum = 0.95
  o.nesterov = True
  # muon: Newton–Schulz iterations. Its updates are scaled to AdamW's RMS (0.2 * sqrt(max(fan_in, fan_out))),
  # so that learning_rate and weight_decay mean the same for both parts.
  o.muon_steps = 5
  # muon: regexes of kernels that are no hidden matrices, and have adamw: embeddings of tokens, positions and patches,
  # the output head, routers, gates, convolutions. Biases, norms and kernels of one row or column have it anyway.
  o.muon_exclude = (r"(^|/)(\w*embed|lm_head|router|shared_gate|\w*conv\w*)/",)
  # adafactor: second-moment decay is 1 - step ** -decay_exponent; matrices smaller than
  # min_dim_size_to_factor keep the full second moment.
  o.decay_exponent = 0.8
  o.min_dim_size_to_factor = 128
  # Decay of the exponential moving average of the trained parameters; 0: none kept.
  o.ema_decay = 0.0
  # A step whose loss or gradient is not finite changes nothing; so many in a row stop the run.
  o.max_nonfinite_steps = 10

  c.spikes = spikes()  # what is done about loss spikes
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
  # trainer/distributed/mesh.py; first match wins. Optimizer state follows its parameter.
  c.sharding_rules = ()
  # ((name of an activation's dimension, mesh axis, axes or None), …), before the built-in table of
  # trainer/distributed/mesh.py: ("stream", "context") turns sequence parallelism off.
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
  # What the backward pass recomputes (models/remat.py): auto | none | full (keep what enters a layer) | attention (also
  # queries, keys, values, attention's output) | attention_mlp (also the MLP's hidden layer) | offload,
  # offload_attention (full, attention, with what enters a layer in the host's memory) | dots (keep matrix products) |
  # dots_no_batch (keep products with weights) | a name of jax.checkpoint_policies. Without a scan, none is faster.
  c.remat = "auto"

  c.evals = ConfigDict()  # name: evaluator(…)
  # name: dict(type="dotted.path.Class", **its arguments); called after the built-in ones.
  c.callbacks = ConfigDict()
  # name: dict(type="wandb" | "mlflow" | "dotted.path.Class", **its arguments): where metrics go besides metrics.jsonl
  # and TensorBoard (docs/observability.md).
  c.loggers = ConfigDict()
  # Signs of trouble that are not to be told (docs/observability.md lists their names).
  c.health_silent = ()
  # Write report.html, the run on one page, at the end and when it fails or is stopped (docs/observability.md).
  c.report = True
  c.update(duration("log", steps=10))  # rows of metrics
  # Rolling checkpoints (`keep_last` of them stay) and permanent ones. A final one is saved, too, also where ckpt is
  # unset; with ckpt = 0 (never) none, at a signal neither.
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
  # with `fresh` in any case. `made_by`: the dotted name of a config (`:argument` behind it) that makes the run at
  # `path`; where none has ended there, it is trained first.
  c.init_from = ConfigDict(dict(
      path=unset(str), remap=(), ignore=(), hf=unset(str), fresh=False, made_by=unset(str)))
  # Continue another run (parameters, optimizer, step, data position) in this workdir.
  c.resume = unset(str)
  # Write a Hugging Face folder at the end: `path` (relative: inside the workdir), and its dtype (float32 | bfloat16 |
  # float16; default: precision.params), and whether with what predicts tokens further ahead (model.mtp_layers), which
  # some families have. At any time: python -m trainer.export.
  c.export = ConfigDict(dict(path=unset(str), dtype=unset(str), mtp=True))
  # Continue a workdir although its config differs in keys that change the training.
  c.allow_config_changes = False
  c.plan = plan()
  return c
