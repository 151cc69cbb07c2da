"""Thresholds and offsets of channels that can be trained: a mask that is hard forwards and soft backwards.

In the backward pass a threshold, and the vector itself, feel a sigmoid of |x| / t (a straight-through estimate).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from sparsepack.calibration.collectors import histogram
from sparsepack.models.records.rule import SiteKey

_LEARNING_RATE = 0.03
_SOFTNESS = 0.15  # width of the sigmoid, as a share of the threshold


def first_threshold(counts: torch.Tensor, sparsity: float) -> float:
    """The threshold that makes a site so sparse, from a histogram of its scores; above zero, since its logarithm is
    trained."""
    threshold = histogram.quantile(counts, sparsity)
    if threshold == 0:  # more exact zeros than asked for: begin among the smallest of the others
        others = counts.clone()
        others[0] = 0
        threshold = histogram.quantile(others, 0.05) or 1.0  # nothing but zeros: any threshold will do
    return threshold


@dataclass
class SoftChannels:
    """log_thresholds and offsets: float32 [columns] per site; scales: each site's first threshold."""

    log_thresholds: dict[SiteKey, torch.Tensor] = field(default_factory=dict)
    offsets: dict[SiteKey, torch.Tensor] = field(default_factory=dict)
    scales: dict[SiteKey, float] = field(default_factory=dict)

    def begin(self, key: SiteKey, thresholds: torch.Tensor, offsets: bool = False) -> None:
        """A site whose channels begin at these thresholds, float32 [columns]; `offsets` are trained, too, or zero."""
        self.scales[key] = float(thresholds.median())
        self.log_thresholds[key] = thresholds.log().requires_grad_(True)
        self.offsets[key] = torch.zeros_like(thresholds).requires_grad_(offsets)

    def groups(self) -> list[dict[str, Any]]:
        """All that is trained, as an optimiser takes it."""
        groups: list[dict[str, Any]] = [{"params": [*self.log_thresholds.values()], "lr": _LEARNING_RATE}]
        return groups + [
            {"params": [offset], "lr": 0.3 * _LEARNING_RATE * self.scales[key]}
            for key, offset in self.offsets.items()
            if offset.requires_grad
        ]

    def sparse(self, key: SiteKey, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., columns] with every inactive channel at its offset, and the share of inactive ones."""
        offset = self.offsets[key]
        shifted = x.float() - offset
        ratio = shifted.abs() * torch.exp(-self.log_thresholds[key])
        soft = torch.sigmoid((ratio - 1) / _SOFTNESS)
        mask = (ratio > 1).float() + soft - soft.detach()
        return (offset + shifted * mask).to(x.dtype), 1 - mask.mean()
