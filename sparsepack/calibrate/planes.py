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

What levels save differs between channels of a site by one factor each, to 5 or 10 %: so a channel has one threshold,
and the site a step for each level. On SmolLM2 a threshold of its own for each level and channel loses no less.

Unpublished. `python -m benchmarks bit_planes` measures it on real models.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsepack.calibrate import histogram
from sparsepack.calibrate.fisher import TOKENS, WINDOWS, Seen, gradients
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import ThresholdsError
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.orders import zigzag
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import say

_FLOOR = 1e-6
"""No channel's level saves less than this beside the mean of the site's first level."""
_BELIEVED = 8.0
"""The mean of a site's experts counts as so many tokens of each of them."""


def find_rules(
    checkpoint: Checkpoint, calibration: Calibration, options: AllocationOptions, weights: Mapping[SiteKey, float]
) -> dict[SiteKey, SiteRule]:
    """The rules of sites, by which calibration text leaves `options.sparsity` of the bits unread.

    weights -- shares of the parameters, of the sites that may be sparse

    Raises `ThresholdsError` where gradients are not finite.
    """
    steps = plane_shares(options.block)
    channels: dict[SiteKey, tuple[Tensor, Tensor]] = {}
    row_costs: dict[SiteKey, Tensor] = {}
    scales: dict[SiteKey, float] = {}
    counts: dict[SiteKey, Tensor] = {}
    ids = spread_windows(calibration.windows, WINDOWS)[:, :TOKENS]
    for key, seen in gradients(checkpoint, ids, options):
        if key not in weights:
            continue
        saved = slopes(site_costs(checkpoint, key, options.block, seen), steps)
        if not torch.isfinite(saved).all():
            raise ThresholdsError(f"blk.{key[0]}.{key[1]}: gradients are not finite; give --dtype float32")
        # A channel's bits are as many as the rows of what a token reads of it. Apart from their scale: histograms hold
        # no number however small.
        rows = _rows_read(checkpoint, key, seen)
        least = max(_FLOOR * float(saved[0].mean()) / rows, torch.finfo(torch.float32).tiny)
        each = (saved / rows).clamp_min(least).log() / 2
        means, shares = each.flatten(1).mean(1), torch.tensor(steps, device=each.device)
        c = torch.tensordot(shares / shares.sum(), each, 1).sub_((shares * means).sum() / shares.sum()).exp()
        scales[key] = float(means[0].exp())
        if seen.of_rows.dim() == 1:
            row_costs[key] = seen.of_rows.cpu()
        channels[key] = c.cpu(), (means[0] - means).exp().cpu()
        counts[key] = histogram.count(seen.x.abs() * (c if seen.chosen is None else c[seen.chosen])).cpu()
    begins = {key: of_levels.tolist() for key, (_, of_levels) in channels.items()}
    price = _price(counts, scales, begins, weights, steps, options.sparsity)
    rules = {}
    for key, (c, of_levels) in channels.items():
        threshold = price / scales[key]
        realised = 1 - _share_read(counts[key], threshold, begins[key], steps)
        rules[key] = SiteRule(*(threshold, None, c, realised, realised), row_costs=row_costs.get(key), steps=of_levels)
    return rules


def _rows_read(checkpoint: Checkpoint, key: SiteKey, seen: Seen) -> int:
    """The rows of the weights that a token reads of a channel: at mlp_in those of all of its experts."""
    layer, site = key
    if seen.of_rows.dim() == 1 or seen.chosen is not None:
        return seen.of_rows.shape[-1]
    return checkpoint.token_weights(site, layer) // seen.x.shape[-1]


def site_costs(checkpoint: Checkpoint, key: SiteKey, block: str, seen: Seen) -> Tensor:
    """What an input of one costs at each level, twice over: float32 [1 + levels, columns].

    The experts of a block share their input at mlp_in, where what the errors of each cost is added up, by how many
    tokens have it. At mlp_mid each has inputs of its own, and costs: [1 + levels, stored experts, columns], for those
    tokens that it has.

    block -- the type that matrices are stored in
    """
    layer, site = key
    if seen.of_rows.dim() == 1:
        return level_costs(checkpoint.stacked(layer, site)[0], block, seen.at_input, seen.of_rows)
    if seen.chosen is None:
        costs = [
            level_costs(weight, block, seen.at_input[:, :0], of_rows, row_scales=False)
            for weight, of_rows in zip(checkpoint.each_expert(layer, site), seen.of_rows, strict=True)
        ]
        together = torch.stack(costs).sum(0)
        together[0] = seen.at_input.square().flatten(0, -2).mean(0)
        return together
    tokens = seen.chosen[..., 0].numel()
    found, shares = [], []
    for number, weight in enumerate(checkpoint.each_expert(layer, site)):
        at_input = seen.at_input[seen.chosen == number]
        shares.append(len(at_input) / tokens)
        of_rows = seen.of_rows[number] / max(shares[-1], 1 / tokens)
        found.append(level_costs(weight, block, at_input, of_rows, row_scales=False))
    if unknown := [number for number, share in enumerate(shares) if not share]:
        first = ", ".join(map(str, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
        say(
            f"note: block {layer}: no token reached {len(unknown)} of its experts ({first}); the thresholds of {site} "
            "there are those of the others in the mean"
        )
    return _shrunk(torch.stack(found, 1), torch.tensor(shares, device=seen.x.device) * tokens)


def _shrunk(costs: Tensor, tokens: Tensor) -> Tensor:
    """Costs [1 + levels, experts, columns] of which an expert's are drawn towards the mean of all, the more the fewer
    tokens it has: an expert that none reaches has the mean."""
    mean = (costs.mean(2) * tokens).sum(1) / tokens.sum()
    return (costs * tokens[:, None] + _BELIEVED * mean[:, None, None]) / (tokens[:, None] + _BELIEVED)


def plane_shares(block: str) -> list[float]:
    """Of the bits of a superblock, those up to the end of each level less those before: with the first plane the
    scales."""
    ends = BLOCKS[block].level_bytes
    return [(high - low) / ends[-1] for low, high in pairwise((0, *ends))]


def level_costs(weight: Tensor, block: str, at_input: Tensor, of_rows: Tensor, row_scales: bool = True) -> Tensor:
    """What an input of one costs at each level, twice over: float32 [1 + levels, columns].

    weight   -- a matrix [rows, columns]; block -- the type that it is stored in
    at_input -- gradients at its input [..., columns], maybe of no token; of_rows -- mean squares of those at its output
                [rows]
    row_scales -- whether rows are brought to one size before
    """
    weight = weight.to(of_rows.device).float()
    rows = zigzag.row_scales(weight, of_rows)[:, None] if row_scales else torch.ones(1, 1, device=weight.device)
    blocks, tail = zigzag.pack_with_tail(weight / rows, block)
    costs = [at_input.square().flatten(0, -2).sum(0) / max(at_input[..., 0].numel(), 1)]
    for level in range(1, len(BLOCKS[block].levels) + 1):
        error = zigzag.unpack(blocks, len(weight), tail=tail, block=block, level=level).mul_(rows).sub_(weight)
        costs.append(of_rows @ error.square_())
    return torch.stack(costs)


def _share_read(counts: Tensor, threshold: float, begins: list[float], steps: list[float]) -> float:
    """The share of a site's bits that is read where scores, which were counted, must exceed a threshold times what each
    level begins at."""
    read = [1 - histogram.share_at_most(counts, threshold * begin) for begin in begins]
    return sum(step * share for step, share in zip(steps, read, strict=True))


def _price(
    counts: Mapping[SiteKey, Tensor],
    scales: Mapping[SiteKey, float],
    begins: Mapping[SiteKey, list[float]],
    weights: Mapping[SiteKey, float],
    steps: list[float],
    sparsity: float,
) -> float:
    """What a score must exceed in all sites, so that so much of all bits is not read."""
    limits = histogram.edges()
    low = math.log(min(scale / begins[key][-1] for key, scale in scales.items()) * float(limits[1]))
    high = math.log(max(scales.values()) * float(limits[-1]))
    for _ in range(60):
        middle = (low + high) / 2
        unread = sum(
            share * (1 - _share_read(counts[key], math.exp(middle) / scales[key], begins[key], steps))
            for key, share in weights.items()
        )
        low, high = (middle, high) if unread < sparsity else (low, middle)
    return math.exp(high)


def slopes(costs: Tensor, steps: list[float]) -> Tensor:
    """What each level saves for each bit that it reads more, over the levels that are worth reading: the slopes of the
    convex hull of costs [1 + levels, ...] over bits. float32 [levels, ...], from level to level never higher.

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
