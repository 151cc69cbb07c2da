"""`global` allocation: thresholds of all blocks and sites at once, judged by the model's own output.

Every channel's threshold is a parameter. They are trained together against the KL divergence between the dense and
the sparse model's next-token distributions on calibration text, at a fixed overall sparsity, with Adam. The mask is
hard forwards and soft backwards (`soft_channels`).
The answer is, per site, a sparsity and channel weights c_j = 1 / t_j, and optionally offsets: what an inactive channel
stands at instead of zero, which at run time is one vector folded into a bias.

Unpublished. benchmarks/RESULTS.md has it beside the block-wise allocations.

Thresholds and offsets of channels that can be trained: a mask that is hard forwards and soft backwards.

In the backward pass a threshold, and the vector itself, feel a sigmoid of |x| / t (a straight-through estimate).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsepack.calibrate import histogram
from sparsepack.calibrate.collector import channel_weights
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.teal import divergence
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.training import Train
from sparsepack.files.tensors import arithmetic
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_model.halves import Change
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.workers.exchange import Each

_LEARNING_RATE = 0.03
_SOFTNESS = 0.15  # width of the sigmoid, as a share of the threshold


def first_threshold(counts: torch.Tensor, sparsity: float) -> float:
    """The threshold that makes a site so sparse, from a histogram of its scores; above zero, since its logarithm is
    trained."""
    threshold = histogram.quantile(counts, sparsity)
    if threshold == 0:  # more exact zeros than asked for: begin among the smallest of the others
        others = counts.clone()
        others[0] = 0
        threshold = histogram.quantile(others, 0.05) or 1.0  # nothing but zeros: any threshold will do
    return threshold


@dataclass
class SoftChannels:
    """log_thresholds and offsets: float32 [columns] per site; scales: each site's first threshold."""

    log_thresholds: dict[SiteKey, torch.Tensor] = field(default_factory=dict)
    offsets: dict[SiteKey, torch.Tensor] = field(default_factory=dict)
    scales: dict[SiteKey, float] = field(default_factory=dict)

    def begin(self, key: SiteKey, thresholds: torch.Tensor, offsets: bool = False) -> None:
        """A site whose channels begin at these thresholds, float32 [columns]; `offsets` are trained, too, or zero."""
        self.scales[key] = float(thresholds.median())
        self.log_thresholds[key] = thresholds.log().requires_grad_(True)
        self.offsets[key] = torch.zeros_like(thresholds).requires_grad_(offsets)

    def groups(self) -> list[dict[str, Any]]:
        """All that is trained, as an optimiser takes it."""
        groups: list[dict[str, Any]] = [{"params": [*self.log_thresholds.values()], "lr": _LEARNING_RATE}]
        return groups + [
            {"params": [offset], "lr": 0.3 * _LEARNING_RATE * self.scales[key]}
            for key, offset in self.offsets.items()
            if offset.requires_grad
        ]

    def sparse(self, key: SiteKey, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., columns] with every inactive channel at its offset, and the share of inactive ones."""
        offset = self.offsets[key]
        shifted = x.float() - offset
        ratio = shifted.abs() * torch.exp(-self.log_thresholds[key])
        soft = torch.sigmoid((ratio - 1) / _SOFTNESS)
        mask = (ratio > 1).float() + soft - soft.detach()
        return (offset + shifted * mask).to(x.dtype), 1 - mask.mean()


_HIGHEST = 0.98


def find_rules(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    train: Train,
    each: Each,
) -> dict[SiteKey, SiteRule]:
    """Target sparsity, channel weights and offsets of the sites in `weights`. Holds the whole model on one device."""
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    model = load_model(checkpoint, options.device, dtype)
    channels = first_channels(checkpoint, calibration, options, model, weights)
    sparse = sparse_at(channels, weights)
    train(
        "learning thresholds",
        channels.groups(),
        calibration.windows,
        lambda ids: divergence(model, checkpoint.family, ids, sparse),
    )
    realised = _realised(model, checkpoint, calibration.windows, options, channels, weights, each)
    return _learnt(channels, options, _shifted(realised, weights, options.sparsity))


def sparse_at(channels: SoftChannels, weights: Mapping[SiteKey, float]) -> Change:
    """The sparse vector of each site in `weights`, and its share of the sparsity."""

    def sparse(layer: int, site: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        key = (layer, site)
        if key not in weights:
            return None
        changed, inactive = channels.sparse(key, x)
        return changed, inactive * weights[key]

    return sparse


def first_channels(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    model: Any,
    weights: Mapping[SiteKey, float],
) -> SoftChannels:
    """Uniform thresholds of the criterion, from the calibration's dense histograms."""
    made = SoftChannels()
    for layer, site in weights:
        counts = calibration.layers[layer][f"{site}.histogram.{options.criterion}"]
        threshold = first_threshold(counts, options.sparsity)
        columns = checkpoint.stacked_shape(site, layer)[1]
        c = channel_weights(options.criterion, backbone_of(model).layers[layer], checkpoint.family, site)
        each = torch.full((columns,), threshold, device=options.device)
        each = each if c is None else each / c.clamp_min(float(c.max()) * 1e-6 or 1.0)
        made.begin((layer, site), each, options.offsets)
    return made


@torch.no_grad()
def _realised(
    model: Any,
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    options: AllocationOptions,
    channels: SoftChannels,
    weights: Mapping[SiteKey, float],
    each: Each,
) -> dict[SiteKey, float]:
    """Share of inactive channels of each site at the learnt thresholds, over a few calibration windows, that `each`
    runs."""
    half = windows.shape[1] // 2
    inactive: dict[SiteKey, float] = {}

    def function(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        key = (layer, site)
        if key not in weights:
            return None
        offset = channels.offsets[key]
        shifted = x[:, half:].float() - offset
        active = shifted.abs() > channels.log_thresholds[key].exp()
        inactive[key] = float((~active).float().mean())
        return torch.cat([x[:, :half], torch.where(active, x[:, half:], offset.to(x.dtype))], 1)

    chosen = spread_windows(windows, options.windows)

    def shares(ids: torch.Tensor) -> list[float]:
        model.base_model(ids[None].to(options.device), use_cache=False)
        return [inactive[key] for key in weights]

    with site_hooks(list(enumerate(backbone_of(model).layers)), checkpoint.family, function):
        found = each(list(chosen), shares)
    return {key: sum(values) / len(chosen) for key, values in zip(weights, zip(*found, strict=True), strict=True)}


def _shifted(
    realised: Mapping[SiteKey, float], weights: Mapping[SiteKey, float], sparsity: float
) -> dict[SiteKey, float]:
    """All sparsities moved by one amount so that their weighted mean is `sparsity`."""
    low, high, highest = -1.0, 1.0, max(_HIGHEST, sparsity)
    for _ in range(60):
        middle = (low + high) / 2
        moved = {key: min(max(value + middle, 0.0), highest) for key, value in realised.items()}
        if sum(moved[key] * weights[key] for key in moved) > sparsity:
            high = middle
        else:
            low = middle
    return moved


def _learnt(
    channels: SoftChannels, options: AllocationOptions, sparsities: Mapping[SiteKey, float]
) -> dict[SiteKey, SiteRule]:
    rules = {}
    for key, logs in channels.log_thresholds.items():
        relative = logs.detach().cpu() - logs.detach().cpu().mean()
        offset = channels.offsets[key].detach().cpu() if options.offsets else None
        rules[key] = SiteRule(offset=offset, channel_weights=torch.exp(-relative), sparsity=sparsities[key])
    return rules
