"""`uniform` allocation: every site that may be sparse gets the target itself."""

from collections.abc import Mapping
from dataclasses import replace

from sparsepack.calibration.folder import Calibration
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.records.rule import SiteKey, SiteRule
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.sparsity.allocation import rules_of_criterion
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.sparsity.sequential import Chooser
from sparsepack.workers.resume import ResumeState


def chooser(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    resume: ResumeState,
) -> Chooser:
    """The target for each site in `weights`; the other sites stay dense."""

    def choose(layer: int, stream: BlockStream) -> dict[str, SiteRule]:
        base = rules_of_criterion(stream, options.criterion)
        return {s: replace(base[s], sparsity=options.sparsity if (layer, s) in weights else 0.0) for s in SITES}

    return choose
