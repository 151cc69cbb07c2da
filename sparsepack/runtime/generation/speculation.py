"""Prompt look-up: drafts are the tokens that followed when the text's last tokens stood in it before, and one step
computes the logits after all of them.

    text so far   def f(x): return x ... def f(
    draft                                      x ) : return
    step of 5     (  x  )  :  return           each position chooses as if it had been stepped alone
    kept          x  )  :  return  y           up to the first choice that is not the draft, that choice included

Each position's token is chosen from its own logits, by the text's own sampler: greedy text is that of steps, and
sampled text takes the same random numbers, up to the rounding of sums that are added in another order.
"""

from collections.abc import Callable, Sequence

from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler

NGRAM = 3
"""So many tokens must have stood in the text before; fewer match by chance."""

FORGETS = 0.95
"""What counts of a look-up weighs this share as much after the next one."""

MOST_DRAFTED = 7
"""With the token before them, as many positions as kernels multiply together (`kernels/few.inc`)."""


def step_cost(positions: int, skips: bool) -> float:
    """What a step of so many positions takes on a CPU, in steps of one (zigzag-q4_k, two threads: several sequences
    together in benchmarks/RESULTS.md). No clock is read, so that a prompt gives the same text every time.

    skips -- columns are skipped, of which positions share fewer the more they are
    """
    if positions == 1:
        return 1.0
    return 1.7 + 0.3 * positions if skips else 1.6 + 0.15 * positions


class PromptLookup:
    """Drafts for one text.

    ids   -- of the prompt
    most  -- tokens of a draft at most
    skips -- as `step_cost` has it

    Every token of the text is compared with what the look-up says, also where nothing was drafted: how often it is
    right, by how long it has been, costs no step to know. A draft is as long as makes most tokens a second, and text
    that does not repeat itself gets none.
    """

    def __init__(self, ids: Sequence[int], most: int, skips: bool) -> None:
        self._most, self._skips = most, skips
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the text went on after the last such tokens
        self._at: int | None = None  # of the token that is expected next
        self._matched = 0
        # Hits and tries, by the length of the match; the shortest are believed once they have been right.
        self._right = [[1.0, 3.0 if n < 2 else 2.0] for n in range(6)]
        self._taken = 0
        for id in ids:
            self._append(id)

    def drafts(self, tokens: Sequence[int], room: int) -> list[int]:
        """What is expected next, at most `room` tokens.

        tokens -- those of the text after the prompt
        """
        for id in tokens[self._taken :]:
            self._learn(id)
            self._append(id)
        self._taken = len(tokens)
        if self._at is None:
            return []
        best, length, expected, chance = 1.0, 0, 1.0, 1.0
        for count in range(1, min(self._most, room) + 1):
            hits, tries = self._right[_bucket(self._matched + count - 1)]
            chance *= hits / tries
            expected += chance
            if (speed := expected / step_cost(count + 1, self._skips)) > best:
                best, length = speed, count
        period = len(self._ids) - self._at
        return [self._ids[self._at + n % period] for n in range(length)]

    def _learn(self, id: int) -> None:
        if self._at is None:
            return
        counts = self._right[_bucket(self._matched)]
        counts[0] = FORGETS * counts[0] + (self._ids[self._at] == id)
        counts[1] = FORGETS * counts[1] + 1

    def _append(self, id: int) -> None:
        if self._at is not None and self._ids[self._at] == id:
            self._at, self._matched = self._at + 1, self._matched + 1
        else:
            self._at, self._matched = None, 0
        self._ids.append(id)
        if len(self._ids) < NGRAM:
            return
        last = tuple(self._ids[-NGRAM:])
        if self._at is None and last in self._after:
            self._at, self._matched = self._after[last], NGRAM
        self._after[last] = len(self._ids)


def _bucket(matched: int) -> int:
    return min((matched // NGRAM).bit_length(), 5)


def decode_drafts(
    engine: Engine,
    id: int,
    drafts: Sequence[int],
    sampler: Sampler,
    take: Callable[[int], bool],
    sequence: int = 0,
) -> int:
    """Append a token and what of the drafts the sampler chooses, too. Returns how many of the drafts it chose.

    take -- is given each token that is chosen, those that are appended and the one to append next; returns whether the
            text goes on
    """
    position, accepted = engine.positions[sequence], 0
    logits = engine.step_positions([id, *drafts], sequence)
    try:
        for draft, row in zip([*drafts, None], logits, strict=True):
            chosen = engine.choose(row, sampler)
            if not take(chosen) or chosen != draft:
                break
            accepted += 1
    finally:
        engine.truncate(position + 1 + accepted, sequence)
    return accepted
