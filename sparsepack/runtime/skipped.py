"""How much an engine skipped of the weights that it ran."""

from collections.abc import Mapping

from sparsepack.formats.packed import PackedModel
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.records.skipped import Skipped, skipped, sparse_sites_of


def skipped_weights(packed: PackedModel, activity: Mapping[SiteKey, float]) -> Skipped:
    """What a packed model skipped where so much of each site was active; a site that is not named was so wholly."""
    inactive = {key: 1 - share for key, share in activity.items()}
    return skipped(packed.parameters, inactive, sparse_sites_of(packed.manifest, packed.rules))
