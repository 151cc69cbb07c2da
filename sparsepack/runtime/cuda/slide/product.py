"""Products with sparse24 weights on an NVIDIA GPU: which kernel makes them, the weights as that kernel takes them,
inputs quantised, and outputs scaled.

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
from sparsepack.formats.orders.slide import Slide, unpack_positions, windowed
from sparsepack.runtime.cuda.driver.kernel import architecture, check_architecture, kernel, launch
from sparsepack.runtime.cuda.slide import cusparselt, hopper
from sparsepack.runtime.cuda.slide.cusparselt import LARGEST, best_algorithm
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.products import Sparse24Matrix

MOST_EIGHTS = {8: 4, 16: 5, 32: 16}
"""A block, which has a token, has this many warps, and a thread holds at most this many groups of eight inputs in
registers."""
LIGHT_EIGHTS = 5
"""With this many groups of eight 16-bit inputs there is room for as many threads as a multiprocessor can have."""
THREADS = 2048
"""A multiprocessor has at most this many threads."""
ALIGNMENT = 32
"""A row of expanded values is padded with zeros to a multiple of this many bytes, as the 2:4 products want."""

_INPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_FROM = 89
"""FP8 needs at least this compute capability, times ten."""


def row_bytes(how: Slide, columns: int) -> int:
    """The number of bytes from one token's expanded values to the next token's."""
    expanded = how.expanded(columns)
    return expanded + -expanded % ALIGNMENT


def quantise_slide(x: Tensor, how: Slide, dtype: torch.dtype, filled: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise inputs token by token and expand them, on the current stream; see `slide.reference.quantise_slide`.

    x      -- float32, float16 or bfloat16 [tokens, columns], contiguous
    dtype  -- int8 or float8_e4m3fn
    filled -- rows of the result, if more than tokens: what the others hold is undefined

    Returns the values [tokens, `row_bytes`], zeros behind those that are expanded, and the scales, float32 [tokens]. A
    token that is not finite gets a scale that is not. Raises `UserError` for FP8 on a GPU without it, `ValueError` for
    what does not fit.
    """
    if x.dim() != 2 or x.dtype not in _INPUTS or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)}, stride {x.stride()}; expected a contiguous float matrix")
    if (how.most, how.window) != (2, 4) or dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"{how.most} of {how.window}, {dtype}: expected 2 of 4, int8 or float8_e4m3fn")
    tokens, columns = x.shape
    device = x.device.index or 0
    fp8 = dtype == torch.float8_e4m3fn
    if fp8 and architecture(device) < _FP8_FROM:
        raise UserError(f"FP8 needs a GPU of compute capability {_FP8_FROM / 10} (Ada) or later; use slide-int8")
    stride = row_bytes(how, columns)
    q = torch.empty(max(tokens, filled), stride, dtype=dtype, device=x.device)
    scale = torch.empty(tokens, device=x.device)
    if not tokens:
        return q, scale
    warps = next((warps for warps, most in MOST_EIGHTS.items() if columns <= 256 * warps * most), 0)
    if not warps:
        raise ValueError(f"{columns} columns; expected at most {256 * 32 * MOST_EIGHTS[32]}")
    eights = -(-columns // (256 * warps))
    full = x.element_size() == 2 and eights <= LIGHT_EIGHTS
    defines = (
        f"INPUT={_INPUTS[x.dtype]}",
        f"FP8={int(fp8)}",
        f"OF={how.pattern.of}",
        f"WINDOWS={how.windows}",
        f"THREAD_EIGHTS={eights}",
        f"WARPS={warps}",
        f"BLOCKS={THREADS // (32 * warps) if full else 1}",
    )
    launch(
        kernel("quantise_slide", "quantise_slide", defines, device),
        (tokens,),
        32 * warps,
        *(x, columns, x.element_size(), stride, q.view(torch.uint8), scale),
        shared=0 if 8 % how.pattern.of == 0 else how.pattern.groups(columns) * how.pattern.of + 8,
    )
    return q, scale


_SUMS = {torch.int32: 0, torch.float32: 1, torch.bfloat16: 2}
_OUTPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ROWS = 1024
"""A block has this many rows."""


def scale_outputs(
    sums: Tensor,
    tokens: int,
    rows: int,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """y = sums * x_scale * w_scale + bias, on the current stream.

    sums    -- int32, float32 or bfloat16 [tokens or more, rows or more], contiguous
    x_scale -- float32 [tokens]; None: 1
    w_scale -- float32 [rows]; None: 1
    bias    -- of the type `out` [rows], or None
    out     -- float32, float16 or bfloat16

    Returns [tokens, rows].
    """
    y = torch.empty(tokens, rows, dtype=out, device=sums.device)
    if tokens:
        launch(
            kernel("scale_outputs", "scale_outputs", _defines(sums.dtype, out), sums.device.index or 0),
            (tokens, -(-rows // _ROWS)),
            256,
            *(sums, sums.shape[1], x_scale, w_scale, bias, y, rows),
        )
    return y


def _defines(sums: torch.dtype, out: torch.dtype) -> tuple[str, str]:
    return f"SUMS={_SUMS[sums]}", f"OUTPUT={_OUTPUTS[out]}"


_PIECE = 1 << 24
"""This many weights are unpacked at a time."""
_PLANS = 256
"""The cache keeps at most this many plans."""

_plans: dict[tuple[cusparselt.ProductShape, torch.device], cusparselt.MatmulPlan] = {}


def prepare(matrix: Sparse24Matrix, out: torch.dtype, tokens: int = 0) -> list[Tensor]:
    """What `sparse24_matmul` needs of a matrix on the current GPU beside the matrix, for inputs and outputs of a type.

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


def sparse24_matmul(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
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
    prepare: Callable[[Sparse24Matrix], list[Tensor]]
    run: Callable[[Tensor, Sparse24Matrix, Tensor | None, Sequence[Tensor]], Tensor]
    tune: Callable[[Sparse24Matrix, torch.dtype, int, Sequence[Tensor]], None]


def _way(matrix: Sparse24Matrix, out: torch.dtype) -> _Way:
    if architecture(matrix.values.device.index or 0) != hopper.ARCHITECTURE:
        return _LIBRARY
    if matrix.scale is None:
        return _DENSE
    return _HOPPER if out in hopper.OUTPUTS else _LIBRARY


def _prepare_for_hopper(matrix: Sparse24Matrix) -> list[Tensor]:
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
    x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor], tile: hopper.Tile | None = None
) -> Tensor:
    arranged, *copies = prepared
    values, scale = copies or (matrix.values, matrix.scale)
    assert scale is not None
    weights = hopper.HopperMatrix(values, arranged, scale, None if bias is None else _padded(bias, hopper.ROWS))
    q, x_scale = quantise_slide(x, matrix.how, values.dtype)
    y = hopper.slide_matmul(weights, q, x_scale, x.dtype, tile)
    return y[:, : len(matrix.values)].contiguous()


def _tune_for_hopper(matrix: Sparse24Matrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
    """Which tile is the best is computed; each is compiled once for all weights of a type."""
    x = torch.zeros(1, matrix.columns, dtype=out, device=matrix.values.device)
    for tile in hopper.TILES:
        _run_on_hopper(x, matrix, None, prepared, tile)


def _prepare_for_library(matrix: Sparse24Matrix) -> list[Tensor]:
    """Values and positions are copied, compressed as the library wants them."""
    return [cusparselt.compress(_padded(_windowed(matrix), cusparselt.ROWS, cusparselt.EXPANDED))]


def _run_by_library(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    (tokens, _), rows, dtype, out = x.shape, len(matrix.values), matrix.values.dtype, x.dtype
    expanded = matrix.how.expanded(matrix.columns)
    filled, rows_filled, expanded = (
        number + -number % of
        for number, of in ((tokens, cusparselt.TOKENS), (rows, cusparselt.ROWS), (expanded, cusparselt.EXPANDED))
    )
    # For bfloat16, sums in bfloat16: they are rounded once more, as little as the outputs are, and take half the time.
    sums_type = cusparselt.OUTPUTS[dtype][0 if out == torch.bfloat16 else -1]
    q, scale = _quantised(x, matrix, filled, expanded)
    sums = torch.empty(filled, rows_filled, dtype=sums_type, device=x.device)
    shape = cusparselt.ProductShape(rows_filled, expanded, filled, dtype, sums_type)
    _plan(shape, prepared[0]).run(prepared[0], q, sums)
    return scale_outputs(sums, tokens, rows, scale, matrix.scale, bias, out)


def _tune_library(matrix: Sparse24Matrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
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


def _quantised(x: Tensor, matrix: Sparse24Matrix, filled: int, expanded: int) -> tuple[Tensor, Tensor | None]:
    """Inputs as the library takes them: [filled, expanded]. What lies behind the tokens is never looked at."""
    if matrix.scale is None:
        q, _ = reference.quantise_slide(x, matrix.how, matrix.values.dtype)
        return F.pad(q, (0, expanded - q.shape[1], 0, filled - len(q))), None
    return quantise_slide(x, matrix.how, matrix.values.dtype, filled)


def _prepare_dense(matrix: Sparse24Matrix) -> list[Tensor]:
    """The weights as they were before they were slid."""
    warnings.warn("slide-bf16 is multiplied dense on this GPU, where that is faster; slide-int8 is not", stacklevel=2)
    return [matrix.dense(matrix.values.dtype)]


def _run_dense(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    (whole,) = prepared
    return F.linear(x.to(whole.dtype), whole, None if bias is None else bias.to(whole.dtype)).to(x.dtype)


def _tune_dense(matrix: Sparse24Matrix, out: torch.dtype, tokens: int, prepared: Sequence[Tensor]) -> None:
    """torch chooses by itself."""


def _windowed(matrix: Sparse24Matrix) -> Tensor:
    """The sparse24 weights with their zeros, of the type of the values [rows, expanded]."""
    whole = matrix.values.new_zeros(len(matrix.values), matrix.how.expanded(matrix.columns))
    for rows, part in _parts(matrix):
        positions = unpack_positions(part.positions, part.values.shape[1], part.how)
        _bits(whole)[rows] = windowed(_bits(part.values), positions, part.how)
    return whole


def _parts(matrix: Sparse24Matrix) -> "list[tuple[slice, Sparse24Matrix]]":
    """Split rows into groups, since unpacked positions take many times the memory of packed ones."""
    step = max(1, _PIECE // max(1, matrix.columns))
    slices = [slice(first, first + step) for first in range(0, len(matrix.values), step)]
    return [
        (s, Sparse24Matrix(matrix.values[s], matrix.positions[s], None, matrix.how, matrix.columns)) for s in slices
    ]


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
