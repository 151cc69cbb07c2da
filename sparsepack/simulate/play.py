"""Play a trace under a policy: what it would have served, and what it would have moved."""

from dataclasses import dataclass

import numpy as np

from sparsepack.placement.policies import Policy, Start


@dataclass(frozen=True)
class Outcome:
    """What happened after the prompt of one session.

    tokens -- decoded
    needed -- neurons that they needed; hits: of these, those that had places at that time
    moves  -- neurons that were given places meanwhile; unused: of these, those that lost them again before being needed
    """

    tokens: int
    needed: int
    hits: int
    moves: int
    unused: int

    @property
    def hit_rate(self) -> float:
        """The share of what was needed that had a place."""
        return self.hits / max(self.needed, 1)


def play(policy: Policy, start: Start) -> Outcome:
    """One session under a policy. The prompt changes what a policy knows and who has places; it is not counted."""
    placement, move = policy(start)
    needed, resident = start.needed, placement.resident
    tokens, total = len(needed) - start.prompt, int(needed[start.prompt :].sum(dtype=np.int64))
    if move is None:
        hits = int(needed[start.prompt :, resident].sum(dtype=np.int64))
        return Outcome(tokens, total, hits, 0, 0)
    hits = moves = unused = 0
    untouched = np.zeros(resident.shape, np.bool_)  # came while decoding, and has not been needed since
    for token, row in enumerate(needed):
        decoding = token >= start.prompt
        if decoding:
            hits += int(np.multiply(row, resident).sum(dtype=np.int64))
            untouched &= row == 0
        after = move(token, row, resident)
        if after is not resident and decoding:
            came, went = after & ~resident, resident & ~after
            moves += int(np.count_nonzero(came))
            unused += int(np.count_nonzero(untouched & went))
            untouched &= ~went
            untouched |= came
        resident = after
    return Outcome(tokens, total, hits, moves, unused)
