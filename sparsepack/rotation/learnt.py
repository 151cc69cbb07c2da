"""Bases that are trained: a turn of each start basis, all together with thresholds, against the model's own output.

PCA gives the basis in which a few channels hold most of the residual stream; what matters is the output. So Q = Q0 C(A)
with C(A) = (I - A)^-1 (I + A), Cayley's map of a skew matrix A, which is orthogonal for every A. A is trained on the KL
divergence of `global` (`sparsity/learned.py`), with all channels' thresholds, at the target sparsity; the thresholds
are then let go, since `pack` learns them on the rotated model.

Nothing is folded while training: with the norms' weights folded into what follows, x at attn_in and mlp_in is the
normalised residual stream, z = x Q is sparsified, and x' = z' Q^T goes on. attn_out and mlp_mid stay in the basis that
they have. In the backward pass Q feels the soft mask, as the thresholds do. With several segments a block's Q is that
of its segment, each has an A of its own, and no matrix stands between segments, since nothing is folded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.folder import Calibration
from sparsepack.files.resume import ResumeState
from sparsepack.models.checkpoint.bases import Bases
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import rotated
from sparsepack.models.families import SITES, Family, stream_of
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.stock.halves import Change
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.whole import backbone_of, load_model
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.rotation import pca
from sparsepack.rotation.options import RotateOptions
from sparsepack.sparsity.allocation import weights_of
from sparsepack.sparsity.divergence import divergence
from sparsepack.sparsity.soft_channels import SoftChannels, first_threshold
from sparsepack.sparsity.training import Training

_WINDOWS = 8
"""The first thresholds are taken on so many windows of the calibration."""


def check_model(checkpoint: Checkpoint) -> None:
    """Every model has one."""


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions, resume: ResumeState) -> Bases:
    """The bases of a model, learnt from those of PCA on. Raises as `pca.bases` does."""
    return learn_bases(checkpoint, calibration, pca.bases(checkpoint, calibration, options, resume), options, resume)


def learn_bases(
    checkpoint: Checkpoint, calibration: Calibration, start: Bases, options: RotateOptions, resume: ResumeState
) -> Bases:
    """Bases of the residual stream, float64 [hidden, hidden] on the CPU. Holds the whole model on one device.

    start -- those to begin with, float64 [hidden, hidden], PCA's or others

    A run that was killed goes on from `resume`, which keeps the state of the training.
    """
    with torch.inference_mode(False), torch.enable_grad():
        start = replace(start, matrices=tuple(matrix.clone() for matrix in start.matrices))  # outside of inference mode
        dtype = arithmetic("auto", checkpoint.dtype, options.device)
        model = load_model(rotated(checkpoint, Bases(), device=options.device), options.device, dtype)
        weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
        first = replace(start, matrices=tuple(m.to(options.device, torch.float32) for m in start.matrices))
        windows = spread_windows(calibration.windows, _WINDOWS).to(options.device)
        channels = uniform_channels(model, checkpoint.family, windows, options.sparsity, first)
        turns = [torch.zeros_like(matrix, requires_grad=True) for matrix in first.matrices]
        hidden = int(checkpoint.config.hidden_size)
        groups = [*channels.groups(), {"params": turns, "lr": options.rate / hidden**0.5}]

        def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
            sparse = sparse_in(turned(first, turns), checkpoint.family, channels, weights)
            return divergence(model, checkpoint.family, ids, sparse)

        Training(groups, options, resume).run("learning a basis", calibration.windows, loss)
        found = turned(start, [turn.detach().cpu().double() for turn in turns])
        return replace(found, matrices=tuple(orthonormal(matrix) for matrix in found.matrices))


@torch.no_grad()
def uniform_channels(model: Any, family: Family, windows: Tensor, sparsity: float, axes: Bases) -> SoftChannels:
    """Thresholds that make every site of a model with folded norms equally sparse on the second halves of dense
    windows [N, S], in the bases `axes`, float32."""
    readers = stream_of(family, family.model_type).readers
    counts: dict[SiteKey, Tensor] = {}
    columns: dict[SiteKey, int] = {}

    def count(layer: int, site: str, x: Tensor) -> None:
        x = x[:, x.shape[1] // 2 :]
        seen = histogram.count((x @ axes.of_block(layer).to(x.dtype) if site in readers else x).float().abs())
        key = (layer, site)
        counts[key] = counts.get(key, 0) + seen
        columns[key] = x.shape[-1]

    with site_hooks(list(enumerate(backbone_of(model).layers)), family, count):
        for ids in windows:
            model.base_model(ids[None], use_cache=False)
    made = SoftChannels()
    for key, seen in counts.items():
        made.begin(key, torch.full((columns[key],), first_threshold(seen.cpu(), sparsity), device=windows.device))
    return made


def sparse_in(axes: Bases, family: Family, channels: SoftChannels, weights: Mapping[SiteKey, float]) -> Change:
    """Each site's sparse vector in the bases `axes`, float32, of a model with folded norms, and its share of the
    sparsity."""
    readers = stream_of(family, family.model_type).readers

    def sparse(layer: int, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
        key = (layer, site)
        if site in readers:
            turn = axes.of_block(layer).to(x.dtype)  # for each use anew: their gradients are summed in float32
            changed, inactive = channels.sparse(key, x @ turn)
            changed = changed @ turn.T
        else:
            changed, inactive = channels.sparse(key, x)
        return changed, inactive * weights[key]

    return sparse


def turned(start: Bases, turns: Sequence[Tensor]) -> Bases:
    """The bases that `turns`, one for each, make of those of the start: zeros leave one as it is."""
    made = (basis @ cayley(turn) for basis, turn in zip(start.matrices, turns, strict=True))
    return replace(start, matrices=tuple(made))


def cayley(a: Tensor) -> Tensor:
    """The orthogonal matrix (I - S)^-1 (I + S) of S = (a - a^T) / 2."""
    skew = (a - a.T) / 2
    one = torch.eye(len(a), dtype=a.dtype, device=a.device)
    matrix: Tensor = torch.linalg.solve(one - skew, one + skew)
    return matrix


def orthonormal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to one that nearly is, by Newton's iteration."""
    for _ in range(6):
        matrix = matrix @ (3 * torch.eye(len(matrix), dtype=matrix.dtype) - matrix.T @ matrix) / 2
    return matrix
