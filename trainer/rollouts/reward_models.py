"""Rewards by models that score (type "model"): completions are scored on the mesh that trains, by a reward model.

It is a Hugging Face folder or a run (trainer/strategies/reward.py makes such), with a tokenizer and a template of its
own: what it scores is the conversation as text, tokenized as in its training. Its parameters are read before the first
completion is scored; they are in no checkpoint, but their fingerprint is.

P prompts, G completions of each, K models; R rows of T tokens at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.examples.pairs import AnswerEncoder
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from trainer.checkpoints.fingerprint import fingerprint
from trainer.config import checks as config_checks
from trainer.config import defaults
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.generate import buckets, image_tokens
from trainer.rollouts.reward_pool import Group
from trainer.rollouts.rewards import MODEL
from trainer.strategies import sequences, teacher

# Rows are as long as the longest conversation in them, up to one of few multiples of this.
LENGTHS = 64


class RewardModels:
  """The rewards of type "model" of a config.

  Attributes:
    names: of the K sections.
    weights: of their scores.

  Raises:
    ConfigError: a path that holds no reward model; nothing is read but its config.
  """

  def __init__(self, config: Any, mesh: Any):
    sections = {name: section for name, section in config.rollout.rewards.items() if section.type == MODEL}
    self.names, self.weights = tuple(sections), [float(section.weight) for section in sections.values()]
    self._models = {name: RewardModel(f"rollout.rewards.{name}.path", section.path, config, mesh)
                    for name, section in sections.items()}

  def score(self, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scores, whether there is none, whether a model abstained: never) of the completions of groups of one size,
    [P, G, K] each. All processes call it, with the same.

    Raises:
      ConfigError: parameters are missing, or others than those that the run has had.
    """
    values = np.full((len(groups), len(groups[0].completions), len(self.names)), np.nan)
    for k, (name, model) in enumerate(self._models.items()):
      places, texts, problems = [], [], []
      for p, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
          try:
            texts.append(model.encode(group, completion))
            places.append((p, g))
          except DataError as e:
            problems.append(str(e))
      for (p, g), score in zip(places, model.score(texts), strict=True):
        values[p, g, k] = score
      if problems:
        logging.warning("rollout: rollout.rewards.%s (%s) failed for %d completions, first: %s", name, MODEL,
                        len(problems), problems[0])
    return values, np.isnan(values), np.zeros(values.shape, bool)

  def saved(self) -> dict[str, str]:
    """{name: fingerprint} of those whose parameters are known."""
    return {name: model.fingerprint for name, model in self._models.items() if model.fingerprint}

  def restore(self, fingerprints: Mapping[str, str]) -> None:
    """Wants the same parameters again."""
    for name in self.names:
      self._models[name].fingerprint = fingerprints.get(name, "")


class RewardModel:
  """A model that scores conversations.

  Args:
    key: what messages call `path`.
    path: a Hugging Face folder, or a run: its workdir or a checkpoint.
    config: of the run that wants its scores.

  Attributes:
    fingerprint: of its parameters; "": not known yet.
  """

  def __init__(self, key: str, path: str, config: Any, mesh: Any):
    self._key, self._path, self._config, self._mesh, self.fingerprint = key, path, config, mesh, ""
    source = teacher.find(path, key)
    section = source.section
    if section.head != "score" or section.num_labels != 1 or section.vision.tower != "none":
      found = f"{section.num_labels} labels" if section.head == "score" else "no head that scores"
      found = "images" if section.vision.tower != "none" else found
      raise ConfigError(f"{key} is {path!r}, a model with {found}. Give one with a single score of a text: a run of "
                        "strategy reward, its export, or another *ForSequenceClassification.")
    self._most = section.max_positions if section.positions == "learned" else None
    theirs = defaults() if source.config is None else config_checks.resolve(source.config)
    with theirs.unlocked():
      theirs.chat.template, theirs.chat.fields = None, ()  # the template that its tokenizer has
    self._encoder = AnswerEncoder(theirs, load_tokenizer(source.tokenizer))
    precision = config.precision
    self._model = model = teacher.make_model(path, str(precision.params), str(precision.compute), key)
    self._params: Any = None

    def scores(params, batch):
      return sequences.scores(model, params, model.apply(params, batch).hidden, batch)[:, 0, 0]

    self._scores = jax.jit(scores, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def encode(self, group: Group, completion: Any) -> np.ndarray:
    """The tokens of a prompt with a completion; raises DataError if it cannot be scored."""
    ids = self._encoder.ids(group.prompt, completion, group.columns, group.where)
    if self._most is not None and len(ids) > self._most:
      raise DataError(f"{group.where}: {len(ids)} tokens, where {self._path} sees {self._most}.")
    return ids

  def score(self, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Scores of texts of token ids, float32 [N]: those of similar lengths together, whatever their order."""
    if self._params is None:
      self._load()
    shards, most = mesh_lib.batch_shards(self._mesh), self._config.rollout.batch_size
    order = np.argsort([-len(text) for text in texts], kind="stable")
    found = np.zeros(len(texts), np.float32)
    for start in range(0, len(order), most):
      chosen = order[start:start + most]
      R, T = buckets.power(len(chosen), shards), buckets.bucket(len(texts[chosen[0]]), LENGTHS)
      batch = image_tokens.batch_of_texts(None, R, T, 0, [texts[i] for i in chosen],
                                          [image_tokens.PromptImages()] * len(chosen))
      batch["segment_roles"] = np.ones((R, 1), np.int32)
      placed = mesh_lib.place(batch, mesh_lib.batch_sharding(self._mesh))
      with mesh_lib.activation_rules(self._mesh, self._config.activation_rules):
        found[chosen] = np.asarray(self._scores(self._params, placed))[:len(chosen)]
    return found

  def _load(self) -> None:
    target = mesh_lib.placed_shapes(self._model.abstract_params(), self._mesh, self._config.sharding_rules)
    self._params = teacher.load(self._config, target, self._path, self._key)
    was, self.fingerprint = self.fingerprint, fingerprint(self._params)
    if was not in ("", self.fingerprint):
      raise ConfigError(f"{self._key}: {self._path} has the fingerprint {self.fingerprint}; the model that this run "
                        f"was trained with had {was}. Give that one, as it was.")
