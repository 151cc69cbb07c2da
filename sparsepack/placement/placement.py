"""A placement: which neurons have slots near the processor, and how the slots are given out.

Slots go to the neurons that are active most often, whatever block they are in: that serves more than the same share of
each block, since blocks differ more than neurons do. Within a block the neurons with slots are the first ones of the
order by falling frequency, so that an artifact whose neurons lie in that order needs one number for each block.

Which neurons stay and which come, from a score: what every policy does in the end. Ties are broken by the index, so
that a choice is a function of the scores and of what was resident, and moves nothing without need.
"""

from dataclasses import dataclass

import numpy as np

from sparsepack.errors import PlacementError


@dataclass(frozen=True, eq=False)
class Placement:
    """Which neurons have slots.

    resident -- bool [blocks, neurons], read-only
    record_bytes -- what a slot takes
    """

    resident: np.ndarray
    record_bytes: int

    def __post_init__(self) -> None:
        self.resident.setflags(write=False)

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each block has."""
        return tuple(int(count) for count in self.resident.sum(1))

    @property
    def bytes(self) -> int:
        """What all slots take."""
        return sum(self.slots) * self.record_bytes

    @property
    def share(self) -> float:
        """The share of all neurons that have slots."""
        return float(self.resident.mean())


def across_blocks(frequency: np.ndarray, budget: int, record_bytes: int = 1) -> Placement:
    """Slots for the most frequent neurons of all blocks, as many as fit into `budget` bytes.

    frequency -- [blocks, neurons]; of two that are the same, the first neuron of the first block goes before

    A larger budget keeps every slot of a smaller one. Raises `PlacementError` for a budget that is none.
    """
    resident = np.zeros(frequency.size, np.bool_)
    resident[_order(frequency.ravel())[: _count(budget, record_bytes)]] = True
    return Placement(resident.reshape(frequency.shape), record_bytes)


def same_share(frequency: np.ndarray, budget: int, record_bytes: int = 1) -> Placement:
    """The placement of `across_blocks` with as many slots in each block as in any other: the rest of the budget stays
    unused."""
    resident = np.zeros(frequency.shape, np.bool_)
    count = _count(budget, record_bytes) // len(frequency)
    for row, frequencies in zip(resident, frequency, strict=True):
        row[_order(frequencies)[:count]] = True
    return Placement(resident, record_bytes)


def budget_of(share: float, frequency: np.ndarray, record_bytes: int = 1) -> int:
    """The bytes of slots for a share of all neurons."""
    return round(share * frequency.size) * record_bytes


def _order(frequency: np.ndarray) -> np.ndarray:
    return np.argsort(-frequency, kind="stable")


def _count(budget: int, record_bytes: int) -> int:
    if budget < 0 or record_bytes < 1:
        raise PlacementError(f"{budget} bytes for records of {record_bytes}; expected at least 0, and at least 1")
    return budget // record_bytes


def best(score: np.ndarray, resident: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Choose the units with the highest scores, `slots` of each group: bool [groups, units].

    score    -- float32 [groups, units]
    resident -- bool [groups, units]: of two with the same score the resident one stays, else the first one
    slots   -- int [groups]
    """
    units = score.shape[1]
    chosen = np.empty(score.shape, np.bool_)
    for row, scores, there, count in zip(chosen, score, resident, slots, strict=True):
        if count in (0, units):
            row[:] = count
            continue
        cut = np.sort(scores)[units - count]  # faster than np.partition, where many are alike by far
        np.greater_equal(scores, cut, out=row)
        if too_many := int(np.count_nonzero(row)) - int(count):
            alike = np.flatnonzero(scores == cut)
            stay_first = np.argsort(~there[alike], kind="stable")
            row[alike[stay_first[-too_many:]]] = False
    return chosen


def swaps(score: np.ndarray, resident: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Swap the best unit outside for the worst resident one, the second best for the second worst, and so on, as long
    as the one outside is better by more than `margin`; return who comes and who goes, in this order: int [swaps] each.

    score -- float32 [units]; resident -- bool [units]. Of two with the same score the first one counts as better.
    """
    least = np.float32(margin)
    # Few can be swapped at all: those outside that better the worst inside, and those inside that the best outside
    # betters. Only these are sorted, of millions.
    worst = np.where(resident, score, np.inf).min()
    best_outside = np.where(resident, -np.inf, score).max()
    coming = np.flatnonzero(~resident & (score > worst + least))
    going = np.flatnonzero(resident & (score + least < best_outside))
    coming = coming[np.argsort(-score[coming], kind="stable")]
    going = going[np.argsort(-score[going], kind="stable")][::-1]
    pairs = min(len(coming), len(going))
    better = score[coming[:pairs]] > score[going[:pairs]] + least
    count = pairs if better.all() else int(np.argmin(better))
    return coming[:count], going[:count]
