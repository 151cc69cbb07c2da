"""Sums over pairs of |q_ic k_jc|: how much channel c moves the score that query i gives to key j.

A score is a sum over channels, q_i . k_j = sum_c q_ic k_jc, and a heavy channel is one whose terms are large (Double
Sparsity 4.1). Counted are the pairs that attention compares: j is i or before it, within the sliding window of a layer
that has one. Not only the pairs j = i, as in the paper's code: a token's score of itself is the one that nobody needs.

For each i the sum over j is |q_ic| times a running sum of |k_jc|, so the pairs are never formed. The query heads that
share a KV head are combined by `GROUPS`.
"""

import torch
from torch import Tensor, nn

_PIECE = 64

GROUPS = "mean"
"""A KV head has the mean of what is known of the query heads that share the KV head."""


def of_groups(queries: Tensor, kv_heads: int, dim: int = 0) -> Tensor:
    """The mean over the query heads of each group: dimension `dim`, heads long, becomes kv_heads long.

    Query head h belongs to KV head h // (heads / kv_heads).
    """
    return torch.unflatten(queries, dim, (kv_heads, -1)).mean(dim + 1)


def product_sums(query: Tensor, key: Tensor, window: int) -> Tensor:
    """The sums of products of queries [B, heads, S, D] and keys [B, kv_heads, S, D], on any device: float64
    [kv_heads, D].

    window -- how many tokens a query sees at most, itself included; 0: all before it
    """
    asked = of_groups(query.float().abs(), key.shape[1], dim=1)  # [B, kv_heads, S, D]
    up_to = _running(key.float().abs())
    if 0 < window < key.shape[2]:
        up_to = torch.cat([up_to[:, :, :window], up_to[:, :, window:] - up_to[:, :, :-window]], 2)
    return up_to.mul_(asked).sum((0, 2))


def _running(amounts: Tensor) -> Tensor:
    """Sums over the tokens up to each, itself included: [B, heads, S, D] -> float64 of that shape.

    Pieces of a window are summed by themselves, then one after the other: a GPU takes each step of a sum for a channel
    by itself.
    """
    length = amounts.shape[2]
    pieces = torch.unflatten(nn.functional.pad(amounts, (0, 0, 0, -length % _PIECE)), 2, (-1, _PIECE))
    within = pieces.cumsum(3, dtype=torch.float64)
    before = nn.functional.pad(within[:, :, :-1, -1].cumsum(2), (0, 0, 1, 0))
    running: Tensor = (within + before[:, :, :, None]).flatten(2, 3)[:, :, :length]
    return running
