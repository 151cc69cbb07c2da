"""Histograms of the score |x_j| * c_j over tokens and channels, for every criterion: what thresholds are taken from."""

import torch
from torch import Tensor

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.collectors.collector import Collector


def _count(x: Tensor, column_norms: Tensor) -> tuple[Tensor, ...]:
    size = x.float().abs()
    return histogram.count(size), histogram.count(size * column_norms)


SCORES = Collector("site", ("histogram.magnitude", "histogram.column-norm"), torch.int64, (histogram.BINS,), _count)
"""Each histogram is int64 [histogram.BINS]; the names end in those of the criteria."""
