"""Products with slid weights on an NVIDIA GPU: which kernel makes them, and the weights as that kernel takes them.

    GPU                  slide-int8, slide-fp8                             slide-bf16
    Hopper               our kernel; float32 outputs: libcusparseLt        dense: libcusparseLt's is slower
    others from Ampere   libcusparseLt                                     libcusparseLt

The measurements are in benchmarks/RESULTS.md. Products can be captured in a CUDA graph once they ran with as many
tokens.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.codecs.slide import unpack_positions, unslide, windowed
from sparsepack.runtime.cuda.driver.compiler import check_architecture
from sparsepack.runtime.cuda.driver.kernel import architecture
from sparsepack.runtime.cuda.slide import cusparselt, hopper
from sparsepack.runtime.cuda.slide.algorithms import best_algorithm
from sparsepack.runtime.cuda.slide.inputs import quantise_slide
from sparsepack.runtime.cuda.slide.outputs import scale_outputs
from sparsepack.runtime.reference import slide as reference
from sparsepack.runtime.reference.slide import SlidMatrix

Product = Callable[[Tensor], Tensor]
"""A product takes x, contiguous [tokens, columns], and returns y of the same type, [tokens, rows]."""

_PIECE = 1 << 24
"""This many weights are unpacked at a time."""
_PLANS = 256
"""The cache keeps at most this many plans."""

_plans: dict[tuple[cusparselt.ProductShape, torch.device], cusparselt.MatmulPlan] = {}


def slid_product(matrix: SlidMatrix, bias: Tensor | None, out: torch.dtype) -> Product:
    """Prepare the products of a matrix on its GPU with inputs and outputs of the type `out`.

    bias -- [rows], or None

    Outputs have no gradient. Raises `UserError` for a GPU that has no such product, where a library is missing, or
    while a CUDA graph is captured; `PackingError` for positions that were changed.
    """
    device = matrix.values.device
    if torch.cuda.is_current_stream_capturing():
        raise UserError("a slid Linear: run it once before it is captured in a CUDA graph")
    if matrix.scale is not None and matrix.scale.dtype != torch.float32:
        raise ValueError(f"scales are {matrix.scale.dtype}; expected float32")
    arch = architecture(device.index or 0)
    check_architecture(arch)
    bias = None if bias is None else bias.to(out)
    if matrix.scale is None:
        return _dense(matrix, bias) if arch == hopper.ARCHITECTURE else _by_library(matrix, bias, out)
    if arch == hopper.ARCHITECTURE and out in hopper.OUTPUTS:
        return _on_hopper(matrix, bias, out)
    return _by_library(matrix, bias, out)


def _on_hopper(matrix: SlidMatrix, bias: Tensor | None, out: torch.dtype) -> Product:
    """Values stay as they lie where their rows are aligned; positions are copied, in the order of the threads."""
    rows, stored = matrix.values.shape
    assert matrix.scale is not None
    values = _padded(matrix.values, hopper.ROWS, hopper.STORED)
    prepared = hopper.HopperMatrix(
        values if values.data_ptr() % hopper.ALIGNMENT == 0 else values.clone(),
        hopper.arranged_positions(matrix.positions, stored),
        _padded(matrix.scale, hopper.ROWS),
        None if bias is None else _padded(bias, hopper.ROWS),
    )

    def product(x: Tensor) -> Tensor:
        q, scale = quantise_slide(x, matrix.how, matrix.values.dtype)
        return hopper.slide_matmul(prepared, q, scale, out)[:, :rows]

    return product


def _by_library(matrix: SlidMatrix, bias: Tensor | None, out: torch.dtype) -> Product:
    """Values and positions are copied, compressed as the library wants them."""
    rows, dtype = len(matrix.values), matrix.values.dtype
    weight = _padded(_windowed(matrix), cusparselt.ROWS, cusparselt.LIFTED)
    compressed, (padded_rows, lifted) = cusparselt.compress(weight), weight.shape
    del weight
    # For bfloat16, sums in bfloat16: they are rounded once more, as little as the outputs are, and take half the time.
    sums_type = cusparselt.OUTPUTS[dtype][0 if out == torch.bfloat16 else -1]

    def product(x: Tensor) -> Tensor:
        tokens = len(x)
        if not tokens:
            return x.new_empty(0, rows)
        filled = tokens + -tokens % cusparselt.TOKENS
        q, scale = _quantised(x, matrix, filled, lifted)
        sums = torch.empty(filled, padded_rows, dtype=sums_type, device=x.device)
        shape = cusparselt.ProductShape(padded_rows, lifted, filled, dtype, sums_type)
        _plan(shape, compressed).run(compressed, q, sums)
        return scale_outputs(sums, tokens, rows, scale, matrix.scale, bias, out)

    return product


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


def _dense(matrix: SlidMatrix, bias: Tensor | None) -> Product:
    """The weights as they were before they were slid."""
    warnings.warn("slide-bf16 is multiplied dense on this GPU, where that is faster; slide-int8 is not", stacklevel=2)
    whole = matrix.values.new_empty(len(matrix.values), matrix.columns)
    for rows, part in _parts(matrix):
        positions = unpack_positions(part.positions, part.values.shape[1], part.how)
        whole[rows] = unslide(part.values, positions, part.how, part.columns)

    def product(x: Tensor) -> Tensor:
        return F.linear(x.to(whole.dtype), whole, None if bias is None else bias.to(whole.dtype)).to(x.dtype)

    return product


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
