"""A text under a policy, token by token: who is resident, and what is counted. Simulations and engines play texts here,
so that both count alike."""

from collections.abc import Iterable

import numpy as np

from sparsepack.placement.counts import HitCounts
from sparsepack.placement.policies import Policy, Start


class PolicyRun:
    """A policy that follows one text from its beginning.

    resident -- who is resident now: bool [blocks, units]
    counts   -- of the decoded tokens so far
    """

    def __init__(self, policy: Policy, start: Start) -> None:
        placement, self._move = policy(start)
        self.resident, self.counts, self._seen = placement.resident, HitCounts(), 0
        self._untouched = np.zeros(self.resident.shape, np.bool_)  # came while decoding, and not needed since

    def advance(self, needed: Iterable[np.ndarray], prompt: int = 0) -> None:
        """Let tokens pass: the policy sees each of them and says who is resident from the next one on.

        needed -- of each token, how many neurons of each unit it needs: uint8 [blocks, units]
        prompt -- so many of these tokens, the first ones, are not counted
        """
        for number, row in enumerate(needed):
            hits, resident = self._hits(row) if number >= prompt else None, self.resident
            if self._move is not None:
                self.resident = self._move(self._seen, row, resident)
            self._seen += 1
            if hits is not None:
                self._count(row, hits, resident)

    def _hits(self, row: np.ndarray) -> int:
        return int(np.multiply(row, self.resident).sum(dtype=np.int64))

    def _count(self, row: np.ndarray, hits: int, before: np.ndarray) -> None:
        moves = unused = 0
        if self._move is not None:
            self._untouched &= row == 0
        if self.resident is not before:
            came, went = self.resident & ~before, before & ~self.resident
            moves, unused = int(np.count_nonzero(came)), int(np.count_nonzero(self._untouched & went))
            self._untouched &= ~went
            self._untouched |= came
        self.counts += HitCounts(1, int(row.sum(dtype=np.int64)), hits, moves, unused)


def play(policy: Policy, start: Start) -> HitCounts:
    """What is counted of one session under a policy, its prompt apart."""
    run = PolicyRun(policy, start)
    run.advance(start.needed, start.prompt)
    return run.counts
