"""The thresholds of a model on the GPU, side by side, so that one kernel scales them all where a share is held."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.runtime.chained.layer import LoadedSite
from sparsepack.runtime.site_columns import Columns, load_vector


class Thresholds:
    """The thresholds of sites, times a scale.

    sparse -- the columns that each site's product reads in sparse steps, in order; their thresholds are parts of one
              tensor
    scale  -- what the thresholds are multiplied by at present
    """

    def __init__(self, sites: Sequence[LoadedSite], device: torch.device) -> None:
        own = [torch.empty(0, device=device) if s.rule is None else load_vector(s.rule.limits, device) for s in sites]
        self._own = torch.cat(own)
        self._scaled = self._own.clone()
        self.scale = 1.0
        parts = torch.split(self._scaled, [len(part) for part in own])
        self.sparse = [_sparse(site, part) for site, part in zip(sites, parts, strict=True)]

    def multiply(self, scale: float) -> None:
        """Let the thresholds be the file's times a scale, compared in float32. The host waits for nothing."""
        if scale != self.scale:
            torch.mul(self._own, scale, out=self._scaled)
            self.scale = scale


def _sparse(site: LoadedSite, threshold: Tensor) -> Columns:
    if site.rule is None:
        return Columns(bias=site.bias)
    device = threshold.device
    offset = None if site.rule.offset is None else load_vector(site.rule.offset, device)
    return Columns(threshold, offset, site.sparse_bias)
