"""Rollouts: completions are sampled from the policy, scored, and become batches to train on.

`rollout` is the data of such a run, `producer` makes one rollout after another, and `ahead` says by which policy and
when, `at_once` where updates go on meanwhile; `environment` answers what the policy says, and `agents` are programs
that ask it themselves; `rewards`, `reward_pool` and `reward_models` score it, `groups` turns scores into training
samples, `experience` into batches.

May import: trainer.checkpoints, trainer.config, trainer.distributed, trainer.generate, trainer.report, trainer.serve,
trainer.strategies, trainer.update, input_pipeline, models.
"""
