"""Policies: who has the slots while a text is decoded. Each is a row of `POLICIES`.

A policy sees one token after the other, and after each says who has slots from then on. A session begins with the
placement that the calibrated frequencies give, the same for all policies that know no more. Within a block as many
neurons have slots at any time as in the beginning, unless the policy ranks all blocks together.

What could be reached by who knows the future: the best demand loading, and a bound on everything.

A text under a policy, token by token: who is resident, and what is counted. Simulations and engines play texts here,
so that both count alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sparsepack.errors import PlacementError
from sparsepack.placement.budget import spare_of
from sparsepack.placement.placement import Placement, across_blocks, best, same_share, swaps
from sparsepack.placement.traffic import HitCounts

Mover = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""A mover takes (token, needed [blocks, units], resident bool [blocks, units]) and returns who has slots from the next
token on: the same array where nothing moves."""

_STEPS = 16
"""The search for the best price of a slot has this many steps: each shortens what is left to 0.62 of it."""


def belady(needed: np.ndarray, prompt: int, placement: Placement, across: bool = True) -> Mover:
    """Keep those, of the ones that are there or just came by, that are needed again soonest after the prompt.

    needed -- [tokens, blocks, units], above 0 where a unit is needed
    across -- slots are of all blocks together; otherwise each block keeps as many as it has

    Where units are neurons, no policy that loads a neuron only when it is needed serves more of what comes after the
    prompt.
    """
    tokens, shape = len(needed), needed.shape[1:]
    slots = np.array([sum(placement.slots)] if across else placement.slots)
    groups = (len(slots), -1)
    units, following, starts = _next_uses(needed[prompt:].reshape(tokens - prompt, -1) > 0)
    soonest = np.full(needed[0].size, tokens, np.int64)
    soonest[units[::-1]] = (np.repeat(np.arange(tokens - prompt), np.diff(starts)))[::-1]  # the first use stays

    def move(token: int, row: np.ndarray, resident: np.ndarray) -> np.ndarray:
        if token >= prompt:
            uses = slice(starts[token - prompt], starts[token - prompt + 1])
            soonest[units[uses]] = following[uses]
        here = (row > 0) | resident
        # At least 1 for those who are here, also where they are never needed again; nobody else is chosen.
        score = np.where(here, tokens - soonest.reshape(shape) + 1, 0).astype(np.float32)
        chosen: np.ndarray = best(score.reshape(groups), resident.reshape(groups), slots).reshape(shape) & here
        return chosen

    return move


def _next_uses(needed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every use in a bool [tokens, units], in the order of tokens: its unit, and the token of the unit's next use.

    The third says where each token's uses begin: int64 [tokens + 1]. Without a next use it is the number of tokens.
    """
    unit, token = np.nonzero(needed.T)
    following = np.append(token[1:], len(needed))
    following[np.append(unit[1:] != unit[:-1], True)[: len(unit)]] = len(needed)
    order = np.argsort(token, kind="stable")
    starts = np.concatenate([[0], np.cumsum(needed.sum(1))])
    return unit[order], following[: len(unit)][order], starts


def bound(needed: np.ndarray, slots: int, price: float) -> float:
    """No policy of whatever knowledge has more hits, less `price` for each move, over these tokens.

    needed -- uint8 [tokens, units]; the first slots are given out for nothing, also by who knows the future

    Of a unit alone the best times to have a slot are found exactly, where a slot costs something each token. What
    all of them gain, and what the slots that there are cost, is a bound for every such cost, and the least is taken.
    """

    def at(cost: float) -> float:
        return _alone(needed, price, cost) + cost * slots * len(needed)

    low, high = 0.0, float(needed.max(initial=0))
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    values = {left: at(left), right: at(right)}
    for _ in range(_STEPS):
        if values[left] <= values[right]:
            high, right = right, left
            left = high - golden * (high - low)
            values[left] = at(left)
        else:
            low, left = left, right
            right = low + golden * (high - low)
            values[right] = at(right)
    return min(*values.values(), at(0.0), at(float(needed.max(initial=0))))


def _alone(needed: np.ndarray, price: float, cost: float) -> float:
    """What every unit alone gains at best, where a move costs `price` and a slot `cost` a token; the sum of them."""
    outside = np.zeros(needed.shape[1])
    inside = np.zeros(needed.shape[1])  # before the first token a slot is free
    for row in needed:
        came = np.maximum(inside, outside - price)
        np.maximum(outside, inside, out=outside)
        inside = came + row - cost
    return float(np.maximum(inside, outside).sum())


@dataclass(frozen=True)
class Start:
    """What a policy knows when a session begins.

    frequency -- float64 [blocks, units], calibrated
    slots    -- of all blocks together
    needed    -- uint8 [tokens, blocks, units], of the session: causal policies do not look at it
    prompt    -- tokens of the prompt
    size      -- neurons of a unit: `needed` says how many of them are
    """

    frequency: np.ndarray
    slots: int
    needed: np.ndarray
    prompt: int
    size: int = 1

    @property
    def placement(self) -> Placement:
        """The slots by calibrated frequency, across all blocks."""
        return across_blocks(self.frequency, self.slots)


Policy = Callable[[Start], tuple[Placement, Mover | None]]
"""A policy gives the placement at the beginning of a session and what moves neurons afterwards, None where nothing
does."""


@dataclass(frozen=True)
class PolicyRow:
    """A policy, what it is in a few words, whether it may look ahead, and the settings of one that is slow: engines
    then follow a text natively."""

    begin: Policy
    summary: str
    clairvoyant: bool = False
    slow: "Slow | None" = None


@dataclass(frozen=True)
class Slow:
    """The settings of the slow momentum; docs/placement.md says why these.

    decay  -- lambda, for a token
    margin -- a neuron comes where its score is better by more than this than that of the one that goes
    every  -- tokens between two decisions
    delay  -- tokens from a decision until the moves are done, which is before the next one
    most   -- so many move after a token, the best first, the others after the tokens that follow; before the next
              decision, or not at all. None: as many as there are spare slots

    Raises `PlacementError` for a delay that is not, and where nobody could move.
    """

    decay: float = 0.995
    margin: float = 0.02
    every: int = 16
    delay: int = 4
    most: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay < self.every:
            raise PlacementError(f"delay {self.delay}: expected at least 0, and less than every, {self.every}")
        if self.most is not None and self.most < 1:
            raise PlacementError(f"most {self.most}: expected at least 1")

    def most_of(self, slots: int) -> int:
        """How many move after a token at most, of so many slots."""
        return spare_of(slots) if self.most is None else self.most

    def factors(self, size: int = 1) -> tuple[np.float32, np.float32]:
        """What a decision multiplies scores with, and what each time that one of `size` neurons was needed adds."""
        decay = np.float32(self.decay**self.every)
        return decay, (np.float32(1) - decay) / np.float32(self.every * size)


def _static(start: Start) -> tuple[Placement, None]:
    return start.placement, None


def _static_same_share(start: Start) -> tuple[Placement, None]:
    return same_share(start.frequency, start.slots), None


PRIOR = 256
"""The calibrated frequencies weigh as much as this many tokens, where the prompt's counts are added to them."""


def _static_after_prompt(start: Start) -> tuple[Placement, Mover]:
    counts = start.frequency * start.size * PRIOR + _times(start.needed[: start.prompt])
    after = across_blocks(counts, start.slots).resident

    def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
        return after if token == start.prompt - 1 else resident

    return start.placement, move


def _oracle_static(start: Start) -> tuple[Placement, None]:
    return across_blocks(_times(start.needed[start.prompt :]), start.slots), None


def _lru(start: Start) -> tuple[Placement, Mover]:
    last = start.frequency.astype(np.float32)  # below 1: before every token

    def rank(token: int, needed: np.ndarray) -> np.ndarray:
        np.copyto(last, np.float32(token + 2), where=needed > 0)
        return last

    return start.placement, _ranked(start, rank)


def _lfu(start: Start) -> tuple[Placement, Mover]:
    counts = np.zeros(start.frequency.shape, np.float32)

    def rank(token: int, needed: np.ndarray) -> np.ndarray:
        np.add(counts, needed > 0, out=counts)
        return counts

    return start.placement, _ranked(start, rank)


def momentum(decay: float, threshold: bool = False, drops: bool = False) -> Policy:
    """KAIROX's scores: S = decay S + (1 - decay) A; of each block those with the highest stay (section 6, eq. 5).

    threshold -- only who is above (1 - decay) may come, as the paper has it; its public code lacks this
    drops     -- and who is not above it goes, even where nobody comes: Algorithm 1 to the letter
    """

    def begin(start: Start) -> tuple[Placement, Mover]:
        score = start.frequency.astype(np.float32)
        gain, tau = np.float32((1 - decay) / start.size), np.float32(1 - decay + 1e-6)
        slots = np.array(start.placement.slots)

        def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
            np.multiply(score, np.float32(decay), out=score)
            np.add(score, gain * needed, out=score)
            if not threshold:
                return best(score, resident, slots)
            may_stay = score > tau if drops else (score > tau) | resident
            chosen = best(np.where(may_stay, score, np.float32(0)), resident, slots)
            return chosen & may_stay

        return start.placement, move

    return begin


def slow(settings: Slow | None = None) -> Policy:
    """A policy by scores with a long memory, of all blocks together, that makes few moves."""
    chosen = settings or Slow()

    def begin(start: Start) -> tuple[Placement, Mover]:
        score = start.frequency.astype(np.float32)
        counts = np.zeros(score.shape, np.float32)
        decay, gain = chosen.factors(start.size)
        most, parts = chosen.most_of(start.slots), list[tuple[np.ndarray, np.ndarray]]()

        def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
            np.add(counts, needed, out=counts)
            since = (token + 1) % chosen.every
            if since == 0:
                np.multiply(score, decay, out=score)
                np.add(score, gain * counts, out=score)
                counts.fill(0)
                coming, going = swaps(score.ravel(), resident.ravel(), chosen.margin)
                starts = range(0, len(coming), most)[: chosen.every - chosen.delay]
                parts[:] = [(coming[first : first + most], going[first : first + most]) for first in starts]
            if since < chosen.delay or not parts:
                return resident
            after, (coming, going) = resident.copy(), parts.pop(0)
            after.ravel()[coming], after.ravel()[going] = True, False
            return after

        return start.placement, move

    return begin


def _belady(start: Start) -> tuple[Placement, Mover]:
    return start.placement, belady(start.needed, start.prompt, start.placement)


def _belady_within_blocks(start: Start) -> tuple[Placement, Mover]:
    return start.placement, belady(start.needed, start.prompt, start.placement, across=False)


def _ranked(start: Start, rank: Callable[[int, np.ndarray], np.ndarray]) -> Mover:
    """A mover to the best of each block, by a score that `rank` keeps."""
    slots = np.array(start.placement.slots)
    return lambda token, needed, resident: best(rank(token, needed), resident, slots)


def _times(needed: np.ndarray) -> np.ndarray:
    """How often each unit is needed: float64 [blocks, units]."""
    times: np.ndarray = needed.sum(0, dtype=np.int64).astype(np.float64)
    return times


NOBODY_MOVES = Slow(margin=2.0)
"""Scores lie between 0 and 1, none is better by so much: what follows a text natively serves slots that stay, too."""

POLICIES: Mapping[str, PolicyRow] = MappingProxyType(
    {
        "static": PolicyRow(_static, "slots by calibrated frequency, across blocks; nothing moves", slow=NOBODY_MOVES),
        "static-same-share": PolicyRow(_static_same_share, "the same with as many slots in each block"),
        "static-after-prompt": PolicyRow(_static_after_prompt, "placed anew once, when the prompt is known"),
        "slow": PolicyRow(
            slow(), "momentum with a long memory: across blocks, every 16 tokens, by a margin", slow=Slow()
        ),
        "lru": PolicyRow(_lru, "the least recently used goes"),
        "lfu": PolicyRow(_lfu, "the least often used in this session goes"),
        "momentum": PolicyRow(
            momentum(0.67), "KAIROX as its public code has it: lambda 0.67, every token, no threshold"
        ),
        "momentum-threshold": PolicyRow(momentum(0.67, True), "with the threshold of the paper"),
        "momentum-letter": PolicyRow(momentum(0.67, True, True), "Algorithm 1 of the paper to the letter"),
        "oracle-static": PolicyRow(_oracle_static, "the best slots that never move, known beforehand", True),
        "belady-within-blocks": PolicyRow(_belady_within_blocks, "as belady, each block with its slots", True),
        "belady": PolicyRow(
            _belady, "the best that loads what is needed when it is needed, and knows the future", True
        ),
    }
)


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
