"""What every allocation starts from, how much each site counts and the channel weights of a criterion; and `uniform`:
every site that may be sparse gets the target itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sparsepack.calibrate.collector import channel_weights
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.sequential import Chooser
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.workers.exchange import Each


def weights_of(checkpoint: Checkpoint, sites: Sequence[SiteKey]) -> dict[SiteKey, float]:
    """Each site's share of the parameters of all `sites` that a token has to do with: how much its sparsity counts."""
    sizes = {key: float(checkpoint.token_weights(key[1], key[0])) for key in sites}
    total = sum(sizes.values())
    return {key: size / total for key, size in sizes.items()}


def rules_of_criterion(stream: BlockStream, layer: int, criterion: str) -> dict[str, SiteRule]:
    """The criterion's channel weights for each site of the loaded block, at no sparsity yet."""
    choices = {}
    for site in stream.source.family.projections_of(layer):
        c = channel_weights(criterion, stream.block, stream.source.family, site, layer)
        choices[site] = SiteRule(channel_weights=None if c is None else c.cpu())
    return choices


def chooser(
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    each: Each,
    carried: dict[str, Tensor],
) -> Chooser:
    """The target for each site in `weights`; the other sites stay dense."""

    def choose(layer: int, stream: BlockStream) -> dict[str, SiteRule]:
        base = rules_of_criterion(stream, layer, options.criterion)
        return {s: replace(base[s], sparsity=options.sparsity if (layer, s) in weights else 0.0) for s in base}

    return choose
