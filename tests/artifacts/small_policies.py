"""Policies of every kind for the small models."""

import torch

from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.rule import SitePolicy


def policies(checkpoint: Checkpoint) -> dict[tuple[int, str], SitePolicy | None]:
    """A policy of every kind."""
    columns = checkpoint.stacked_shape("mlp_mid")[1]
    ramp = torch.arange(columns) / columns
    return {
        (0, "attn_in"): SitePolicy(torch.tensor(0.25)),
        (1, "mlp_mid"): SitePolicy(ramp, -ramp),
        (1, "attn_in"): None,
    }
