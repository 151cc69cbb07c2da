"""The vectors that enter a site, and what is counted of them together: on an NVIDIA GPU one kernel reads them once."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.collectors.kernels import kernels_on


class SiteCounts(NamedTuple):
    """What is counted of a site's input.

    scores  -- int64 [2, histogram.BINS], of |x| and of |x| times the norms of columns
    squares -- float64 [columns], sums of x * x over tokens
    active  -- int64 [columns], tokens for which a column is not zero; None where nobody asked
    each    -- integers [tokens], columns that are not zero for a token; likewise
    """

    scores: Tensor
    squares: Tensor
    active: Tensor | None
    each: Tensor | None


@dataclass(frozen=True)
class SiteInput:
    """What enters a site.

    x            -- [B, S, columns]; of experts [B, S, experts, columns]
    column_norms -- of the site's matrix, float32 [columns]
    neurons      -- whether the columns are an MLP's neurons
    """

    x: Tensor
    column_norms: Tensor
    neurons: bool = False

    @property
    def tokens(self) -> int:
        """How many vectors there are."""
        return self.x.numel() // self.x.shape[-1]

    @cached_property
    def counted(self) -> SiteCounts:
        """What is counted of it, on its device. A GPU is not waited for."""
        if kernels_on(self.x.device):
            from sparsepack.runtime.cuda.calibration import count_site

            x = self.x.flatten(1, -2)
            return SiteCounts(*count_site(x, self.column_norms, histogram.BINS, self.neurons))
        return counted_by_torch(self)


def counted_by_torch(site: SiteInput) -> SiteCounts:
    """`SiteInput.counted` on any device."""
    size = site.x.float().abs()
    scores = torch.stack([histogram.count(size), histogram.count(size * site.column_norms)])
    squares = size.square().flatten(0, -2).sum(0, dtype=torch.float64)
    if not site.neurons:
        return SiteCounts(scores, squares, None, None)
    active = (site.x != 0).flatten(0, -2)
    return SiteCounts(scores, squares, active.sum(0), active.sum(1))
