"""Which neuron lies in which slot: a table in two versions, of which one is read while the other is written."""

from collections.abc import Callable

import numpy as np

from sparsepack.placement.budget import SPARE

NOWHERE = -1

Copy = Callable[[int, np.ndarray, np.ndarray], None]
"""The function copies neurons of a block into slots, given the block, its neurons and the slots, int32 [n] each."""


class Residency:
    """The slot of each neuron, or NOWHERE. Changes are made between two tokens.

    shape -- blocks, neurons of each
    most  -- how many neurons may be resident

    At any moment the table in force is true: a slot that it names has that neuron, since slots become free only when
    a version that does not name them is in force.
    """

    def __init__(self, shape: tuple[int, int], most: int) -> None:
        self.slots = most + SPARE
        self._versions = [np.full(shape, NOWHERE, np.int32) for _ in range(2)]
        self._now = 0

    @property
    def table(self) -> np.ndarray:
        """The version in force: int32 [blocks, neurons]. Not to be written."""
        return self._versions[self._now]

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
        self._put(np.full_like(fresh, NOWHERE))
        self.change(resident, copy)

    def change(self, resident: np.ndarray, copy: Copy) -> None:
        """Let others have the slots: bool [blocks, neurons], at most as many as may be resident.

        Those that come take free slots in ascending order. Where there are fewer free ones than neurons that come, a
        first version has a part of them and nobody of those that go; then their slots are free. Raises ValueError for
        more neurons than may be resident.
        """
        if np.count_nonzero(resident) > self.slots - SPARE:
            raise ValueError(f"{np.count_nonzero(resident)} neurons for {self.slots - SPARE} slots")
        coming = np.argwhere(resident & ~self.resident)
        while True:
            following = np.where(resident, self.table, np.int32(NOWHERE))
            free = np.setdiff1d(np.arange(self.slots, dtype=np.int32), self.table[self.table != NOWHERE])
            now, coming = coming[: len(free)], coming[len(free) :]
            slots = free[: len(now)]
            for block in np.unique(now[:, 0]):
                of_block = now[:, 0] == block
                copy(int(block), now[of_block, 1].astype(np.int32), slots[of_block])
            following[now[:, 0], now[:, 1]] = slots
            self._put(following)
            if not len(coming):
                return

    def _put(self, table: np.ndarray) -> None:
        """Write the version that nobody reads, then let it be in force."""
        other = 1 - self._now
        np.copyto(self._versions[other], table)
        self._now = other
