"""Run parts of hidden states by what was recorded of a run: Python launches nothing then."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Such a function records what a function puts on a GPU, without running it there. It gives what repeats that, on what
stands in the same tensors then, and the tensor in which the result is."""

_LEAST = 3
"""Recording is worth while for so many parts."""


def run_recorded(
    parts: Sequence[Tensor], run: Callable[[Tensor], Tensor], record: Record, advance: Callable[[], object]
) -> None:
    """Put `run` of each part in its place; `advance` is called after each.

    The first part is run as it is, which loads kernels and makes what later runs add to. Then one run is recorded and
    repeated for each part of the same shape. Whatever watches the run is called in these two alone: what it counts must
    be added to tensors that stay the same.
    """
    repeat: Callable[[], None] | None = None
    for number, part in enumerate(parts):
        if number == 0 or part.shape != parts[0].shape or len(parts) < _LEAST:
            part.copy_(run(part))
        else:
            if repeat is None:
                entering = torch.empty_like(part)
                repeat, leaving = record(partial(run, entering))
            entering.copy_(part)
            repeat()
            part.copy_(leaving)
        advance()
