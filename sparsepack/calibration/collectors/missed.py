"""What attention misses that reads the best of the tokens alone: the share of its weight that the others have.

For Double Sparsity (4.1, 4.2): layers whose attention is spread over all tokens must stay dense. Measured are the exact
best tokens, those that labels only estimate: one list for each KV head, by the mean query of its group, as decoding
selects them. The first positions are among the tokens that are read or missed.

Some positions of each window are enough, evenly spaced in its second half: it costs a few of the window's rows of
scores, where attention itself has all of them.
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors import wide
from sparsepack.calibration.collectors.collector import Collector

SHARES = (4, 8, 16, 32)
"""The figures are for reading the best 1/4 of the tokens that a position sees, rounded up, 1/8, and so on."""

POSITIONS = 32
"""A window is measured at this many positions, if its second half has so many."""


def _count(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    at = _positions(query.shape[2], query.device)
    token = torch.arange(key.shape[2], device=query.device)
    seen = (token <= at[:, None]) & (token > at[:, None] - (window or len(token)))
    counts = seen.sum(1)
    last_read = torch.stack([-(-counts // share) for share in SHARES], 1) - 1  # [P, shares]
    groups = torch.unflatten(query[:, :, at], 1, (key.shape[1], -1)).flatten(0, 1)  # [B * kv_heads, group, P, D]
    missed = _missed(groups, key.flatten(0, 1), seen, last_read)
    positions = torch.full((len(SHARES),), len(query) * len(at), dtype=torch.float64, device=query.device)
    return missed / key.shape[1], positions


def _positions(length: int, device: torch.device) -> Tensor:
    """Which positions of a window are looked at: int64 [P]."""
    first = length // 2
    return torch.linspace(first, length - 1, min(POSITIONS, length - first), device=device).round().long()


def _missed(groups: Tensor, keys: Tensor, seen: Tensor, last_read: Tensor) -> Tensor:
    """For queries [N, group, P, D] and keys [N, S, D] of N KV heads: the weight that each share misses, mean over the
    group, summed over heads and positions: float64 [shares].

    seen -- bool [P, S]; last_read -- int64 [P, shares], the rank of the last token that is read
    """
    products = wide.product(groups.flatten(1, 2), keys.mT) * keys.shape[2] ** -0.5
    scores = torch.unflatten(products, 1, groups.shape[1:3]).masked_fill_(~seen, -torch.inf)  # [N, group, P, S]
    # The mean of the scores is the score of the mean query.
    best_first = scores.mean(1).argsort(-1, descending=True)
    weights = scores.softmax(-1).mean(1)
    found = weights.gather(-1, best_first).cumsum(-1, dtype=torch.float64)
    missed = 1 - found.gather(-1, last_read.expand(len(found), -1, -1))
    return missed.clamp(0, 1).sum((0, 1))


MISSED = Collector("window", ("missed", "missed_positions"), torch.float64, (len(SHARES),), _count)
"""The sums are float64 [shares]: of the attention weight that is missed, over positions, and of the number of
positions."""
