"""Modules that predict tokens further ahead (models/mtp.py) under the names that folders have for them."""

from collections.abc import Iterable
from dataclasses import replace

from models.hf.errors import HFError
from models.hf.family import Ahead, Tensor
from models.hf.keys import Rule


class Modules(Rule):
  """How many modules there are, under any of some names of which the first is written; at most `most`.

  `always`: the entry is written if there are none, too.
  """

  def __init__(self, *counts: str, most: int = 100, always: bool = True):
    self.counts, self.most, self.always = counts, most, always

  def read(self, source, model):
    found = 0
    for key in self.counts:
      count = source.get(key, object, 0, 0)
      if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.most:
        raise source.error(key, f"a whole number from 0 to {self.most}")
      found = found or count
    return {"mtp_layers": found}

  def write(self, model):
    count = model["mtp_layers"]
    if count > self.most:
      raise HFError(f"model.mtp_layers is {count}; folders of this family have names for at most {self.most}")
    return {self.counts[0]: count} if count or self.always else {}

  def notes(self, source):
    found = {key: source.content[key] for key in self.counts if source.content.get(key)}
    return [f"{source.where}: {key} is {count}; layers that predict tokens further ahead are passed over, and are not "
            "exported, but for as many as model.mtp_layers says." for key, count in [*found.items()][:1]]


def _blocks(table: Iterable[Tensor]) -> list[Tensor]:
  return [replace(tensor, ours=tuple(f"mtp/{path}" for path in tensor.ours) if isinstance(tensor.ours, tuple) else
                  f"mtp/{tensor.ours}")
          for tensor in table if all(path.startswith("blocks/") for path in (
              (tensor.ours,) if isinstance(tensor.ours, str) else tensor.ours))]


def as_layers(table: Iterable[Tensor], *counts: str) -> Ahead:
  """DeepSeek's: further layers behind the last, each with a copy of the embedding and the unembedding. `table`: of the
  family's other tensors; `counts`: entries of config.json that say how many there are, see `Modules`."""
  layer = "layers.{layer}."
  return Ahead(
      counts=counts, mark=".eh_proj.weight",
      table=(*_blocks(table),
             Tensor(f"{layer}enorm.weight", "mtp/enorm/scale"), Tensor(f"{layer}hnorm.weight", "mtp/hnorm/scale"),
             Tensor(f"{layer}eh_proj.weight", "mtp/eh_proj/kernel", transpose=True),
             Tensor(f"{layer}shared_head.norm.weight", "mtp/final_norm/scale")),
      copies=(Tensor(f"{layer}embed_tokens.weight", "embed/embedding"),
              Tensor(f"{layer}shared_head.head.weight", "unembed/kernel", transpose=True)))


def apart(table: Iterable[Tensor], *counts: str) -> Ahead:
  """Qwen's: one module, `mtp`, beside the model. The arguments are those of `as_layers`."""
  of_block = (replace(tensor, theirs=f"mtp.{tensor.theirs}", prefixed=False) for tensor in _blocks(table))
  return Ahead(
      counts=counts, names=r"^mtp\.",
      table=(*of_block,
             *(Tensor(f"mtp.{theirs}.weight", f"mtp/{ours}", transpose=ours.endswith("kernel"), prefixed=False,
                      form="row")
               for theirs, ours in (("pre_fc_norm_embedding", "enorm/scale"), ("pre_fc_norm_hidden", "hnorm/scale"),
                                    ("fc", "eh_proj/kernel"), ("norm", "final_norm/scale")))))
