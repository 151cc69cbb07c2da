"""How a step ends on the GPU: the likeliest token of each sequence, and the threshold controller
(`runtime/threshold_controller.py`), which kernels read and change, and for which no host waits."""

from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.threshold_controller import ThresholdController


@dataclass(frozen=True)
class CudaThresholdController:
    """The state of the threshold controller of B sequences.

    scales  -- float32 [B]: what their thresholds are multiplied by
    steps   -- float32 [B]: how many sparse steps they have made
    skipped -- int64 [B]: the weights in inactive columns of a step so far, or of planes the unread bytes of weights,
               as `weights` of the controller counts them; zero between steps
    moving  -- int32 [B]: 0 for a sequence that stands still; None: there is one, which never does
    constants -- float64 [7]: the fields of `controller`
    """

    controller: ThresholdController
    scales: Tensor
    steps: Tensor
    skipped: Tensor
    moving: Tensor | None
    constants: Tensor

    def begin(self, sequence: int | None = None) -> None:
        """Let a sequence begin anew, on the current stream; None: every one."""
        which = slice(None) if sequence is None else sequence
        self.scales[which].fill_(1.0)
        self.steps[which].fill_(0.0)


def new_cuda_controller(controller: ThresholdController, state: Tensor, block: str) -> CudaThresholdController:
    """The controller of new sequences.

    state -- float32 [2, B], where scales and steps lie
    block -- of the matrices: kernels count what they skip of planes by the bytes of a superblock
    """
    if BLOCKS[block].levels:
        controller = replace(controller, weights=controller.weights * BLOCKS[block].bytes)
    sequences, device = state.shape[1], state.device
    constants = torch.tensor(astuple(controller), dtype=torch.float64, device=device)
    skipped = torch.zeros(sequences, dtype=torch.int64, device=device)
    moving = torch.ones(sequences, dtype=torch.int32, device=device) if sequences > 1 else None
    started = CudaThresholdController(controller, state[0], state[1], skipped, moving, constants)
    started.begin()
    return started


def pick_likeliest(
    candidates: Tensor,
    ids: Tensor,
    best: Tensor,
    positions: Tensor | None = None,
    controller: CudaThresholdController | None = None,
) -> None:
    """Put the likeliest token of every sequence on the current stream, the lowest id of equals, and finish the step.

    candidates -- int64 [sequences, blocks], as `rows.product` wrote them
    ids        -- int32 [sequences]: the tokens are written here, where `rows.embed` reads them
    best       -- float32 [sequences]: their logits. NaN or infinite: no token is likeliest, and the host must say so
    positions  -- int32 [sequences]: one is added to each; None: nothing is
    controller -- after a sparse step: scales the thresholds of the next one
    """
    launch(
        kernel("sampling", "pick_likeliest", (), candidates.device.index or 0),
        (len(candidates),),
        32 if controller is None else 64,
        *(candidates, candidates.shape[1], ids, best, positions),
        *([None] * 5 if (c := controller) is None else [c.scales, c.steps, c.skipped, c.moving, c.constants]),
    )
