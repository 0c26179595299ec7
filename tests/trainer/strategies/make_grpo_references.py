"""Writes grpo_references.npz: what TRL's GRPOTrainer makes of log-probs and rewards.

    python tests/trainer/strategies/make_grpo_references.py

in an environment with trl; run with trl 1.16. Losses: of 5 completions of up to 7 tokens, whose log-probs now, then,
and by the sampler are given in place of a model's, with gradients by the log-probs of now. Advantages: of 3 groups of 4
completions and their rewards by 2 functions, NaN where one abstained.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

# name: options of TRL.
LOSSES = {
    "grpo": dict(loss_type="grpo"),
    "dapo": dict(loss_type="dapo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.2),
    "sapo": dict(loss_type="sapo"),
    "sapo, sequence": dict(loss_type="sapo", importance_sampling_level="sequence"),
    "sapo, steep": dict(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=5.0),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.06),
    "masked": dict(loss_type="dapo", off_policy_mask_threshold=0.1),
}
OPTIONS = dict(loss_type="dapo", delta=None, importance_sampling_level="token", epsilon=0.2, epsilon_high=0.25,
               off_policy_mask_threshold=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
WEIGHTS = (1.0, 0.25)


def losses(given, options):
  """(loss, gradient by the log-probs of now)."""
  now = torch.tensor(given["now"], requires_grad=True)
  mask = torch.tensor(given["mask"])
  options = SimpleNamespace(**OPTIONS | options)
  stub = SimpleNamespace(
      _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None), args=options,
      epsilon_low=options.epsilon, aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0, use_vllm=False,
      current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
      _metrics=dict(train=defaultdict(list)), get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
      accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x), **vars(options))
  stub.args.steps_per_generation = 1
  ids = torch.zeros_like(mask, dtype=torch.long)
  inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids, completion_mask=mask,
                advantages=torch.tensor(given["advantages"]), old_per_token_logps=torch.tensor(given["old"]),
                sampling_per_token_logps=torch.tensor(given["sampled"]), num_items_in_batch=mask.sum())
  loss = GRPOTrainer._compute_loss(stub, None, inputs)
  loss.backward()
  return loss.item(), now.grad.numpy()


def advantages(rewards, how, folder):
  """What a trainer makes of these rewards, [prompts × completions, functions]."""
  words = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
  words.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
  model = LlamaForCausalLM(LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                       num_attention_heads=1, num_key_value_heads=1))
  args = GRPOConfig(output_dir=folder, per_device_train_batch_size=len(rewards), num_generations=4, use_cpu=True,
                    max_completion_length=3, report_to="none", bf16=False, reward_weights=list(WEIGHTS),
                    multi_objective_aggregation=how)
  prompts = [{"prompt": "a b"}] * len(rewards)
  trainer = GRPOTrainer(model, [lambda completions, **_: [0.0] * len(completions)] * 2, args,
                        train_dataset=Dataset.from_list(prompts), processing_class=tokenizer)
  trainer._calculate_rewards = lambda *_: torch.tensor(rewards, dtype=torch.float32)
  trainer.current_gradient_accumulation_steps = 1
  return trainer._generate_and_score_completions(prompts)["advantages"].numpy()


if __name__ == "__main__":
  rng = np.random.default_rng(0)
  made = dict(now=rng.normal(size=(5, 7)) * 0.5 - 2, mask=np.arange(7) < np.array([[7], [3], [5], [1], [6]]),
              advantages=np.array([0.9, -1.1, -0.6, 0.4, -0.2]))
  made["old"] = made["now"] + rng.normal(size=(5, 7)) * 0.3
  # Of completions with a negative advantage some have drifted by more than the threshold, and some by less.
  made["sampled"] = made["old"] + rng.normal(size=(5, 7)) * 0.1 + np.array([[0.5], [0.5], [-0.5], [0.0], [0.3]])
  for name, options in LOSSES.items():
    made[f"loss/{name}"], made[f"gradient/{name}"] = losses(made, options)
  rewards = np.round(rng.normal(size=(12, 2)) * [1, 10], 2)
  rewards[:4, 0], rewards[5, 1], rewards[8:] = 1.0, np.nan, [1.0, 3.0]  # equal, abstained, all of them equal
  made["rewards"] = rewards
  with tempfile.TemporaryDirectory() as folder:
    for how in ("sum_then_normalize", "normalize_then_sum"):
      made[f"advantages/{how}"] = advantages(rewards, how, folder)
  np.savez_compressed(Path(__file__).parent / "grpo_references.npz", **made)
