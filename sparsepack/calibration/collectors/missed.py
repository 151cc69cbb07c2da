"""What attention misses that reads the best of the tokens alone: the share of its weight that the others have.

For Double Sparsity (4.1, 4.2): layers whose attention is spread over all tokens must stay dense. Measured are the exact
best tokens, those that labels only estimate: one list for each KV head, by the mean query of its group, as decoding
selects them. The first positions are among the tokens that are read or missed.

Some positions of each window are enough, evenly spaced in its second half: it costs a few of the window's rows of
scores, where attention itself has all of them.
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.products import of_groups

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
    # A head at a time: scores exist of one head only.
    missed = [_missed(*pair, seen, last_read) for pair in zip(groups, key.flatten(0, 1), strict=True)]
    positions = torch.full((len(SHARES),), float(len(query) * len(at)), dtype=torch.float64)
    return torch.stack(missed).sum(0) / key.shape[1], positions


def _positions(length: int, device: torch.device) -> Tensor:
    """Which positions of a window are looked at: int64 [P]."""
    first = length // 2
    return torch.linspace(first, length - 1, min(POSITIONS, length - first), device=device).round().long()


def _missed(group: Tensor, key: Tensor, seen: Tensor, last_read: Tensor) -> Tensor:
    """For queries [group, P, D] and the key [S, D] of one KV head: the weight that each share misses, mean over the
    group, summed over the positions: float64 [shares].

    seen -- bool [P, S]; last_read -- int64 [P, shares], the rank of the last token that is read
    """
    scores = (group.float() @ key.float().T * key.shape[1] ** -0.5).masked_fill(~seen, -torch.inf)
    # The mean of the scores is the score of the mean query.
    best_first = of_groups(scores, 1).squeeze(0).argsort(1, descending=True)
    weights = of_groups(scores.softmax(-1), 1).squeeze(0)
    found = weights.gather(1, best_first).cumsum(1, dtype=torch.float64).gather(1, last_read)
    return (1 - found).clamp(0, 1).sum(0)


MISSED = Collector("window", ("missed", "missed_positions"), torch.float64, (len(SHARES),), _count)
"""The sums are float64 [shares]: of the attention weight that is missed, over positions, and of the number of
positions."""
