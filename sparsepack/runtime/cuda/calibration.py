"""Kernels for calibration on a GPU: counts that read their inputs once, and parts of transformers' blocks in one kernel
each, rounded as the several kernels of torch round them."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from sparsepack.models.hf_model.fused import OWN_CODE, Parts, apply_rope_by_torch
from sparsepack.progress import say
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


_FARTHEST = 2**31 - 1
"""Kernels take distances between values, and numbers of them, in 32 bits."""
_ALIGNED = 16
_ROPE_THREADS, _SILU_THREADS, _SILU_EACH, _NORM_THREADS = 128, 256, 4, 128
"""The last two stand in the kernels, too."""
_WIDEST = 16384
"""A norm's row stays in registers."""


def apply_rope(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rotary embedding of whole heads in halves, or None where the kernel does not take such tensors.

    query, key   -- float32, float16 or bfloat16 [B, heads, S, D] and [B, kv_heads, S, D]
    cosine, sine -- [1 or B, S, D], in the same type
    """
    inputs = (query, key, cosine, sine)
    (windows, heads, tokens, channels), kv_heads = query.shape, key.shape[1]
    fit = (
        query.dtype in INPUTS
        and all(x.dtype == query.dtype and _aligned(x) for x in inputs)
        and channels % 16 == 0
        and channels <= _WIDEST
        and key.shape == (windows, kv_heads, tokens, channels)
        and cosine.shape == sine.shape == (cosine.shape[0], tokens, channels)
        and cosine.shape[0] in (1, windows)
        and cosine.is_contiguous()
        and sine.is_contiguous()
        and windows <= _MOST_Y
    )
    if not fit:
        return None
    rotated = torch.empty_like(query), torch.empty_like(key)
    table = 0 if cosine.shape[0] == 1 else cosine.stride(0)
    pieces = channels // 16
    with torch.cuda.device(query.device):
        launch(
            kernel("apply_rope", "apply_rope", (f"INPUT={INPUTS[query.dtype]}",), query.device.index or 0),
            (tokens, windows),
            pieces * max(1, min(heads + kv_heads, _ROPE_THREADS // pieces)),
            *(query, *query.stride()[:3], key, *key.stride()[:3], cosine, sine, table, heads, kv_heads, channels),
            *(rotated[0], *rotated[0].stride()[:3], rotated[1], *rotated[1].stride()[:3]),
        )
    return rotated


def silu_times(gate: Tensor, up: Tensor) -> Tensor | None:
    """SiLU of the gate times up, both of one shape and type; None where the kernel does not take such tensors."""
    fit = (
        gate.dtype in INPUTS
        and all(x.dtype == gate.dtype and x.is_contiguous() and _aligned(x) for x in (gate, up))
        and gate.shape == up.shape
        and 0 < gate.numel() // 8 <= _FARTHEST
        and gate.numel() % 8 == 0
    )
    if not fit:
        return None
    result, eights = torch.empty_like(gate), gate.numel() // 8
    with torch.cuda.device(gate.device):
        launch(
            kernel("silu_times", "silu_times", (f"INPUT={INPUTS[gate.dtype]}",), gate.device.index or 0),
            (-(-eights // (_SILU_THREADS * _SILU_EACH)),),
            _SILU_THREADS,
            *(gate, up, eights, result),
        )
    return result


def norm_rows(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor | None:
    """Rows [..., S, columns] over their root mean square, times the weight if there is one, without gaps; None where
    the kernel does not take such tensors.

    x      -- float16 or bfloat16, [S, columns] or [B, S, columns], of which first rows may have been left out
    weight -- [columns], in the same type
    """
    shape, columns = x.shape, x.shape[-1]
    rows = x if x.dim() == 3 else x[None] if x.dim() == 2 else None
    fit = (
        rows is not None
        and rows.dtype in (torch.float16, torch.bfloat16)
        and columns % 8 == 0
        and 0 < columns <= _WIDEST
        and rows.stride(1) == columns
        and _aligned(rows)
        and (weight is None or (weight.dtype == rows.dtype and _aligned(weight)))
        and rows.shape[0] <= _MOST_Y
        and rows.numel() > 0
    )
    if not fit or rows is None:
        return None
    result = torch.empty(shape, dtype=x.dtype, device=x.device)
    defines = (f"INPUT={INPUTS[x.dtype]}", f"ROUNDS={-(-columns // (4 * _NORM_THREADS))}")
    with torch.cuda.device(x.device):
        launch(
            kernel("norm_rows", "norm_rows", defines, x.device.index or 0),
            (rows.shape[1], rows.shape[0]),
            _NORM_THREADS,
            *(rows, rows.stride(0), columns, eps, weight, result),
        )
    return result


_MOST_Y = 65535
"""A grid has no more blocks in y."""


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _aligned(x: Tensor) -> bool:
    """Whether the GPU has the values, and eight lie one beside the other and can be read at once wherever a row
    begins."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return (
        _on_gpu(x)
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.data_ptr() % _ALIGNED == 0
        and all(stride % 8 == 0 and stride <= _FARTHEST for stride in strides[:-1])
    )


@cache
def checked_parts(device: torch.device) -> Parts:
    """The parts that give on this GPU what stock code gives: compared once, on random values and on all numbers of 16
    bits. What does not is said, and left to stock code."""
    return Parts(
        apply_rope if _agrees("rotary embeddings", _ropes_agree, device) else OWN_CODE.apply_rope,
        silu_times if _agrees("SiLU", _silus_alike, device) else OWN_CODE.silu_times,
        norm_rows if _agrees("norms", _norms_alike, device) else OWN_CODE.norm_rows,
    )


def _agrees(what: str, alike: Callable[[torch.device], bool], device: torch.device) -> bool:
    if alike(device):
        return True
    say(f"note: {device}: {what} are computed by PyTorch's kernels, since ours gave something else; please report this")
    return False


def _random(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(shape, generator=generator)).to(device, torch.bfloat16)


def _ropes_agree(device: torch.device) -> bool:
    query, key = (_random(device, 3, 33, heads, 128).transpose(1, 2) for heads in (8, 2))
    angles = _random(device, 1, 33, 128).sin(), _random(device, 1, 33, 128).cos()
    found = apply_rope(query, key, *angles)
    return found is not None and all(
        torch.equal(result, apply_rope_by_torch(x, *angles)) for result, x in zip(found, (query, key), strict=True)
    )


def _silus_alike(device: torch.device) -> bool:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = every[every.isfinite()].to(device)
    up = _random(device, len(gate))
    found = silu_times(gate, up)
    return found is not None and torch.equal(found, nn.functional.silu(gate) * up)


def _norms_alike(device: torch.device) -> bool:
    x, weight = _random(device, 3, 40, 4096), _random(device, 4096)
    for rows in (x, x[:, 4:]):
        expected = nn.functional.rms_norm(rows, (4096,), eps=1e-5)
        found, times = norm_rows(rows, 1e-5), norm_rows(rows, 1e-5, weight)
        if found is None or times is None:
            return False
        for one, other, bits in ((found, expected, 7), (times, weight * expected, 6)):
            if not torch.allclose(one, other, rtol=2**-bits, atol=0):  # the order of the sum may differ
                return False
    return True
