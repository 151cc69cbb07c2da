"""Attention by latents (MLA) on the GPU: what stands between its products and the heads that attend
(`kernels/attention/latent_heads.cu`). Keys and values are cached whole."""

import torch
from torch import Tensor

from sparsepack.models.blocks import Latent
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.gemm_fp16 import Product

THREADS = 256


def join_latents(
    of: Latent, heads: int, q: Product, kv: Product, turning: Tensor, qkv: Tensor, *, flag_in_data: bool = False
) -> None:
    """Put queries, keys and values of all heads, as caches take them, on the current stream.

    q, kv        -- [S, heads * (plain + turning)] and [S, heads * (plain + value)]: products of the latents
    turning      -- float32 [S, turning]: the part of keys that all heads share
    qkv          -- float32 [S, 3 * heads * head_dim]
    flag_in_data -- these are in words of `driver/memory.py`, of one position: read as soon as they are stored; qkv may
                    be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = len(qkv), 3 * heads * of.head_dim
    expected = {
        "q": (q.sums, heads * of.query),
        "kv": (kv.sums, heads * (of.plain + of.value)),
        "turning": (turning, of.turning),
        "qkv": (qkv, width),
    }
    for name, (tensor, columns) in expected.items():
        if tensor.shape != (rows, columns) or tensor.stride(1) != 1:
            raise ValueError(f"{name} {list(tensor.shape)}: expected {[rows, columns]}")
    defines = (
        *(f"PLAIN={of.plain}", f"TURNING={of.turning}", f"VALUE={of.value}", f"HEAD_DIM={of.head_dim}"),
        f"FLAG_IN_DATA={int(flag_in_data)}",
    )
    if rows:
        launch(
            kernel("latent_heads", "latent_heads", defines, qkv.device.index or 0),
            (-(-width // THREADS), rows),
            THREADS,
            *(q.sums, q.sums.stride(0), q.factor, q.inverse, q.bias),
            *(kv.sums, kv.sums.stride(0), kv.factor, kv.inverse, kv.bias),
            *(turning, turning.stride(0), heads, qkv),
        )


def of_ones(rows: Tensor) -> Product:
    """Rows [S, width] as a product."""
    return Product(rows, torch.ones(len(rows), device=rows.device), 1.0, None)


def latent_parts(of: Latent, heads: int, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `norm_latents` left of so many rows: latents of queries, or queries, those of keys and values, and the part
    of keys that turns, contiguous [count, width] each."""
    queries, keys = of.into(heads)
    widths = (queries, of.kv_rank, keys - of.kv_rank)
    parts = torch.split(rows.view(-1), [count * width for width in widths])
    q, kv, turning = (part.view(count, width) for part, width in zip(parts, widths, strict=True))
    return q, kv, turning
