"""Inputs of slid weights on the GPU: quantised and lifted by one kernel, which reads them once."""

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import Slide
from sparsepack.runtime.cuda.driver.kernel import architecture, kernel, launch

MOST_EIGHTS = {8: 4, 16: 5, 32: 16}
"""A block, which has a token, has this many warps, and a thread holds at most this many groups of eight inputs in
registers."""
LIGHT_EIGHTS = 5
"""With this many groups of eight 16-bit inputs there is room for as many threads as a multiprocessor can have."""
THREADS = 2048
"""A multiprocessor has at most this many threads."""
ALIGNMENT = 32
"""A row of lifted values is padded with zeros to a multiple of this many bytes, as the 2:4 products want."""

_INPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_FROM = 89
"""FP8 needs at least this compute capability, times ten."""


def row_bytes(how: Slide, columns: int) -> int:
    """The number of bytes from one token's lifted values to the next token's."""
    lifted = how.lifted(columns)
    return lifted + -lifted % ALIGNMENT


def quantise_slide(x: Tensor, how: Slide, dtype: torch.dtype, filled: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise inputs token by token and lift them, on the current stream; see `slide.reference.quantise_slide`.

    x      -- float32, float16 or bfloat16 [tokens, columns], contiguous
    dtype  -- int8 or float8_e4m3fn
    filled -- rows of the result, if more than tokens: what the others hold is undefined

    Returns the values [tokens, `row_bytes`], zeros behind those that are lifted, and the scales, float32 [tokens]. A
    token that is not finite gets a scale that is not. Raises `UserError` for FP8 on a GPU without it, `ValueError` for
    what does not fit.
    """
    if x.dim() != 2 or x.dtype not in _INPUTS or not x.is_contiguous():
        raise ValueError(f"x: {x.dtype} {list(x.shape)}, stride {x.stride()}; expected a contiguous float matrix")
    if (how.most, how.window) != (2, 4) or dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"{how.most} of {how.window}, {dtype}: expected 2 of 4, int8 or float8_e4m3fn")
    tokens, columns = x.shape
    device = x.device.index or 0
    fp8 = dtype == torch.float8_e4m3fn
    if fp8 and architecture(device) < _FP8_FROM:
        raise UserError(f"FP8 needs a GPU of compute capability {_FP8_FROM / 10} (Ada) or later; use slide-int8")
    stride = row_bytes(how, columns)
    q = torch.empty(max(tokens, filled), stride, dtype=dtype, device=x.device)
    scale = torch.empty(tokens, device=x.device)
    if not tokens:
        return q, scale
    warps = next((warps for warps, most in MOST_EIGHTS.items() if columns <= 256 * warps * most), 0)
    if not warps:
        raise ValueError(f"{columns} columns; expected at most {256 * 32 * MOST_EIGHTS[32]}")
    eights = -(-columns // (256 * warps))
    full = x.element_size() == 2 and eights <= LIGHT_EIGHTS
    defines = (
        f"INPUT={_INPUTS[x.dtype]}",
        f"FP8={int(fp8)}",
        f"OF={how.pattern.of}",
        f"WINDOWS={how.windows}",
        f"THREAD_EIGHTS={eights}",
        f"WARPS={warps}",
        f"BLOCKS={THREADS // (32 * warps) if full else 1}",
    )
    launch(
        kernel("quantise_slide", "quantise_slide", defines, device),
        (tokens,),
        32 * warps,
        *(x, columns, x.element_size(), stride, q.view(torch.uint8), scale),
        shared=0 if 8 % how.pattern.of == 0 else how.pattern.groups(columns) * how.pattern.of + 8,
    )
    return q, scale
