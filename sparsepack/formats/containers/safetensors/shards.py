"""Which tensors lie in which file of a slid folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sparsepack.files.shards import INDEX, file_names, index_text, split
from sparsepack.files.tensors import header
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, tensors_of


@dataclass(frozen=True)
class Shard:
    """A safetensors file of a folder."""

    name: str
    groups: Sequence[PlannedGroup]

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """The tensors of all groups."""
        return tensors_of(self.groups)

    @cached_property
    def header(self) -> bytes:
        """What stands before the tensors."""
        return header((tensor.name, tensor.type, tensor.shape, tensor.nbytes) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of the file."""
        return len(self.header) + _nbytes(self.tensors)


def shards_of(groups: Sequence[PlannedGroup], most: int) -> tuple[Shard, ...]:
    """Groups, in their order, in files of at most `most` bytes of tensors; a group with more has a file of its own."""
    parts = split([_nbytes(group.tensors) for group in groups], most)
    return tuple(Shard(name, groups[part]) for name, part in zip(file_names(len(parts)), parts, strict=True))


def index_of(shards: Sequence[Shard]) -> dict[str, str]:
    """The text by which other programs find a tensor's file, by its name; none where there is one file alone."""
    if len(shards) == 1:
        return {}
    file_of = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    return {INDEX: index_text(file_of, sum(_nbytes(shard.tensors) for shard in shards))}


def _nbytes(tensors: Sequence[PlannedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
