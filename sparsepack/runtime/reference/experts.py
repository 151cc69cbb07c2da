"""Which experts a token has, and how much of each: the oracle in plain torch."""

import torch
from torch import Tensor


def route(x: Tensor, router: Tensor, used: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts that a router chooses, the likeliest ones by the softmax of its logits.

    x -- float32 [S, hidden]; router -- float32 [experts, hidden]; used -- experts that a token has
    normalised -- whether the weights of these are made to add up to one

    Returns their numbers, int64 [S, used], and weights, float32 [S, used]; the likeliest first.
    """
    weights, chosen = torch.softmax(x @ router.T, -1).topk(used, -1)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalised else weights


def with_shared(x: Tensor, gate: Tensor, numbers: range, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What `route` returned, and after it the experts that every token has: [S, used + shared].

    gate -- float32 [1, hidden]: the sigmoid of its product with x is their weight; numbers -- of these experts
    """
    more = torch.tensor([*numbers], device=x.device).expand(len(x), -1)
    weight = torch.sigmoid(x @ gate.T).expand(-1, len(numbers))
    return torch.cat([chosen, more], 1), torch.cat([weights, weight], 1)
