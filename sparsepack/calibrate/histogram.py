"""A streaming histogram of non-negative values with exact counts in log-spaced bins.

Bin 0 holds exact zeros (and subnormals that float32 barely tells from them). Every octave from 2**-40 to 2**24 is cut
into 256 equal parts, so a bin is at most 0.4 % wide and a quantile interpolated within its bin is exact to far less
than 0.1 point on continuous data. Values outside fall into the first and the last bin. Counts are integers: histograms
of shards add up to the histogram of the whole, bit for bit.
"""

from functools import cache

import numpy as np
import torch

_LOWEST, _OCTAVES, _PARTS_BITS = -40, 64, 8
_PARTS = 1 << _PARTS_BITS
BINS = 1 + _OCTAVES * _PARTS
_OFFSET = (127 + _LOWEST) << _PARTS_BITS  # float32 exponent bias


def count(values: torch.Tensor) -> torch.Tensor:
    """Histogram of float32 values >= 0 of any shape: int64 [BINS] on the values' device."""
    # A float32's bits, cut after eight mantissa bits, count through the bins in order, from far below ours to above.
    bits = values.contiguous().view(torch.int32).flatten() >> (23 - _PARTS_BITS)
    counts = torch.bincount(bits, minlength=256 << _PARTS_BITS)
    middle = counts[_OFFSET : _OFFSET + BINS - 1].clone()
    middle[0] += counts[1:_OFFSET].sum()
    middle[-1] += counts[_OFFSET + BINS - 1 :].sum()
    return torch.cat([counts[:1], middle])


@cache
def edges() -> np.ndarray:
    """Lower edges of all bins, then the upper edge of the last: float64 [BINS + 1], not to be changed. Bin 0 is the
    single value 0."""
    steps = np.arange(_OCTAVES * _PARTS + 1)
    octave, part = np.divmod(steps, _PARTS)
    return np.concatenate([[0.0], np.ldexp(1 + part / _PARTS, octave + _LOWEST)])


def quantile(histogram: torch.Tensor | np.ndarray, share: float) -> float:
    """The smallest value t such that `share` of all values are <= t, interpolated within its bin.

    Where more than `share` of the values are exactly zero the answer is 0: a threshold cannot split ties.
    `share` of 0 or an empty histogram gives 0.
    """
    counts = np.asarray(histogram, dtype=np.int64)
    total = int(counts.sum())
    target = share * total
    if total == 0 or target <= counts[0]:
        return 0.0
    below = np.cumsum(counts)
    index = int(np.searchsorted(below, target))
    inside = (target - below[index - 1]) / counts[index]
    lower, upper = edges()[index : index + 2]
    return float(lower + inside * (upper - lower))


def share_at_most(histogram: torch.Tensor | np.ndarray, value: float) -> float:
    """The share of all values that are <= `value`: the inverse of `quantile`."""
    counts = np.asarray(histogram, dtype=np.int64)
    total = counts.sum()
    if total == 0 or value < 0:
        return 0.0
    limits = edges()
    index = int(np.searchsorted(limits, value, side="right")) - 1
    if index >= BINS:
        return 1.0
    width = limits[index + 1] - limits[index]
    inside = 1.0 if index == 0 else (value - limits[index]) / width
    return float((counts[:index].sum() + inside * counts[index]) / total)
