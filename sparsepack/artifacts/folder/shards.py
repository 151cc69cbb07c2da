"""Which tensors lie in which file of a folder: one file, or several with an index, as Hugging Face has them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparsepack.artifacts.folder.layout import INDEX, WEIGHTS
from sparsepack.artifacts.plan import PlannedGroup, PlannedTensor, tensors_of
from sparsepack.files.tensors import header

SHARD_BYTES = 2_000_000_000
"""Of tensors in one file: a system lets one thread write to a file at a time, and files of this size are enough to keep
a device's threads from waiting for each other."""


@dataclass(frozen=True)
class Shard:
    """A safetensors file of a folder."""

    name: str
    groups: Sequence[PlannedGroup]

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """Those of all groups."""
        return tensors_of(self.groups)

    @cached_property
    def header(self) -> bytes:
        """What stands before the tensors."""
        return header((tensor.name, tensor.type, tensor.shape, tensor.nbytes) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.header) + _nbytes(self.tensors)


def shards_of(groups: Sequence[PlannedGroup], most: int) -> tuple[Shard, ...]:
    """Groups, in their order, in files of at most `most` bytes of tensors; a group with more has a file of its own."""
    parts: list[list[PlannedGroup]] = [[]]
    held = 0
    for group in groups:
        nbytes = _nbytes(group.tensors)
        if parts[-1] and held + nbytes > most:
            parts.append([])
            held = 0
        parts[-1].append(group)
        held += nbytes
    count = len(parts)
    if count == 1:
        return (Shard(WEIGHTS, groups),)
    return tuple(Shard(f"model-{n:05}-of-{count:05}.safetensors", part) for n, part in enumerate(parts, 1))


def index_of(shards: Sequence[Shard]) -> dict[str, str]:
    """The text by which other programs find a tensor's file, by its name; none where there is one file alone."""
    if len(shards) == 1:
        return {}
    index = {
        "metadata": {"total_size": sum(_nbytes(shard.tensors) for shard in shards)},
        "weight_map": {tensor.name: shard.name for shard in shards for tensor in shard.tensors},
    }
    return {INDEX: json.dumps(index, indent=2, ensure_ascii=False) + "\n"}


def check_index(text: str, file_of: Mapping[str, str]) -> None:
    """Raise ValueError unless an index names the file of each tensor, `file_of`, and no other tensor."""
    weight_map = json.loads(text)["weight_map"]
    for name in {**file_of, **weight_map}:
        said, found = weight_map.get(name), file_of.get(name)
        if said != found:
            raise ValueError(
                f"{INDEX} has {name[:60]} in {str(said)[:60] if said else 'no file'}, it is in {found or 'none'}"
            )


def _nbytes(tensors: Sequence[PlannedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
