"""Bases that are trained: a turn of each start basis, all together with thresholds, against the model's own output.

PCA gives the bases in which a few channels hold most of the residual stream, and of values; what matters is the output.
So Q = Q0 C(A) with C(A) = (I - A)^-1 (I + A), Cayley's map of a skew matrix A, which is orthogonal for every A. A is
trained on the KL divergence of `global` (`learned.py`), with all channels' thresholds, at the target sparsity;
the thresholds are then let go, since `pack` learns them on the rotated model.

Nothing is folded while training: with the norms' weights folded into what follows, x at attn_in and mlp_in is the
normalised residual stream, z = x Q is sparsified, and x' = z' Q^T goes on; so it is at attn_out, where each KV head has
a Q. mlp_mid stays as it is. In the backward pass Q feels the soft mask, as the thresholds do. With several segments a
block's Q is that of its segment, each has an A of its own, and no matrix stands between segments, since nothing is
folded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibrate import histogram, pca
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.learned import SoftChannels, first_threshold
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.teal import divergence
from sparsepack.calibrate.training import Train
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import RotationError
from sparsepack.files.tensors import arithmetic
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import Bases, rotated
from sparsepack.models.families import stream_of
from sparsepack.models.family import ATTN_OUT, SITES, Family
from sparsepack.models.hf_model.halves import Change
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model
from sparsepack.models.sites import SiteKey
from sparsepack.models.tokenizer.windows import spread_windows

_WINDOWS = 8
"""The first thresholds are taken on so many windows of the calibration."""


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `RotationError` for a model with experts, whose inputs differ from token to token."""
    if checkpoint.family.experts is not None:
        raise RotationError(
            f"{checkpoint.name}: a basis is not learnt for mixtures of experts; take the basis pca or hadamard"
        )


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions) -> Bases:
    """The bases from which a model's are learnt: those of PCA. Raises as `pca.bases` does."""
    return pca.bases(checkpoint, calibration, options)


def learn_bases(
    checkpoint: Checkpoint, calibration: Calibration, start: Bases, options: RotateOptions, train: Train
) -> Bases:
    """Bases of the residual stream and of values, float64 on the CPU. Holds the whole model on one device.

    start -- those to begin with, float64, PCA's or others
    """
    with torch.inference_mode(False), torch.enable_grad():
        start = start.map(torch.clone)  # outside of inference mode
        dtype = arithmetic("auto", checkpoint.dtype, options.device)
        model = load_model(rotated(checkpoint, Bases(), device=options.device), options.device, dtype)
        weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
        first = start.map(lambda matrix: matrix.to(options.device, torch.float32))
        windows = spread_windows(calibration.windows, _WINDOWS).to(options.device)
        channels = uniform_channels(model, checkpoint.family, windows, options.sparsity, first)
        turns = first.map(lambda matrix: torch.zeros_like(matrix, requires_grad=True))
        parts = [part for part in (turns.matrices, turns.values) if part]
        rates = [{"params": [*part], "lr": options.rate / part[0].shape[-1] ** 0.5} for part in parts]
        groups = [*channels.groups(), *rates]

        def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
            sparse = sparse_in(turned(first, turns), checkpoint.family, channels, weights)
            return divergence(model, checkpoint.family, ids, sparse)

        train("learning a basis", groups, calibration.windows, loss)
        found = turned(start, turns.map(lambda turn: turn.detach().cpu().double()))
        return found.map(orthonormal)


@torch.no_grad()
def uniform_channels(model: Any, family: Family, windows: Tensor, sparsity: float, axes: Bases) -> SoftChannels:
    """Thresholds that make every site of a model with folded norms equally sparse on the second halves of dense
    windows [N, S], in the bases `axes`, float32."""
    counts: dict[SiteKey, Tensor] = {}
    columns: dict[SiteKey, int] = {}

    def count(layer: int, site: str, x: Tensor) -> None:
        x = x[:, x.shape[1] // 2 :]
        axis = axis_of(axes, family, layer, site)
        seen = histogram.count((x if axis is None else in_axis(x, axis.to(x.dtype))).float().abs())
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

    def sparse(layer: int, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
        key, axis = (layer, site), axis_of(axes, family, layer, site)
        if axis is None:
            changed, inactive = channels.sparse(key, x)
        else:
            turn = axis.to(x.dtype)  # for each use anew: their gradients are summed in float32
            changed, inactive = channels.sparse(key, in_axis(x, turn))
            changed = in_axis(changed, turn.mT)
        return changed, inactive * weights[key]

    return sparse


def axis_of(axes: Bases, family: Family, layer: int, site: str) -> Tensor | None:
    """The basis of what enters a site: [hidden, hidden] of the stream, [kv_heads, D, D] of heads; None: it stays."""
    if site in stream_of(family, family.model_type).readers:
        return axes.of_block(layer)
    return axes.values[layer] if site == ATTN_OUT and axes.values else None


def in_axis(x: Tensor, axis: Tensor) -> Tensor:
    """x [B, S, columns] in a basis [columns, columns], or each KV head's part of it in one of [kv_heads, D, D]."""
    if axis.dim() == 2:
        return x @ axis
    of_heads = torch.unflatten(x, -1, (len(axis), -1, axis.shape[1]))  # [B, S, kv_heads, group, D]
    turned_heads: Tensor = (of_heads @ axis).flatten(-3)
    return turned_heads


def turned(start: Bases, turns: Bases) -> Bases:
    """The bases that `turns`, one for each, make of those of the start: zeros leave one as it is."""
    pairs = ((start.matrices, turns.matrices), (start.values, turns.values))
    made = (tuple(basis @ cayley(turn) for basis, turn in zip(*pair, strict=True)) for pair in pairs)
    return Bases(start.starts, *made)


def cayley(a: Tensor) -> Tensor:
    """The orthogonal matrices (I - S)^-1 (I + S) of S = (a - a^T) / 2: [..., n, n]."""
    skew = (a - a.mT) / 2
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    matrix: Tensor = torch.linalg.solve(one - skew, one + skew)
    return matrix


def orthonormal(matrix: Tensor) -> Tensor:
    """The orthogonal matrices nearest to some that nearly are, by Newton's iteration: [..., n, n]."""
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    for _ in range(6):
        matrix = matrix @ (3 * one - matrix.mT @ matrix) / 2
    return matrix
