"""Products of many inputs at once, through cuBLAS in float16, and what lies between them (`kernels/prefill.cu`)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.runtime.cuda import zigzag
from sparsepack.runtime.cuda.attention import CACHE_TYPES
from sparsepack.runtime.cuda.deal import BAND_ROWS
from sparsepack.runtime.cuda.kernel import Kernel, kernel, launch
from sparsepack.runtime.cuda.zigzag import ZigzagMatrix, dequantise

THREADS = 512  # of a block that takes a row
HEADS = 8  # that a block takes


@dataclass(frozen=True)
class Halves:
    """Rows x = values * factor, with the largest magnitude of each row's values just below 2^15.

    values -- float16 [S, columns]
    factor -- float32 [S], powers of two
    """

    values: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Product:
    """Rows y = sums * factor * inverse + bias, put together by who reads them.

    sums    -- float32 [S, rows]
    factor  -- float32 [S], powers of two
    inverse -- a power of two
    bias    -- float32 [rows] or None
    """

    sums: Tensor
    factor: Tensor
    inverse: float
    bias: Tensor | None

    def rows(self) -> Tensor:
        """y: float32 [S, rows], in the place of the sums."""
        # One after the other: together the two may leave the range of float32.
        y = self.sums.mul_(self.factor[:, None]).mul_(self.inverse)
        return y if self.bias is None else y.add_(self.bias)


def new_scratch(matrices: Iterable[ZigzagMatrix], device: torch.device) -> Tensor:
    """Room for what `multiply` dequantises of any of these matrices: float16, at most `zigzag.SCRATCH_BYTES`."""
    largest = max(m.columns * BAND_ROWS * min(_bands(m), _bands_at_once(m)) for m in matrices)
    return torch.empty(largest, dtype=torch.float16, device=device)


def multiply(matrix: ZigzagMatrix, x: Halves, scratch: Tensor, bias: Tensor | None = None) -> Product:
    """W x + bias for every row, with every column.

    Weights and inputs are rounded to float16, the inputs relative to the largest of their row; sums are float32.

    scratch -- of `new_scratch`; products on one stream may share it
    """
    sums = torch.empty(len(x.values), matrix.rows, device=x.values.device)
    step = _bands_at_once(matrix)
    for first in range(0, _bands(matrix) if len(sums) else 0, step):
        bands = min(step, _bands(matrix) - first)
        weights = scratch[: matrix.columns * bands * BAND_ROWS].view(matrix.columns, -1)
        dequantise(matrix, weights, first, bands)
        part = sums[:, first * BAND_ROWS : (first + bands) * BAND_ROWS]
        _half_product(x.values, weights[:, : part.shape[1]], part)
    return Product(sums, x.factor, 1 / matrix.half_scale, bias)


def _half_product(x: Tensor, weights: Tensor, out: Tensor) -> None:
    torch.mm(x, weights, out_dtype=torch.float32, out=out)


def _bands(matrix: ZigzagMatrix) -> int:
    return -(-matrix.rows // BAND_ROWS)


def _bands_at_once(matrix: ZigzagMatrix) -> int:
    return max(zigzag.SCRATCH_BYTES // (2 * BAND_ROWS * matrix.columns), 1)


def halved(x: Tensor, added: Product | None = None, norm: Tensor | None = None, eps: float = 0.0) -> Halves:
    """x, or its RMSNorm, as input of a product.

    x     -- float32 [S, columns], contiguous
    added -- is added to x before, and x written back
    norm  -- weight of the RMSNorm, float32 [columns], with `eps`
    """
    halves = _new_halves(x)
    _add_rows(x, added, norm, eps, halves)
    return halves


def add(x: Tensor, added: Product) -> None:
    """x += added: float32 [S, columns], contiguous."""
    _add_rows(x, added, None, 0.0, None)


def gated(stacked: Product, activation: int) -> Halves:
    """activation(gate) * up, as input of a product: [S, 2 * width] -> [S, width].

    activation -- number of the function, see `kernels/activations.cuh`
    """
    sums = stacked.sums
    width = sums.shape[1] // 2
    halves = _new_halves(sums[:, :width])
    if len(sums):
        launch(
            _row_kernel("gate_rows", width, sums, activation=activation),
            (len(sums),),
            THREADS,
            *(sums, width, stacked.factor, stacked.inverse, stacked.bias, halves.values, halves.factor),
        )
    return halves


def split_heads(
    qkv: Product,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: int,
    *,
    heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate q and k of the positions `first` .. first + S - 1, and append k and v to the cache.

    qkv            -- [S, (heads + 2 * kv_heads) * head_dim]: q, then k, then v
    keys, values   -- of any of the cache's types, [1, kv_heads, context, head_dim], contiguous
    cos, sin       -- float32 [context or more, head_dim / 2], as `reference.rotary_table` gives them
    q_norm, k_norm -- float32 [head_dim]: RMSNorm of every head before it is rotated, with `eps`

    Returns q: [S, heads, head_dim] of the cache's type.
    """
    _, kv_heads, context, head_dim = keys.shape
    q = torch.empty(len(qkv.sums), heads, head_dim, dtype=keys.dtype, device=keys.device)
    if len(q):
        defines = ("HEADS=1", f"HEAD_DIM={head_dim}", f"KV={CACHE_TYPES[keys.dtype]}")
        launch(
            kernel("prefill", "split_heads", defines, keys.device.index or 0),
            (len(q), -(-(heads + 2 * kv_heads) // HEADS)),
            HEADS * 32,
            *(qkv.sums, qkv.factor, qkv.inverse, qkv.bias, q_norm, k_norm, float(eps), cos, sin),
            *(first, context, heads, kv_heads, q, keys, values),
        )
    return q


def _new_halves(x: Tensor) -> Halves:
    values = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return Halves(values, torch.empty(len(x), device=x.device))


def _add_rows(x: Tensor, added: Product | None, norm: Tensor | None, eps: float, halves: Halves | None) -> None:
    if not len(x):
        return
    product = (added.sums, added.factor, added.inverse, added.bias) if added else (None, None, 0.0, None)
    launch(
        _row_kernel("add_rows", x.shape[1], x, product[0]),
        (len(x),),
        THREADS,
        *(x, x.shape[1], *product, norm, float(eps)),
        *((halves.values, halves.factor) if halves else (None, None)),
    )


def _row_kernel(name: str, width: int, x: Tensor, product: Tensor | None = None, activation: int = 0) -> Kernel:
    """The variant for rows of a width, four columns at a time where rows begin at multiples of 16 bytes."""
    places = x.data_ptr() | (0 if product is None else product.data_ptr()) | 4 * width
    vector = 1 if places % 16 else 4
    defines = (f"VECTOR={vector}", f"ROUNDS={-(-width // (vector * THREADS))}", f"ACTIVATION={activation}")
    return kernel("prefill", name, defines, x.device.index or 0)
