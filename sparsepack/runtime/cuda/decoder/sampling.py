"""Choose the next token on the device: the host need not wait for the logits."""

import torch
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


def sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """What `Sampler.choose` chooses from the same logits and draw, by operations that no host waits for.

    logits      -- float32 [vocabulary]
    draw        -- float64 scalar in [0, 1), on the logits' device
    temperature -- more than 0
    top_k, top_p -- as in `Sampling`

    Returns the id, int64 scalar; any id where the largest logit is not finite (`pick_likeliest` tells). The operations
    can be captured in a CUDA graph, with the three settings as constants.

    Sums of probabilities run in another order than on the CPU: a draw within about 1e-15 of where one token ends and
    the next begins may choose its neighbour, and so may top_p. Logits are sorted before the largest is taken from them
    and they are divided; where that makes two of them equal (1e-17 and 0 beside 20), the CPU sorts them by id.
    """
    ordered, ids = torch.sort(logits + 0.0, descending=True, stable=True)  # -0 becomes 0
    # A scalar divisor would be multiplied by its reciprocal.
    divisor = torch.full((), temperature, dtype=torch.float64, device=logits.device)
    exponents = (ordered.double() - ordered[0].double()) / divisor
    if top_k is not None:
        exponents = exponents[:top_k]
    # The largest exponent is 0, so that no exponential overflows.
    cumulative = exponents.exp().cumsum(0)
    last = len(cumulative) - 1
    total = cumulative[last:]
    if top_p is not None:
        kept = (cumulative < top_p * total).sum(0, keepdim=True)  # without the one that reaches top_p
        total = cumulative.gather(0, kept.clamp(max=last))
    place = torch.searchsorted(cumulative, draw * total)
    return ids.gather(0, place.clamp(max=last))[0]
