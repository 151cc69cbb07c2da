"""What is measured of the links between two memories (`placement.machine.BandwidthProfile`), and out of what."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.formats.table import MatrixFormat
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cpu.machine import last_caches
from sparsepack.runtime.tuning import ROTATION, random_blocks

LISTED = 2048
"""A call lists this many active neurons, so many that starting the call hardly counts."""
ONE_IN = 8
"""One of this many neurons is active, as in trained models with ReLU."""
MOST_LISTS = 256
"""No more lists than these take turns."""
TIMES_CACHES = 4
MOST_ROTATION = 2 << 30
"""What takes turns has at least this many times the bytes of the processor's caches, but no more than so many: a
server's cache of 300 MiB holds all that others do not, and a worker is faster out of it than out of memory."""


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured: `together` is what the division goes by, all else is for people.

    copies -- neurons a second whose records large copies bring over the bus
    """

    together: BandwidthProfile
    alone: BandwidthProfile
    copies: float


def count_for(hidden: int) -> int:
    """So many records that no cache has more than a quarter of them, a whole number of lists; of small ones no more
    than so many lists have: a model of those is served by a cache when it runs, too."""
    count = min(beyond_caches(record_bytes(hidden)), MOST_LISTS * LISTED)
    return count + -count % (ONE_IN * LISTED)


def beyond_caches(size: int) -> int:
    """So many things of a size that no cache has more than a quarter of them."""
    rotation = max(ROTATION, min(TIMES_CACHES * last_caches(), MOST_ROTATION))
    return -(-rotation // size)


def records(count: int, hidden: int) -> PackedMatrix:
    """Random records, as stored."""
    blocks = random_blocks((256 * count, 2 * hidden // 256))
    return PackedMatrix(blocks.flatten(1), MatrixFormat("Q4_K"), count, 2 * hidden)


def lists(count: int, seed: int) -> list[Tensor]:
    """Lists of active neurons, int32 [LISTED] each, each neuron in one of them: when a list comes again, no cache has
    its records any more."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.arange(0, count, ONE_IN * LISTED)
    within = torch.rand(len(starts), ONE_IN * LISTED, generator=generator).argsort(dim=1)
    found = (starts[:, None] + within).view(-1, LISTED).sort(dim=1).values.to(torch.int32)
    # Lists of the same neighbours share pages.
    return list(found[torch.randperm(len(found), generator=generator)])
