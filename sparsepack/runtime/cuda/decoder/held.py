"""What a step holds of its texts on the GPU (`runtime/hold.py`): kernels read and change it, and no host waits."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from sparsepack.runtime.hold import Hold


@dataclass(frozen=True)
class CudaHeld:
    """What is held of each of B sequences.

    scales  -- float32 [B]: what their thresholds are multiplied by
    steps   -- float32 [B]: how many sparse steps they have made
    skipped -- int64 [B]: the weights in inactive columns of a step so far; zero between steps
    moving  -- int32 [B]: 0 for a sequence that stands still; None: there is one, which never does
    how     -- float64 [7]: the fields of `hold`
    """

    hold: Hold
    scales: Tensor
    steps: Tensor
    skipped: Tensor
    moving: Tensor | None
    how: Tensor

    def begin(self, sequence: int | None = None) -> None:
        """Let a sequence begin anew, on the current stream; None: every one."""
        which = slice(None) if sequence is None else sequence
        self.scales[which].fill_(1.0)
        self.steps[which].fill_(0.0)


def new_held(hold: Hold, state: Tensor) -> CudaHeld:
    """What is held of sequences that begin. state: float32 [2, B], where scales and steps lie."""
    sequences, device = state.shape[1], state.device
    how = torch.tensor(astuple(hold), dtype=torch.float64, device=device)
    skipped = torch.zeros(sequences, dtype=torch.int64, device=device)
    moving = torch.ones(sequences, dtype=torch.int32, device=device) if sequences > 1 else None
    held = CudaHeld(hold, state[0], state[1], skipped, moving, how)
    held.begin()
    return held
