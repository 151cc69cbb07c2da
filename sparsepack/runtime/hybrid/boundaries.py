"""The slots of a text, from its beginning on and from one token boundary to the next, on any device."""

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import numpy as np

from sparsepack.placement.traffic import HitCounts
from sparsepack.runtime.hybrid.following import Following, Moves


class Slots(Protocol):
    """What a device does with the slots; between passes alone."""

    def forget(self) -> None:
        """Forget who was seen to be active in a pass that was interrupted."""
        ...

    def place(self, resident: np.ndarray) -> None:
        """Give slots when a text begins: bool [blocks, neurons]."""
        ...

    def move(self, moves: Moves) -> None:
        """Give slots to some and take those of others."""
        ...


class SlotsBeside(Slots, Protocol):
    """The slots of a device that computes beside who calls: `move` may come while it does, and is in force for the next
    token. `prepare` may not come after it before this token has ended."""

    def prepare(self, moves: Moves) -> None:
        """Do what can be done before `move` of the same moves."""
        ...

    def step_bits(self, number: int) -> np.ndarray:
        """Return who was active in the step of this number, as `following` has bits; until the step after the next one
        begins."""
        ...


class Boundaries:
    """The token boundaries of a text: there the policy is told who was active, and neurons move.

    follows -- the policy; slots: those of the device; anew: counts anew on the device

    A pass that is interrupted, by Ctrl-C or an error, may leave a policy that knows of moves which were not made, and
    sides that count differently. So the next pass begins with slots and counts as a text does.

    seconds -- that this took between decoded tokens since the text began
    """

    def __init__(self, follows: Following, slots: Slots, anew: Callable[[], None]) -> None:
        self.follows, self._slots, self._anew = follows, slots, anew
        self._interrupted = True  # no text has begun
        self.seconds = 0.0

    @property
    def counts(self) -> HitCounts:
        """What is counted of the text so far."""
        return self.follows.counts

    def begin_text(self) -> None:
        """Give slots as the policy does at first, and count anew."""
        self._interrupted, self.seconds = True, 0.0
        self._slots.forget()
        self.follows.restart()
        self._anew()
        self._slots.place(self.follows.first)
        self._interrupted = False

    def begin_pass(self) -> None:
        """Positions are to pass, until `passed` or `nothing_passed`."""
        if self._interrupted:
            self.begin_text()
        self._interrupted = True

    def nothing_passed(self) -> None:
        """What ran since `begin_pass` belongs to no text, and left nothing behind."""
        self._interrupted = False

    def passed(self, bits: np.ndarray, prompt: int) -> None:
        """Positions have passed, the first `prompt` of them not decoded: tell the policy who was active, as `following`
        has bits, and move."""
        begun = perf_counter()
        self.follows.saw(bits, prompt)
        if (moves := self.follows.moves()) is not None:
            self._slots.move(moves)
        self._interrupted = False
        if not prompt:
            self.seconds += perf_counter() - begun


class BoundariesBeside(Boundaries):
    """The boundaries of a device that computes beside us, and between two tokens waits for us. So nothing is done there
    for a policy that foresees: what it says of moves after a token does not depend on that token.

        device   token t |                    | token t + 1                      | the moves
        here             | stepped, begin_pass | beside: saw t, moves after t + 1 |
    """

    def __init__(self, follows: Following, slots: SlotsBeside, anew: Callable[[], None]) -> None:
        super().__init__(follows, slots, anew)
        self._beside = slots
        self._unseen: int | None = None  # the token that passed last, of which the policy does not know

    @property
    def counts(self) -> HitCounts:
        self.catch_up()
        return super().counts

    def begin_text(self) -> None:
        self._unseen = None
        super().begin_text()

    def beside(self) -> None:
        """The device computes the token of which `stepped` will tell."""
        self.catch_up()
        if (moves := self.follows.ahead()) is not None:
            self._beside.prepare(moves)
        if self.follows.foresees and (moves := self.follows.moves(unseen=1)) is not None:
            self._slots.move(moves)

    def stepped(self, number: int) -> None:
        """A decoded token has passed, in the step of this number."""
        begun = perf_counter()
        if self.follows.foresees:
            self._unseen, self._interrupted = number, False
            self.seconds += perf_counter() - begun
        else:
            self.passed(self._beside.step_bits(number), prompt=0)

    def passed(self, bits: np.ndarray, prompt: int) -> None:
        self.catch_up()
        super().passed(bits, prompt)

    def catch_up(self) -> None:
        """Tell the policy who was active in the last token, if it does not know."""
        if (number := self._unseen) is not None:
            self._unseen = None
            self.follows.saw(self._beside.step_bits(number), 0)
