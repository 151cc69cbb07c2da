"""What llama.cpp's files have in place of a tensor of the stock model: other orders of rows and columns, weights of
norms as they multiply, another number of dimensions.

Matrices, whole ones and rows of them, and their blocks are only put in another order; all else is computed in float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.blocks import DeltaNet, Mamba
from sparsepack.models.family import Family
from sparsepack.models.hf_config import delta_net, mamba

Shape = tuple[int, ...]

_CONVOLUTIONS = ("delta_conv", "short_conv", "mamba_conv")


@dataclass(frozen=True)
class LlamaCppTensors:
    """The tensors of a model by their Hugging Face names, as llama.cpp has them ("there") and as the stock model has
    them ("here").

    heads -- of queries and of keys, by the projection
    delta -- of the blocks that have a delta net
    mamba -- of those that have a state-space model
    """

    family: Family
    heads: dict[str, int]
    delta: DeltaNet | None = None
    mamba: Mamba | None = None

    @classmethod
    def of(cls, family: Family, config: Any) -> "LlamaCppTensors":
        """Of the models of a stock configuration."""
        kv_heads = family.setting(config, "num_key_value_heads")
        heads = {"q_proj": config.num_attention_heads, "k_proj": kv_heads}
        delta = delta_net(config) if family.delta_net is not None else None
        return cls(family, heads, delta, mamba(config) if family.mamba is not None else None)

    def shape_there(self, name: str, shape: Shape) -> Shape:
        """The shape of a tensor there."""
        if self._is_vector(name):
            return shape[1:]
        if self.mamba is not None and self._is(name, "mamba_norm"):
            return self.mamba.groups, shape[0] // self.mamba.groups
        if self._is(name, "mamba_a_log", "mamba_skip"):
            return *shape, 1
        return (shape[0], *shape[2:]) if self._is(name, *_CONVOLUTIONS) else shape

    def shape_here(self, name: str, shape: Shape) -> Shape:
        """The inverse of `shape_there`; shapes that it does not give are as they are."""
        if self._is_vector(name) and len(shape) == 1:
            return (1, *shape)
        if len(shape) == 2 and self._is(name, "mamba_norm", "mamba_a_log", "mamba_skip"):
            return (shape[0] * shape[1],)
        return (shape[0], 1, *shape[1:]) if self._is(name, *_CONVOLUTIONS) and len(shape) == 2 else shape

    def there(self, name: str, value: Tensor) -> Tensor:
        """A tensor of the stock model as it is there."""
        value = value.reshape(self.shape_there(name, tuple(value.shape)))
        if offset := self.family.norm_offset_of(name):
            return value.float() + offset
        if self._is(name, "delta_a_log", "mamba_a_log"):
            value = -value.float().exp()
        if (rows := self.rows(name, len(value))) is not None:
            value = value[rows]
        if (columns := self.columns(name)) is not None:
            value = value[:, columns]
        return value

    def here(self, name: str, value: Tensor) -> Tensor:
        """The inverse of `there`."""
        if (columns := self.columns(name)) is not None:
            value = value[:, columns.argsort()]
        if (rows := self.rows(name, len(value))) is not None:
            value = value[rows.argsort()]
        if self._is(name, "delta_a_log", "mamba_a_log"):
            value = (-value.float()).log()
        if offset := self.family.norm_offset_of(name):
            value = value.float() - offset
        return value.reshape(self.shape_here(name, tuple(value.shape)))

    def rows(self, name: str, count: int) -> Tensor | None:
        """The numbers of a tensor's rows, in the order in which they stand there: int64 [count]; None: as here."""
        gguf = self.family.gguf
        for projection, heads in self.heads.items():
            if gguf is not None and gguf.permuted and f".{projection}." in name:
                # Here the halves of a rotary pair are apart, there they are neighbours.
                return torch.arange(count).reshape(heads, 2, -1).transpose(1, 2).flatten()
        delta = self.delta
        if delta is None or self._grouped:
            return None
        if self._is(name, "delta_conv", "attn_in"):
            before = count - delta.values  # queries and keys, where it has them
            return torch.cat([torch.arange(before), before + self._values(delta, delta.value_dim)])
        if self._is(name, "delta_beta", "delta_alpha", "delta_a_log", "delta_dt_bias"):
            return self._values(delta, 1)
        return None

    def columns(self, name: str) -> Tensor | None:
        """Likewise of its columns."""
        if self.delta is None or self._grouped or not self._is(name, "attn_out"):
            return None
        return self._values(self.delta, self.delta.value_dim)

    def _values(self, delta: DeltaNet, width: int) -> Tensor:
        """The order of value heads of so many channels: here those of a key head stand together, there the first of
        each key head, then the second."""
        each = torch.arange(delta.value_heads * width).reshape(delta.key_heads, -1, width)
        return each.transpose(0, 1).flatten()

    @property
    def _grouped(self) -> bool:
        """Whether value heads stand there as they do here."""
        return self.family.delta_net is not None and self.family.delta_net.grouped

    def _is_vector(self, name: str) -> bool:
        """Whether it is what says how much of a shared expert a token has."""
        shared = None if self.family.experts is None else self.family.experts.shared
        return shared is not None and bool(shared.gate) and name.endswith(f".{shared.gate}.weight")

    def _is(self, name: str, *what: str) -> bool:
        """Whether a tensor is one of a block that keeps a state: our names of it, or sites."""
        names = self.family.state
        if names is None:
            return False
        of_sites = [f"{part}.weight" for site in what for part in names.projections.get(site, ())]
        ours = [names.tensors[one] for one in what if one in names.tensors]
        return name.endswith(tuple(f".{end}" for end in (*of_sites, *ours)))
