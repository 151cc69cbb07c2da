"""Which neuron lies in which slot: a table in two versions, of which one is read while the other is written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsepack.placement.budget import spare_of

NOWHERE = -1

Copy = Callable[[np.ndarray, np.ndarray], None]
"""The function copies neurons into slots, given the neurons, block * neurons of a block + position, ascending, and the
slots: int32 [n] each."""


class Residency:
    """The slot of each neuron, or NOWHERE. Changes are made between two tokens.

    shape -- blocks, neurons of each
    most  -- how many neurons may be resident

    At any moment the table in force is true: a slot that it names has that neuron, since slots become free only when
    a version that does not name them is in force. What a change takes depends on how many move, not on the table.
    """

    def __init__(self, shape: tuple[int, int], most: int) -> None:
        self._most, self.slots = most, most + spare_of(most)
        self._versions = [np.full(shape, NOWHERE, np.int32) for _ in range(2)]
        self._force = 0, np.arange(self.slots, dtype=np.int32)  # which version, and the slots that it leaves free
        self._may_differ = np.zeros(0, np.int32)  # where the versions are not the same
        self._prepared: _Prepared | None = None

    @property
    def table(self) -> np.ndarray:
        """The version in force: int32 [blocks, neurons]. Not to be written."""
        return self._versions[self._force[0]]

    @property
    def resident(self) -> np.ndarray:
        """Which neurons have a slot: bool [blocks, neurons]."""
        resident: np.ndarray = self.table != NOWHERE
        return resident

    def restart(self, resident: np.ndarray, copy: Copy) -> None:
        """Give slots in ascending order, as a table does that was never changed: what follows has the same bits."""
        fresh = np.full(self.table.shape, NOWHERE, np.int32)
        fresh[resident] = np.arange(np.count_nonzero(resident), dtype=np.int32)
        if np.array_equal(fresh, self.table):
            return
        nobody = np.zeros(0, np.int32)
        self.move(nobody, _positions(self.resident), copy)
        self.move(_positions(resident), nobody, copy)

    def change(self, resident: np.ndarray, copy: Copy) -> None:
        """Let others have the slots, bool [blocks, neurons]: see `move`."""
        now = self.resident
        self.move(_positions(resident & ~now), _positions(now & ~resident), copy)

    def move(self, coming: np.ndarray, going: np.ndarray, copy: Copy) -> None:
        """Give slots to neurons that have none, and take those of others: int32 [n] each, ascending.

        Those that come take free slots in ascending order. Where there are fewer free ones than neurons that come, a
        first version has a part of them and nobody of those that go; then their slots are free. Raises ValueError for
        more neurons than may be resident.
        """
        while True:
            if not self.is_prepared(coming, going):
                self.prepare(coming, going, copy)
            assert self._prepared is not None
            self._flip(self._prepared)
            coming, going = coming[len(self._prepared.now) :], going[:0]
            self._prepared = None
            if not len(coming):
                return

    def prepare(self, coming: np.ndarray, going: np.ndarray, copy: Copy) -> None:
        """Do of a `move` what can be done while the version in force is read: copy to free slots, and write the other
        version. `move` of the same neurons then does the rest; whatever else happens first makes this vain."""
        self._prepared = None
        free = self._force[1]
        after = self.slots - len(free) + len(coming) - len(going)
        if after > self._most:
            raise ValueError(f"{after} neurons for {self._most} slots")
        now = coming[: len(free)]
        taken, left = free[: len(now)], free[len(now) :]
        if len(now):
            copy(now, taken)
        positions = np.concatenate([going, now])
        self._write(positions, np.concatenate([np.full_like(going, NOWHERE), taken]))
        free = np.sort(np.concatenate([left, self.table.ravel()[going]]))
        self._prepared = _Prepared(coming, going, now, positions, free)

    def is_prepared(self, coming: np.ndarray, going: np.ndarray) -> bool:
        """Whether `move` of these has nothing to copy but what finds no free slot yet."""
        prepared = self._prepared
        return prepared is not None and _same(prepared.coming, coming) and _same(prepared.going, going)

    def _write(self, positions: np.ndarray, slots: np.ndarray) -> None:
        """Write the version that nobody reads. An interruption leaves the one that is in force."""
        now, before = self._force[0], self._may_differ
        self._may_differ = np.concatenate([before, positions])
        force, other = (self._versions[version].ravel() for version in (now, 1 - now))
        other[before] = force[before]
        other[positions] = slots

    def _flip(self, prepared: "_Prepared") -> None:
        """Let the version that was written be in force."""
        self._force = 1 - self._force[0], prepared.free
        self._may_differ = prepared.positions


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Moves that stand in the version that is not in force: of those that come, the first ones, `now`.

    positions -- where the versions differ; free: the slots that this one leaves free
    """

    coming: np.ndarray
    going: np.ndarray
    now: np.ndarray
    positions: np.ndarray
    free: np.ndarray


def ranges_of_blocks(neurons: np.ndarray, count: int) -> Iterator[tuple[int, int, int]]:
    """Which of the neurons, ascending, are of each block of `count`: blocks that have some, first, last + 1."""
    blocks = neurons // count
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    for first, last in pairwise([*starts.tolist(), len(neurons)]):
        yield int(blocks[first]), first, last


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or np.array_equal(one, other)


def _positions(chosen: np.ndarray) -> np.ndarray:
    return np.flatnonzero(chosen).astype(np.int32)
