"""A basis that is trained: a turn of the start basis, together with thresholds, against the model's own output.

PCA gives the basis in which a few channels hold most of the residual stream; what matters is the output. So Q = Q0 C(A)
with C(A) = (I - A)^-1 (I + A), Cayley's map of a skew matrix A, which is orthogonal for every A. A is trained on the KL
divergence of `global` (`sparsity/learned.py`), with all channels' thresholds, at the target sparsity; the thresholds
are then let go, since `pack` learns them on the rotated model.

Nothing is folded while training: with the norms' weights folded into what follows, x at attn_in and mlp_in is the
normalised residual stream, z = x Q is sparsified, and x' = z' Q^T goes on. attn_out and mlp_mid stay in the basis that
they have. In the backward pass Q feels the soft mask, as the thresholds do.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.folder import Calibration
from sparsepack.files.resume import ResumeState
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import SITES, Family
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.stock.halves import Change
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.whole import backbone_of, load_model
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.rotation.learnt_options import LearntOptions
from sparsepack.sparsity.allocation import weights_of
from sparsepack.sparsity.divergence import divergence
from sparsepack.sparsity.soft_channels import SoftChannels, first_threshold
from sparsepack.sparsity.training import Training

_NORM_BEFORE = {"attn_in": "attn_norm", "mlp_in": "mlp_norm"}
"""The sites that read the residual stream, each through a norm."""


def learn_basis(
    checkpoint: Checkpoint, calibration: Calibration, start: torch.Tensor, options: LearntOptions, resume: ResumeState
) -> torch.Tensor:
    """A basis [hidden, hidden] of the residual stream, float64 on the CPU, whose columns are the new coordinates' axes.
    Holds the whole model on one device.

    start  -- an orthogonal matrix [hidden, hidden], PCA's or another

    A run that was killed goes on from `resume`. Raises `RotationError` for options out of range.
    """
    options.check()
    if "basis" in resume.parts:
        return resume.load("basis")["basis"]
    model = load_model(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))
    fold_norms(model, checkpoint.family)
    weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
    first = start.to(options.device, torch.float32)
    windows = spread_windows(calibration.windows, options.windows).to(options.device)
    channels = uniform_channels(model, checkpoint.family, windows, options.sparsity, first)
    turn = torch.zeros_like(first, requires_grad=True)
    groups = [*channels.groups(), {"params": [turn], "lr": options.rate / len(start) ** 0.5}]
    training = Training(groups, options, resume)
    training.run(
        "learning a basis",
        calibration.windows,
        lambda ids: divergence(model, checkpoint.family, ids, sparse_in(turned(first, turn), channels, weights)),
    )
    basis = orthonormal(turned(start.double().cpu(), turn.detach().double().cpu()))
    training.drop()
    resume.keep("basis", "basis", {"basis": basis})
    resume.commit("basis")
    return basis


def fold_norms(model: Any, family: Family) -> None:
    """Fold the weights of the norms before attention and MLP into the matrices behind them: the same function."""
    for block in backbone_of(model).layers:
        for site, norm in _NORM_BEFORE.items():
            weight = block.get_submodule(family.norms[norm]).weight
            for name in family.projections[site]:
                block.get_submodule(name).weight.mul_(weight)
            weight.fill_(1)


@torch.no_grad()
def uniform_channels(
    model: Any, family: Family, windows: torch.Tensor, sparsity: float, basis: torch.Tensor
) -> SoftChannels:
    """Thresholds that make every site of a model with folded norms equally sparse on the second halves of dense
    windows [N, S], in a basis."""
    counts: dict[SiteKey, torch.Tensor] = {}
    columns: dict[SiteKey, int] = {}

    def count(layer: int, site: str, x: torch.Tensor) -> None:
        x = x[:, x.shape[1] // 2 :]
        seen = histogram.count((x @ basis.to(x.dtype) if site in _NORM_BEFORE else x).float().abs())
        key = (layer, site)
        counts[key] = counts.get(key, 0) + seen
        columns[key] = x.shape[-1]

    with site_hooks(list(enumerate(backbone_of(model).layers)), family, count):
        for ids in windows:
            model.base_model(ids[None], use_cache=False)
    made = SoftChannels()
    for key, seen in counts.items():
        made.begin(key, torch.full((columns[key],), first_threshold(seen.cpu(), sparsity), device=basis.device))
    return made


def sparse_in(basis: torch.Tensor, channels: SoftChannels, weights: Mapping[SiteKey, float]) -> Change:
    """Each site's sparse vector in a basis [hidden, hidden], float32, and its share of the sparsity."""

    def sparse(layer: int, site: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = (layer, site)
        if site in _NORM_BEFORE:
            axes = basis.to(x.dtype)  # each use apart: their gradients are summed in float32
            changed, inactive = channels.sparse(key, x @ axes)
            changed = changed @ axes.T
        else:
            changed, inactive = channels.sparse(key, x)
        return changed, inactive * weights[key]

    return sparse


def turned(start: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """The basis that `turn` makes of a start basis: zeros leave it as it is."""
    return start @ cayley(turn)


def cayley(a: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix (I - S)^-1 (I + S) of S = (a - a^T) / 2."""
    skew = (a - a.T) / 2
    one = torch.eye(len(a), dtype=a.dtype, device=a.device)
    matrix: torch.Tensor = torch.linalg.solve(one - skew, one + skew)
    return matrix


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix nearest to one that nearly is, by Newton's iteration."""
    for _ in range(6):
        matrix = matrix @ (3 * torch.eye(len(matrix), dtype=matrix.dtype) - matrix.T @ matrix) / 2
    return matrix
