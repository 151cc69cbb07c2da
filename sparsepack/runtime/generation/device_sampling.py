"""Draw the next token on the device: the host need not wait for the logits."""

import torch
from torch import Tensor


def sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """What `Sampler.choose` chooses from the same logits and draw, by operations that no host waits for.

    logits      -- float32 [vocabulary]
    draw        -- scalar in [0, 1), on the logits' device: float64, or float32 where the device has no other; sums of
                   probabilities have its type
    temperature -- more than 0
    top_k, top_p -- as in `Sampling`

    Returns the id, int64 scalar; any id where the largest logit is not finite (`pick_likeliest` tells). The operations
    can be captured in a CUDA graph, with the three settings as constants.

    Sums of probabilities run in another order than on the CPU: a draw within about 1e-15 (float32: 1e-6) of where one
    token ends and the next begins may choose its neighbour, and so may top_p. Logits are sorted before the largest is
    taken from them and they are divided; where that makes two of them equal (1e-17 and 0 beside 20), the CPU sorts them
    by id.
    """
    ordered, ids = torch.sort(logits + 0.0, descending=True, stable=True)  # -0 becomes 0
    # A scalar divisor would be multiplied by its reciprocal.
    divisor = torch.full((), temperature, dtype=draw.dtype, device=logits.device)
    exponents = (ordered.to(draw.dtype) - ordered[0].to(draw.dtype)) / divisor
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
