"""The operator `sparsepack::planes_linear`: products with weights in planes, for whoever runs a model.

    planes_linear(x, pieces, scale, threshold, steps, bias, prepared, decode) -> y

    x         -- float32, float16 or bfloat16 [..., columns]
    pieces    -- uint8 [pieces, columns, 50]: `formats.orders.planes`
    scale     -- float32 [rows]
    threshold -- float32 [columns]; steps -- float32 [levels]: `formats.planes`
    bias      -- [rows], or None
    prepared  -- what `prepare` returned for these, or nothing
    decode    -- True: x is of tokens that are decoded, and a column is read at as many levels as its input exceeds
                 limits, vector by vector; False: of prompts, which read all planes; None: what `decoded_rows` says

y is of the type of x [..., rows]. A vector that is decoded is multiplied as if it came alone, so that its token does
not depend on what else is decoded with it. CPUs have kernels, the same as the engine's: prompts take weights that are
unpacked panel by panel, to float32. Elsewhere, and where the kernels were not built, planes are joined in torch, some
rows at a time: of prompts to the type of x; of tokens that are decoded to float32, for each level anew, which is right
and slow.

To torch this is one operation (`operator_library`), which has no gradients. Tensors that do not fit together are a
`ValueError`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import planes
from sparsepack.formats.planes import BLOCK, LEVELS, read_rule
from sparsepack.models.sites import levels_read
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.operator_library import define

_AT_ONCE = 1 << 22
"""So many weights are unpacked at a time."""


@dataclass(frozen=True, eq=False)
class PlanesMatrix:
    """The weights of a Linear as they lie in a folder of planes; see the operator's arguments."""

    pieces: Tensor
    scale: Tensor
    threshold: Tensor
    steps: Tensor

    @property
    def limits(self) -> Tensor:
        """What inputs exceed where they are read: float32 [levels, columns]."""
        return read_rule(self.threshold, self.steps).limits


@dataclass(eq=False)
class _Loaded:
    """A matrix in the order of the CPU's kernels, under the number by which the operator finds it."""

    matrix: Any
    number: int


_LOADED: WeakValueDictionary[int, _Loaded] = WeakValueDictionary()
_NUMBERS = count()


@dataclass(frozen=True, eq=False)
class Prepared:
    """What else the operator needs of a matrix: `tensors`, for as long as this object lives."""

    tensors: list[Tensor] = field(default_factory=list)
    loaded: _Loaded | None = None


def prepare(matrix: PlanesMatrix) -> Prepared:
    """Prepare products of a matrix, on its device. On a CPU with kernels it takes a copy of the planes, in the order
    that these read."""
    # It serves calls in inference mode and outside of it.
    with torch.inference_mode(False), torch.no_grad():
        limits = matrix.limits
        if not (matrix.pieces.is_cpu and has_kernels()):
            return Prepared([limits])
        rows, columns = len(matrix.scale), matrix.pieces.shape[1]
        blocks, tail = planes.to_zigzag(matrix.pieces, rows)
        packed = PackedMatrix(blocks, MatrixFormat(BLOCK, "zigzag"), rows, columns, tail, matrix.scale)
        loaded = _Loaded(operations.load_zigzag(packed), next(_NUMBERS))
        _LOADED[loaded.number] = loaded
        # A number in a tensor, which compiled graphs do not keep from one process for the next.
        return Prepared([limits, torch.tensor([loaded.number])], loaded)


def has_kernels() -> bool:
    """Whether the CPU's kernels were built."""
    try:
        machine.native()
    except UserError:
        return False
    return True


def planes_linear(
    x: Tensor, matrix: PlanesMatrix, bias: Tensor | None, prepared: Sequence[Tensor], decode: bool | None
) -> Tensor:
    """y = x W^T + bias by the operator: [..., columns] -> [..., rows]."""
    weights = (matrix.pieces, matrix.scale, matrix.threshold, matrix.steps, bias, list(prepared), decode)
    if not (x.is_cuda or torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())):
        return _run(x, *weights)  # torch's way to it takes as long as a small product
    y: Tensor = torch.ops.sparsepack.planes_linear(x, *weights)
    return y


_ASK: list[Callable[[int], Tensor | None]] = []


def decoded_rows(ask: Callable[[int], Tensor | None]) -> None:
    """Say who knows which vectors are of tokens that are decoded, where callers of the operator do not: a function of
    how many there are, which returns bool [vectors], or None for all of them."""
    _ASK[:] = [ask]


def _run(
    x: Tensor,
    pieces: Tensor,
    scale: Tensor,
    threshold: Tensor,
    steps: Tensor,
    bias: Tensor | None,
    prepared: Sequence[Tensor],
    decode: bool | None,
) -> Tensor:
    matrix = PlanesMatrix(pieces, scale, threshold, steps)
    _check(x, matrix)
    flat = x.reshape(-1, x.shape[-1])
    if not len(flat):
        return x.new_empty(*x.shape[:-1], len(scale))
    which = None
    if decode is None and _ASK:
        which = _ASK[0](len(flat))
        decode = which is None or bool(which.all())
        which = which if not decode and which is not None and bool(which.any()) else None
    if which is not None:
        y = torch.empty(len(flat), len(scale), device=x.device)
        y[which] = _decoded(flat[which], matrix, prepared)
        y[~which] = _whole(flat[~which], matrix, prepared)
    else:
        y = (_decoded if decode else _whole)(flat, matrix, prepared)
    y = y.view(*x.shape[:-1], len(scale))
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _decoded(x: Tensor, matrix: PlanesMatrix, prepared: Sequence[Tensor]) -> Tensor:
    """Every column of each vector at its level: [vectors, columns] -> float32 [vectors, rows]."""
    x, limits = x.float(), prepared[0] if prepared else matrix.limits
    levels = levels_read(x, limits)
    if len(prepared) > 1:
        return operations.planes_matmul(_find(prepared), x, levels)
    y = torch.zeros(len(x), len(matrix.scale), device=x.device)
    for level in range(1, len(LEVELS) + 1):
        of_level = torch.where(levels == level, x, 0)
        for pieces, rows, held in _tiles(matrix):
            y[:, rows] += of_level @ planes.decode(pieces, held, level).t()
    return y.mul_(matrix.scale)


def _whole(x: Tensor, matrix: PlanesMatrix, prepared: Sequence[Tensor]) -> Tensor:
    """Every column with all planes: [vectors, columns] -> float32 [vectors, rows]."""
    if len(prepared) > 1:
        return operations.zigzag_matmul(_find(prepared), x.float())
    y = torch.empty(len(x), len(matrix.scale), device=x.device)
    for pieces, rows, held in _tiles(matrix):
        y[:, rows] = F.linear(x, planes.decode(pieces, held).to(x.dtype))
    return y.mul_(matrix.scale)


def _tiles(matrix: PlanesMatrix) -> Iterator[tuple[Tensor, slice, int]]:
    """Some pieces at a time, which rows of the matrix they have, and how many these are."""
    total, step = len(matrix.scale), max(1, _AT_ONCE // (planes.PIECE_ROWS * matrix.pieces.shape[1]))
    for first in range(0, len(matrix.pieces), step):
        rows = slice(first * planes.PIECE_ROWS, min((first + step) * planes.PIECE_ROWS, total))
        yield matrix.pieces[first : first + step], rows, rows.stop - rows.start


def _find(prepared: Sequence[Tensor]) -> Any:
    found = _LOADED.get(int(prepared[1]))
    if found is None:
        raise ValueError("weights in planes were prepared by another process, or for a Linear that is gone")
    return found.matrix


def _check(x: Tensor, matrix: PlanesMatrix) -> None:
    rows, columns = len(matrix.scale), matrix.pieces.shape[1]
    fits = matrix.pieces.shape == (planes.pieces(rows), columns, planes.PIECE_BYTES) and x.shape[-1] == columns
    fits = fits and matrix.threshold.shape == (columns,) and matrix.steps.shape == (len(LEVELS),)
    if not fits or not x.is_floating_point() or x.device != matrix.pieces.device:
        raise ValueError(
            f"inputs {list(x.shape)} of {x.dtype} on {x.device} do not fit planes {list(matrix.pieces.shape)} of "
            f"{rows} rows on {matrix.pieces.device}; expected [..., {columns}]"
        )


define(
    "planes_linear(Tensor x, Tensor pieces, Tensor scale, Tensor threshold, Tensor steps, Tensor? bias, "
    "Tensor[] prepared, bool? decode) -> Tensor",
    _run,
    lambda x, pieces, scale, *rest: x.new_empty(*x.shape[:-1], len(scale)),
    None,
)
