"""Products with slid weights on an NVIDIA GPU: which kernel makes them, and the weights as that kernel takes them.

    GPU                  slide-int8, slide-fp8                             slide-bf16
    Hopper               our kernel; float32 outputs: libcusparseLt        dense: libcusparseLt's is slower
    others from Ampere   libcusparseLt                                     libcusparseLt

The measurements are in benchmarks/RESULTS.md. Products can be captured in a CUDA graph once they ran with as many
tokens.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import unpack_positions, unslide, windowed
from sparsepack.runtime.cuda.driver.compiler import check_architecture
from sparsepack.runtime.cuda.driver.kernel import architecture
from sparsepack.runtime.cuda.slide import cusparselt, hopper
from sparsepack.runtime.cuda.slide.algorithms import LARGEST, best_algorithm
from sparsepack.runtime.cuda.slide.inputs import quantise_slide
from sparsepack.runtime.cuda.slide.outputs import scale_outputs
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.products import SlidMatrix

_PIECE = 1 << 24
"""This many weights are unpacked at a time."""
_PLANS = 256
"""The cache keeps at most this many plans."""

_plans: dict[tuple[cusparselt.ProductShape, torch.device], cusparselt.MatmulPlan] = {}


def prepare(matrix: SlidMatrix, out: torch.dtype, tokens: int = 0) -> list[Tensor]:
    """What `slid_matmul` needs of a matrix on the current GPU beside the matrix, for inputs and outputs of a type.

    tokens -- find and compile now what suits up to so many tokens

    Raises `UserError` for a GPU that has no such product, where a library is missing, or while a CUDA graph is
    captured; `PackingError` for positions that were changed.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UserError("a slid Linear: run it once before it is captured in a CUDA graph")
    if matrix.scale is not None and matrix.scale.dtype != torch.float32:
        raise ValueError(f"scales are {matrix.scale.dtype}; expected float32")
    check_architecture(architecture(matrix.values.device.index or 0))
    way = _way(matrix, out)
    prepared = way.prepare(matrix)
    if tokens:
        way.tune(matrix, out, tokens, prepared)
    return prepared


def slid_matmul(x: Tensor, matrix: SlidMatrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    """y = x W^T + bias on the current GPU and stream, without waiting for either.

    x        -- float32, float16 or bfloat16 [tokens, columns], contiguous
    bias     -- [rows], or None
    prepared -- from `prepare`, for the type of x

    Returns [tokens, rows] of the type of x, contiguous. Raises `ValueError` where the weights were not prepared.
    """
    way = _way(matrix, x.dtype)
    if not prepared or prepared[0].dim() != way.dimensions:
        raise ValueError(f"slid weights {list(matrix.values.shape)} are not prepared for {x.dtype}")
    if not len(x):
        return x.new_empty(0, len(matrix.values))
    return way.run(x, matrix, None if bias is None else bias.to(x.dtype), prepared)


@dataclass(frozen=True)
class _Way:
    """A way to make products, on some GPUs.

    dimensions -- of the first tensor that `prepare` returns: no other way has as many
    prepare    -- weights -> what `run` needs beside them
    run        -- inputs [tokens, columns], weights, bias of the same type, what was prepared -> outputs [tokens, rows]
    tune       -- weights, the type of inputs, the most tokens, what was prepared: get ready for all numbers of tokens
    """

    dimensions: int
    prepare: Callable[[SlidMatrix], list[Tensor]]
    run: Callable[[Tensor, SlidMatrix, Tensor | None, Sequence[Tensor]], Tensor]
    tune: Callable[[SlidMatrix, torch.dtype, int, Sequence[Tensor]], None]


def _way(matrix: SlidMatrix, out: torch.dtype) -> _Way:
    if architecture(matrix.values.device.index or 0) != hopper.ARCHITECTURE:
        return _LIBRARY
    if matrix.scale is None:
        return _DENSE
    return _HOPPER if out in hopper.OUTPUTS else _LIBRARY


def _prepare_for_hopper(matrix: SlidMatrix) -> list[Tensor]:
    """Positions in the order of the threads. Values and scales are used as they lie, unless rows are not aligned: then
    copies of them, too."""
    stored = matrix.values.shape[1]
    assert matrix.scale is not None
    arranged = hopper.arranged_positions(matrix.positions, stored)
    values, scale = _padded(matrix.values, hopper.ROWS, hopper.STORED), _padded(matrix.scale, hopper.ROWS)
    if values.data_ptr() % hopper.ALIGNMENT:
        values = values.clone()
    as_they_lie = values is matrix.values and scale is matrix.scale
    return [arranged] if as_they_lie else [arranged, values, scale]


def _run_on_hopper(
    x: Tensor, matrix: SlidMatrix, bias: Tensor | None, prepared: Sequence[Tensor], tile: hopper.Tile | None = None
) -> Tensor:
    arranged, *copies = prepared
    values, scale = copies or (matrix.values, matrix.scale)
    assert scale is not None
    weights = hopper.HopperMatrix(values, arranged, scale, None if bias is None else _padded(bias, hopper.ROWS))
    q, x_scale = quantise_slide(x, matrix.how, values.dtype)
    y = hopper.slide_matmul(weights, q, x_scale, x.dtype, tile)
    return y[:, : len(matrix.values)].contiguous()


def _tune_for_hopper(matrix: SlidMatrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
    """Which tile is the best is computed; each is compiled once for all weights of a type."""
    x = torch.zeros(1, matrix.columns, dtype=out, device=matrix.values.device)
    for tile in hopper.TILES:
        _run_on_hopper(x, matrix, None, prepared, tile)


def _prepare_for_library(matrix: SlidMatrix) -> list[Tensor]:
    """Values and positions are copied, compressed as the library wants them."""
    return [cusparselt.compress(_padded(_windowed(matrix), cusparselt.ROWS, cusparselt.LIFTED))]


def _run_by_library(x: Tensor, matrix: SlidMatrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    (tokens, _), rows, dtype, out = x.shape, len(matrix.values), matrix.values.dtype, x.dtype
    lifted = matrix.how.lifted(matrix.columns)
    filled, rows_filled, lifted = (
        number + -number % of
        for number, of in ((tokens, cusparselt.TOKENS), (rows, cusparselt.ROWS), (lifted, cusparselt.LIFTED))
    )
    # For bfloat16, sums in bfloat16: they are rounded once more, as little as the outputs are, and take half the time.
    sums_type = cusparselt.OUTPUTS[dtype][0 if out == torch.bfloat16 else -1]
    q, scale = _quantised(x, matrix, filled, lifted)
    sums = torch.empty(filled, rows_filled, dtype=sums_type, device=x.device)
    shape = cusparselt.ProductShape(rows_filled, lifted, filled, dtype, sums_type)
    _plan(shape, prepared[0]).run(prepared[0], q, sums)
    return scale_outputs(sums, tokens, rows, scale, matrix.scale, bias, out)


def _tune_library(matrix: SlidMatrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
    """Algorithms are the same up to the next power of two."""
    most = min(LARGEST, 1 << (tokens - 1).bit_length())
    x = torch.zeros(most, matrix.columns, dtype=out, device=matrix.values.device)
    while most:
        _run_by_library(x[:most], matrix, None, prepared)
        most = most // 2 if most > cusparselt.TOKENS else 0


def _plan(shape: cusparselt.ProductShape, compressed: Tensor) -> cusparselt.MatmulPlan:
    """The plan for a shape, which all layers share. The last ones used are kept."""
    key = (shape, compressed.device)
    plan = _plans.pop(key, None)
    if plan is None:
        if torch.cuda.is_current_stream_capturing():
            raise UserError(f"a product of {shape.tokens} tokens: run it once before it is captured in a CUDA graph")
        plan = cusparselt.MatmulPlan(shape, compressed.device, best_algorithm(shape, compressed))
        if len(_plans) >= _PLANS:
            _plans.pop(next(iter(_plans)))
    _plans[key] = plan
    return plan


def _quantised(x: Tensor, matrix: SlidMatrix, filled: int, lifted: int) -> tuple[Tensor, Tensor | None]:
    """Inputs as the library takes them: [filled, lifted]. What lies behind the tokens is never looked at."""
    if matrix.scale is None:
        q, _ = reference.quantise_slide(x, matrix.how, matrix.values.dtype)
        return F.pad(q, (0, lifted - q.shape[1], 0, filled - len(q))), None
    return quantise_slide(x, matrix.how, matrix.values.dtype, filled)


def _prepare_dense(matrix: SlidMatrix) -> list[Tensor]:
    """The weights as they were before they were slid."""
    warnings.warn("slide-bf16 is multiplied dense on this GPU, where that is faster; slide-int8 is not", stacklevel=2)
    whole = matrix.values.new_empty(len(matrix.values), matrix.columns)
    for rows, part in _parts(matrix):
        positions = unpack_positions(part.positions, part.values.shape[1], part.how)
        whole[rows] = unslide(part.values, positions, part.how, part.columns)
    return [whole]


def _run_dense(x: Tensor, matrix: SlidMatrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    (whole,) = prepared
    return F.linear(x.to(whole.dtype), whole, None if bias is None else bias.to(whole.dtype)).to(x.dtype)


def _tune_dense(matrix: SlidMatrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
    """torch chooses by itself."""


def _windowed(matrix: SlidMatrix) -> Tensor:
    """The slid weights with their zeros, of the type of the values [rows, lifted]."""
    whole = matrix.values.new_zeros(len(matrix.values), matrix.how.lifted(matrix.columns))
    for rows, part in _parts(matrix):
        positions = unpack_positions(part.positions, part.values.shape[1], part.how)
        _bits(whole)[rows] = windowed(_bits(part.values), positions, part.how)
    return whole


def _parts(matrix: SlidMatrix) -> "list[tuple[slice, SlidMatrix]]":
    """Split rows into groups, since unpacked positions take many times the memory of packed ones."""
    step = max(1, _PIECE // max(1, matrix.columns))
    slices = [slice(first, first + step) for first in range(0, len(matrix.values), step)]
    return [(s, SlidMatrix(matrix.values[s], matrix.positions[s], None, matrix.how, matrix.columns)) for s in slices]


def _padded(x: Tensor, rows: int, columns: int = 1) -> Tensor:
    """The tensor with zeros behind it, up to a multiple of so many rows and columns; itself where it is one already."""
    sizes = [(-x.shape[1] % columns)] if x.dim() == 2 else []
    pads = [amount for size in (*sizes, -x.shape[0] % rows) for amount in (0, size)]
    return F.pad(_bits(x), pads).view(x.dtype) if any(pads) else x


def _bits(x: Tensor) -> Tensor:
    """View FP8 as bytes, since torch cannot move all FP8 values otherwise."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


_HOPPER = _Way(4, _prepare_for_hopper, _run_on_hopper, _tune_for_hopper)
_LIBRARY = _Way(1, _prepare_for_library, _run_by_library, _tune_library)
_DENSE = _Way(2, _prepare_dense, _run_dense, _tune_dense)
