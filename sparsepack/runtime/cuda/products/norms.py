"""Norms that some models have: of the queries and keys of all heads together, and behind attention and MLP."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.gemm_fp16 import Product

THREADS = 1024
"""A block has this many threads, as in `kernels/decoder/row_norms.cu`."""


def norm_rows(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    """Put y = RMSNorm(q), RMSNorm(k), v of B rows on the current stream.

    qkv, y       -- float32 [B, queries + 2 * keys], contiguous: q of all heads, then k, then v
    norms, eps   -- weights of the two RMSNorms, float32 [queries] and [keys], and what they add to the mean square
    flag_in_data -- qkv is in words of `driver/memory.py`: read as soon as it is stored; y may be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    _launch(qkv, None, 1.0, None, norms, eps, y, flag_in_data)


def normed_rows(qkv: Product, norms: tuple[Tensor, Tensor], eps: float) -> Product:
    """RMSNorm(q), RMSNorm(k), v of the rows of a product [S, queries + 2 * keys]; norms and eps as `norm_rows` takes
    them."""
    y = torch.empty_like(qkv.sums)
    if len(y):
        _launch(qkv.sums, qkv.factor, qkv.inverse, qkv.bias, norms, eps, y, flag_in_data=False)
    return Product(y, torch.ones_like(qkv.factor), 1.0, None)


def _launch(
    x: Tensor,
    factor: Tensor | None,
    inverse: float,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor],
    eps: float,
    y: Tensor,
    flag_in_data: bool,
) -> None:
    queries, keys = (len(norm) for norm in norms)
    if x.shape != (len(x), queries + 2 * keys) or y.shape != x.shape:
        raise ValueError(f"qkv {list(x.shape)}, y {list(y.shape)}: expected {[len(x), queries + 2 * keys]} twice")
    defines = (f"ROUNDS={-(-max(queries, keys) // THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("row_norms", "row_norms", defines, x.device.index or 0),
        (3, len(x)),
        THREADS,
        *(x, factor, inverse, bias, *norms, queries, keys, float(eps), y),
    )


THREADS = 1024
"""A block has this many threads, as in `kernels/decoder/post_norm.cu`."""


def post_norm(
    update: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    y: Tensor,
    *,
    squares: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    """Put y = residual + RMSNorm(update) of B rows on the current stream.

    update, residual, y -- float32 [B, width], contiguous; residual may be y itself, and is not what the kernel just
                           before writes
    norm, eps           -- weight of the RMSNorm, float32 [width], and what it adds to the mean square
    squares             -- float32 [B] or [B, 1]: the sums of y^2; None: nobody asks for them
    flag_in_data        -- update is in words of `driver/memory.py`: read as soon as it is stored; y and squares may be
                           read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = update.shape
    if residual.shape != update.shape or y.shape != update.shape or norm.shape != (width,):
        raise ValueError(
            f"residual {list(residual.shape)}, y {list(y.shape)}, norm {list(norm.shape)}: expected "
            f"twice {[rows, width]} and {[width]}"
        )
    if squares is not None and squares.numel() != rows:
        raise ValueError(f"squares {list(squares.shape)}, expected {[rows]}")
    defines = (f"ROUNDS={-(-width // THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("post_norm", "post_norm", defines, update.device.index or 0),
        (rows,),
        THREADS,
        *(update, residual, norm, width, float(eps), y, squares),
    )
