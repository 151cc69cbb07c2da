"""The bases in which a model's residual stream is written, one for each segment of its blocks, and those of the values
of its attention, one for each KV head."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

FROM_START = (0,)
"""The one segment of a model whose stream keeps its basis."""
_STREAM, _VALUES = "stream.", "values."


@dataclass(frozen=True)
class Bases:
    """A basis for each segment, a run of consecutive blocks.

    starts   -- the first block of each segment, ascending from 0
    matrices -- orthogonal [hidden, hidden], float64 unless they are being trained, whose columns are the directions;
                none: they are not known yet, and nothing is turned
    values   -- of each block, orthogonal [kv_heads, D, D], a matrix like these for the values of each KV head; none:
                values stay as they are
    """

    starts: tuple[int, ...] = FROM_START
    matrices: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The blocks before which the stream changes its basis."""
        return self.starts[1:]

    def segment(self, layer: int) -> int:
        """The number of a block's segment."""
        return bisect_right(self.starts, layer) - 1

    def of_block(self, layer: int) -> Tensor:
        """The basis of a block."""
        return self.matrices[self.segment(layer)]

    def change(self, layer: int) -> Tensor:
        """The matrix W of the boundary before a block: h' = h W^T takes h, a row in the basis before it, into the
        block's own. As h = s Q_a and h' = s Q_b are one stream s, W is Q_b^T Q_a."""
        segment = self.starts.index(layer)
        return self.matrices[segment].t() @ self.matrices[segment - 1]

    def tensors(self) -> dict[str, Tensor]:
        """The matrices, by the first blocks of their segments, and those of values, by their blocks: what `bases_of`
        reads."""
        stream = {f"{_STREAM}{start}": matrix for start, matrix in zip(self.starts, self.matrices, strict=True)}
        return stream | {f"{_VALUES}{layer}": matrices for layer, matrices in enumerate(self.values)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Bases":
        """The same with each tensor changed."""
        return Bases(self.starts, tuple(map(change, self.matrices)), tuple(map(change, self.values)))


def bases_of(tensors: Mapping[str, Tensor]) -> Bases:
    """The bases that `Bases.tensors` told of."""
    starts, blocks = (
        sorted(int(name.removeprefix(kind)) for name in tensors if name.startswith(kind)) for kind in (_STREAM, _VALUES)
    )
    matrices = tuple(tensors[f"{_STREAM}{start}"] for start in starts)
    return Bases(tuple(starts), matrices, tuple(tensors[f"{_VALUES}{layer}"] for layer in blocks))
