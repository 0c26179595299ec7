"""The sections of a config that a run may have several of, or one of several kinds of: each key with its meaning.

    config.input.sources.mine = source(type="jsonl", path="data/*.jsonl")
    config.evals.val = evaluator(type="loss")
    config.strategy = strategy("dpo", beta=0.2)
    config.rollout.rewards.right = reward(type="numeric")
"""

from ml_collections import ConfigDict, config_dict


def unset(kind: type) -> config_dict.FieldReference:
  """A key of that type with no value yet. (A new one each time: ml_collections ties together keys that share one.)"""
  return config_dict.placeholder(kind)


DURATION_UNITS = ("steps", "examples", "tokens", "epochs", "percent")


def duration(prefix: str, **given: float) -> dict:
  """The keys `{prefix}_{steps,examples,tokens,epochs,percent}`, of which one may be set.

  None or -1 means "not given" (the command line cannot spell None); 0 means never.
  Examples are packed rows, tokens are row positions (rows × seq_len), percent (0 to 100) is of the
  whole run.
  """
  whole = ("steps", "examples", "tokens")
  keys = {f"{prefix}_{unit}": unset(int if unit in whole else float) for unit in DURATION_UNITS}
  for unit, value in given.items():
    keys[f"{prefix}_{unit}"] = value
  return keys


def source(**changed) -> ConfigDict:
  """One data source, `input.sources.<name>`: where documents come from."""
  c = ConfigDict()
  # text | jsonl (also files that are a list of objects) | csv | parquet | arrow (Arrow files, and folders of datasets'
  # save_to_disk) | arrayrecord | tfds | python_stdlib | python_docstrings (signatures and their docstrings) |
  # python_docstring_pairs (each with its own docstring, chosen, and another's, rejected) |
  # python_docstring_matches (docstrings as queries, functions as what they look for) |
  # arithmetic (sums to solve) | arithmetic_mistakes (half of the answers are wrong) |
  # arithmetic_pairs (the right answer chosen, a wrong one rejected) |
  # digits (small pictures of handwritten digits, with questions about them) |
  # the dotted path of a reader of yours (docs/extending.md), which has its own keys besides these.
  c.type = "text"
  # A file, a folder (searched recursively) or a glob; several are separated by commas. Each may be a URL: gs://, s3://,
  # hf:// or https:// (docs/data.md#data-that-lie-elsewhere).
  c.path = unset(str)
  # Of URLs: the folder that their files are copied to before they are read. Default: ~/.cache/weft/data.
  c.copies = unset(str)
  # jsonl, csv, parquet, arrow, tfds, arrayrecord (if its records are JSON): the field that holds the text.
  c.text_key = "text"
  # jsonl: of files that are one object, the key behind which the list of rows stands ("data").
  c.rows_key = unset(str)
  # text: what one document is: file | line | paragraph (blank-line separated).
  c.documents = "file"
  # tfds: the dataset's name (`name[/config][:version]`); `path` is its data_dir.
  # digits: name | description, the question that is asked of each picture; unset: both.
  # python_docstrings, python_docstring_pairs, arithmetic and the like: chat, for conversations; unset: texts.
  c.dataset = unset(str)
  # tfds: its own split; arrow: that of a saved DatasetDict.
  c.dataset_split = "train"
  # all | train | validation. The two parts are disjoint; a document belongs to one of them by a hash of
  # its name or content, whatever the order of files.
  c.split = "all"
  # Share of documents that make up `validation`.
  c.validation_fraction = 0.05
  # Use at most this many documents, evenly spaced over the source (for quick evaluations).
  c.max_documents = unset(int)
  # Share in the mixture, relative to the other sources' weights.
  c.weight = 1.0
  # 0: the source is read whole before the first step. n: in parts of n files, the next while one is trained on
  # (docs/data.md#streams).
  c.stream_files = 0
  # Of streams of text (lines, paragraphs), jsonl, csv and parquet: 0: files are read whole. n: in pieces of n bytes, of
  # which a part has one of each of its files; the first step waits for the first.
  c.stream_bytes = 0
  c.update(changed)
  return c


def images() -> ConfigDict:
  """How images become pixels, `input.images` (docs/images.md)."""
  c = ConfigDict()
  # squash (to a square, whatever the shape) | pad (the longer side fits) | crop (the shorter side fits, the middle is
  # taken) | auto: crop for CLIP, else squash.
  c.resize = "auto"
  # bilinear | bicubic | lanczos | nearest | auto: bilinear for the projector pool (Gemma 3), else bicubic.
  c.interpolation = "auto"
  # In training: the least share of the area that is taken (1: all), how often it is mirrored, and by how much
  # brightness, contrast and saturation change (0.2: by 20 percent at most).
  c.augment = ConfigDict(dict(crop=1.0, flip=0.0, color=0.0))
  # Larger images are not decoded, but an error.
  c.max_pixels = 50_000_000
  # error | drop: what becomes of a row with an image that cannot be used; dropped rows are counted.
  c.on_error = "error"
  # Processes that decode images; 0: the threads that prepare batches do it.
  c.workers = 0
  return c


def evaluator(**changed) -> ConfigDict:
  """One evaluator, `evals.<name>`. `type`: loss, samples, generate, classify, preference, retrieval, a dotted path."""
  c = ConfigDict()
  # loss, samples, generate, classify, preference, retrieval, or the dotted path of a class of yours
  # (docs/extending.md).
  c.type = "loss"
  # When it runs, besides step 0 and the end. Default: the five units unset = 10 percent.
  c.update(duration("eval"))
  # Whether it also runs before the first step, and after the last.
  c.at_start = True
  c.at_end = True
  # stop: a failing evaluator stops the run. warn: it is reported, counted and the run goes on.
  c.on_error = "stop"
  # loss, generate, classify, preference, retrieval: the sources evaluated, as in `input.sources`; empty: the training
  # sources …
  c.sources = ConfigDict()
  # … with this split in place of their own.
  c.split = "validation"
  # loss, classify, preference, retrieval: rows per evaluation batch (the value does not depend on it). Default: that
  # of a micro-batch.
  # samples, generate: texts generated at a time. Default: 32.
  c.batch_size = unset(int)
  # loss, generate, classify, preference, retrieval: at most this many documents per source, evenly spaced over it.
  c.max_documents = unset(int)
  # loss: compressors whose bits per byte on the same text are shown beside the model's: gzip, xz.
  c.baselines = ()
  # samples: texts to continue.
  c.prompts = ()
  # samples, generate: new tokens for each at most, softmax temperature (0: most likely token).
  c.max_new_tokens = 64
  c.temperature = 0.8
  # samples, generate: strings that end a text, each with the token that completes it; and whether its text has them.
  c.stop = ()
  c.keep_stop = False
  # generate: of a distribution truncated to the top_k most likely tokens (0: all), to those that make up top_p,
  # to those at least min_p times as likely as the most likely one.
  c.top_k = 0
  c.top_p = 1.0
  c.min_p = 0.0
  # generate: completions of each prompt, and the k of `pass@k`, each at most that many.
  c.num_samples = 1
  c.pass_at = (1,)
  # generate, classify: columns that hold the prompt and the right answer, both strings (of generate, the answer may be
  # a list, each right). Default: as in fine-tuning, where what the assistant says last is the answer.
  c.prompt_key = unset(str)
  c.answer_key = unset(str)
  # generate: a regex whose last match (its first group, if it has one) is the answer, in completions and in answers;
  # GSM8K: r"####\s*(-?[\d,.]+)". Default: all of the text.
  c.extract = unset(str)
  # generate: exact: the answer is one of those known; vqa: it is worth what evaluators/vqa.py says, with ten answers.
  c.match = "exact"
  # classify: the possible answers, or the column that lists them; what is compared: sum | mean of the log-probs of
  # their tokens, and whether the end of the text behind them is one of these.
  c.options = ()
  c.options_key = unset(str)
  c.score = "sum"
  c.with_end = True
  # retrieval: the k of `recall@k`.
  c.recall_at = (1, 5, 10)
  c.update(changed)
  return c


def strategy(name: str = "seq", **changed) -> ConfigDict:
  """What is optimised, `config.strategy`: a built-in one (trainer/strategies), or the dotted path of your own, with its
  options.

  Raises:
    ConfigError: no such strategy.
  """
  from trainer import strategies  # imports JAX, as `import trainer.config` does not
  # A type stands for "no value yet".
  options = {key: unset(value) if isinstance(value, type) else value for key, value in strategies.options(name).items()}
  c = ConfigDict(dict(name=name, **options))
  for key in ("loss", "teachers"):
    if key in changed:
      c[key] = changed.pop(key)  # replaced as a whole
  c.update(changed)
  return c


def spikes() -> ConfigDict:
  """Loss spikes (trainer/telemetry/spikes.py)."""
  s = ConfigDict()
  # none | warn | rollback: go back to the newest checkpoint that is old enough, and on with later data.
  s.action = "none"
  # So many steps in a row are a spike whose metric is above the median of a window of steps before and so many (robust)
  # deviations more, or not finite.
  s.metric = "loss"
  s.in_a_row = 3
  s.window = 100
  s.deviations = 10.0
  # Steps by which the checkpoint must be older than the spike, and steps after it whose data are left out as well.
  s.margin = 20
  s.skip = 20
  # After so many the run stops.
  s.max_rollbacks = 10
  return s


def plan() -> ConfigDict:
  """What `--mode=plan` is asked, `config.plan` (docs/scaling.md); training reads none of it."""
  c = ConfigDict()
  # KIND:SHAPE, e.g. v5e:16x16, v5p:4x4x8, h100:8x4 (GPUs a node x nodes), cpu:8. Unset: the devices that are here.
  c.topology = unset(str)
  # Slices of that topology (TPUs), or groups of such nodes, with the slow network between them.
  c.slices = 1
  # Compile the step for the topology, where its compiler is installed: auto | always | never.
  c.compile = "auto"
  # In place of the data sheet, for each device: GB that a program may use, dense bfloat16 TFLOP/s, GB/s of its memory,
  # GB/s of a link and of the network, each in one direction.
  c.memory_gb = unset(float)
  c.tflops = unset(float)
  c.memory_bandwidth = unset(float)
  c.link_bandwidth = unset(float)
  c.network_bandwidth = unset(float)
  # Places for images in a row (tiles, or squares, of images that are cut), which otherwise the data decide. Default: as
  # many as the largest image takes that a row has room for.
  c.images_per_row = unset(int)
  return c


def rollout() -> ConfigDict:
  """Completions to train on that are sampled from the policy and scored, `config.rollout` (docs/grpo.md)."""
  c = ConfigDict()
  # Prompts that are sampled for at a time, from input.sources; 0: none, completions come with the data.
  c.num_prompts = 0
  # The column that holds the prompt, with a chat template what the user says. Default: as in fine-tuning, or `prompt`.
  c.prompt_key = unset(str)
  # Completions of each prompt. Default: that of the preset, or 8.
  c.group_size = unset(int)
  # Optimizer steps that share out the completions of a rollout, and passes over them.
  c.updates = 1
  c.epochs = 1
  # Sampled tokens of a completion at most; prompts must leave room for them in seq_len.
  c.max_new_tokens = 128
  # Strings that end a completion, with the token that completes one; it is trained, and no longer to be cut off. What
  # rewards and environments are told is without the string, or with it (keep_stop).
  c.stop = ()
  c.keep_stop = False
  # Of the softmax that is drawn from. Truncating it (top_k, top_p, min_p) is refused where ratios are trained.
  c.temperature = 1.0
  c.top_k = 0
  c.top_p = 1.0
  c.min_p = 0.0
  # Texts decoded at a time.
  c.batch_size = 64
  # Prompts longer than this are run so many tokens at a time, between decoding steps of other texts; 0: each at once.
  c.prefill_chunk = 0
  # The address of a server that samples in place of this program (docs/grpo.md), how it is given new parameters (weft:
  # python -m trainer.serve; vllm; sglang), and how long it may leave a request without an answer.
  c.engine = unset(str)
  c.engine_handover = "weft"
  c.engine_timeout_seconds = 600.0
  # Of a mixture of experts: an update takes each token through the experts that it went through when it was sampled,
  # with weights by its own router (routing replay, R3: arXiv 2510.11370). False: through those that its own router
  # chooses; how often these differ is rollout/expert_disagreement.
  c.replay_experts = False
  # How many updates older than the policy that is trained the one may be that sampled (docs/grpo.md). concurrent:
  # completions are sampled while updates go on, by the newest policy that is at hand; which one that was stands in
  # schedule.jsonl, and a run that is given this file as its schedule is the same again, to the bit.
  c.max_staleness = 0
  c.concurrent = False
  c.schedule = unset(str)
  # With concurrent: newer parameters are taken between two chunks of decoding steps, too; keys and values of what has
  # been run stay as they are (PipelineRL).
  c.in_flight = False
  # So many of the devices, the last ones, sample and do nothing else, and `mesh` is of the others; 0: all do both. Each
  # group of `tensor` of them has the parameters once, and a share of the texts.
  c.devices = 0
  c.tensor = 1
  # Begin more prompts in the rows that get free, end a rollout when enough groups are whole, and let the others go on
  # in the next one, by the policy of then, as far as max_staleness allows; no row waits for the longest completion.
  # What goes on is run again by that policy, but not with in_flight: then it goes on in its row.
  c.carry_over = False
  # Beside its own, each rollout trains on so many groups of the `replay_window` rollouts before it, of those that had
  # something to teach, drawn anew each time (docs/grpo.md#groups-that-are-trained-on-again).
  c.replay_groups = 0
  c.replay_window = 4
  # Replace groups whose rewards are all equal by new prompts, so many times over (DAPO). Default: that of the preset,
  # or 0.
  c.resample = unset(int)
  # The share of its completions that should pass: prompts near it are sampled for most often, those that always or
  # never passed most seldom, a new one always (docs/grpo.md#prompts-by-pass-rate). Default: all come in turn.
  c.curriculum_target = unset(float)
  # The least probability that a prompt is taken with, and the reward from which on a completion has passed.
  c.curriculum_floor = 0.1
  c.curriculum_passing = 1.0
  # Do not train on completions that did not end within max_new_tokens.
  c.mask_truncated = False
  # After so many rollouts in a row that teach nothing (rewards fail, all is cut off, or from the start all rewards are
  # equal) the run ends with an error; 0: never.
  c.max_without_lesson = 10
  # name: reward(…)
  c.rewards = ConfigDict()
  # Processes that compute rewards (0: this one), and how long a call may take.
  c.reward_workers = 1
  c.reward_timeout_seconds = 60.0
  # The dotted path of a class that answers completions, or of a function that asks for them (docs/rewards.md), and
  # completions of one conversation.
  c.environment = unset(str)
  c.max_turns = 8
  # The dotted paths of Python functions that the policy may call, in place of an environment, and the format of its
  # calls: auto is that in which the chat template writes them; tagged, listed, bare (docs/rewards.md).
  c.tools = ()
  c.tool_format = "auto"
  # How long a reset or a step of it may take; one that takes longer costs its episode. Default: as long as it wants.
  c.environment_timeout_seconds = unset(float)
  # What is added to the reward so far of an episode whose step took longer. Default: it has no reward, and is not
  # trained.
  c.environment_timeout_reward = unset(float)
  # Episodes whose environment is called at the same time, each in a thread of its own; 1: one after another.
  c.environment_workers = 64
  # The share of the episodes whose next turns begin together: 1, all of them, turn by turn; less, when the environments
  # of so many have answered, in rows that are free, while the others are still sampled (docs/rewards.md).
  c.turn_share = 1.0
  # Conversations whose keys and values are kept while they wait for an answer, so that of the next turn only what is
  # new is run; others are run again from their beginning. 0: all are (docs/rewards.md).
  c.kept_texts = 0
  # Run what different prompts have in common at their beginnings, a system prompt say, once for all that are sampled
  # for at the same time, where it is 64 tokens or more; log-probs are the same to rounding (docs/grpo.md).
  c.share_beginnings = False
  return c


def reward(**changed) -> ConfigDict:
  """One reward function, `rollout.rewards.<name>` (docs/rewards.md).

  `type` is exact_match, regex, numeric, length, format, repetition, model, or the dotted path of a function of yours,
  which gets all further keys of the section as keyword arguments.
  """
  c = ConfigDict()
  # exact_match, regex, numeric, length, format, repetition, model (what a reward model says), or the dotted path of a
  # function of yours.
  c.type = "exact_match"
  # Rewards are added up with these weights.
  c.weight = 1.0
  # exact_match, numeric: the column that holds the right answer.
  c.answer_key = "answer"
  # regex: what is searched for; format: what all of the text must match; numeric, exact_match: the answer is its last
  # match (its first group, if it has one).
  c.pattern = unset(str)
  # length, in tokens: below min_length, and from max_length - cache_length to max_length, it falls from 0 to -1.
  c.min_length = 0
  c.max_length = unset(int)
  c.cache_length = 0
  # repetition: length of what may repeat, and the penalty if all does.
  c.ngram = 3
  c.max_penalty = 1.0
  # model: a run of strategy reward (its workdir or a checkpoint), or a Hugging Face folder of a model that scores.
  c.path = unset(str)
  c.update(changed)
  return c
