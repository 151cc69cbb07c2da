"""The slots of a text, from its beginning on and from one token boundary to the next, on any device."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from sparsepack.runtime.hybrid.following import Following, Moves


class Slots(Protocol):
    """What a device does with the slots; between passes alone."""

    def forget(self) -> None:
        """Forget who was seen to be active in a pass that has ended or was interrupted."""
        ...

    def place(self, resident: np.ndarray) -> None:
        """Give slots when a text begins: bool [blocks, neurons]."""
        ...

    def move(self, moves: Moves) -> None:
        """Give slots to some and take those of others."""
        ...


class Boundaries:
    """The token boundaries of a text: there the policy is told who was active, and neurons move.

    follows -- the policy; slots: those of the device; anew: counts anew on the device

    A pass that is interrupted, by Ctrl-C or an error, may leave a policy that knows of moves which were not made, and
    sides that count differently. So the next pass begins with slots and counts as a text does.
    """

    def __init__(self, follows: Following, slots: Slots, anew: Callable[[], None]) -> None:
        self.follows, self._slots, self._anew = follows, slots, anew
        self._interrupted = True  # no text has begun

    def begin_text(self) -> None:
        """Give slots as the policy does at first, and count anew."""
        self._interrupted = True
        self.follows.restart()
        self._anew()
        self._slots.place(self.follows.first)
        self._interrupted = False

    def begin_pass(self) -> None:
        """Positions are to pass, until `passed` or `nothing_passed`."""
        if self._interrupted:
            self.begin_text()
        self._interrupted = True
        self._slots.forget()

    def nothing_passed(self) -> None:
        """What ran since `begin_pass` belongs to no text, and left nothing behind."""
        self._interrupted = False

    def passed(self, bits: np.ndarray, prompt: int) -> None:
        """Positions have passed, the first `prompt` of them not decoded: tell the policy who was active, as `following`
        has bits, and move."""
        self.follows.saw(bits, prompt)
        if (moves := self.follows.moves()) is not None:
            self._slots.move(moves)
        self._interrupted = False
