"""Rules of every kind for the small models."""

import torch

from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.sites import SiteKey, SiteRule


def rules(checkpoint: Checkpoint) -> dict[SiteKey, SiteRule]:
    """A rule of every kind."""
    columns = checkpoint.stacked_shape("mlp_mid")[1]
    ramp = torch.arange(columns) / columns
    return {
        (0, "attn_in"): SiteRule(torch.tensor(0.25)),
        (1, "mlp_mid"): SiteRule(ramp, -ramp),
        (1, "attn_in"): SiteRule(),
    }
