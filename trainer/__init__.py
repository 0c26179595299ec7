"""Weft: pretrain, fine-tune and align language models in JAX. `from trainer import train; train(config, workdir)`."""


def __getattr__(name: str):
  # Imported on use, so that `import trainer.config` in a config file does not start JAX.
  if name == "train":
    from trainer.main import train
    return train
  raise AttributeError(f"module 'trainer' has no attribute {name!r}")
