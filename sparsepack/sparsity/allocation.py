"""What every allocation starts from: how much each site counts, and the channel weights of a criterion."""

from collections.abc import Sequence

from sparsepack.calibration.criteria import channel_weights
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.records.rule import SiteKey, SiteRule
from sparsepack.models.stock.blocks import BlockStream


def weights_of(checkpoint: Checkpoint, sites: Sequence[SiteKey]) -> dict[SiteKey, float]:
    """Each site's share of the parameters of all `sites` that a token has to do with: how much its sparsity counts."""
    sizes = {key: float(checkpoint.token_weights(key[1], key[0])) for key in sites}
    total = sum(sizes.values())
    return {key: size / total for key, size in sizes.items()}


def rules_of_criterion(stream: BlockStream, criterion: str) -> dict[str, SiteRule]:
    """The criterion's channel weights for each site of the loaded block, at no sparsity yet."""
    choices = {}
    for site in SITES:
        c = channel_weights(criterion, stream.block, stream.source.family, site)
        choices[site] = SiteRule(channel_weights=None if c is None else c.cpu())
    return choices
