"""Products of many inputs at once, through cuBLAS in float16, and the kernels between two products
(`kernels/decoder/prefill.cu`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.attention.attention import KV_MACROS, AttentionParameters
from sparsepack.runtime.cuda.driver.kernel import Kernel, kernel, launch
from sparsepack.runtime.cuda.products import grouped, zigzag
from sparsepack.runtime.cuda.products.rows import RowsFp16, decode
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, dequantise

THREADS = 512  # of a block that takes a row
HEADS = 8  # that a block takes


@dataclass(frozen=True)
class ScaledFp16:
    """Rows x = values * factor in float16, with the largest magnitude of each row's values just below 2^15.

    values -- float16 [S, columns]
    factor -- float32 [S], powers of two
    """

    values: Tensor
    factor: Tensor

    def rows(self, numbers: Tensor) -> "ScaledFp16":
        """Some of the rows, by their numbers: int64 [n]."""
        return ScaledFp16(self.values[numbers], self.factor[numbers])


@dataclass(frozen=True)
class Product:
    """Rows y = sums * factor * inverse + bias, put together by who reads them.

    sums    -- float32 [S, rows], rows side by side
    factor  -- float32 [S], powers of two
    inverse -- a power of two
    bias    -- float32 [rows] or None
    """

    sums: Tensor
    factor: Tensor
    inverse: float
    bias: Tensor | None

    def part(self, first: int, rows: int) -> "Product":
        """Some of the rows, from the first on."""
        of = slice(first, first + rows)
        return replace(self, sums=self.sums[:, of], bias=None if self.bias is None else self.bias[of])


def new_scratch(
    matrices: Iterable[CudaZigzag], device: torch.device, at_least: int = 0, most: int | None = None
) -> Tensor:
    """A buffer for what `multiply` dequantises of any of these matrices, or `at_least` so many numbers: float16, at
    most so many bytes (None: `zigzag.SCRATCH_BYTES`), but no less than a band takes."""
    most = (zigzag.SCRATCH_BYTES if most is None else most) // 2
    of_bands = [(m.columns * BAND_ROWS, _bands(m)) for m in matrices]
    largest = max([at_least, *(band * bands for band, bands in of_bands)])
    return torch.empty(max([min(largest, most), *(band for band, _ in of_bands)]), dtype=torch.float16, device=device)


def multiply(matrix: CudaZigzag, x: ScaledFp16, scratch: Tensor, bias: Tensor | None = None) -> Product:
    """The product W x + bias for every row of x, with every column of W.

    Weights and inputs are rounded to float16, the inputs relative to the largest of their row; sums are float32.

    scratch -- of `new_scratch`; products on one stream may share it
    """
    if grouped.takes(matrix, len(x.values)):
        return Product(grouped.sums_of_few(matrix, x.values), x.factor, 1 / matrix.fp16_scale, bias)
    sums = torch.empty(len(x.values), matrix.rows, device=x.values.device)
    step = len(scratch) // (matrix.columns * BAND_ROWS)
    for first in range(0, _bands(matrix) if len(sums) else 0, step):
        bands = min(step, _bands(matrix) - first)
        weights = scratch[: matrix.columns * bands * BAND_ROWS].view(matrix.columns, -1)
        dequantise(matrix, weights, first, bands)
        part = sums[:, first * BAND_ROWS : (first + bands) * BAND_ROWS]
        _fp16_product(x.values, weights[:, : part.shape[1]], part)
    return Product(sums, x.factor, 1 / matrix.fp16_scale, bias)


def multiply_rows(rows: RowsFp16, x: ScaledFp16, scratch: Tensor) -> Product:
    """`multiply` for a matrix stored by rows, without a bias."""
    matrix = rows.matrix
    sums = torch.empty(len(x.values), matrix.rows, device=x.values.device)
    step = min(len(scratch) // (3 * matrix.columns), matrix.rows)  # a weight as float32 and as float16
    exact = scratch[: 2 * step * matrix.columns].view(torch.float32).view(step, -1)
    rounded = scratch[2 * step * matrix.columns :][: step * matrix.columns].view(step, -1)
    for first in range(0, matrix.rows if len(sums) else 0, step):
        part = sums[:, first : first + step]
        of_part = slice(0, part.shape[1])
        decode(matrix, first, exact[of_part], rows.fp16_scale)
        rounded[of_part].copy_(exact[of_part])
        _fp16_product(x.values, rounded[of_part].t(), part)
    return Product(sums, x.factor, 1 / rows.fp16_scale, None)


def new_sums(x: ScaledFp16, weights: Tensor) -> Tensor:
    """The product of values and weights float16 [columns, rows]: float32 [S, rows]."""
    sums = torch.empty(len(x.values), weights.shape[1], device=weights.device)
    _fp16_product(x.values, weights, sums)
    return sums


def _fp16_product(x: Tensor, weights: Tensor, out: Tensor) -> None:
    torch.mm(x, weights, out_dtype=torch.float32, out=out)


def new_products(x: Tensor, weights: Tensor) -> Tensor:
    """The products of several matrices, float16 [n, S, columns] and [n, columns, rows]: float32 [n, S, rows]."""
    return torch.bmm(x, weights, out_dtype=torch.float32)


def _bands(matrix: CudaZigzag) -> int:
    return -(-matrix.rows // BAND_ROWS)


def to_scaled_fp16(
    x: Tensor,
    update: Product | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    update_norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    sum_scale: float = 1.0,
) -> ScaledFp16:
    """Scale x, or its RMSNorm or LayerNorm, to the input of a product.

    x           -- float32 [S, columns], contiguous
    update      -- a product that is added to x (the residual stream) before, and x written back
    norm        -- weight of the RMSNorm, float32 [columns], with `eps`
    update_norm -- of that of the update before it is added, likewise; None: it is added as it is
    norm_bias   -- what the norm adds, float32 [columns]: it is a LayerNorm; None: it is an RMSNorm
    sum_scale   -- what x is multiplied by when an update is added
    """
    scaled = _new_scaled(x)
    _add_rows(x, update, update_norm, norm, norm_bias, eps, scaled, sum_scale)
    return scaled


def add(x: Tensor, update: Product, norm: Tensor | None = None, eps: float = 0.0, sum_scale: float = 1.0) -> None:
    """x += update, or RMSNorm(update) where a norm's weight is given, then x *= sum_scale: float32 [S, columns],
    contiguous."""
    _add_rows(x, update, norm, None, None, eps, None, sum_scale)


def gated(gate: Product, up: Product, activation: int) -> ScaledFp16:
    """Scale activation(gate) * up, products of one input, to the input of a product: [S, width] each -> [S, width].

    activation -- number of the function, see `kernels/common/activations.cuh`
    """
    width = gate.sums.shape[1]
    scaled = _new_scaled(gate.sums)
    if len(gate.sums):
        launch(
            _row_kernel("gate_rows", width, gate.sums, up.sums, activation),
            (len(gate.sums),),
            THREADS,
            *(gate.sums, gate.sums.stride(0), gate.inverse, gate.bias),
            *(up.sums, up.sums.stride(0), up.inverse, up.bias),
            *(width, gate.factor, scaled.values, scaled.factor),
        )
    return scaled


def split_heads(parameters: AttentionParameters, qkv: Product, first: int, sequence: int = 0) -> Tensor:
    """Norm and rotate q and k of the positions `first` .. first + S - 1 of a sequence, and append k and v to its cache;
    of a layer that reads another's there is q alone.

    qkv -- [S, rows] as `attend` takes them; gates are left alone

    Returns q: [S, heads, head_dim] of the cache's type.
    """
    shape, layer = parameters.shape, parameters.layer
    keys, values = parameters.keys[sequence], parameters.values[sequence]
    kv_heads, context, head_dim = keys.shape
    q = torch.empty(len(qkv.sums), shape.heads, head_dim, dtype=keys.dtype, device=keys.device)
    if len(q):
        cos, sin = (of[sequence if parameters.rope_stride else 0] for of in parameters.table)
        defines = (
            *("HEADS=1", f"HEAD_DIM={head_dim}", f"KV={KV_MACROS[keys.dtype]}"),
            f"ROTARY_DIM={2 * cos.shape[1]}",
            *(f"NEIGHBOURS={int(shape.neighbours)}", f"OUTPUT_GATES={int(layer.gated)}"),
            f"K_EQ_V={int(layer.k_eq_v)}",
            *(("SHARED_KV=1",) if layer.source is not None else ()),
        )
        kept = 0 if layer.source is not None else 2 * kv_heads
        launch(
            kernel("prefill", "split_heads", defines, keys.device.index or 0),
            (len(q), -(-(shape.heads + kept) // HEADS)),
            HEADS * 32,
            *(qkv.sums, qkv.factor, qkv.inverse, qkv.bias, layer.q_norm, layer.k_norm, parameters.v_norm),
            float(shape.eps),
            *(cos, sin, shape.query_scale, first, context, shape.heads, kv_heads, q, keys, values),
        )
    return q


def _new_scaled(x: Tensor) -> ScaledFp16:
    values = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return ScaledFp16(values, torch.empty(len(x), device=x.device))


def _add_rows(
    x: Tensor,
    update: Product | None,
    update_norm: Tensor | None,
    norm: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    scaled: ScaledFp16 | None,
    sum_scale: float,
) -> None:
    if not len(x):
        return
    product = (update.sums, update.factor, update.inverse, update.bias) if update else (None, None, 0.0, None)
    launch(
        _row_kernel("add_rows", x.shape[1], x, product[0], 0, update_norm is not None, norm_bias is not None),
        (len(x),),
        THREADS,
        *(x, x.shape[1], *product, update_norm, float(sum_scale), norm, norm_bias, float(eps)),
        *((scaled.values, scaled.factor) if scaled else (None, None)),
    )


def _row_kernel(
    name: str,
    width: int,
    x: Tensor,
    product: Tensor | None = None,
    activation: int = 0,
    normed: bool = False,
    centred: bool = False,
) -> Kernel:
    """The variant for rows of a width, four columns at a time where rows begin at multiples of 16 bytes."""
    rows = [x] if product is None else [x, product]
    addresses = reduce(or_, (of.data_ptr() | 4 * of.stride(0) for of in rows), 4 * width)
    vector = 1 if addresses % 16 else 4
    defines = (
        *(f"VECTOR={vector}", f"ROUNDS={-(-width // (vector * THREADS))}"),
        *(f"ACTIVATION={activation}", f"NORMED={int(normed)}", f"CENTRED={int(centred)}"),
    )
    return kernel("prefill", name, defines, x.device.index or 0)


NORM_THREADS = 1024
"""A block has this many threads, as in `kernels/decoder/row_norms.cu`."""


def norm_rows(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    """Put y = RMSNorm(q), RMSNorm(k), v of B rows on the current stream.

    qkv, y       -- float32 [B, queries + 2 * keys], contiguous: q of all heads, then k, then v
    norms, eps   -- weights of the two RMSNorms, float32 [queries] and [keys], and what they add to the mean square
    flag_in_data -- qkv is in words of `driver/memory.py`: read as soon as it is stored; y may be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    queries, keys = map(len, norms)
    _launch_row_norms(qkv, None, norms, (queries, keys, keys), eps, y, flag_in_data)


def norm_prefill_rows(qkv: Product, norms: tuple[Tensor, Tensor], eps: float) -> Product:
    """RMSNorm(q), RMSNorm(k), v of the rows of a product [S, queries + 2 * keys]; norms and eps as `norm_rows` takes
    them."""
    y, (queries, keys) = torch.empty_like(qkv.sums), map(len, norms)
    _launch_row_norms(qkv.sums, qkv, norms, (queries, keys, keys), eps, y)
    return Product(y, torch.ones_like(qkv.factor), 1.0, None)


def norm_latents(
    rows: Tensor | Product,
    norms: tuple[Tensor | None, Tensor],
    widths: tuple[int, int, int],
    eps: float,
    y: Tensor,
    *,
    flag_in_data: bool = False,
) -> None:
    """Put the RMSNorms of latents, and what stands behind them as it is, on the current stream.

    rows         -- [S, sum of widths], contiguous: latents of queries, or queries themselves, which stay as they are,
                    those of keys and values, and the part of keys that turns
    norms, eps   -- weights of the two RMSNorms, None where there are queries, and what they add to the mean square
    y            -- float32 of as many numbers: [S, width] of each, one after the other
    flag_in_data -- rows are in words of `driver/memory.py`: read as soon as they are stored; y may be read so in any
                    case

    Raises `ValueError` for shapes that do not fit.
    """
    sums, product = (rows.sums, rows) if isinstance(rows, Product) else (rows, None)
    _launch_row_norms(sums, product, norms, widths, eps, y, flag_in_data, apart=True)


def _launch_row_norms(
    x: Tensor,
    product: Product | None,
    norms: tuple[Tensor | None, Tensor],
    widths: tuple[int, int, int],
    eps: float,
    y: Tensor,
    flag_in_data: bool = False,
    apart: bool = False,
) -> None:
    if x.shape != (len(x), sum(widths)) or (y.numel() != x.numel() if apart else y.shape != x.shape):
        raise ValueError(f"qkv {list(x.shape)}, y {list(y.shape)}: expected {[len(x), sum(widths)]} twice")
    defines = (
        *(f"ROUNDS={-(-max(widths) // NORM_THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}"),
        *(("APART=1",) if apart else ()),
    )
    of_product = (None, 1.0, None) if product is None else (product.factor, product.inverse, product.bias)
    if len(x):
        launch(
            kernel("row_norms", "row_norms", defines, x.device.index or 0),
            (3, len(x)),
            NORM_THREADS,
            *(x, *of_product, *norms, *widths, float(eps), y),
        )


def layer_norm(x: Tensor, norm: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    """Put y = LayerNorm(x) of B rows on the current stream.

    x, y         -- float32 [B, width], contiguous
    norm, eps    -- weight and bias of the LayerNorm, float32 [width], and what it adds to the variance
    flag_in_data -- x is in words of `driver/memory.py`: read as soon as it is stored; y may be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = x.shape
    if y.shape != x.shape or any(of.shape != (width,) for of in norm):
        raise ValueError(
            f"y {list(y.shape)}, norm {[list(of.shape) for of in norm]}: expected {[rows, width]} and {[width]}"
        )
    defines = (f"ROUNDS={-(-width // NORM_THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("layer_norm", "layer_norm", defines, x.device.index or 0),
        (rows,),
        NORM_THREADS,
        *(x, *norm, width, float(eps), y),
    )


def gate_inputs(gates: Tensor, inputs: Tensor, activation: int, y: Tensor) -> None:
    """Put y = activation(gates) * inputs on the current stream: float32 [B, width] each, whose last axes are
    contiguous; rows of inputs may lie apart. Raises `ValueError` for shapes that do not fit."""
    if not gates.shape == inputs.shape == y.shape or inputs.stride(1) != 1:
        shapes = [list(of.shape) for of in (gates, inputs, y)]
        raise ValueError(f"gates, inputs, y {shapes}: expected one shape, and rows of inputs without gaps")
    rows, width = gates.shape
    if rows:
        launch(
            kernel("per_layer", "gate_inputs", (f"ACTIVATION={activation}",), gates.device.index or 0),
            (-(-width // 256), rows),
            256,
            *(gates, inputs, width, inputs.stride(0), y),
        )


def activation_norm(
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int | None = None,
    xielu: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    """Put y = v of B rows, or RMSNorm(v) where there is a norm, on the current stream: what enters attn_out or mlp_mid.

    x            -- float32 [B, width], contiguous: v; with an activation [B, 2 * width]: v = activation(gate) * up
    y            -- float32 [B, width]
    norm, eps    -- weight of the RMSNorm, float32 [width], and what it adds to the mean square
    activation   -- number of the function, see `kernels/common/activations.cuh`; None: there are no gates
    xielu        -- coefficients float32 [4], as `models.activations.xielu` takes them: v = xIELU(x); None: another v
    flag_in_data -- x is in words of `driver/memory.py`: read as soon as it is stored; y may be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = y.shape
    made = 1 if activation is not None else 2 if xielu is not None else 0
    wide = width * (1 + (made == 1))
    if x.shape != (rows, wide) or (norm is not None and norm.shape != (width,)):
        of_norm = None if norm is None else list(norm.shape)
        raise ValueError(f"x {list(x.shape)}, norm {of_norm}: expected {[rows, wide]} and {[width]}")
    defines = (
        *(f"ROUNDS={-(-width // NORM_THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}"),
        *(f"MADE={made}", f"NORMED={int(norm is not None)}", f"ACTIVATION={activation or 0}"),
    )
    launch(
        kernel("activation_norm", "activation_norm", defines, x.device.index or 0),
        (rows,),
        NORM_THREADS,
        *(x, norm, xielu, width, float(eps), y),
    )


def post_norm(
    update: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    y: Tensor,
    *,
    squares: Tensor | None = None,
    flag_in_data: bool = False,
    scale: float = 1.0,
    sums: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Put y = scale (residual + RMSNorm(update)) of B rows on the current stream.

    update, residual, y -- float32 [B, width], contiguous; residual may be y itself, and is not what the kernel just
                           before writes
    norm, eps           -- weight of the RMSNorm, float32 [width], and what it adds to the mean square
    squares             -- float32 [B] or [B, 1]: the sums of y^2; None: nobody asks for them
    flag_in_data        -- update is in words of `driver/memory.py`: read as soon as it is stored; y and squares may be
                           read so in any case
    sums                -- other, and norms [width] of two: RMSNorm(update) + RMSNorm(other) is taken in place of
                           update; None: that itself. other is as update

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = update.shape
    other, *of_both = sums or (None, None, None)
    if sums is not None and (sums[0].shape != update.shape or {of.shape for of in sums[1:]} != {(width,)}):
        raise ValueError(f"sums {[list(of.shape) for of in sums]}, expected {[rows, width]} and twice {[width]}")
    if residual.shape != update.shape or y.shape != update.shape or norm.shape != (width,):
        raise ValueError(
            f"residual {list(residual.shape)}, y {list(y.shape)}, norm {list(norm.shape)}: expected "
            f"twice {[rows, width]} and {[width]}"
        )
    if squares is not None and squares.numel() != rows:
        raise ValueError(f"squares {list(squares.shape)}, expected {[rows]}")
    defines = (f"ROUNDS={-(-width // NORM_THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}", f"SUMS={1 + bool(sums)}")
    launch(
        kernel("post_norm", "post_norm", defines, update.device.index or 0),
        (rows,),
        NORM_THREADS,
        *(update, residual, norm, width, float(eps), y, squares, float(scale), other, *of_both),
    )
