"""Sums over tokens of |q|, q**2, |k| and k**2, after rotary embedding and q/k norms, and over pairs of |q_c k_c|.

For Double Sparsity's heavy channels (4.1).
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.kernels import kernels_on
from sparsepack.calibration.collectors.products import product_sums

_FARTHEST = 2**31 - 1
"""Kernels take distances between values in 32 bits."""


def _count(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    too_far = max(*query.stride(), *key.stride()) > _FARTHEST
    if too_far or not kernels_on(query.device):
        return (*sums_by_torch(query, key), product_sums(query, key, window))
    from sparsepack.runtime.cuda.calibration import sum_heads

    *sums, products = sum_heads(query, key)
    return (*sums, product_sums(query, key, window) if 0 < window < key.shape[2] else products)


def sums_by_torch(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """The sums over tokens, on any device: float64 [heads, D], twice, and [kv_heads, D], twice."""
    amounts = (amount for value in (query.float(), key.float()) for amount in (value.abs(), value.square()))
    return tuple(amount.sum((0, 2), dtype=torch.float64) for amount in amounts)


ATTENTION = Collector(
    "attention", ("query_abs", "query_square", "key_abs", "key_square", "product_abs"), torch.float64, (0, 0), _count
)
"""The sums are float64, [heads, D] for the query, and [kv_heads, D] for the key and for pairs."""
