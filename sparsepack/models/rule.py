"""What a site does with its input while decoding: which channels are active, and what stands in for the others."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SitePolicy:
    """A site's rule.

    threshold -- float32 scalar or [columns]: channel j is active where |x_j - offset_j| > threshold_j, strictly
    offset    -- float32 [columns] or None (zero): the value that an inactive channel takes
    """

    threshold: torch.Tensor
    offset: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "SitePolicy":
        """The same policy on another device."""
        offset = None if self.offset is None else self.offset.to(device)
        return SitePolicy(self.threshold.to(device), offset)


def active_channels(x: torch.Tensor, policy: SitePolicy) -> torch.Tensor:
    """Which channels of x [..., columns] are active: bool [..., columns], compared in float32."""
    shifted = x.float() if policy.offset is None else x.float() - policy.offset
    return shifted.abs() > policy.threshold


def sparsify(x: torch.Tensor, policy: SitePolicy) -> torch.Tensor:
    """x [..., columns] with every inactive channel replaced by its offset: what the sparse product computes with."""
    rest = torch.zeros((), dtype=x.dtype, device=x.device) if policy.offset is None else policy.offset.to(x.dtype)
    return torch.where(active_channels(x, policy), x, rest)
