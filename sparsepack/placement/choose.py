"""Which neurons stay and which come, from a score: what every policy does in the end. Ties are broken by the index, so
that a choice is a function of the scores and of who was there, and moves nothing without need."""

import numpy as np


def best(score: np.ndarray, resident: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Those with the highest scores, so many of each group: bool [groups, units].

    score    -- float32 [groups, units], at least 0
    resident -- bool [groups, units]: of two with the same score, the one that is there stays; then the first one
    places   -- int [groups]
    """
    units = score.shape[1]
    # A float32 that is not negative counts upwards with its bits. All keys differ, so a cut leaves as many as wanted.
    key = score.view(np.uint32).astype(np.uint64) << np.uint64(32)
    key |= resident.astype(np.uint64) << np.uint64(31)
    key |= np.arange(units, dtype=np.uint64)[::-1]
    chosen = np.empty(score.shape, np.bool_)
    for row, keys, count in zip(chosen, key, places, strict=True):
        np.greater_equal(keys, _cut(keys, int(count)), out=row)
    return chosen


def _cut(keys: np.ndarray, count: int) -> np.uint64:
    """The smallest of the `count` largest keys."""
    if count == 0:
        return np.uint64(2**64 - 1)  # which no key is: no score has all bits set
    at = len(keys) - count
    return np.uint64(np.partition(keys, at)[at])


def swapped(score: np.ndarray, resident: np.ndarray, margin: float) -> np.ndarray:
    """Who is there after pairs changed places: the best of those outside for the worst of those inside, the second
    best for the second worst, as long as the one outside is better by more than `margin`: bool [units].

    score -- float32 [units]; resident -- bool [units]. Of two with the same score the first one counts as better.
    """
    order = np.argsort(-score, kind="stable")
    inside = resident[order]
    coming, going = order[~inside], order[inside][::-1]
    pairs = min(len(coming), len(going))
    better = score[coming[:pairs]] > score[going[:pairs]] + np.float32(margin)
    count = pairs if better.all() else int(np.argmin(better))
    after = resident.copy()
    after[coming[:count]] = True
    after[going[:count]] = False
    return after
