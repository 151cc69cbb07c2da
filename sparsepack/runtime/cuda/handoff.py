"""Memory through which kernels hand values off before they end, the flag in the data (`kernels/handoff.cuh`)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import multiprocessors

SENTINEL = -1
"""The bits, as an int32, of a word that nobody has stored to since it was reset."""

WORKSPACE_WORDS = 1 << 14
"""For each multiprocessor: the sums of a block with the most rows (`zigzag.MOST_TILE_BANDS` bands of 256) and inputs
(8)."""


def handoff_buffers(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Words that hold SENTINEL, int32 [..], and in them float32 arrays of these sizes, each from a multiple of 16 bytes
    on."""
    room = [-(-size // 4) * 4 for size in sizes]
    words = torch.full((sum(room),), SENTINEL, dtype=torch.int32, device=device)
    parts = torch.split(words.view(torch.float32), room)
    return words, [part[:size] for part, size in zip(parts, sizes, strict=True)]


@cache
def workspace(device: torch.device) -> Tensor:
    """Where the blocks of a kernel leave partial results for each other (CUTLASS's split-K workspace): words that hold
    SENTINEL before and after it. Kernels on one stream share them."""
    return handoff_buffers([multiprocessors(device) * WORKSPACE_WORDS], device)[0]
