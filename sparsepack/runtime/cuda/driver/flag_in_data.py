"""Memory through which kernels hand values over before they end (`kernels/common/flag_in_data.cuh`)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import multiprocessors

SENTINEL = -1
"""A word that nobody has stored to since its reset has these bits, as an int32."""

WORKSPACE_WORDS = 1 << 14
"""Each multiprocessor has this many words: the sums of a block with the most rows (`zigzag.MOST_TILE_BANDS` bands of
256) and inputs (8)."""


def flag_in_data_buffers(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Words that hold SENTINEL, int32 [..], and in them float32 arrays of these sizes, each from a multiple of 16 bytes
    on."""
    room = [-(-size // 4) * 4 for size in sizes]
    words = torch.full((sum(room),), SENTINEL, dtype=torch.int32, device=device)
    parts = torch.split(words.view(torch.float32), room)
    return words, [part[:size] for part, size in zip(parts, sizes, strict=True)]


@cache
def workspace(device: torch.device) -> Tensor:
    """The words in which blocks of a kernel leave partial sums for each other (CUTLASS's split-K workspace). The words
    hold SENTINEL before and after the kernel. Kernels on one stream share the workspace."""
    return flag_in_data_buffers([multiprocessors(device) * WORKSPACE_WORDS], device)[0]
