"""Histograms of the score |x_j| * c_j over tokens and channels, for every criterion: what thresholds are taken from."""

import torch
from torch import Tensor

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.site_input import SiteInput


def _count(site: SiteInput) -> tuple[Tensor, ...]:
    return site.counted.scores.unbind()


SCORES = Collector("site", ("histogram.magnitude", "histogram.column-norm"), torch.int64, (histogram.BINS,), _count)
"""Each histogram is int64 [histogram.BINS]; the names end in those of the criteria."""
