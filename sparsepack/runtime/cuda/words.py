"""Memory through which kernels hand on values before they end (`kernels/words.cuh`)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import multiprocessors

EMPTY = -1
"""The bits of a word, as an int32, that nobody has written."""

SLOT_WORDS = 1 << 14
"""For each multiprocessor: the sums of a block with the most rows (`zigzag.MOST_GROUP` bands of 256) and inputs (8)."""


def empty_words(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Empty words, int32 [..], and in them float32 arrays of these sizes, each from a multiple of 16 bytes on."""
    room = [-(-size // 4) * 4 for size in sizes]
    words = torch.full((sum(room),), EMPTY, dtype=torch.int32, device=device)
    parts = torch.split(words.view(torch.float32), room)
    return words, [part[:size] for part, size in zip(parts, sizes, strict=True)]


@cache
def slots(device: torch.device) -> Tensor:
    """Empty words where the blocks of a kernel meet, and which they leave empty. Kernels on one stream share them."""
    return empty_words([multiprocessors(device) * SLOT_WORDS], device)[0]
