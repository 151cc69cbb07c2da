"""Heavy channels for the accuracy benchmarks of sparse attention, chosen from a calibration as `pack` chooses them."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sparsepack.calibration.channels import importance
from sparsepack.calibration.folder import load
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.records.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.sparsity.attention import heaviest


def importances(model: str, calibration: Path, by: str = "product") -> list[Tensor]:
    """How important each channel of each head is, by a field of `calibration.channels.Importance`: [kv_heads, D] a
    layer. Raises `CalibrationError` for a calibration of another model."""
    statistics = load(calibration)
    statistics.check_model(open_checkpoint(model))
    return [getattr(each, by) for each in importance(statistics)]


def attention_by(ranked: Sequence[Tensor], channels: int, dense: str, policy: TokenPolicy) -> SparseAttention:
    """Sparse attention by so many channels of each head (0: all), but in the layers of `dense`, numbers with commas."""
    left = {int(layer) for layer in dense.split(",") if layer}
    best = [heaviest(each, channels or each.shape[1]) for each in ranked]
    return SparseAttention(policy, tuple(None if n in left else each for n, each in enumerate(best)))
