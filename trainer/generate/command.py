"""Generate: python -m trainer.generate --workdir=DIR [--step=N] | --hf=DIR [--prompt="…" [--chat]] [--image=FILE …]
[--video=FILE …] …

`--prompt` may be given several times. Without one: a conversation where standard input is a terminal and there is a
chat template, else one prompt that is read from standard input. A single completion is printed as it is generated.
`--image`, for models that see images, may be given several times too: each prompt is about all of them. They stand
where the text has `<image>` (chat.image_marker), else before it; a conversation begins with them, and `/image FILE`
adds another to what is said next. `--video` and `/video FILE` are the same for videos, whose place is `<video>`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from input_pipeline.examples.prompts import Prompt, Prompter
from input_pipeline.images.images import ImageRef
from input_pipeline.tokenizer.tokenizer import Tokenizer, load_tokenizer
from models import api, hf, lora
from models.hf import files
from trainer import startup, tree
from trainer.checkpoints import checkpoint, init_from
from trainer.config import checks as config_checks
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.export import hugging_face
from trainer.generate.completion import Completion, Request, joined
from trainer.generate.sampler import Sampler
from trainer.generate.stop_strings import StopStrings, columns, ending

# Decoding steps between two looks at what there is to print.
CHUNK = 8


@dataclass(frozen=True)
class Loaded:
  """What generates: a model with its parameters, the tokenizer, and the prompts' form."""

  model: Any
  params: Any
  tokenizer: Tokenizer
  prompter: Prompter
  # A sentence on what was loaded.
  origin: str
  # What ends a text about images, as the rows' `prefix` ends in training; "" where these are prompts like others.
  prefix_end: str = ""
  # Of the run, or what a folder says.
  config: Any = None


def load_run(workdir: str | Path, mesh: jax.sharding.Mesh, *, step: int | None = None,
             template: str | None = None) -> Loaded:
  """A run's model, with the parameters of a checkpoint spread over the mesh.

  Args:
    mesh: any; it need not be the run's.
    step: which checkpoint; None: the newest.
    template: in place of the run's `chat.template`.

  Raises:
    ConfigError: no such run or checkpoint, or one that does not fit its config.
  """
  workdir = Path(workdir).expanduser().absolute()
  file = workdir / "config.json"
  if not file.is_file():
    raise ConfigError(f"{workdir} holds no config.json, so it is no workdir of a run. Give the --workdir that it was "
                      "trained in, or --hf for a Hugging Face folder.")
  config = config_checks.resolve(files.read_json(file))
  folder = checkpoint.find(str(workdir if step is None else workdir / "checkpoints" / str(step)))
  tokenizer = load_tokenizer(workdir / "tokenizer.json")
  precision = config.precision
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype=precision.params,
                         compute_dtype=precision.compute, frozen=precision.frozen, freeze=config.optimizer.freeze)
  params = _restore(config, model, mesh, folder)
  with config.unlocked():
    config.chat.template = template or config.chat.template
  return Loaded(model, params, tokenizer, Prompter(config, tokenizer), str(folder), _prefix_end(config), config)


def _restore(config: Any, model: Any, mesh: jax.sharding.Mesh, folder: Path) -> Any:
  """The parameters in a checkpoint; under adapters it leaves out the base, which is made as the run made it."""
  wanted = tree.flatten(mesh_lib.placed_shapes(model.abstract_params(), mesh, config.sharding_rules))
  saved = checkpoint.param_shapes(folder)
  base = {path: leaf for path, leaf in wanted.items() if path not in saved and config.model.lora.rank
          and not lora.is_adapter(path)}
  problems = tree.compare({path: leaf for path, leaf in wanted.items() if path not in base}, saved)
  if problems:
    listed = "\n  ".join(problems[:40])
    raise ConfigError(f"{folder} does not hold the model of its config.json (-: only here, +: only there, !: other "
                      f"shape):\n  {listed}")
  params = checkpoint.restore_params(folder, {path: leaf for path, leaf in wanted.items() if path in saved})
  if base:
    origin = init_from.origin_of(config)
    made, where = init_from.first_params(origin, model, tree.unflatten(base), partial=True)
    init_from.check_base(config, made, where, folder)
    params |= tree.flatten(made)
  return tree.unflatten({path: params[path] for path in wanted})


def load_folder(folder: str | Path, mesh: jax.sharding.Mesh, *, template: str | None = None) -> Loaded:
  """A Hugging Face folder's model, in float32 on CPU and bfloat16 elsewhere.

  Raises:
    HFError, ConfigError, DataError: what cannot be read or represented.
  """
  folder = Path(folder).expanduser().absolute()
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  tokenizer = load_tokenizer(folder)
  model, params = hf.load(folder, dtype=dtype, shardings=lambda p: mesh_lib.param_shardings(p, mesh)[0],
                          progress=sys.stderr.isatty())
  config = defaults()
  config.model.hf, config.chat.template = str(folder), template
  hugging_face.fill_in(config)  # how it sees images decides what prompts are
  return Loaded(model, params, tokenizer, Prompter(config, tokenizer), f"{folder}, in {dtype}", _prefix_end(config),
                config)


def check_given(given: Any) -> None:
  """Refuses flags of `startup.define_model_flags` that name no model, or two. Raises ConfigError, naming them."""
  if (given.workdir is None) == (given.hf is None):
    raise ConfigError("give one of --workdir (a run) and --hf (a Hugging Face folder).")
  if given.hf and given.step is not None:
    raise ConfigError("--step is a checkpoint of a run; leave it out with --hf.")


def load(given: Any) -> tuple[Loaded, jax.sharding.Mesh]:
  """The model that the flags of `startup.define_model_flags` name, and the mesh that it is spread over.

  Raises:
    ConfigError, DataError: see `check_given`, `load_run` and `load_folder`.
  """
  check_given(given)
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=given.tensor))
  if given.hf:
    return load_folder(given.hf, mesh, template=given.template), mesh
  return load_run(given.workdir, mesh, step=given.step, template=given.template), mesh


def _prefix_end(config: Any) -> str:
  return config.chat.prefix_end if config.model.vision.attention == "prefix" else ""


def text_prompt(loaded: Loaded, text: str, where: str, images: Sequence[str | ImageRef] = ()) -> Prompt:
  """A text to be continued, about images (paths) and videos (`shown_by`).

  Raises:
    ConfigError, DataError: see `Prompter.text`.
  """
  return loaded.prompter.text(text + loaded.prefix_end if images else text, where, images)


class Printed:
  """The text of one completion as its parts come: a character only once all its tokens have, and the beginning of a
  stop string that is cut once it is known to be none."""

  def __init__(self, tokenizer: Tokenizer, stop: StopStrings | None = None):
    self._stop, self._parts, self._shown = stop or StopStrings(tokenizer), list[Completion](), ""

  def add(self, part: Completion) -> str:
    """What of the text can be told now and could not before."""
    self._parts.append(part)
    completion = joined(self._parts)
    text = self._stop.text(completion) if part.finish_reason else self._stop.certain(completion.ids).rstrip("\ufffd")
    if not text.startswith(self._shown):  # a later token has changed what an earlier one looks like
      return ""
    new, self._shown = text[len(self._shown):], text
    return new

  def with_special(self) -> str:
    """The text of all parts, with its special tokens."""
    return self._stop.text(joined(self._parts), skip_special=False)


def printed(tokenizer: Tokenizer, parts: Iterator[Completion], stop: StopStrings | None = None) -> Iterator[str]:
  """The text of one completion, piece by piece; see `Printed`."""
  text = Printed(tokenizer, stop)
  for part in parts:
    yield text.add(part)


def converse(loaded: Loaded, sampler: Sampler, options: dict[str, Any], system: str | None,
             images: Sequence[str | ImageRef] = (), stop: StopStrings | None = None) -> None:
  """Answers what is typed, line by line, until the end of the input; /new begins anew, Ctrl-C stops an answer.

  `images` (paths, and videos) belong to what is said first, those of `/image FILE` and `/video FILE` to what is said
  next.
  """
  print("/new begins a new conversation, /image FILE or /video FILE shows one with what is said next, Ctrl-D ends.")
  more = {} if stop is None else stop.options
  start = [] if system is None else [{"role": "system", "content": system}]
  messages, shown = list(start), list(images)
  while True:
    try:
      line = input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
      print()
      return
    if line == "/new":
      messages, shown = list(start), []
    command, _, file = line.partition(" ")
    if file and command in ("/image", "/video"):
      shown += shown_by([file.strip()] if command == "/image" else [], [file.strip()] if command == "/video" else [])
    if not line or line == "/new" or file and command in ("/image", "/video"):
      continue
    asked: list[Any] = [*messages, {"role": "user", "content": said_with(line, shown)}]
    said = ""
    try:
      prompt = loaded.prompter.messages(asked)
      request = Request(**images_of([prompt]), **more, **options)
      for text in printed(loaded.tokenizer, sampler.stream(loaded.params, [prompt.ids], request), stop):
        print(text, end="", flush=True)
        said += text
    except KeyboardInterrupt:
      pass
    except (ConfigError, DataError) as error:  # too long, say
      print(f"{type(error).__name__}: {error}\n/new begins a new conversation.")
      shown = []
      continue
    print()
    messages, shown = [*asked, {"role": "assistant", "content": said}], []


def shown_by(images: Sequence[str], videos: Sequence[str]) -> list[str | ImageRef]:
  """The paths of images, and those of videos as such."""
  return [*images, *(ImageRef(path, path, video=True) for path in videos)]


def said_with(text: str, images: Sequence[str | ImageRef]) -> str | list[dict[str, str]]:
  """The content of a message that shows images and videos (`shown_by`) before its text."""
  if not images:
    return text
  parts = [{"type": "image", "path": one} if isinstance(one, str) else {"type": "video", "path": one.value}
           for one in images]
  return [*parts, {"type": "text", "text": text}]


def images_of(prompts: Sequence[Prompt]) -> dict[str, Any]:
  """The images of prompts as an argument of the sampler, if there are any."""
  return dict(images=[list(p.images) for p in prompts]) if any(len(p.images) for p in prompts) else {}


def complete(loaded: Loaded, sampler: Sampler, prompts: Sequence[Prompt], options: dict[str, Any],
             stop: StopStrings | None = None) -> None:
  """Prints the completions of prompts: one as it comes, several when all are there."""
  stop = stop or StopStrings(loaded.tokenizer)
  ids, options = [prompt.ids for prompt in prompts], options | images_of(prompts) | stop.options
  if len(prompts) == options["num_samples"] == 1:
    for text in printed(loaded.tokenizer, sampler.stream(loaded.params, ids, Request(**options)), stop):
      print(text, end="", flush=True)
    print()
    return
  for completion in sampler.generate(loaded.params, ids, **options):
    ended = ending(columns(completion.finish_reason, completion.stop_reason))
    print(f"--- prompt {completion.prompt}, sample {completion.sample}: {len(completion.ids)} tokens, "
          f"{ended}, log-prob {completion.logprobs.sum(dtype=np.float64):.3f}")
    print(stop.text(completion))


def _define_flags() -> None:
  startup.define_model_flags()
  flags.DEFINE_multi_string("prompt", None, "A text to continue; with --chat what the user says. May be repeated.")
  flags.DEFINE_multi_string("image", [], "The file of an image that prompts are about. May be repeated.")
  flags.DEFINE_multi_string("video", [], "A video, a file or a folder of frames, that they are about. May be repeated.")
  flags.DEFINE_bool("chat", False, "Put prompts into the chat template.")
  flags.DEFINE_string("system", None, "System message of conversations.")
  flags.DEFINE_integer("max_new_tokens", 256, "Of each completion.")
  flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: the most likely token.")
  flags.DEFINE_integer("top_k", 0, "Draw from that many most likely tokens; 0: from all.")
  flags.DEFINE_float("top_p", 1.0, "Draw from the most likely tokens that have this share.")
  flags.DEFINE_float("min_p", 0.0, "Draw from tokens at least so likely, relative to the most likely one.")
  flags.DEFINE_multi_string("stop", [], "A text that ends a completion. May be repeated. In bash $'\\n' is a newline.")
  flags.DEFINE_bool("keep_stop", False, "Print the text that ended it, too.")
  flags.DEFINE_integer("num_samples", 1, "Completions of each prompt.")
  flags.DEFINE_integer("seed", 0, "Of the random draws.")


def _run(given: Any) -> None:
  loaded, mesh = load(given)
  sys.stderr.write(f"{loaded.origin}\n")
  prompts = given.prompt
  talks = prompts is None and sys.stdin.isatty()
  if talks and loaded.prompter.template is None:
    raise ConfigError("there is no chat template to converse with. Give --prompt=… to have a text continued, or "
                      "--template, e.g. chatml.")
  images = shown_by(given.image, given.video)
  stop = StopStrings(loaded.tokenizer, given.stop, given.keep_stop, "--stop")
  options = dict(num_samples=given.num_samples, max_new_tokens=given.max_new_tokens, temperature=given.temperature,
                 top_k=given.top_k, top_p=given.top_p, min_p=given.min_p, stop_ids=loaded.prompter.stop_ids,
                 seed=given.seed)
  if talks:
    if given.num_samples > 1:
      raise ConfigError(f"--num_samples is {given.num_samples}, but a conversation has one answer. Give a --prompt.")
    return converse(loaded, Sampler(loaded.model, mesh, rows=1, chunk=CHUNK), options, given.system, images, stop)
  if given.system is not None and not given.chat:
    raise ConfigError("--system is a message of a conversation; add --chat.")
  if loaded.prompter.template is not None and not given.chat:
    sys.stderr.write("This model has a chat template, but the prompt is continued as a plain text. With --chat it is "
                     "what the user says, and is answered.\n")
  texts = [sys.stdin.read()] if prompts is None else prompts
  system = [] if given.system is None else [{"role": "system", "content": given.system}]
  made = [loaded.prompter.messages([*system, {"role": "user", "content": text}], where=f"prompt {n}",
                                   images=images) if given.chat
          else text_prompt(loaded, text, f"prompt {n}", images) for n, text in enumerate(texts)]
  chunk = CHUNK if len(made) * given.num_samples == 1 else 32
  complete(loaded, Sampler(loaded.model, mesh, chunk=chunk), made, options, stop)


def main(argv: list[str]) -> None:
  startup.run_given(argv, _run, 'a prompt is written --prompt="…"')
