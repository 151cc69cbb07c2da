"""Second moments of each input channel: the sum of x_j**2 over tokens."""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector


def _count(x: Tensor, column_norms: Tensor) -> tuple[Tensor, ...]:
    return (x.float().square().flatten(0, -2).sum(0, dtype=torch.float64),)


MOMENTS = Collector("site", ("second_moment",), torch.float64, (0,), _count)
"""The second moments are float64 [columns]."""
