"""Sums over tokens of |q|, q**2, |k| and k**2, after rotary embedding and q/k norms.

For Double Sparsity's heavy channels (4.1).
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector


def _count(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    amounts = (amount for value in (query.float(), key.float()) for amount in (value.abs(), value.square()))
    return tuple(amount.sum((0, 2), dtype=torch.float64) for amount in amounts)


ATTENTION = Collector(
    "attention", ("query_abs", "query_square", "key_abs", "key_square"), torch.float64, (0, 0), _count
)
"""The sums are float64, [heads, D] for the query and [kv_heads, D] for the key."""
