"""How much each site counts in an allocation."""

from collections.abc import Sequence

import torch

from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.rule import SiteKey


def weights_of(checkpoint: Checkpoint, sites: Sequence[SiteKey]) -> dict[SiteKey, float]:
    """Each site's share of the parameters of all `sites`: how much its sparsity counts."""
    sizes = {key: float(torch.Size(checkpoint.stacked_shape(key[1], key[0])).numel()) for key in sites}
    total = sum(sizes.values())
    return {key: size / total for key, size in sizes.items()}
