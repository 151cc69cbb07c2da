"""Thresholds of formats with planes: for each channel, how large its input must be for each plane to be read.

Reading channel j at level l leaves an error of x_j e_lj in a site's output, e_lj the column's weights less what l
planes say of them; reading nothing leaves x_j w_j. What such an error moves the model's output by, to second order, is
half of x_j^2 E[(e_lj . g)^2], g the gradient of log p(y) with respect to the site's output, y drawn from the model
itself (`calibrate.fisher`). The errors of quantised weights have nothing in common from row to row, so that this is the
sum over rows of e_lj^2 E[g^2]; w_j is no such thing, and E[(w_j . g)^2] is measured, at the site's input.

So level l is worth reading from the input on at which what it saves, for each bit more, exceeds one price for all
channels of all sites (reverse water-filling: a bit for about each doubling of the input). A level that is worth less
for each bit than the one after it is left out (`slopes`). The price is the one at which calibration text reads as many
bits as were asked for. No weight is trained.

Unpublished. `python -m benchmarks bit_planes` measures it on real models.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsepack.calibrate import histogram
from sparsepack.calibrate.fisher import TOKENS, WINDOWS, gradients
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import ThresholdsError
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.orders import zigzag
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.models.tokenizer.windows import spread_windows

_FLOOR = 1e-6
"""No channel's level saves less than this beside the mean of the site's first level."""


def find_rules(
    checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions, weights: Mapping[SiteKey, float]
) -> dict[SiteKey, SiteRule]:
    """The rules of sites, by which calibration text leaves `options.sparsity` of the bits unread.

    weights -- shares of the parameters, of the sites that may be sparse

    Raises `ThresholdsError` for a model whose MLPs have experts, and where gradients are not finite.
    """
    if checkpoint.family.experts is not None:
        raise ThresholdsError(
            f"{checkpoint.name}: levels of planes are found for models without experts yet; pack it as zigzag-q4_k"
        )
    steps = plane_shares(options.block)
    channels: dict[SiteKey, Tensor] = {}
    row_costs: dict[SiteKey, Tensor] = {}
    scales: dict[SiteKey, float] = {}
    counts: dict[SiteKey, list[Tensor]] = {}
    ids = spread_windows(calibration.windows, WINDOWS)[:, :TOKENS]
    for key, x, at_input, of_rows in gradients(checkpoint, ids, options):
        if key not in weights:
            continue
        saved = slopes(level_costs(checkpoint.stacked(*key)[0], options.block, at_input, of_rows), steps)
        if not torch.isfinite(saved).all():
            raise ThresholdsError(f"blk.{key[0]}.{key[1]}: gradients are not finite; give --dtype float32")
        # A channel's bits are as many as the site has rows. Apart from their scale: histograms hold no number however
        # small.
        c = (saved / len(of_rows)).clamp_min(_FLOOR * float(saved[0].mean()) / len(of_rows) or 1e-30).sqrt()
        scales[key] = float(c[0].log().mean().exp())
        channels[key], row_costs[key] = (c / scales[key]).cpu(), of_rows.cpu()
        counts[key] = [histogram.count(x.abs() * (row / scales[key])).cpu() for row in c]
    price = _price(counts, scales, weights, steps, options.sparsity)
    rules = {}
    for key, c in channels.items():
        realised = 1 - _share_read(counts[key], price / scales[key], steps)
        rules[key] = SiteRule(
            price / scales[key], channel_weights=c, sparsity=realised, realised=realised, row_costs=row_costs[key]
        )
    return rules


def plane_shares(block: str) -> list[float]:
    """Of the bits of a superblock, those up to the end of each level less those before: with the first plane the
    scales."""
    ends = BLOCKS[block].level_bytes
    return [(high - low) / ends[-1] for low, high in pairwise((0, *ends))]


def level_costs(weight: Tensor, block: str, at_input: Tensor, of_rows: Tensor) -> Tensor:
    """What an input of one costs at each level, twice over: float32 [1 + levels, columns].

    weight   -- a site's matrix [rows, columns]; block -- the type that it is stored in, its rows brought to one size
    at_input -- gradients at the site's input [..., columns]; of_rows -- mean squares of those at its output [rows]
    """
    weight = weight.to(of_rows.device).float()
    rows = zigzag.row_scales(weight, of_rows)[:, None]
    blocks, tail = zigzag.pack_with_tail(weight / rows, block)
    costs = [at_input.square().flatten(0, -2).mean(0)]
    for level in range(1, len(BLOCKS[block].levels) + 1):
        error = zigzag.unpack(blocks, len(weight), tail=tail, block=block, level=level).mul_(rows).sub_(weight)
        costs.append(of_rows @ error.square_())
    return torch.stack(costs)


def _share_read(counts: list[Tensor], threshold: float, steps: list[float]) -> float:
    """The share of a site's bits that is read where scores, counted for each level, must exceed a threshold."""
    return sum(step * (1 - histogram.share_at_most(each, threshold)) for step, each in zip(steps, counts, strict=True))


def _price(
    counts: Mapping[SiteKey, list[Tensor]],
    scales: Mapping[SiteKey, float],
    weights: Mapping[SiteKey, float],
    steps: list[float],
    sparsity: float,
) -> float:
    """What a score must exceed in all sites, so that so much of all bits is not read."""
    limits = histogram.edges()
    low = math.log(min(scales.values()) * float(limits[1]))
    high = math.log(max(scales.values()) * float(limits[-1]))
    for _ in range(60):
        middle = (low + high) / 2
        unread = sum(
            share * (1 - _share_read(counts[key], math.exp(middle) / scales[key], steps))
            for key, share in weights.items()
        )
        low, high = (middle, high) if unread < sparsity else (low, middle)
    return math.exp(high)


def slopes(costs: Tensor, steps: list[float]) -> Tensor:
    """What each level saves for each bit that it reads more, over the levels that are worth reading: the slopes of the
    convex hull of costs [1 + levels, columns] over bits. float32 [levels, columns], from level to level never higher.

    steps -- the bits of each level beyond those of the one before, in any unit
    """
    bits = [0.0, *accumulate(steps)]
    found = []
    for level in range(1, len(bits)):
        of_starts = []
        for low in range(level):
            to_ends = [(costs[low] - costs[high]) / (bits[high] - bits[low]) for high in range(level, len(bits))]
            of_starts.append(torch.stack(to_ends).amax(0))
        found.append(torch.stack(of_starts).amin(0))
    return torch.stack(found).clamp_min(0)
