"""The operator `sparsepack::slid_linear`: products with sparse24 weights, for whoever runs a model.

    slid_linear(x, values, positions, scale, bias, prepared, keep, of) -> y

    x         -- float32, float16 or bfloat16 [..., columns]
    values    -- int8, float8_e4m3fn or bfloat16 [rows, stored]; inputs are quantised token by token to this type
    positions -- uint8 [rows, stored / 4 rounded up]
    scale     -- float32 [rows]; None for bfloat16
    bias      -- [rows], or None
    prepared  -- what `prepare` made of the weights for the type of x
    keep, of  -- the pattern of the weights

y is of the type of x [..., rows]; of a token with an input that is not finite, no output is. NVIDIA GPUs have kernels
(`runtime.cuda.slide`), other devices a dense product; without what `prepare` made, the reference.

To torch this is one operation that depends on its arguments alone: `torch.compile` keeps a model whole, and CUDA graphs
capture it once it ran with as many tokens. There is no gradient: asking for one is a `UserError`. Tensors that do not
fit together are a `ValueError`.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import SMALLEST, STEPS, Slide
from sparsepack.models.pattern import Pattern
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.operator_library import define
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.products import Sparse24Matrix


def sparse24_linear(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    """y = x W^T + bias by the operator: [..., columns] -> [..., rows]."""
    if not (x.is_cuda or torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())) and prepared:
        # On a CPU torch's way to this function takes as long as the product of a small matrix with one token.
        return _off_gpu(x, matrix, bias, prepared)
    pattern = matrix.how.pattern
    weights = (matrix.values, matrix.positions, matrix.scale)
    y: Tensor = torch.ops.sparsepack.slid_linear(x, *weights, bias, list(prepared), pattern.keep, pattern.of)
    return y


def prepare(matrix: Sparse24Matrix, dtype: torch.dtype, tokens: int = 0) -> list[Tensor]:
    """What the operator needs of a matrix for inputs of a type beside the matrix itself, on its device.

    tokens -- products of up to so many tokens will come: what suits them is found and compiled now. 0: when they come

    It waits for the GPU, which the operator never does. Of what lies on another device it is the weights before they
    were slid, [rows, columns]: of int8 values as they are, the columns padded to whole steps of the CPU's kernels;
    where those do not take them, `dense_type`, multiplied by their scales where that is float32. Raises `UserError` for
    a GPU that has no such product, where a library is missing, or while a CUDA graph is captured; `PackingError` for
    positions that were changed.
    """
    # What is made here serves calls in inference mode and outside of it.
    with torch.inference_mode(False), torch.no_grad():
        if not matrix.values.is_cuda:
            dense = matrix.dense(dense_type(matrix, dtype))
            if dense.dtype == torch.int8:
                return [F.pad(dense, (0, -matrix.columns % _INT8_STEP))]
            if matrix.scale is not None and dense.dtype == torch.float32:  # bfloat16 would round them
                dense *= matrix.scale[:, None]
            return [dense]
        from sparsepack.runtime.cuda.slide.product import prepare as prepare_on_gpu

        with torch.cuda.device(matrix.values.device):
            return prepare_on_gpu(matrix, dtype, tokens)


_MOST = {dtype: torch.tensor(steps) for dtype, steps in STEPS.items()}
"""Tensors: of a Python number and a tensor torch makes a product with a reciprocal, which rounds twice."""


_INT8_STEP = 32  # quantise/int8.h
_MOST_BY_US = 8
"""Tokens of a product of int8 that the CPU's kernels compute themselves. torch copies the weights for each product, in
the order that the processor takes, and is faster from there on where that has VNNI or AMX."""


def dense_type(matrix: Sparse24Matrix, dtype: torch.dtype) -> torch.dtype:
    """The type of dense weights for inputs of a type off NVIDIA's GPUs: int8 where they are int8 and the CPU's kernels
    run; else bfloat16 where the inputs are and the processor multiplies it. Values of 8 bits are exact in each."""
    if matrix.values.dtype == torch.int8 and matrix.values.is_cpu and _kernels(torch.get_num_threads()):
        return torch.int8
    fast = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return torch.bfloat16 if fast and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _off_gpu(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: Sequence[Tensor]) -> Tensor:
    if prepared:
        y = _by_dense(x, matrix, bias, *prepared)
    else:
        y = _by_reference(x.reshape(-1, matrix.columns), matrix).view(*x.shape[:-1], len(matrix.values))
        y = y if bias is None else y + bias.float()
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _by_dense(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, dense: Tensor) -> Tensor:
    """As the reference but for roundings of sums, [..., columns] -> float32 [..., rows], or bfloat16 where `dense` is.
    In few operations: of one token each takes a part of the time that the product takes."""
    dtype = matrix.values.dtype
    if dense.dtype == torch.int8:
        return _int8_linear(x, matrix, bias, dense)
    if matrix.scale is None:
        x = x.to(dtype).to(dense.dtype)
    elif dense.dtype == torch.float32:
        x, _ = _rounded_rows(x, dtype, scaled=True)
    else:
        q, scale = _rounded_rows(x, dtype, scaled=False)
        assert scale is not None
        y = F.linear(q.to(dense.dtype), dense).float().mul_(scale * matrix.scale)
        return y if bias is None else y.add_(bias)
    return F.linear(x, dense, bias if bias is None or bias.dtype == dense.dtype else bias.to(dense.dtype))


def _int8_linear(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, weights: Tensor) -> Tensor:
    """The reference's values to the last bit, by the CPU's kernels: [..., columns] -> float32 [..., rows]."""
    assert matrix.scale is not None
    (rows, stride), columns, bfloats = weights.shape, matrix.columns, x.dtype == torch.bfloat16
    if x.shape[-1] != columns:
        raise ValueError(f"inputs {list(x.shape)}; expected [..., {columns}]")
    x = (x if bfloats else x.float()).contiguous()
    tokens = x.numel() // columns
    if not tokens:
        return torch.empty(*x.shape[:-1], rows)
    bias = None if bias is None else bias.float()
    scales = (matrix.scale.data_ptr(), 0 if bias is None else bias.data_ptr())
    kernels = _kernels(torch.get_num_threads())
    assert kernels is not None  # `prepare` would have made no int8 weights
    if tokens <= _MOST_BY_US or not _torch_multiplies_int8():
        y = torch.empty(*x.shape[:-1], rows)
        addresses = (x.data_ptr(), bfloats, weights.data_ptr(), *scales, y.data_ptr())
        kernels.int8_linear(*addresses, tokens, rows, columns, stride)
        return y
    q, x_scale = torch.empty(tokens, stride, dtype=torch.int8), torch.empty(tokens)
    kernels.int8_rows(x.data_ptr(), bfloats, q.data_ptr(), x_scale.data_ptr(), tokens, columns, stride)
    y = torch._int_mm(q, weights.t()).view(torch.float32)  # sums, which become y in their own memory
    kernels.scale_sums(x_scale.data_ptr(), *scales, y.data_ptr(), tokens, rows)
    return y.view(*x.shape[:-1], rows)


@cache
def _torch_multiplies_int8() -> bool:
    """Whether torch has a fast product of int8 on this processor, and its sums are exact: without VNNI they saturate at
    16 bits."""
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):  # type: ignore[no-untyped-call]
        return False
    largest = torch.full((_MOST_BY_US + 1, 2 * _INT8_STEP), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 127**2 * largest.shape[1]).all())


def _rounded_rows(x: Tensor, dtype: torch.dtype, scaled: bool) -> tuple[Tensor, Tensor | None]:
    """What `quantise_rows` makes of inputs, but float32, and a scale of NaN for rows that are not finite:
    [..., columns] -> [..., columns], [..., 1].

    scaled -- the first is multiplied by the scales, which are not returned
    """
    found = _kernels(torch.get_num_threads()) if x.is_cpu else None
    if found is None:
        largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32).clamp_(min=SMALLEST)
        q, scale = x * (_MOST[dtype] / largest), largest / _MOST[dtype]
        q = q.to(dtype).float() if dtype.is_floating_point else q.round_()
        return (q.mul_(scale), None) if scaled else (q, scale)
    bfloats, columns = x.dtype == torch.bfloat16, x.shape[-1]
    x = (x if bfloats else x.float()).contiguous()
    q = torch.empty_like(x, dtype=torch.float32)
    scale = None if scaled else torch.empty(*x.shape[:-1], 1)
    if q.numel():
        into = 0 if scale is None else scale.data_ptr()
        found.round_rows(
            x.data_ptr(), bfloats, q.data_ptr(), into, q.numel() // columns, columns, STEPS[dtype], dtype != torch.int8
        )
    return q, scale


@lru_cache(maxsize=4)
def _kernels(threads: int) -> Any | None:
    """The native operations; None where they were not built. To find them takes as long as a small product."""
    try:
        return machine.native().Operations(machine.instruction_set(), threads)
    except UserError:
        return None


def _by_reference(x: Tensor, matrix: Sparse24Matrix) -> Tensor:
    finite = x.isfinite().all(-1, keepdim=True)
    q, scale = reference.quantise_slide(torch.where(finite, x, 0), matrix.how, matrix.values.dtype)
    return torch.where(finite, reference.slide_matmul(matrix, q, scale), torch.nan)


def _on_gpu(x: Tensor, *weights: Any) -> Tensor:
    from sparsepack.runtime.cuda.slide.product import sparse24_matmul

    matrix, bias, prepared = _unpack(x, *weights)
    with torch.cuda.device(x.device):  # kernels run on the current one
        y = sparse24_matmul(x.reshape(-1, matrix.columns).contiguous(), matrix, bias, prepared)
    return y.view(*x.shape[:-1], len(matrix.values))


def _shape_alone(x: Tensor, *weights: Any) -> Tensor:
    matrix, _, _ = _unpack(x, *weights)
    return x.new_empty(*x.shape[:-1], len(matrix.values))


def _unpack(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    prepared: list[Tensor],
    keep: int,
    of: int,
) -> tuple[Sparse24Matrix, Tensor | None, list[Tensor]]:
    """The operator's arguments behind x. Raises `ValueError` where something does not fit."""
    matrix = Sparse24Matrix(values, positions, scale, Slide(Pattern(keep, of)), x.shape[-1])
    (rows, width), stored = values.shape, matrix.how.stored(matrix.columns)
    fits = width == stored and positions.shape == (rows, -(-stored // 4)) and x.device == values.device
    if not fits or not x.is_floating_point() or (scale is not None) != (values.dtype in STEPS):
        raise ValueError(
            f"inputs {list(x.shape)} of {x.dtype} on {x.device} do not fit slid weights, {matrix.how.pattern}: "
            f"{list(values.shape)} values of {values.dtype} on {values.device}, {list(positions.shape)} positions, "
            f"{'no' if scale is None else 'with'} scales; expected {stored} values a row"
        )
    return matrix, bias, prepared


define(
    "slid_linear(Tensor x, Tensor values, Tensor positions, Tensor? scale, Tensor? bias, Tensor[] prepared, int keep, "
    "int of) -> Tensor",
    lambda x, *weights: _off_gpu(x, *_unpack(x, *weights)),
    _shape_alone,
    _on_gpu,
)
