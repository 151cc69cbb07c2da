"""Which neurons of a model have slots: a policy follows a sequence. An engine says who was active, and learns at a
token boundary who gets slots and who loses them.

Who was active comes as bits, as devices make them: uint8 [tokens, blocks, bytes of the neurons or more], bit i of byte
b of the neuron stored at 8 b + i; those beyond the neurons are 0. Neurons are meant by block * neurons + position, as
stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.placement import across_blocks
from sparsepack.placement.policies import POLICIES, Policy, PolicyRun, Slow, Start
from sparsepack.placement.traffic import HitCounts
from sparsepack.runtime.options import DEFAULT_POLICY, EngineOptions


@dataclass(frozen=True, eq=False)
class Moves:
    """Neurons that get slots and neurons that lose theirs: int32 [n] each, ascending."""

    coming: np.ndarray
    going: np.ndarray


class Following(Protocol):
    """A policy that follows one sequence after the other."""

    @property
    def first(self) -> np.ndarray:
        """Return who is resident when a sequence begins: bool [blocks, neurons], as stored."""

    def restart(self) -> None:
        """Begin with a sequence."""

    def saw(self, bits: np.ndarray, prompt: int) -> None:
        """Let tokens pass, the first `prompt` of them not decoded. The bits may be written again `KEPT` calls later."""

    def moves(self, unseen: int = 0) -> Moves | None:
        """What moves between the token that passed last and the next one; None: nothing. With 1 unseen token, if the
        policy foresees: what moves after the token that passes next."""

    @property
    def foresees(self) -> bool:
        """Whether what moves after a token is known before it has passed."""

    def ahead(self) -> Moves | None:
        """What `moves` will give soon, each once, as soon as it is known: time to prepare it. Whether it comes, and
        when, depends on how fast the machine is, and so may nothing but time. `moves` then gives the same arrays."""

    @property
    def counts(self) -> HitCounts:
        """What is counted of the sequence so far."""


KEPT = 10
"""A caller that has this many buffers for bits, writes to them in turns, and calls `saw` before the next token ends,
never waits without need."""


class Played:
    """Any policy, on the caller's thread: each token takes it milliseconds where a model has millions of neurons.

    begin     -- the policy; frequency: float64 [blocks, neurons] in the model's order; slots: how many
    order     -- int [blocks, neurons]: of each stored neuron, its number in the model. Policies break ties by it, as
                 they do in simulations.
    """

    foresees = False

    def __init__(self, begin: Policy, frequency: np.ndarray, slots: int, order: np.ndarray) -> None:
        self._begin, self._order = begin, order
        nothing = np.zeros((0, *frequency.shape), np.uint8)
        self._start = Start(frequency, slots, nothing, prompt=0)
        self.restart()

    @property
    def first(self) -> np.ndarray:
        return self._first

    @property
    def counts(self) -> HitCounts:
        return self._run.counts

    def restart(self) -> None:
        self._run = PolicyRun(self._begin, self._start)
        self._first = self._taken = self._stored(self._run.resident)

    def saw(self, bits: np.ndarray, prompt: int) -> None:
        count = self._order.shape[1]
        rows = (np.unpackbits(row, axis=1, count=count, bitorder="little") for row in bits)
        self._run.advance(map(self._by_model, rows), prompt)

    def moves(self, unseen: int = 0) -> Moves | None:
        before, self._taken = self._taken, self._stored(self._run.resident)
        coming, going = (np.flatnonzero(each) for each in (self._taken & ~before, before & ~self._taken))
        return Moves(coming.astype(np.int32), going.astype(np.int32)) if len(coming) + len(going) else None

    def ahead(self) -> Moves | None:
        return None

    def _by_model(self, stored: np.ndarray) -> np.ndarray:
        known = np.empty_like(stored)
        np.put_along_axis(known, self._order, stored, axis=1)
        return known

    def _stored(self, known: np.ndarray) -> np.ndarray:
        return np.take_along_axis(known, self._order, axis=1)


class FollowedNatively:
    """The slow policy on a thread of its own: what `Played` says of it, some microseconds of the caller's a token.

    native -- the class `SlowPolicy` of the native module; all else as for `Played`, with the policy's settings
    """

    def __init__(
        self, native: Callable[..., Any], settings: Slow, frequency: np.ndarray, slots: int, order: np.ndarray
    ) -> None:
        placement = across_blocks(frequency, slots)
        numbers = np.arange(frequency.size, dtype=np.int32).reshape(frequency.shape)
        score, self._first, ties = (
            np.ascontiguousarray(np.take_along_axis(known, order, axis=1))
            for known in (frequency.astype(np.float32), placement.resident, numbers)
        )
        decay, gain = map(float, settings.factors())
        margin, every, delay, most = settings.margin, settings.every, settings.delay, settings.most_of(slots)
        self._policy = native(score, self._first, ties, decay, gain, margin, every, delay, most)
        self.restart, self.saw = self._policy.restart, self._policy.saw
        self.foresees = settings.delay > 0

    @property
    def first(self) -> np.ndarray:
        return self._first

    @property
    def counts(self) -> HitCounts:
        return HitCounts(*self._policy.counts())

    def moves(self, unseen: int = 0) -> Moves | None:
        found = self._policy.moves(unseen)
        return None if found is None else Moves(*found)

    def ahead(self) -> Moves | None:
        found = self._policy.ahead()
        return None if found is None else Moves(*found)


@dataclass(frozen=True)
class Placing:
    """The slots of a model, and who follows a sequence to say who has them.

    shape -- blocks, neurons of each
    share -- of all neurons, that has slots
    name  -- of the policy; None: it is one of the caller's own
    """

    shape: tuple[int, int]
    share: float
    name: str | None
    follows: Following

    @property
    def description(self) -> str:
        """For people: `30 % of the neurons with slots, slow`."""
        return f"{100 * self.share:.3g} % of the neurons with slots{f', {self.name}' if self.name else ''}"


def find_placing(
    packed: PackedModel, options: EngineOptions, plan: Plan, slow: Callable[..., Any] | None = None
) -> Placing:
    """What options ask for, with the slots of a plan.

    slow -- the native `SlowPolicy`, for the policies that it knows; None: all run in numpy
    """
    mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    order = torch.stack([mlp.order for mlp in mlps]).numpy()
    stored = torch.stack([mlp.frequency for mlp in mlps]).double().numpy()
    frequency = np.empty_like(stored)
    np.put_along_axis(frequency, order, stored, axis=1)
    name, slots = options.policy or DEFAULT_POLICY, plan.slots
    row = POLICIES[name]
    follows: Following = (
        FollowedNatively(slow, row.slow, frequency, slots, order)
        if slow and row.slow and not options.begin
        else Played(options.begin or row.begin, frequency, slots, order)
    )
    shape: tuple[int, int] = frequency.shape
    return Placing(shape, plan.share, None if options.begin else name, follows)


class Slots(Protocol):
    """The slots of a device. `move` may come while it computes a token, and is in force for the next one. `prepare` may
    not come after it before this token has ended."""

    def forget(self) -> None:
        """Forget who was seen to be active in a pass that was interrupted."""

    def place(self, resident: np.ndarray) -> None:
        """Give slots when a sequence begins: bool [blocks, neurons]."""

    def move(self, moves: Moves) -> None:
        """Give slots to some and take those of others."""

    def prepare(self, moves: Moves) -> None:
        """Do what can be done before `move` of the same moves."""

    def step_bits(self, number: int) -> np.ndarray:
        """Return who was active in the step of this number; until the step after the next one begins."""


class TokenBoundaries:
    """The token boundaries of a sequence: there the policy is told who was active, and neurons move. The device waits
    for us between two tokens, so nothing is done there for a policy that foresees: what it says of moves after a token
    does not depend on that token.

        device   token t |         | token t + 1                         | the moves
        here             | end_step| meanwhile: saw t, moves after t + 1 |

    follows -- the policy; slots: those of the device
    seconds -- that this took between decoded tokens since the sequence began
    """

    def __init__(self, follows: Following, slots: Slots) -> None:
        self.follows, self._slots = follows, slots
        self._unseen: int | None = None  # the token that passed last, of which the policy does not know
        self.seconds = 0.0

    @property
    def counts(self) -> HitCounts:
        """What is counted of the sequence so far."""
        self.catch_up()
        return self.follows.counts

    def begin_sequence(self, anew: Callable[[], None]) -> None:
        """Give slots as the policy does at first. anew -- lets the device count anew"""
        self._unseen, self.seconds = None, 0.0
        self._slots.forget()
        self.follows.restart()
        anew()
        self._slots.place(self.follows.first)

    def meanwhile(self) -> None:
        """The device computes the token of which `end_step` will tell."""
        self.catch_up()
        if (moves := self.follows.ahead()) is not None:
            self._slots.prepare(moves)
        if self.follows.foresees and (moves := self.follows.moves(unseen=1)) is not None:
            self._slots.move(moves)

    def end_step(self, number: int) -> None:
        """A decoded token has passed, in the step of this number."""
        begun = perf_counter()
        if self.follows.foresees:
            self._unseen = number
        else:
            self.end_pass(self._slots.step_bits(number), prompt=0)
        self.seconds += perf_counter() - begun

    def end_pass(self, bits: np.ndarray, prompt: int) -> None:
        """Positions have passed, the first `prompt` of them not decoded: tell the policy who was active, and move."""
        self.catch_up()
        self.follows.saw(bits, prompt)
        if (moves := self.follows.moves()) is not None:
            self._slots.move(moves)

    def catch_up(self) -> None:
        """Tell the policy who was active in the last token, if it does not know."""
        if (number := self._unseen) is not None:
            self._unseen = None
            self.follows.saw(self._slots.step_bits(number), 0)
