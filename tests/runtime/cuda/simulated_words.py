"""Words with their flag in the data (`driver/memory.py`), and what kernels rely on that read or write them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.memory import SENTINEL
from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers as real_flag_in_data_buffers

BUFFERS: dict[int, Tensor] = {}
"""The words of `flag_in_data_buffers` by where they lie; kept, so that nothing else lies there."""


def flag_in_data_buffers(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    words, parts = real_flag_in_data_buffers(sizes, device)
    BUFFERS[words.untyped_storage().data_ptr()] = words
    return words, parts


def assert_written(x: Tensor) -> None:
    assert not (x.view(torch.int32) == SENTINEL).any(), "a kernel would wait for ever"


def write(to: Tensor, x: Tensor) -> None:
    """Words must be empty before."""
    if to.untyped_storage().data_ptr() in BUFFERS:
        assert bool((to.view(torch.int32) == SENTINEL).all()), "who reads these words would take what was there before"
    to.copy_(x)
