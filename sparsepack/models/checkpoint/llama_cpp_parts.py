"""What llama.cpp's files have in several tensors where the stock model has one, or the other way round: experts, split
projections (`experts.part_shapes`), the rows of keys and of values of latents, and gates of a delta net head by head.

Of a projection from a latent of keys and values [heads * (plain + value), rank] a file has the rows of keys
[heads, rank, plain], transposed, and those of values [heads, value, rank].
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from sparsepack.models.checkpoint.delta_net import apart, grouped, grouped_names
from sparsepack.models.checkpoint.experts import fused_tensor, part_shapes, part_tensor
from sparsepack.models.checkpoint.sources import MadeSource, TensorSource, entries_of
from sparsepack.models.family import Family
from sparsepack.models.hf_config import delta_net, latent

Shape = tuple[int, ...]
Tensors = Callable[[str], torch.Tensor]
Source = TypeVar("Source", bound=TensorSource)

_WHOLE, _KEYS, _VALUES = ".kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight"
_GATES = (".in_proj_b.weight", ".in_proj_a.weight")
_OF_HEADS = ".in_proj_ba.weight"


def shapes_there(family: Family, config: Any, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Name and shape of the stock model's tensors and of their parts, of a stock configuration; those that a file has
    nothing but parts of are not among them."""
    found = {**shapes, **part_shapes(family, shapes)}
    latents, grouped_gates = latent(config), grouped_names(family)
    for name, shape in shapes.items():
        if latents is not None and name.endswith(_WHOLE):
            heads, rank = shape[0] // (latents.plain + latents.value), shape[1]
            found[name.replace(_WHOLE, _KEYS)] = heads, rank, latents.plain
            found[name.replace(_WHOLE, _VALUES)] = heads, latents.value, rank
            del found[name]
        if grouped_gates is not None and name.endswith(_GATES[0]):
            found[name.replace(_GATES[0], _OF_HEADS)] = 2 * shape[0], shape[1]
            for gate in _GATES:
                del found[name.replace(_GATES[0], gate)]
    return found


def tensor_there(family: Family, config: Any, name: str, tensor: Tensors) -> torch.Tensor:
    """A tensor by a name of `shapes_there`, of a model whose tensors `tensor` gives by the stock model's names."""
    if (latents := latent(config)) is not None and name.endswith((_KEYS, _VALUES)):
        end = _KEYS if name.endswith(_KEYS) else _VALUES
        of_heads = torch.unflatten(tensor(name.replace(end, _WHOLE)), 0, (-1, latents.plain + latents.value))
        keys, values = torch.split(of_heads, [latents.plain, latents.value], 1)
        return (keys.mT if end == _KEYS else values).contiguous()
    if (mixer := delta_net(config)) is not None and name.endswith(_OF_HEADS):
        beta, alpha = (tensor(name.replace(_OF_HEADS, gate)) for gate in _GATES)
        return grouped(_OF_HEADS.removeprefix("."), (beta, alpha), mixer)
    return part_tensor(family, name, tensor)


def joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The projection from a latent out of the rows of keys and of values that a file has."""
    return torch.cat([keys.mT, values], 1).reshape(-1, keys.shape[1])


def joined_source(source: Source, config: Any) -> Source | MadeSource:
    """A source of a GGUF whose projections from latents are whole; one of a model without them is as it is."""
    latents = latent(config)
    if latents is None:
        return source
    entries = dict(entries_of(source))
    parts: dict[str, tuple[str, str]] = {}
    for keys in [name for name in entries if name.endswith(_KEYS)]:
        values, whole = keys.replace(_KEYS, _VALUES), keys.replace(_KEYS, _WHOLE)
        expected = (latents.kv_rank, latents.plain), (latents.value, latents.kv_rank)
        if values not in entries or (entries[keys][1][1:], entries[values][1][1:]) != expected:
            continue  # which the names that it lacks tell
        parts[whole] = keys, values
        dtype, (heads, rank, _) = entries.pop(keys)
        del entries[values]
        entries[whole] = dtype, (heads * (latents.plain + latents.value), rank)

    def tensor(name: str) -> torch.Tensor:
        if name not in parts:
            return source.tensor(name)
        keys, values = (source.tensor(part) for part in parts[name])
        return joined(keys, values)

    return MadeSource(source, entries, tensor)


def tensor_here(family: Family, config: Any, name: str, part: Tensors) -> torch.Tensor:
    """The inverse of `tensor_there`: a tensor by the stock model's name, where `part` gives what a file has."""
    if latent(config) is not None and name.endswith(_WHOLE):
        keys, values = (part(name.replace(_WHOLE, end)) for end in (_KEYS, _VALUES))
        return joined(keys, values)
    if (mixer := delta_net(config)) is not None and grouped_names(family) is not None and name.endswith(_GATES):
        both = part(f"{name.rpartition('.in_proj')[0]}{_OF_HEADS}")
        return apart(_OF_HEADS.removeprefix("."), both, mixer)[_GATES.index(name[-len(_GATES[0]) :])]
    return fused_tensor(family, name, part)
