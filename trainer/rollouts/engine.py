"""Completions by a server elsewhere (`rollout.engine`): it is given the policy's parameters before each rollout and
prompts as token ids, and returns token ids with their log-probs.

The protocol is that of vLLM's /v1/completions with `return_token_ids`; `python -m trainer.serve` answers it, too. How a
server is given parameters differs (`HANDOVERS`): all read them from a folder of safetensors. What it draws rounds
otherwise than what is trained, and it may truncate or forget: by how much is measured each rollout (`sampling/kl`), and
corrected by `strategy.correction`. What can be checked is checked: ids, lengths, ends, and whose parameters it has.
Of several processes the first asks, and writes the parameters that all of them hold.
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from models import hf, lora
from trainer import tree
from trainer.checkpoints.init_from import EMBEDDINGS
from trainer.distributed import processes
from trainer.errors import ConfigError, DataError, one_of
from trainer.generate.completion import Completion, More, Request
from trainer.generate.sampler import Sampler

# How servers are told to read a folder: (route, body of it).
HANDOVERS: dict[str, Any] = {
    "weft": ("/v1/load_weights", lambda folder: {"path": folder}),
    # With VLLM_SERVER_DEV_MODE=1.
    "vllm": ("/collective_rpc", lambda folder: {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
    "sglang": ("/update_weights_from_disk", lambda folder: {"model_path": folder}),
}
# Requests at a time.
AT_A_TIME = 256
RETRY_SECONDS = 0.5
# Between two looks at whether the run stops, while the server is waited for.
LOOK_SECONDS = 1.0
# Between two warnings that it is not there.
WARN_SECONDS = 60


class Stopped(Exception):
  """The run stops, and waits no longer."""


def check(config: Any) -> None:
  """Refuses what an engine cannot do. Raises ConfigError."""
  c = config.rollout
  if c.engine is None:
    return
  if not c.engine.startswith(("http://", "https://")):
    raise ConfigError(f"rollout.engine is {c.engine!r}; allowed: the address of a server, e.g. http://127.0.0.1:8000.")
  one_of("rollout.engine_handover", c.engine_handover, HANDOVERS)
  if not c.engine_timeout_seconds > 0:
    raise ConfigError(f"rollout.engine_timeout_seconds is {c.engine_timeout_seconds}; it must be above 0.")
  for key in ("prefill_chunk", "kept_texts", "share_beginnings"):
    if c[key]:
      raise ConfigError(f"rollout.{key} is {c[key]}, but rollout.engine runs prompts in its own way: use "
                        f"--config.rollout.{key}={type(c[key])()} (python -m trainer.serve has flags for the like), or "
                        "leave rollout.engine out.")
  if c.replay_experts:
    raise ConfigError("rollout.replay_experts is True, but servers do not tell which experts tokens went through: use "
                      "--config.rollout.replay_experts=False, or leave rollout.engine out.")
  if config.model.vision.tower != "none":
    raise ConfigError("rollout.engine is for models of text; leave it out, and the run samples by itself.")
  if config.precision.frozen in ("int8", "nf4"):
    raise ConfigError(f"precision.frozen is {config.precision.frozen}: a base in few bits cannot be handed to "
                      "rollout.engine. Use --config.precision.frozen=bfloat16.")


class Engine(Sampler):
  """Samples at a server; what it gives is what `Sampler` gives.

  Args:
    folder: for parameters that are handed over; the server must see it under the same name.
  """

  def __init__(self, config: Any, model: Any, mesh: Any, folder: Path):
    super().__init__(model, mesh, rows=config.rollout.batch_size)
    c = config.rollout
    self._url, self._timeout, self._handover = c.engine.rstrip("/"), c.engine_timeout_seconds, c.engine_handover
    self._folder, self._lora = Path(folder), model.spec.lora
    model.architecture = hf.keys_of(config.model, model.num_real_vocab)
    if config.model.hf:  # whose names the server knows
      model.hf_config = hf.files.read_config(config.model.hf)
    hf.config_json(model.architecture, getattr(model, "hf_config", None))  # better said now
    self._has: Any = None  # a leaf of the parameters that the server has
    self._fingerprint: str | None = None
    self._giving, self._given_again = threading.Lock(), False
    self._warns_at = 0.0
    self._times, self._name = 0, ""

  def stream(self, params: Any, prompts: Sequence[Sequence[int] | np.ndarray], request: Request
             ) -> Iterator[Completion]:
    """See `Sampler.stream`; each completion comes as a whole.

    Raises:
      ConfigError: the server refuses, or does not answer in time.
      DataError: what it answers cannot be.
    """
    try:
      self.hand_over(params, request.stopped)
    except Stopped:
      return
    waiting: dict[int, Sequence[int]] = {}  # the samples of each prompt that is not answered
    asked: dict[Future, int] = {}  # in the first process, its number
    numbers = itertools.count()
    pool, leaves = ThreadPoolExecutor(AT_A_TIME), threading.Event()
    try:

      def ask(prompts: Sequence[Sequence[int] | np.ndarray], request: Request) -> None:
        ids = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
        limits = np.broadcast_to(np.asarray(request.max_new_tokens, np.int32), len(ids))
        self.check(ids, limits)
        samples = [range(request.num_samples)] * len(ids) if request.samples is None else request.samples
        for one, limit, of in zip(ids, limits.tolist(), samples, strict=True):
          waiting[number := next(numbers)] = of
          if jax.process_index() == 0:
            asked[pool.submit(self._complete, one, limit, of, request, leaves.is_set)] = number

      ask(prompts, request)
      while not request.stopped():
        more = More() if request.more is None else request.more(not waiting)
        if len(more.prompts):
          ask(more.prompts, dataclasses.replace(request, **more.options))
        if not waiting and not more.coming:
          return
        for number, answers in self._answers(asked) if waiting else ():
          for sample, (tokens, told, reason, string) in zip(waiting.pop(number), answers, strict=True):
            logprobs = np.array(told, np.float32)
            yield Completion(number, sample, np.array(tokens, np.int32), logprobs, logprobs, reason, string)
    finally:  # whatever is asked and not answered is of no use to anybody
      leaves.set()
      pool.shutdown(wait=False, cancel_futures=True)

  def _answers(self, asked: dict[Future, int]) -> list[tuple[int, list[tuple]]]:
    """(number of a prompt, its completions) of those that have come, the same in every process; they leave `asked`."""
    found: list[tuple[int, list[tuple]]] = []
    with processes.first_goes_first("sampling by rollout.engine"):
      if asked:
        alone = jax.process_count() == 1  # several stop where all have the same parts
        done = wait(asked, timeout=LOOK_SECONDS if alone else None, return_when=FIRST_COMPLETED).done
        found = sorted((asked.pop(future), future.result()) for future in done)
    return processes.from_first(found)

  def hand_over(self, params: Any, stopped: Callable[[], bool] = lambda: False) -> None:
    """Gives the server these parameters, unless it has them.

    Raises:
      Stopped: `stopped` says so while the server is not there.
    """
    leaf = jax.tree.leaves(params)[0]
    if leaf is self._has:
      return
    self._times += 1
    folder = self._folder / str(self._times)
    with processes.first_goes_first("reaching rollout.engine"):
      if jax.process_index() == 0 and not self._name:
        self._name = self._ask("/v1/models", None, stopped)["data"][0]["id"]
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was stopped
    merged = params if self._lora is None else lora.merge(params, self._lora)
    hf.save(self.model, _without_padding(merged, self.model.num_real_vocab), folder, overwrite=True,
            gather=processes.on_every_host if jax.process_count() > 1 else None)
    with processes.first_goes_first("giving parameters to rollout.engine"):
      if jax.process_index() == 0:
        self._give(stopped)
        shutil.rmtree(self._folder / str(self._times - 1), ignore_errors=True)
    self._has, self._given_again = leaf, False

  def _give(self, stopped: Callable[[], bool]) -> None:
    """Has the server read what was written last."""
    route, body = HANDOVERS[self._handover]
    told = self._ask(route, body(str(self._folder / str(self._times))), stopped)
    self._fingerprint = told.get("system_fingerprint") if isinstance(told, Mapping) else None

  def _give_again(self, stopped: Callable[[], bool]) -> None:
    """Once for a handover, whichever thread is first: a server that was started anew has what it was started with."""
    with self._giving:
      if not self._given_again:
        logging.warning("%s answers with other parameters than it was given: it is given them again.", self._url)
        self._given_again = True
        self._give(stopped)

  def _complete(self, ids: np.ndarray, limit: int, samples: Sequence[int], request: Request,
                stopped: Callable[[], bool]) -> list[tuple]:
    """(ids, log-probs, finish_reason, stop_reason) of each sample of a prompt, JSON-able."""
    drawn = hashlib.blake2b(f"{request.seed}:{list(samples)}:".encode() + ids.tobytes(), digest_size=4)
    body = {"model": self._name, "prompt": ids.tolist(), "n": len(samples), "max_tokens": limit, "logprobs": 0,
            "temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k or -1,
            "min_p": request.min_p, "seed": int.from_bytes(drawn.digest(), "big") >> 1, "return_token_ids": True,
            "stop_token_ids": sorted(set(request.stop_ids))}
    if request.stop is not None:
      body |= {"stop": list(request.stop.strings), "include_stop_str_in_output": True}
    answer = self._ask("/v1/completions", body, stopped)
    if self._fingerprint and answer.get("system_fingerprint") != self._fingerprint:
      self._give_again(stopped)
      answer = self._ask("/v1/completions", body, stopped)
    has = answer.get("system_fingerprint")
    if self._fingerprint and has != self._fingerprint:
      raise DataError(f"{self._url} answers with parameters of the fingerprint {has}, and was given those of "
                      f"{self._fingerprint}, twice. Does another run use it, too?")
    choices = sorted(answer.get("choices", ()), key=lambda choice: choice["index"])
    if len(choices) != len(samples):
      raise DataError(f"{self._url} returned {len(choices)} completions where {len(samples)} were asked for.")
    return [self._read(choice, limit, body) for choice in choices]

  def _read(self, choice: Mapping[str, Any], limit: int, body: Mapping[str, Any]) -> tuple:
    """A completion, checked."""
    ids, told = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not ids or told is None:
      raise DataError(f"{self._url} returned no token_ids or no logprobs. It must be a server that has "
                      "return_token_ids, as vLLM's and python -m trainer.serve.")
    ids, logprobs, reason = np.array(ids, np.int32), np.array(told, np.float32), choice.get("finish_reason")
    problem = ""
    if len(logprobs) != len(ids) or not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
      problem = f"{len(ids)} tokens with {len(logprobs)} log-probs, some of them no log-probs"
    elif ids.min() < 0 or ids.max() >= self.model.num_real_vocab:
      problem = f"token {ids.max()}, where the vocabulary has {self.model.num_real_vocab}"
    elif reason not in ("stop", "length") or len(ids) > limit or reason == "length" and len(ids) < limit:
      problem = f"{len(ids)} tokens that end by {reason!r}, where {limit} were allowed"
    string = choice.get("stop_reason")
    string = string if isinstance(string, str) else None
    if not problem and reason == "stop" and string is None and ids[-1] not in body["stop_token_ids"]:
      problem = f"an end by token {ids[-1]}, which ends nothing (rollout's are {body['stop_token_ids']})"
    if problem:
      raise DataError(f"{self._url} returned {problem}. Is it the same model, with the same tokenizer?")
    return ids.tolist(), logprobs.tolist(), reason, string

  def _ask(self, route: str, body: Any, stopped: Callable[[], bool]) -> Any:
    """What the server answers; it is asked again while it cannot be reached or has an error of its own."""
    until, problem = time.monotonic() + self._timeout, ""
    data = None if body is None else json.dumps(body).encode()
    while (left := until - time.monotonic()) > 0:
      if stopped():
        raise Stopped
      try:
        asked = urllib.request.Request(self._url + route, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=left) as response:
          text = response.read()
          return json.loads(text) if text.strip() else {}
      except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        if error.code < 500:
          raise ConfigError(f"rollout.engine {self._url}{route} refuses with status {error.code}: {said}") from error
        problem = f"status {error.code}: {said}"
      except (OSError, ValueError) as error:  # gone, or what came is no JSON
        problem = f"{type(error).__name__}: {error}"
      if self._warns_at <= (now := time.monotonic()):
        self._warns_at = now + WARN_SECONDS
        logging.warning("rollout.engine %s%s: %s. It is asked again for up to %.0f s.", self._url, route, problem, left)
      time.sleep(min(RETRY_SECONDS, max(until - now, 0)))
    raise ConfigError(f"rollout.engine {self._url}{route} has not answered for {self._timeout:g} s "
                      f"(rollout.engine_timeout_seconds): {problem or 'it takes too long'}. Start it, then run the "
                      "same command again.")


def _without_padding(params: Any, size: int) -> Any:
  """The parameters with so many entries of the vocabulary, those that its tokenizer has."""
  leaves = tree.flatten(params)
  return tree.unflatten(leaves | {
      path: leaves[path][:size] if axis == 0 else leaves[path][:, :size]
      for path, axis in EMBEDDINGS.items() if path in leaves and leaves[path].shape[axis] > size})


def make_sampler(config: Any, model: Any, mesh: Any, workdir: Path) -> Sampler:
  """What samples a run's completions: this program, or the server of `rollout.engine`."""
  if config.rollout.engine is None:
    c = config.rollout
    return Sampler(model, mesh, rows=c.batch_size, prefill_chunk=c.prefill_chunk, record=True)
  return Engine(config, model, mesh, workdir / "engine")
