"""Gradients that have the same bits each time they are taken, on a GPU, too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable() -> Iterator[None]:
    """Within the context torch takes kernels that add in an order of their own, where it has such.

    Without it attention's backward pass on a GPU adds in the order in which groups of threads happen to end, and a
    training is another one each time it is run. Where torch has no such kernel it warns, and names the operation.
    """
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode(1)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
