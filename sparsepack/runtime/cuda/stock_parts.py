"""Parts of stock blocks by one kernel each, rounded as the several kernels of stock code round them."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from sparsepack.models.hf_model.fused import OWN_CODE, Parts, apply_rope_by_torch
from sparsepack.progress import say
from sparsepack.runtime.cuda.calibration import INPUTS
from sparsepack.runtime.cuda.driver.kernel import kernel, launch

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
