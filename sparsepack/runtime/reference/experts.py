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
