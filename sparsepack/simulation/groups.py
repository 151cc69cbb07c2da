"""Groups: neurons of a block that move together, and how they are formed. Each way is a row of `ORDERS`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from sparsepack.calibrate.trace_file import Trace
from sparsepack.errors import PlacementError

_SEED = 0  # of groups at random


def _by_frequency(frequency: np.ndarray) -> np.ndarray:
    return np.argsort(-frequency, axis=1, kind="stable")


def _at_random(frequency: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(_SEED)
    blocks, neurons = frequency.shape
    return np.stack([random.permutation(neurons) for _ in range(blocks)])


ORDERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"frequency": _by_frequency, "random": _at_random}
)
"""How often each neuron is active, float64 [blocks, neurons], to an order of them: those of a group side by side."""


def groups_of(frequency: np.ndarray, order: str, size: int) -> np.ndarray:
    """The neurons of each block by groups: int64 [blocks, groups, neurons of a group].

    Groups are in the order of their first neurons. Raises `PlacementError` where a block does not divide into groups.
    """
    blocks, neurons = frequency.shape
    if neurons % size:
        raise PlacementError(f"--group {size}: {neurons} neurons of a block do not divide into such groups")
    groups = np.sort(ORDERS[order](frequency).reshape(blocks, -1, size), axis=2)
    return np.stack([rows[rows[:, 0].argsort()] for rows in groups])


def grouped_frequency(frequency: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The mean frequency of each group's neurons: float64 [blocks, groups]."""
    found: np.ndarray = np.take_along_axis(frequency[:, None], groups, axis=2).mean(2)
    return found


def needed_of(trace: Trace, session: int, groups: np.ndarray) -> np.ndarray:
    """How many neurons of each group were active: uint8 [tokens, blocks, groups]."""
    blocks = [trace.active(session, block)[:, groups[block]].sum(2, dtype=np.uint8) for block in range(trace.layers)]
    return np.stack(blocks, axis=1)
