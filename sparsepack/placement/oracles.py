"""What could be reached by who knows the future: the best demand loading, and a bound on everything."""

from collections.abc import Callable

import numpy as np

from sparsepack.placement.choose import best
from sparsepack.placement.placement import Placement

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
