"""What calibrating counts on a GPU, by kernels that read their inputs once."""

import torch
from torch import Tensor, nn

from sparsepack.runtime.cuda.driver.kernel import blocks_at_once, kernel, launch

INPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The types of vectors that are counted, and what stands for them in `kernels/common/eight.cuh`."""
_THREADS, _ROWS, _STRIP = 1024, 256, 256
_STAGED = _THREADS // 32 * _STRIP
_PIECE = 128
"""These numbers stand in the kernels, too."""


def count_site(
    x: Tensor, norms: Tensor, bins: int, active: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Count what enters a site: the values of `calibrate.collector.SiteCounts`, in its order.

    x      -- float32, float16 or bfloat16 [windows, seen, columns]
    norms  -- float32 [columns]
    bins   -- of a histogram
    active -- whether values that are not zero are counted
    """
    windows, seen, columns = x.shape
    if x.stride(2) != 1 or x.stride(1) != columns or x.stride(0) % columns:
        x = x.contiguous()
    tokens, device = windows * seen, x.device
    number = device.index or 0
    counts = torch.zeros(2, bins, dtype=torch.int64, device=device)
    squares = torch.empty(-(-tokens // _ROWS), columns, dtype=torch.float64, device=device)
    of_columns = torch.zeros(columns, dtype=torch.int64, device=device) if active else None
    of_tokens = torch.zeros(tokens, dtype=torch.int32, device=device) if active else None
    most = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin"))  # noqa: B009
    # A bfloat16 has every second bin. The last one is counted beside them.
    sizes = (bins - 1) // 2 + 4 if x.dtype == torch.bfloat16 else bins - 1
    both = 4 * (sizes + bins - 1 + _STAGED)
    criteria, shared = (2, both) if both <= most else (1, 4 * (bins - 1 + _STAGED))
    defines = (f"INPUT={INPUTS[x.dtype]}", f"CRITERIA={criteria}", f"ACTIVE={int(active)}")
    with torch.cuda.device(device):
        function = kernel("site_counts", "site_counts", defines, number)
        at_once = blocks_at_once(function, device, _THREADS, shared)
        tiles = len(squares) * -(-columns // _STRIP)
        launch(
            function,
            (min(tiles, at_once), 2 // criteria),
            _THREADS,
            *(x, tokens, columns, seen, x.stride(0) // columns, norms, counts, squares, of_columns, of_tokens),
            shared=shared,
        )
    return counts, squares.sum(0), of_columns, of_tokens


def sum_heads(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Sums over tokens of |q|, q * q, |k| and k * k, and over pairs of the mean of |q| over a KV head's queries times
    |k| of a token that is not after it: float64, two of [heads, D] and three of [kv_heads, D].

    query, key -- float32, float16 or bfloat16 [B, heads, S, D] and [B, kv_heads, S, D]
    """
    query, key = (value if value.stride(3) == 1 else value.contiguous() for value in (query, key))
    (windows, heads, tokens, channels), kv_heads = query.shape, key.shape[1]
    group, pieces = heads // kv_heads, -(-tokens // _PIECE)
    sums = torch.empty(4 + 2 * group, windows, pieces, kv_heads, channels, dtype=torch.float64, device=query.device)
    defines = (f"INPUT={INPUTS[query.dtype]}", f"GROUP={group}")
    with torch.cuda.device(query.device):
        launch(
            kernel("head_sums", "head_sums", defines, query.device.index or 0),
            (pieces, kv_heads, windows),
            min(256, -(-channels // 32) * 32),
            *(query, *query.stride()[:3], key, *key.stride()[:3], tokens, channels, sums),
        )
    key_abs, key_square, _, pairs, *of_queries = sums.sum((1, 2))
    before = nn.functional.pad(sums[0, :, :-1].cumsum(1), (0, 0, 0, 0, 1, 0))  # |k| of the pieces before each
    pairs = pairs + (sums[2] * before).sum((0, 1))
    query_abs, query_square = (torch.stack(of, 1).flatten(0, 1) for of in (of_queries[:group], of_queries[group:]))
    return query_abs, query_square, key_abs, key_square, pairs
