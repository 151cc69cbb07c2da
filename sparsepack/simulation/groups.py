"""Groups: neurons of a block that move together, and how they are formed. Each way is a row of `ORDERS`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sparsepack.errors import PlacementError
from sparsepack.simulation.metis import metis_order
from sparsepack.tracing.trace import Trace

_SEED = 0  # of groups at random


@dataclass(frozen=True)
class Known:
    """What is known of the neurons when groups are formed.

    frequency -- how often each is active: float64 [blocks, neurons]
    sessions  -- a trace of text that is not played, which says who is active together; None where there is none
    """

    frequency: np.ndarray
    sessions: Trace | None = None


@dataclass(frozen=True)
class Order:
    """A way to form groups.

    form     -- of so many neurons: int64 [blocks, neurons], those of a group side by side
    together -- it asks who is active together: `Known` must have sessions
    """

    form: Callable[[Known, int], np.ndarray]
    together: bool = False


def _by_frequency(known: Known, size: int) -> np.ndarray:
    return np.argsort(-known.frequency, axis=1, kind="stable")


def _at_random(known: Known, size: int) -> np.ndarray:
    random = np.random.default_rng(_SEED)
    blocks, neurons = known.frequency.shape
    return np.stack([random.permutation(neurons) for _ in range(blocks)])


def _by_metis(known: Known, size: int) -> np.ndarray:
    if known.sessions is None:
        raise PlacementError(
            "--order metis: the calibration counts each neuron alone, METIS must know who is active together; give as "
            "--calibration a trace of the calibration's text"
        )
    return metis_order(known.sessions, size)


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "frequency": Order(_by_frequency),
        "random": Order(_at_random),
        "metis": Order(_by_metis, together=True),
    }
)


def groups_of(known: Known, order: str, size: int) -> np.ndarray:
    """The neurons of each block by groups: int64 [blocks, groups, neurons of a group].

    Groups are in the order of their first neurons. Raises `PlacementError` where a block does not divide into groups,
    or the order asks for sessions that are not there; `UserError` where pymetis is missing.
    """
    blocks, neurons = known.frequency.shape
    if neurons % size:
        raise PlacementError(f"--group {size}: {neurons} neurons of a block do not divide into such groups")
    groups = np.sort(ORDERS[order].form(known, size).reshape(blocks, -1, size), axis=2)
    return np.stack([rows[rows[:, 0].argsort()] for rows in groups])


def grouped_frequency(frequency: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The mean frequency of each group's neurons: float64 [blocks, groups]."""
    found: np.ndarray = np.take_along_axis(frequency[:, None], groups, axis=2).mean(2)
    return found


def needed_of(trace: Trace, session: int, groups: np.ndarray) -> np.ndarray:
    """How many neurons of each group were active: uint8 [tokens, blocks, groups]."""
    blocks = [trace.active(session, block)[:, groups[block]].sum(2, dtype=np.uint8) for block in range(trace.layers)]
    return np.stack(blocks, axis=1)
