"""A report on how concentrated the importance of channels is, and whether the heads of a layer differ as heads do.

Heads that learned different things have different heavy channels. Where those of all heads are nearly the same, the
statistics were mixed up on the way, which is easily done: heads and positions are neighbouring dimensions.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from sparsepack.calibration.channels import Importance

COUNTS = (8, 16, 32)
"""The report says which share of a head's importance this many of its channels have."""

COMPARED = 16
"""Two heads are compared by this many of their heaviest channels."""

ALIKE = 0.9
"""Heads that have more than this share of their heaviest channels in common are reported: in the mixed-up lists that
were published with the paper's code it is 0.91 to 0.99; in books-26m-silu, by these statistics, 0.2 to 0.5."""


def channel_report(layers: Sequence[Importance]) -> dict[str, Any]:
    """Every layer's channels in a few numbers, JSON-able. Shares and overlaps are between 0 and 1.

    counts   -- COUNTS, and compared -- COMPARED, as far as head_dim has more than that; otherwise a quarter of head_dim
    chance   -- the overlap of two heads that have nothing to do with each other
    layers   -- share: of the importance by q*k, in so many channels of a head, for each of `counts`; mean of the heads
                heads_agree: by q, k and q*k, the overlap of the heaviest channels of two heads, mean of all pairs of KV
                heads; None where there is one
                key_agrees: the overlap of a head's heaviest channels by k and by q*k, mean of the heads
    alike    -- the layers whose heads agree beyond ALIKE by any of the three
    """
    head_dim = layers[0].key.shape[1]
    quarter = max(1, head_dim // 4)
    counts = [count for count in COUNTS if count < head_dim] or [quarter]
    compared = COMPARED if head_dim > COMPARED else quarter
    rows = [_row(layer, counts, compared) for layer in layers]
    return {
        "head_dim": head_dim,
        "counts": counts,
        "compared": compared,
        "chance": compared / head_dim,
        "layers": rows,
        "alike": [
            n for n, row in enumerate(rows) if any((found or 0) > ALIKE for found in row["heads_agree"].values())
        ],
    }


def _row(layer: Importance, counts: Sequence[int], compared: int) -> dict[str, Any]:
    heavy = {name: _heaviest(value, compared) for name, value in vars(layer).items()}
    largest = layer.product.sort(1, descending=True).values.cumsum(1)
    shares = (largest / largest[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)).mean(0)
    return {
        "share": [float(shares[count - 1]) for count in counts],
        "heads_agree": {name: _agreement(combinations(sets, 2), compared) for name, sets in heavy.items()},
        "key_agrees": _agreement(zip(heavy["key"], heavy["product"], strict=True), compared),
    }


def _heaviest(value: torch.Tensor, count: int) -> list[set[int]]:
    """The heaviest channels of each head."""
    return [set(channels) for channels in value.topk(count, 1).indices.tolist()]


def _agreement(pairs: Any, compared: int) -> float | None:
    """The share of channels that two sets of so many have in common, mean over the pairs."""
    shares = [len(one & other) / compared for one, other in pairs]
    return sum(shares) / len(shares) if shares else None
