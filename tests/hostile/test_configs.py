"""Configs that cannot be run: refused by `train`, before any step."""

import math

import pytest

from tests import tiny
from tests.hostile.common import named, refused
from trainer import main

INF, NAN = math.inf, math.nan
GONE = object()  # the key is taken out
EVIL = ("../../../evil", "/etc/evil", "a/b", "a\0b", "", ".", "..", "a\nb", "-rf", "\udc80", "x" * 300)

TABLE = [
    # Types.
    ("batch size a string", {"batch_size": "8"}, "config.batch_size is '8' (str)", "a whole number"),
    ("batch size a fraction", {"batch_size": 8.5}, "config.batch_size is 8.5"),
    ("batch size nan", {"batch_size": NAN}, "config.batch_size is nan"),
    ("batch size infinite", {"batch_size": INF}, "config.batch_size is inf"),
    ("batch size true", {"batch_size": True}, "config.batch_size is True"),
    ("batch size none", {"batch_size": None}, "config.batch_size is None"),
    ("batch size a list", {"batch_size": [8]}, "config.batch_size is"),
    ("batch size zero", {"batch_size": 0}, "batch_size is 0"),
    ("batch size negative", {"batch_size": -8}, "batch_size is -8"),
    ("batch size absurd", {"batch_size": 10**30}, "batch_size"),
    ("seq len negative", {"seq_len": -1}, "seq_len is -1"),
    ("seq len one", {"seq_len": 1}, "seq_len is 1"),
    ("seq len absurd", {"seq_len": 10**18}, "seq_len"),
    ("seed negative", {"seed": -(2**70)}, "seed"),
    ("seed beyond 64 bits", {"seed": 2**70}, "seed"),
    ("seed a string", {"seed": "random"}, "config.seed is 'random'"),
    ("optimizer a string", {"optimizer": "adamw"}, "config.optimizer is 'adamw'", "a dict with keys"),
    ("strategy a string", {"strategy": "dpo"}, "strategy"),
    ("strategy a list", {"strategy": ["dpo"]}, "strategy"),
    ("strategy name a number", {"strategy.name": 7}, "strategy.name is 7"),
    ("strategy name a list", {"strategy.name": ["seq"]}, "strategy.name"),
    ("model a list", {"model": []}, "config.model is []"),
    ("sources a list", {"input.sources": ["a.txt"]}, "input.sources"),
    ("sources a string", {"input.sources": "a.txt"}, "input.sources"),
    ("source a string", {"input.sources.main": "a.txt"}, "config.input.sources.main is 'a.txt'", "a dict with"),
    ("evals a list", {"evals": ["loss"]}, "evals"),
    ("eval none", {"evals.val": None}, "config.evals.val is None"),
    ("eval sources a string", {"evals.val.sources": "main"}, "evals.val.sources"),
    ("input none", {"input": None}, "config.input is None"),
    ("input a number", {"input": 1}, "config.input is 1", "a dict with keys"),
    ("rollout a string", {"rollout": "yes"}, "config.rollout is 'yes'", "a dict with keys"),
    ("a key that is a number", {7: 1}, "has the key 7; keys are names"),
    ("a key that is empty", {"": 1}, "has the key ''"),
    ("unknown key", {"batchsize": 8}, "unknown key config.batchsize; did you mean config.batch_size?"),
    ("unknown key deep", {"model.moe.experts": 8}, "unknown key config.model.moe.experts"),
    ("many problems", {f"unknown_{i}": i for i in range(500)}, "500 problems"),
    # Names.
    *((f"source named {i}", {"input.sources": {name: {"type": "text", "path": "{corpus}"}}}, "input.sources")
      for i, name in enumerate(EVIL)),
    *((f"evaluator named {i}", {"evals": {name: {"type": "loss", "eval_steps": 4}}}, "evals")
      for i, name in enumerate(EVIL)),
    ("samples named out", {"evals": {"../../../evil": {"type": "samples", "prompts": ("a",)}}}, "evals"),
    ("export outside", {"export.path": "../../evil"}, "export.path"),
    ("unknown strategy", {"strategy.name": "ppo2"}, "strategy.name is 'ppo2'", "known strategies: seq"),
    ("unknown optimizer", {"optimizer.name": "adam"}, "optimizer.name is 'adam'", "adamw"),
    ("unknown schedule", {"schedule.name": ""}, "schedule.name is ''", "cosine"),
    ("unknown model", {"model.name": "gpt5"}, "model.name"),
    ("model of no module", {"model.name": "no.such.Module"}, "no.such.Module", "could not be imported"),
    ("model that is a function", {"model.name": "os.system"}, "os.system"),
    ("model that is a module", {"model.name": "os.path"}, "os.path"),
    ("model relative", {"model.name": "..evil.Model"}, "..evil.Model"),
    ("evaluator of no module", {"evals.val.type": "no.such.Thing"}, "evals.val", "could not be imported"),
    ("evaluator that is a number", {"evals.val.type": 3}, "evals.val.type is 3"),
    ("evaluator that is a function", {"evals": {"val": {"type": "os.getcwd"}}}, "evals.val"),
    ("callback of no module", {"callbacks": {"mine": {"type": "nothing.Here"}}}, "callbacks.mine"),
    ("callback without a type", {"callbacks": {"mine": {"a": 1}}}, "callbacks.mine", "type"),
    ("callback with wrong arguments", {"callbacks": {"mine": {"type": "trainer.callbacks.Progress", "a": 1}}},
     "callbacks.mine"),
    ("dotted path with a nul", {"callbacks": {"mine": {"type": "os\0.path"}}}, "callbacks.mine"),
    ("tokenizer type", {"tokenizer.type": "sentencepiece"}, "tokenizer.type is 'sentencepiece'"),
    ("tokenizer file missing", {"tokenizer.type": "hf", "tokenizer.path": "/nowhere"}, "/nowhere", "tokenizer.path"),
    ("model folder missing", {"model.hf": "/nowhere"}, "/nowhere", "does not exist", "downloads nothing"),
    ("model folder a hub name", {"model.hf": "meta-llama/Llama-3.2-1B"}, "does not exist", "downloads nothing"),
    ("model folder a url", {"model.hf": "https://huggingface.co/x"}, "does not exist"),
    ("resume missing", {"resume": "/nowhere"}, "/nowhere does not exist"),
    ("resume with a nul", {"resume": "a\0b"}, "resume"),
    ("init from missing", {"init_from.path": "/nowhere"}, "/nowhere does not exist"),
    ("init from two places", {"init_from.path": "/a", "init_from.hf": "/b"}, "init_from has both"),
    # Numbers.
    ("learning rate nan", {"optimizer.learning_rate": NAN}, "optimizer.learning_rate is nan"),
    ("learning rate infinite", {"optimizer.learning_rate": INF}, "optimizer.learning_rate"),
    ("learning rate negative", {"optimizer.learning_rate": -1.0}, "optimizer.learning_rate is -1.0"),
    ("learning rate a string", {"optimizer.learning_rate": "1e-3"}, "config.optimizer.learning_rate is '1e-3' (str)"),
    ("learning rate beyond floats", {"optimizer.learning_rate": 10**400}, "optimizer.learning_rate"),
    ("b1 of one", {"optimizer.b1": 1.0}, "optimizer.b1"),
    ("b2 nan", {"optimizer.b2": NAN}, "optimizer.b2"),
    ("eps negative", {"optimizer.eps": -1.0}, "optimizer.eps"),
    ("weight decay nan", {"optimizer.weight_decay": NAN}, "optimizer.weight_decay"),
    ("clip norm nan", {"optimizer.clip_norm": NAN}, "optimizer.clip_norm is nan"),
    ("muon steps negative", {"optimizer.name": "muon", "optimizer.muon_steps": -1}, "optimizer.muon_steps"),
    ("dropout of one", {"model.dropout": 1.0}, "model.dropout"),
    ("dropout nan", {"model.dropout": NAN}, "model.dropout is nan"),
    ("norm eps nan", {"model.norm_eps": NAN}, "model.norm_eps"),
    ("norm eps negative", {"model.norm_eps": -1.0}, "model.norm_eps"),
    ("init std negative", {"model.init_std": -1.0}, "model.init_std"),
    ("init std nan", {"model.init_std": NAN}, "model.init_std"),
    ("rope theta nan", {"model.rope_theta": NAN}, "model.rope_theta"),
    ("rope theta infinite", {"model.rope_theta": INF}, "model.rope_theta"),
    ("attention scale nan", {"model.attention_scale": NAN}, "model.attention_scale"),
    ("logit cap nan", {"model.final_logit_cap": NAN}, "model.final_logit_cap"),
    ("no layers", {"model.num_layers": 0}, "model.num_layers"),
    ("absurdly many layers", {"model.num_layers": 10**15}, "model.num_layers"),
    ("absurdly wide", {"model.hidden_size": 2**62}, "model.hidden_size"),
    ("absurdly large vocabulary", {"model.vocab_size": 2**62}, "model.vocab_size"),
    ("heads that do not divide", {"model.num_heads": 3}, "model.head_dim"),
    ("kv heads that do not divide", {"model.num_heads": 4, "model.num_kv_heads": 3}, "model.num_kv_heads"),
    ("a layer pattern that is a string", {"model.layer_pattern": "global"}, "config.model.layer_pattern is 'global'"),
    ("a layer pattern of numbers", {"model.layer_pattern": (1, 2)}, "model.layer_pattern"),
    ("a layer pattern of tuples", {"model.layer_pattern": (("global",),)}, "model.layer_pattern"),
    ("validation fraction nan", {"input.sources.main.validation_fraction": NAN}, "validation_fraction"),
    ("source weight nan", {"input.sources.main.weight": NAN}, "input.sources.main.weight is nan"),
    ("source weight negative", {"input.sources.main.weight": -1.0}, "weight of source 'main'"),
    ("max documents zero", {"input.sources.main.max_documents": 0}, "max_documents=0"),
    ("max over long nan", {"input.max_over_long": NAN}, "input.max_over_long is nan"),
    ("prefetch absurd", {"input.prefetch": 10**12}, "input.prefetch"),
    ("workers absurd", {"input.workers": 10**9}, "input.workers"),
    ("keep last zero", {"keep_last": 0}, "keep_last is 0"),
    ("heartbeat nan", {"processes.heartbeat_seconds": NAN}, "processes.heartbeat_seconds"),
    # Durations.
    ("two units", {"total_steps": 4, "total_epochs": 1.0}, "total_steps = 4 and total_epochs = 1 are both set"),
    ("no length", {"total_steps": -1}, "the run has no end"),
    ("length zero", {"total_steps": 0}, "total_steps is 0"),
    ("length in percent", {"total_steps": -1, "total_percent": 50.0}, "total_percent"),
    ("epochs nan", {"total_steps": -1, "total_epochs": NAN}, "total_epochs"),
    ("epochs infinite", {"total_steps": -1, "total_epochs": INF}, "config.total_epochs is inf"),
    ("epochs absurd", {"total_steps": -1, "total_epochs": 1e300}, "total_epochs"),
    ("tokens absurd", {"total_steps": -1, "total_tokens": 10**400}, "total_tokens"),
    ("steps absurd", {"total_steps": 10**30}, "total_steps"),
    ("percent above 100", {"schedule.warmup_percent": 101.0}, "schedule.warmup_percent = 101"),
    ("warm-up longer than the run", {"schedule.warmup_percent": -1.0, "schedule.warmup_steps": 99}, "warmup lasts 99"),
    ("a duration that is a string", {"ckpt_steps": "often"}, "config.ckpt_steps is 'often'"),
]


def changed(config, changes, corpus):
  """The config as a plain dict, with values as they are given, whatever their types."""
  given = config.to_dict()
  for key, value in changes.items():
    *parents, last = key.split(".") if isinstance(key, str) else [key]
    node = given
    for parent in parents:
      node = node[parent]
    node[last] = value
  for source in given["input"]["sources"].values() if isinstance(given["input"], dict) and isinstance(
      given["input"]["sources"], dict) else ():
    if isinstance(source, dict) and source["path"] == "{corpus}":
      source["path"] = str(corpus)
  return given


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def accepted(*args):
  raise AssertionError("the config was accepted")


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in TABLE]))
def test_a_bad_config_is_one_message(row, tmp_path, guard, corpus, monkeypatch):
  monkeypatch.setattr(main.workdir_lib, "save_config", accepted)
  changes, *expected = row
  config = changed(tiny.config(corpus, total_steps=4), changes, corpus)
  work = tmp_path / "a" / "b" / "work"
  work.parent.mkdir(parents=True)
  with guard.only(work):
    refused(lambda: main.train(config, work), *expected)
