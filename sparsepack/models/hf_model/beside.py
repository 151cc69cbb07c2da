"""What blocks of some models are given beside hidden states: an input that each token has for each block
(`models.parts.PerLayerNames`), and keys and values of earlier blocks (`SharedKv`)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.models.family import Family
from sparsepack.models.hf_config import kv_sources, per_layer_width


class Beside:
    """What travels with hidden states through the blocks of a model, in columns behind theirs.

        hidden states | of each block its input of the token | keys and values that others read, of each kind

    Of most models there is none of it. Each number is of one position, so that a run may go on from them.
    """

    def __init__(self, config: Any, family: Family) -> None:
        self.hidden, self.layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.each = per_layer_width(config) if family.has_row else 0
        self.kinds: dict[str, tuple[int, int]] = {}  # of layers whose keys and values are read: their heads
        for layer in dict.fromkeys(kv_sources(config) if family.has_row else ()):
            of = config.per_layer_config[layer]
            self.kinds[config.layer_types[layer]] = int(of.num_key_value_heads), int(of.head_dim)

    @property
    def width(self) -> int:
        """Columns behind the hidden states."""
        return self.layers * self.each + sum(2 * heads * size for heads, size in self.kinds.values())

    def entered(self, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """What the stream has of positions that enter the first block. inputs: [..., layers * width of each] or None"""
        made = hidden if inputs is None else torch.cat([hidden, inputs], -1)
        return nn.functional.pad(made, (0, self.hidden + self.width - made.shape[-1]))

    def given(self, states: Tensor, layer: int) -> dict[str, Any]:
        """What the stock backbone of one block is given of these states [B, S, H + width]."""
        found: dict[str, Any] = {"inputs_embeds": states[..., : self.hidden]}
        if self.each:
            first = self.hidden + layer * self.each
            found["per_layer_inputs"] = states[..., None, first : first + self.each]
        if self.kinds:
            from transformers.cache_utils import KVSharingDict

            found["shared_kv_states"] = KVSharingDict(self._shared(states))
        return found

    def _shared(self, states: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Keys and values [B, heads, S, size] that blocks read of others, by the kind of these."""
        found, first = dict[str, tuple[Tensor, ...]](), self.hidden + self.layers * self.each
        for kind, (heads, size) in self.kinds.items():
            both = torch.unflatten(states[..., first : first + 2 * heads * size], -1, (2, heads, size))
            found[kind] = both[..., 0, :, :].transpose(1, 2), both[..., 1, :, :].transpose(1, 2)
            first += 2 * heads * size
        return found

    def left(self, output: Tensor, states: Tensor, shared: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        """What the stream has behind a block, which had these states."""
        parts = [output, states[..., self.hidden : self.hidden + self.layers * self.each]]
        parts += [cached.transpose(1, 2).flatten(2) for kind in self.kinds for cached in shared[kind]]
        return torch.cat(parts, -1)


def per_layer_inputs(config: Any, family: Family, tensor: Callable[[str], Tensor], ids: Tensor, x: Tensor) -> Tensor:
    """What each block is given of tokens [N, S] whose embeddings are x [N, S, H]: [N, S, layers * width of each]."""
    names = family.per_layer
    assert names is not None
    of = (f"{family.backbone}.{module}.weight" for module in names.outside)
    table, projection, norm = (tensor(name).to(x.dtype) for name in of)
    width = names.of(config)
    made = nn.functional.linear(x, projection) * config.hidden_size**-0.5
    made = torch.unflatten(made, -1, (-1, width)).float()
    made = nn.functional.rms_norm(made, (width,), norm.float(), config.rms_norm_eps).to(x.dtype).flatten(-2)
    rows = nn.functional.embedding(ids, table) * torch.tensor(width**0.5).to(x.dtype)
    inputs: Tensor = (made + rows) * 2.0**-0.5
    return inputs
