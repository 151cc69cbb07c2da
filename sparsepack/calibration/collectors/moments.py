"""Second moments of each input channel: the sum of x_j**2 over tokens."""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.site_input import SiteInput


def _count(site: SiteInput) -> tuple[Tensor, ...]:
    return (site.counted.squares,)


MOMENTS = Collector("site", ("second_moment",), torch.float64, (0,), _count)
"""The second moments are float64 [columns]."""
