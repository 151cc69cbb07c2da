"""How a step ends on the GPU: the likeliest token of each sequence, and the threshold controller
(`runtime/threshold_controller.py`), which kernels read and change, and for which no host waits."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.threshold_controller import ThresholdController


@dataclass(frozen=True)
class CudaThresholdController:
    """What is held of each of B sequences.

    scales  -- float32 [B]: what their thresholds are multiplied by
    steps   -- float32 [B]: how many sparse steps they have made
    skipped -- int64 [B]: the weights in inactive columns of a step so far; zero between steps
    moving  -- int32 [B]: 0 for a sequence that stands still; None: there is one, which never does
    how     -- float64 [7]: the fields of `controller`
    """

    controller: ThresholdController
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


def new_threshold_controller(controller: ThresholdController, state: Tensor) -> CudaThresholdController:
    """What is held of sequences that begin. state: float32 [2, B], where scales and steps lie."""
    sequences, device = state.shape[1], state.device
    how = torch.tensor(astuple(controller), dtype=torch.float64, device=device)
    skipped = torch.zeros(sequences, dtype=torch.int64, device=device)
    moving = torch.ones(sequences, dtype=torch.int32, device=device) if sequences > 1 else None
    held = CudaThresholdController(controller, state[0], state[1], skipped, moving, how)
    held.begin()
    return held


def pick_likeliest(
    candidates: Tensor,
    ids: Tensor,
    best: Tensor,
    positions: Tensor | None = None,
    held: CudaThresholdController | None = None,
) -> None:
    """Put the likeliest token of every sequence on the current stream, the lowest id of equals, and finish the step.

    candidates -- int64 [sequences, blocks], as `rows.product` wrote them
    ids        -- int32 [sequences]: the tokens are written here, where `rows.embed` reads them
    best       -- float32 [sequences]: their logits. NaN or infinite: no token is likeliest, and the host must say so
    positions  -- int32 [sequences]: one is added to each; None: nothing is
    held       -- where the step was sparse and a share is held: thresholds are scaled for the next one
    """
    of_held = [None] * 5 if held is None else [held.scales, held.steps, held.skipped, held.moving, held.how]
    launch(
        kernel("sampling", "pick_likeliest", (), candidates.device.index or 0),
        (len(candidates),),
        32 if held is None else 64,
        *(candidates, candidates.shape[1], ids, best, positions),
        *of_held,
    )
