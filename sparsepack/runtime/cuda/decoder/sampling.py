"""Choose the likeliest token on the device: the host need not wait for the logits."""

from torch import Tensor

from sparsepack.runtime.cuda.decoder.held import CudaHeld
from sparsepack.runtime.cuda.driver.kernel import kernel, launch


def pick_likeliest(
    candidates: Tensor, ids: Tensor, best: Tensor, positions: Tensor | None = None, held: CudaHeld | None = None
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
