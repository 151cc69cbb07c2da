"""The inputs that blocks of some models take besides hidden states: an input that each token has for each block
(`models.parts.PerLayerNames`), and keys and values of earlier blocks (`SharedKv`)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.models.family import Family
from sparsepack.models.hf_config import kv_sources, per_layer_width


class ExtraInputs:
    """The inputs of blocks that travel with hidden states through a model, in columns behind theirs.

        hidden states | of each block its input of the token | keys and values that others read, of each kind

    Most models have none. Each number is of one position, so that a run may go on from them.

    hidden, layers -- of the configuration; per_layer: columns of a block's own input, 0: there is none
    kinds     -- type of the layers whose keys and values are read -> their heads of keys, and channels of each
    """

    def __init__(self, config: Any, family: Family) -> None:
        self.hidden, self.layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.per_layer = per_layer_width(config) if family.has_row else 0
        self.kinds: dict[str, tuple[int, int]] = {}
        for layer in dict.fromkeys(kv_sources(config) if family.has_row else ()):
            of = config.per_layer_config[layer]
            self.kinds[config.layer_types[layer]] = int(of.num_key_value_heads), int(of.head_dim)

    @property
    def width(self) -> int:
        """Columns behind the hidden states."""
        return self.layers * self.per_layer + sum(2 * heads * size for heads, size in self.kinds.values())

    def append(self, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """Return what enters the first block: float [..., H] -> [..., H + width].

        inputs -- of all blocks, [..., layers * per_layer]; None: there are none
        """
        made = hidden if inputs is None else torch.cat([hidden, inputs], -1)
        return nn.functional.pad(made, (0, self.hidden + self.width - made.shape[-1]))

    def arguments(self, states: Tensor, layer: int) -> dict[str, Any]:
        """Return the arguments of the stock backbone of one block, of states [B, S, H + width]."""
        found: dict[str, Any] = {"inputs_embeds": states[..., : self.hidden]}
        if self.per_layer:
            first = self.hidden + layer * self.per_layer
            found["per_layer_inputs"] = states[..., None, first : first + self.per_layer]
        if self.kinds:
            from transformers.cache_utils import KVSharingDict

            found["shared_kv_states"] = KVSharingDict(self._shared(states))
        return found

    def _shared(self, states: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Keys and values [B, heads, S, size] that blocks read of others, by the kind of these."""
        found, first = dict[str, tuple[Tensor, ...]](), self.hidden + self.layers * self.per_layer
        for kind, (heads, size) in self.kinds.items():
            both = torch.unflatten(states[..., first : first + 2 * heads * size], -1, (2, heads, size))
            found[kind] = both[..., 0, :, :].transpose(1, 2), both[..., 1, :, :].transpose(1, 2)
            first += 2 * heads * size
        return found

    def after_block(self, output: Tensor, states: Tensor, shared: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        """Return what leaves a block, [B, S, H + width], whose input was states.

        output -- its hidden states [B, S, H]; shared: keys and values behind it, as `_shared` has them
        """
        parts = [output, states[..., self.hidden : self.hidden + self.layers * self.per_layer]]
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
