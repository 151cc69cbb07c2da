"""Sums over pairs of |q_ic k_jc|: how much channel c moves the score that query i gives to key j.

A score is a sum over channels, q_i . k_j = sum_c q_ic k_jc, and a heavy channel is one whose terms are large (Double
Sparsity 4.1). Counted are the pairs that attention compares: j is i or before it, within the sliding window of a layer
that has one. Not only the pairs j = i, as in the paper's code: a token's score of itself is the one that nobody needs.

For each i the sum over j is |q_ic| times a running sum of |k_jc|, so the pairs are never formed. The query heads that
share a KV head are combined by `GROUPS`.
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector

GROUPS = "mean"
"""A KV head has the mean of what is known of the query heads that share the KV head."""


def of_groups(queries: Tensor, kv_heads: int, dim: int = 0) -> Tensor:
    """The mean over the query heads of each group: dimension `dim`, heads long, becomes kv_heads long.

    Query head h belongs to KV head h // (heads / kv_heads).
    """
    return torch.unflatten(queries, dim, (kv_heads, -1)).mean(dim + 1)


def _count(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    kv_heads = key.shape[1]
    groups = torch.unflatten(query, 1, (kv_heads, -1))  # [B, kv_heads, group, S, D]
    # A head at a time: numbers in 64 bits exist of one head only.
    sums = [_pairs(groups[:, head], key[:, head], window) for head in range(kv_heads)]
    return (torch.stack(sums),)


def _pairs(group: Tensor, key: Tensor, window: int) -> Tensor:
    """The sums of products of the queries [B, group, S, D] and the key [B, S, D] of one KV head: float64 [D]."""
    asked = of_groups(group.float().abs(), 1, dim=1).squeeze(1)  # [B, S, D]
    up_to = key.float().abs().cumsum(1, dtype=torch.float64)
    if 0 < window < key.shape[1]:
        up_to = torch.cat([up_to[:, :window], up_to[:, window:] - up_to[:, :-window]], 1)
    return up_to.mul_(asked).sum((0, 1))


PRODUCTS = Collector("attention", ("product_abs",), torch.float64, (0, 0), _count)
"""The sums are float64 [kv_heads, D]."""
