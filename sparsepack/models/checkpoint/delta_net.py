"""The projections of gated delta nets of a checkpoint that has them head by head (`DeltaNetNames.grouped`), as most
have them: all queries, then all keys and all values in one matrix, gates of the output in another.

Stored are two matrices [rows, hidden]: of each key head its queries, its keys, then values and output gates of the
value heads that read it; and of each key head beta, then what makes the decay, of these value heads.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from sparsepack.models.blocks import DeltaNet
from sparsepack.models.checkpoint.sources import MadeSource, TensorSource, entries_of
from sparsepack.models.family import Family
from sparsepack.models.hf_config import delta_net
from sparsepack.models.parts import DeltaNetNames

_PARTS: Mapping[str, tuple[str, str]] = {
    "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
}
"""What is stored -> what it is made into."""

Source = TypeVar("Source", bound=TensorSource)


def grouped_names(family: Family) -> DeltaNetNames | None:
    """The delta nets of a family whose checkpoints have them head by head; None: it has no such ones."""
    return family.delta_net if family.delta_net is not None and family.delta_net.grouped else None


def apart(stored: str, weight: torch.Tensor, mixer: DeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    """The two matrices that a stored one is made into, by its name within the delta net."""
    ratio = mixer.value_heads // mixer.key_heads
    heads = torch.unflatten(weight, 0, (mixer.key_heads, -1))
    if stored == "in_proj_ba.weight":
        beta, alpha = heads.chunk(2, 1)
        return beta.flatten(0, 1), alpha.flatten(0, 1)
    values = ratio * mixer.value_dim
    q, k, v, z = (each.flatten(0, 1) for each in torch.split(heads, [mixer.key_dim, mixer.key_dim, values, values], 1))
    return torch.cat([q, k, v]), z


def grouped(stored: str, parts: tuple[torch.Tensor, torch.Tensor], mixer: DeltaNet) -> torch.Tensor:
    """The inverse of `apart`."""
    of_heads: tuple[torch.Tensor, ...] = parts
    if stored == "in_proj_qkvz.weight":
        keys = mixer.key_heads * mixer.key_dim
        of_heads = (*torch.split(parts[0], [keys, keys, mixer.values]), parts[1])
    return torch.cat([torch.unflatten(each, 0, (mixer.key_heads, -1)) for each in of_heads], 1).flatten(0, 1)


def apart_source(source: Source, family: Family, config: Any) -> Source | MadeSource:
    """A source whose delta nets have the projections of most checkpoints, of one that has them head by head. A source
    of another family is as it is, and a matrix whose rows are not those of the configuration, which the names that it
    lacks tell then."""
    names = grouped_names(family)
    mixer = None if names is None else delta_net(config)
    if names is None or mixer is None:
        return source
    rows = {"in_proj_qkvz.weight": mixer.channels + mixer.values, "in_proj_ba.weight": 2 * mixer.value_heads}
    parts_rows = {
        "in_proj_qkvz.weight": (mixer.channels, mixer.values),
        "in_proj_ba.weight": (mixer.value_heads, mixer.value_heads),
    }
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    places: dict[str, tuple[str, str, int]] = {}  # what is stored: in whole, within the delta net; which part
    for name, (dtype, shape) in entries_of(source).items():
        within, stored = name.rpartition(".")[0].rpartition(".")[0], ".".join(name.split(".")[-2:])
        if stored not in _PARTS or not within.endswith(f".{names.module}") or shape[0] != rows[stored]:
            entries[name] = dtype, shape
            continue
        for number, (part, of_part) in enumerate(zip(_PARTS[stored], parts_rows[stored], strict=True)):
            entries[f"{within}.{part}"] = dtype, (of_part, *shape[1:])
            places[f"{within}.{part}"] = name, stored, number

    def tensor(name: str) -> torch.Tensor:
        if name not in places:
            return source.tensor(name)
        whole, stored, number = places[name]
        return apart(stored, source.tensor(whole), mixer)[number].contiguous()

    return MadeSource(source, entries, tensor)


def grouped_source(source: TensorSource, family: Family, config: Any) -> TensorSource:
    """The inverse of `apart_source`."""
    names = grouped_names(family)
    mixer = None if names is None else delta_net(config)
    if names is None or mixer is None:
        return source
    entries = dict(entries_of(source))
    places: dict[str, tuple[str, tuple[str, ...]]] = {}  # what is stored within the delta net, and its parts
    for name in list(entries):
        for stored, parts in _PARTS.items():
            if name.endswith(f".{names.module}.{parts[0]}"):
                within = name.removesuffix(parts[0])
                of_whole = tuple(f"{within}{part}" for part in parts)
                dtype, (_, *rest) = entries[name]
                rows = sum(entries.pop(part)[1][0] for part in of_whole)
                entries[f"{within}{stored}"] = dtype, (rows, *rest)
                places[f"{within}{stored}"] = stored, of_whole

    def tensor(name: str) -> torch.Tensor:
        if name not in places:
            return source.tensor(name)
        stored, (first, second) = places[name]
        return grouped(stored, (source.tensor(first), source.tensor(second)), mixer).contiguous()

    return MadeSource(source, entries, tensor)
