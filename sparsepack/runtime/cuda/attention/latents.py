"""Attention by latents (MLA) on the GPU: what stands between its products and the heads that attend
(`kernels/attention/latent_heads.cu`), and, where latents are cached, what attn_kv_b is multiplied into
(`kernels/attention/latent_products.cu`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.models.blocks import Latent
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16

THREADS = 256
COLUMNS, WARPS = 64, 8
"""A block of `latent_queries` has so many columns, one of `latent_outputs` so many rows, a warp each."""


@dataclass(frozen=True)
class LatentWeights:
    """attn_kv_b of a block, as steps that read latents multiply with it.

    keys, values -- float16 [heads, plain, kv_rank] and [heads, value, kv_rank], times a power of two
    inverse      -- undoes that
    bias         -- float32 [heads * (plain + value)]; None: there is none. That of keys adds the same to all scores
    units        -- what a step reads, as `PackedMatrix.units` has it
    """

    latent: Latent
    keys: Tensor
    values: Tensor
    inverse: float
    bias: Tensor | None
    units: int

    @property
    def defines(self) -> tuple[str, ...]:
        of = self.latent
        return (f"PLAIN={of.plain}", f"TURNING={of.turning}", f"VALUE={of.value}", f"RANK={of.kv_rank}")


def latent_weights(
    of: Latent,
    heads: int,
    multiply: Callable[[ScaledFp16], Product],
    bias: Tensor | None,
    units: int,
    device: torch.device,
) -> LatentWeights:
    """The weights of attn_kv_b, rounded to float16. multiply -- the product with it"""
    one = torch.eye(of.kv_rank, dtype=torch.float16, device=device)
    product = multiply(ScaledFp16(one, torch.ones(len(one), device=one.device)))
    weights = product.sums.t().half().view(heads, of.plain + of.value, of.kv_rank)
    keys, values = (part.contiguous() for part in torch.split(weights, [of.plain, of.value], dim=1))
    return LatentWeights(of, keys, values, product.inverse, bias, units)


def latent_queries(
    of: LatentWeights,
    q: Tensor,
    latents: Tensor,
    turning: Tensor,
    qkv: Tensor,
    *,
    active: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    """Put queries of cached latents, and the new row of the cache, on the current stream.

    q            -- float32 [B, heads * (plain + turning)]
    latents      -- float32 [B, kv_rank], normed; turning: [B, turning]
    qkv          -- float32 [B, (heads + 1) * (turning + kv_rank)]
    active       -- int64 []: the units that are read are added
    flag_in_data -- these are in words of `driver/memory.py`, of one sequence: read as soon as they are stored; qkv may
                    be read so in any case
    """
    heads, rank = len(of.keys), of.latent.kv_rank
    defines = (*of.defines, f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("latent_products", "latent_queries", defines, qkv.device.index or 0),
        (-(-rank // COLUMNS), heads + 1, len(qkv)),
        THREADS,
        *(of.keys, of.inverse, q, latents, turning, of.units, active, qkv),
    )


def latent_outputs(of: LatentWeights, mixed: Tensor, out: Tensor, *, flag_in_data: bool = False) -> None:
    """Put the values of what attention gives of latents on the current stream.

    mixed        -- float32 [B, heads * kv_rank]
    out          -- float32 [B, heads * value]
    flag_in_data -- mixed is in words of `driver/memory.py`: read as soon as it is stored; out may be read so in any
                    case
    """
    defines = (*of.defines, f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("latent_products", "latent_outputs", defines, out.device.index or 0),
        (-(-of.latent.value // WARPS), len(of.values), len(out)),
        THREADS,
        *(of.values, of.inverse, of.bias, mixed, out),
    )


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
