"""What a basis is found from: the second moments that a calibration has, of the residual stream and of what its heads
give."""

from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.heads import OUTPUT_PRODUCT
from sparsepack.calibration.residual import PRODUCT


def second_moments(calibration: Calibration) -> list[tuple[range, Tensor]] | None:
    """The second moments E[x x^T] of the residual stream before the norms' weights, x = h / rms(h), for each run of
    blocks: float64 [hidden, hidden]. None where the calibration has none."""
    section = calibration.manifest.get("residual")
    if section is None:
        return None
    found, first = [], 0
    counted = calibration.manifest["tokens"]["counted"] * section["norms"]
    for layer, statistics in enumerate(calibration.layers):
        if PRODUCT in statistics:
            blocks = range(first, layer + 1)
            found.append((blocks, statistics[PRODUCT] / (counted * len(blocks))))
            first = layer + 1
    return found


def output_moments(calibration: Calibration) -> tuple[Tensor, ...] | None:
    """The second moments E[y y^T] of what the query heads of each KV head give, of each block: float64
    [kv_heads, D, D]. None where the calibration has none."""
    heads = calibration.manifest["attention"]
    counted = calibration.manifest["tokens"]["counted"] * (heads["heads"] // heads["kv_heads"])
    found = [layer[OUTPUT_PRODUCT] / counted for layer in calibration.layers if OUTPUT_PRODUCT in layer]
    return tuple(found) or None
