"""Sliding windows: structured sparsity of any kind as that of the hardware, exactly (SlideSparse, 3.2, 3.3 and C.1).

Windows of `window` inputs lie `stride` apart over each group of `of` inputs. Every nonzero goes to the first window
that covers it and has room for it; a window has room for `most`. For keep 6 of 8 on 2:4 tensor cores, with weights at
inputs 0, 1, 2, 3, 6 and 7:

    input             0  1  2  3  4  5  6  7
    weight            a  b  c  d  .  .  e  f
    window 0          a  b  .  .
    window 1                c  d  .  .
    window 2                      .  .  e  f
    slid weight       a  b  .  .  c  d  .  .  .  .  e  f        each four have at most two nonzeros
    expanded input      0  1  2  3  2  3  4  5  4  5  6  7        the inputs that the windows see

sparse24 weights times expanded inputs is weights times inputs. Of the sparse24 weights only the `most` values of each
window and their positions in it are stored.

Symmetric quantisation of rows: one scale each, zero stays zero (SlideSparse, 4.2).

scale = largest |x| of the row / STEPS          q = x / scale, rounded to the type          x ~ scale * q

A sparse24 matrix as it is stored: values of a type, their positions packed, a scale for each row.

Made of some rows at a time: what one step leaves for the next then stays in a cache, and takes little memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.models.pattern import Pattern, check_pattern, filled, grouped, ungrouped


@dataclass(frozen=True)
class ValueType:
    """A type of sparse24 values.

    name          -- a row of the table of formats gives it in `matrices`
    kind          -- of numbers, as benchmarks call it
    dtype         -- torch's type
    output_bound  -- largest relative Frobenius error of a product's outputs whose inputs are rounded to the type, too
    steps         -- what the largest value of a row becomes where rows are quantised; None: values are kept as they are
    stored_as     -- the type in safetensors, one of `blocks.table.BLOCKS`; empty: the name
    """

    name: str
    kind: str
    dtype: torch.dtype
    output_bound: float
    steps: float | None = None
    stored_as: str = ""

    @property
    def stored(self) -> str:
        """The type of the values in safetensors."""
        return self.stored_as or self.name

    @property
    def scaled(self) -> bool:
        """Whether the values are quantised, with a scale for each row."""
        return self.steps is not None


VALUE_TYPES: Mapping[str, ValueType] = {
    type.name: type
    for type in (
        ValueType("I8", "INT8", torch.int8, 0.03, steps=127.0),
        ValueType("F8_E4M3", "FP8", torch.float8_e4m3fn, 0.06, steps=448.0),
        ValueType("BF16", "BF16", torch.bfloat16, 0.01),
    )
}
"""The types of sparse24 values, by their names."""


STEPS: Mapping[torch.dtype, float] = {
    row.dtype: row.steps for row in reversed([*VALUE_TYPES.values()]) if row.steps is not None
}
"""The largest value of a row becomes this number unless told otherwise, by the type that the row is quantised to: where
several types of sparse24 values have that one of torch's, the number of the first."""

SMALLEST = 1e-30
"""A row of smaller values counts as zeros: its scale's reciprocal would leave float32."""


def quantise_rows(x: Tensor, dtype: torch.dtype, steps: float | None = None) -> tuple[Tensor, Tensor]:
    """float32, float16 or bfloat16 [..., K] -> q, `dtype` [..., K], and scale, float32 [...].

    steps -- what the largest value of a row becomes; None: as `STEPS` says

    Computed in float32; nearest, ties to even. A row of zeros has scale 0. Raises `PackingError` for values that are
    not finite.
    """
    values = x.float()
    scale, inverse = scales(values, STEPS[dtype] if steps is None else steps)
    q = values * inverse[..., None]  # beyond the steps by a rounding of float32 at most, which that of the type undoes
    return (q if dtype.is_floating_point else q.round_()).to(dtype), scale


def scales(values: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """The scales that make `steps` of the largest values of float32 rows [..., K], and their reciprocals: [...] each.

    Raises `PackingError` for values that are not finite.
    """
    largest = values.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise PackingError("a value is not finite; it cannot be quantised")
    # A tensor: of a Python number and a tensor torch makes a product with a reciprocal, which rounds twice.
    most = largest.new_tensor(steps)
    held = largest > SMALLEST
    return torch.where(held, largest / most, 0), torch.where(held, most / largest, 0)


def dequantised(q: Tensor, scale: Tensor) -> Tensor:
    """What q [..., K] and scale [...] stand for: float32 [..., K]."""
    return q.float() * scale[..., None]


@dataclass(frozen=True)
class Slide:
    """How a pattern becomes one of at most `most` nonzeros in `window` inputs; 2 in 4 is what NVIDIA's tensor cores
    skip zeros of.

    Raises `PackingError` where some weights of the pattern would find no room. The paper's condition for that
    (theorem 2) is not enough: with a window that has room for less than the stride (1 in 4), two nonzeros that only one
    window covers cannot both be placed.
    """

    pattern: Pattern
    most: int = 2
    window: int = 4

    def __post_init__(self) -> None:
        known = 1 <= self.most < self.window <= self.pattern.of
        if not known or (self.pattern.of - self.window) % self.stride:
            raise PackingError(f"{self.pattern}: windows of {self.window} do not cover it in steps of {self.stride}")
        if (self.windows > 1 and self.most < self.stride) or self.windows * self.most < self.pattern.keep:
            raise PackingError(
                f"{self.pattern}: {self.windows} windows of {self.window} with {self.most} nonzeros each have no room "
                f"for every choice of {self.pattern.keep}"
            )

    @property
    def stride(self) -> int:
        """Inputs from one window to the next."""
        return self.window - self.most

    @property
    def windows(self) -> int:
        """Windows over a group."""
        return (self.pattern.of - self.window) // self.stride + 1

    @property
    def slots(self) -> int:
        """Values that are stored for a group."""
        return self.windows * self.most

    def stored(self, columns: int) -> int:
        """Values that are stored for a row of so many inputs."""
        return self.pattern.groups(columns) * self.slots

    def expanded(self, columns: int) -> int:
        """Expanded inputs of so many inputs."""
        return self.pattern.groups(columns) * self.windows * self.window


def slide(weight: Tensor, how: Slide) -> tuple[Tensor, Tensor]:
    """The values of the sparse24 weights and their positions.

    weight: [rows, columns], of integers, float32, float16 or bfloat16. Returns the values in that type and uint8
    positions within their windows, both [rows, how.stored(columns)]. The positions of a window ascend; one with fewer
    nonzeros than room has zeros at positions that are free. A zero stays a zero, whatever its sign was.

    Raises `PackingError` naming the first group that does not have the pattern.
    """
    tables = _tables(how, weight.device)
    groups = grouped(weight, how.pattern).flatten(0, -2)
    which = _sets(groups != 0)
    if not tables.fits.index_select(0, which).all():
        check_pattern(weight, how.pattern)
    # Adding 0 takes the sign of zeros away. Rows of a table are copied whole: far faster than value by value.
    values = (groups + 0).gather(1, tables.sources.index_select(0, which).long())
    positions = tables.positions.index_select(0, which)
    stored = how.stored(weight.shape[1])
    return values.view(-1, stored), positions.view(-1, stored)


def windowed(values: Tensor, positions: Tensor, how: Slide) -> Tensor:
    """The sparse24 weights with their zeros: [rows, stored] twice -> [rows, expanded]."""
    shape = (*values.shape[:-1], -1, how.most)
    dense = values.new_zeros(*values.shape[:-1], values.shape[-1] // how.most, how.window)
    return dense.scatter_(-1, positions.view(shape).long(), values.view(shape)).flatten(-2)


def unslide(values: Tensor, positions: Tensor, how: Slide, columns: int) -> Tensor:
    """The inverse of `slide`: [rows, stored] twice -> [rows, columns]."""
    groups = windowed(values, positions, how).view(*values.shape[:-1], -1, how.windows, how.window)
    weight = values.new_zeros(*groups.shape[:-2], how.pattern.of)
    for number in range(how.windows):  # every input has its weight in one of the windows, zeros in the others
        seen = weight[..., number * how.stride :][..., : how.window]
        seen.copy_(torch.where(groups[..., number, :] != 0, groups[..., number, :], seen))
    return ungrouped(weight, columns)


def expand(x: Tensor, how: Slide) -> Tensor:
    """The inputs that the windows see: [..., columns] -> [..., expanded]."""
    return grouped(x, how.pattern).unfold(-1, how.window, how.stride).flatten(-3)


def pack_positions(positions: Tensor) -> Tensor:
    """Positions below 4, four to a byte, the first in the lowest bits: uint8 [rows, n] -> [rows, n / 4 rounded up]."""
    # Four bytes as one number: the product has the lowest two bits of each, side by side, in its highest byte.
    return (filled(positions, 4).contiguous().view(torch.int32) * 0x01041040 >> 24).to(torch.uint8)


def unpack_positions(packed: Tensor, count: int, how: Slide) -> Tensor:
    """The inverse of `pack_positions`: uint8 [rows, bytes] -> [rows, count].

    Raises `PackingError` where they do not ascend within a window: no hardware could have such weights.
    """
    positions = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)[..., :count]
    ascending = positions.view(*positions.shape[:-1], -1, how.most).to(torch.int8).diff(dim=-1) > 0
    if not ascending.all():
        row, window = (int(n) for n in (~ascending).any(-1).nonzero()[0])
        raise PackingError(f"the positions of row {row}, window {window} do not ascend; they were changed")
    return positions


def _sets(nonzero: Tensor) -> Tensor:
    """Which inputs of each group are not zero, a bit each: bool [groups, of] -> int64 [groups]."""
    # Eight bytes of 0 or 1 as one number: the product has them, the first as the lowest bit, in its highest byte.
    bits = filled(nonzero, 8).contiguous().view(torch.int64) * 0x0102040810204080 >> 56 & 0xFF
    return bits[:, 0] if bits.shape[1] == 1 else bits[:, 0] | bits[:, 1] << 8  # of is 16 at most


@dataclass(frozen=True, eq=False)
class _Tables:
    """Tables of every set of nonzeros in a group, as `_sets` numbers them.

    sources   -- uint8 [2 ** of, slots]: the input that each slot takes; an empty one takes one that is zero
    positions -- uint8 [2 ** of, slots]: the position of the slot in its window
    fits      -- bool [2 ** of]: whether the set has the pattern; where not, the others are nonsense
    """

    sources: Tensor
    positions: Tensor
    fits: Tensor


@cache
def _tables(how: Slide, device: torch.device) -> _Tables:
    of = how.pattern.of
    nonzero = (torch.arange(1 << of)[:, None] >> torch.arange(of) & 1).bool()
    zero = nonzero.byte().argmin(1, keepdim=True)  # a set that fits leaves one
    left = nonzero.clone()  # nonzeros without a place
    sources, positions = [], []
    for first in range(0, how.windows * how.stride, how.stride):
        seen = left[:, first : first + how.window]
        taken = seen & (seen.cumsum(1) <= how.most)
        free = ~taken
        stored = taken | (free & (free.cumsum(1) <= how.most - taken.sum(1, keepdim=True)))
        position = stored.byte().argsort(dim=1, descending=True, stable=True)[:, : how.most]
        sources.append(torch.where(taken.gather(1, position), position + first, zero))
        positions.append(position)
        left[:, first : first + how.window] &= free
    return _Tables(
        sources=torch.cat(sources, 1).to(device, torch.uint8),
        positions=torch.cat(positions, 1).to(device, torch.uint8),
        fits=(nonzero.sum(1) <= how.pattern.keep).to(device),
    )


PIECE, CUDA_PIECE = 1 << 20, 1 << 23
"""This many weights are in work at a time, on a CPU and on a CUDA device: fewer would cost more in calls; a weight
takes some 20 bytes with what is made of it."""


def encode(
    weight: Tensor, how: Slide, dtype: torch.dtype, steps: float | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slide a matrix and quantise it to `dtype`, one of `symmetric.STEPS`; or keep its values, in any other type.

    steps -- as `symmetric.quantise_rows` takes it
    scale -- float32 [rows] of values that are quantised already, and that `dtype` holds exactly; they are slid alone

    weight: [rows, columns] of float32, float16 or bfloat16. Returns values, `dtype` [rows, how.stored(columns)],
    positions as `pack_positions` has them, and scales, float32 [rows], or None where nothing is quantised.

    Raises `PackingError` naming the first group without the pattern, or where a value is not finite.
    """
    rows, stored = len(weight), how.stored(weight.shape[1])
    values = torch.empty(rows, stored, dtype=dtype, device=weight.device)
    positions = torch.empty(rows, -(-stored // 4), dtype=torch.uint8, device=weight.device)
    quantised, scale = scale is not None, torch.empty(rows, device=weight.device) if scale is None else scale
    step = max((CUDA_PIECE if weight.is_cuda else PIECE) // max(weight.shape[1], 1), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        try:
            slid, within = slide(weight[part], how)
        except PackingError:
            check_pattern(weight, how.pattern)  # which counts rows from the first of all
            raise
        if dtype in STEPS and not quantised:
            slid, scale[part] = quantise_rows(slid, dtype, steps)
        values[part], positions[part] = slid, pack_positions(within)
    return values, positions, scale if dtype in STEPS else None
