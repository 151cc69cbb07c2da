"""Which neurons stay and which come, from a score: what every policy does in the end. Ties are broken by the index, so
that a choice is a function of the scores and of what was resident, and moves nothing without need."""

import numpy as np


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
