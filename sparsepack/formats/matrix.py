"""One stored matrix of any type: which type fits it, its bytes, and its weights back from them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks.table import BLOCKS, TYPES
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.orders import zigzag


@dataclass(frozen=True)
class PackedMatrix:
    """Any stored matrix.

    blocks -- the stored bytes: in zigzag order uint8 [bands, columns, superblock bytes]; else [rows, bytes per row]
    format -- its blocks and their order, "zigzag" or "rows"
    rows, columns -- the logical shape (padding rows not counted)
    tail   -- in zigzag order, the rows after the whole bands: uint8 [superblocks, bytes]; None: bands hold all rows
    row_scale -- likewise, what the blocks' weights of each row are multiplied by: float32 [rows]; None: nothing
    """

    blocks: torch.Tensor
    format: MatrixFormat
    rows: int
    columns: int
    tail: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None

    @property
    def weights(self) -> int:
        """Logical weights."""
        return self.rows * self.columns

    @property
    def levels(self) -> tuple[int, ...]:
        """Bytes of a superblock that a reader of its first plane, of two, ... reads; empty: it has no planes."""
        return BLOCKS[self.format.block].level_bytes if self.format.order == "zigzag" else ()

    @property
    def units(self) -> int:
        """The pieces of which a token may leave some out: columns, or with planes bytes of one row of superblocks."""
        return self.columns * (self.levels[-1] if self.levels else 1)

    @property
    def nbytes(self) -> int:
        """Stored bytes, without those of `row_scale`: a token reads them whatever it skips."""
        return self.blocks.nbytes + (0 if self.tail is None else self.tail.nbytes)

    @property
    def padded_nbytes(self) -> int:
        """Bytes of `padded`, likewise."""
        return self.blocks.nbytes + (0 if self.tail is None else self.columns * self.blocks.shape[-1])

    def to(self, device: torch.device) -> "PackedMatrix":
        """The same matrix on another device."""
        tail, row_scale = (None if each is None else each.to(device) for each in (self.tail, self.row_scale))
        return replace(self, blocks=self.blocks.to(device), tail=tail, row_scale=row_scale)

    def padded(self) -> "PackedMatrix":
        """The same matrix, a tail laid out as one more band, for kernels of whole bands: exactly the same weights.

        Copies a matrix that has a tail. Raises `PackingError` as `zigzag.expand_tail`.
        """
        if self.tail is None:
            return self
        band = zigzag.expand_tail(self.tail, self.rows, self.columns, self.format.block)
        return replace(self, blocks=torch.cat([self.blocks, band[None]]), tail=None)


@dataclass(frozen=True)
class PackedExperts:
    """A zigzag matrix of each expert of an MLP, all of one shape.

    blocks -- the stored bytes: uint8 [experts, bands, columns, superblock bytes]
    format -- its blocks, in zigzag order
    rows, columns -- the logical shape of one (padding rows not counted)
    tail   -- the rows of each after the whole bands: uint8 [experts, superblocks, bytes]; None: bands hold all rows
    """

    blocks: torch.Tensor
    format: MatrixFormat
    rows: int
    columns: int
    tail: torch.Tensor | None = None
    row_scale: ClassVar[None] = None

    @property
    def weights(self) -> int:
        """Logical weights of all of them."""
        return self.experts * self.rows * self.columns

    @property
    def levels(self) -> tuple[int, ...]:
        """As of a `PackedMatrix`."""
        return BLOCKS[self.format.block].level_bytes

    @property
    def units(self) -> int:
        """As of a `PackedMatrix`, those of one expert."""
        return self.columns * (self.levels[-1] if self.levels else 1)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.blocks.nbytes + (0 if self.tail is None else self.tail.nbytes)

    @property
    def padded_nbytes(self) -> int:
        """Bytes of all of them as `PackedMatrix.padded` has them."""
        return sum(self.expert(number).padded_nbytes for number in range(self.experts))

    def padded_blocks(self, first: int, last: int) -> Tensor:
        """The blocks of experts [first, last) as `PackedMatrix.padded` has them: [experts, bands, columns, bytes].

        Raises `PackingError` as that does.
        """
        if self.tail is None:
            return self.blocks[first:last]
        numbers = range(*slice(first, last).indices(self.experts))
        return torch.stack([self.expert(number).padded().blocks for number in numbers])

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.blocks.shape[0]

    def expert(self, number: int) -> PackedMatrix:
        """The matrix of one expert."""
        tail = None if self.tail is None else self.tail[number]
        return PackedMatrix(self.blocks[number], self.format, self.rows, self.columns, tail)


def fitting_type(asked: str, columns: int, name: str) -> str:
    """ggml's name of a type that the user asked for.

    Raises `PackingError` for an unknown type, or one of blocks that do not divide the width.
    """
    if asked not in TYPES:
        raise PackingError(f"{name}: unknown type {asked!r}; expected auto, {', '.join(TYPES)}")
    if columns % (block := BLOCKS[asked.upper()].weights):
        raise PackingError(
            f"{name}: {columns} columns, {asked.upper()} needs a multiple of {block}; choose auto, f16, bf16 or f32"
        )
    return asked.upper()


def relative_error(weights: Tensor, type: str) -> float:
    """What storing weights in ggml's `type` does to them: the root mean square of the error over that of the weights.

    Raises `PackingError` as `Block.encode`.
    """
    exact = weights.float()
    error = BLOCKS[type].decode(BLOCKS[type].encode(exact)) - exact
    return float(error.norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))


def decode_matrix(matrix: PackedMatrix, level: int = 0) -> Tensor:
    """The logical weights of a stored matrix of any type: float32 [rows, columns].

    level -- of a matrix with planes, those that are read; 0: all
    """
    if matrix.format.order == "zigzag":
        return zigzag_rows(matrix, 0, matrix.rows, level)
    return BLOCKS[matrix.format.block].decode(matrix.blocks)


def decode_experts(matrix: PackedExperts, first: int = 0, last: int | None = None) -> Tensor:
    """The logical weights of experts [first, last), of all unless told otherwise: float32 [experts, rows, columns]."""
    numbers = range(*slice(first, last).indices(matrix.experts))
    return torch.stack([decode_matrix(matrix.expert(number)) for number in numbers])


def zigzag_rows(matrix: PackedMatrix, start: int, stop: int, level: int = 0) -> Tensor:
    """Rows [start, stop) of a zigzag matrix, only their bands decoded: float32 [stop - start, columns]. level: as in
    `decode_matrix`."""
    whole = matrix.rows if matrix.tail is None else matrix.rows - zigzag.tail_rows(matrix.rows)
    first, last = min(start, whole) // zigzag.BAND_ROWS, zigzag.bands(min(stop, whole))
    top, block = first * zigzag.BAND_ROWS, matrix.format.block
    if stop <= whole:
        held = min(last * zigzag.BAND_ROWS, whole) - top
        found = zigzag.unpack(matrix.blocks[first:last], held, block=block, level=level)[start - top : stop - top]
    else:
        rest = zigzag.unpack(matrix.blocks[first:last], matrix.rows - top, tail=matrix.tail, block=block, level=level)
        found = rest[start - top : stop - top]
    return found if matrix.row_scale is None else found.mul_(matrix.row_scale[start:stop, None])
