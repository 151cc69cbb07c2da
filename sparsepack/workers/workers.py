"""What one of several workers knows of the others, and how they exchange what they found.

Small values travel through a store, tensors from process to process: from GPU to GPU by NCCL where each worker has one
of its own, else by gloo, over the CPU's memory. Nothing is unpickled. Whoever waits sees at once when another one
fails, and gives up after `LIMIT` seconds.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sparsepack.errors import WorkerLost, WorkersError

T = TypeVar("T")

LIMIT = 3600.0
"""An exchange waits for so many seconds at most: for the slowest worker's part, or for the hash of a large model."""

FAILED = "failed"
"""The store's key of the first failure: JSON, `worker` and `line`."""

_POLL = 0.02
_LATE = 0.02  # what is waited for is seen after so much of the wait more, or `_POLL` seconds if that is less
_FIRST_POLL = 0.0005
_UNHEARD = 64  # exchanges in which the first worker alone speaks, until it asks whether all have heard it
_GRACE = 3.0  # seconds in which a worker that failed says why
_LEAVE = 10.0  # seconds in which the others leave when all is done


class Link(Protocol):
    """How workers reach each other: a store of small values, and tensors from one to another."""

    def set(self, key: str, value: str) -> None:
        """Keep a value under a key."""

    def get(self, key: str) -> str | None:
        """The value of a key, None while it has none."""

    def forget(self, key: str) -> None:
        """Keep no longer what this worker has set under a key."""

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to a worker, each on the CPU or on the worker's own GPU, where that is `Workers.gpu`. A GPU is
        not waited for. Raises RuntimeError where that worker is gone."""

    def receive(self, into: Sequence[Tensor], sender: int) -> None:
        """Fill tensors with what a worker sends, each on the device where that one has it. Raises RuntimeError where
        that worker is gone."""


@dataclass
class Workers:
    """The workers of one piece of work, as one of them sees them. Number 0 is the first: it alone writes the result.

    Every worker takes part in every exchange, in the same order.

    number -- of this one, from 0
    count  -- of them all
    link   -- None for one that is alone
    names  -- what each is called in messages: "worker 1 of 2 on HOST"
    gpu    -- this worker's GPU, where each has one of its own: tensors there go straight to those of others. None: all
              go over the CPU's memory
    """

    number: int = 0
    count: int = 1
    link: Link | None = None
    names: tuple[str, ...] = ("this process",)
    gpu: torch.device | None = None
    _exchanges: int = 0
    _unheard: int = 0  # exchanges since all have last spoken
    _kept: list[str] = field(default_factory=list)  # the store's keys of what this one said that others may still read

    @property
    def first(self) -> bool:
        """Whether this is the worker that writes the result."""
        return self.number == 0

    def told(self, value: Any) -> list[Any]:
        """What each worker says, in their order: JSON-able values."""
        if self.link is None:
            return [value]
        before, self._kept, self._unheard = self._kept, [], 0
        self._say(value)
        said = [json.loads(self._waited(f"{self._exchanges}/{other}", other)) for other in range(self.count)]
        for key in before:  # whoever speaks now has read what was said before
            self.link.forget(key)
        return said

    def told_by_first(self, value: Any) -> Any:
        """What the first worker says, a JSON-able value; what others give is not looked at."""
        if self.link is None:
            return value
        if self._unheard == _UNHEARD:
            self.told(None)
        self._unheard += 1
        if self.first:
            self._say(value)
            return value
        self._exchanges += 1
        return json.loads(self._waited(f"{self._exchanges}/0", 0))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise `WorkersError` at all workers unless they have the same facts, JSON-able; the first that differs is
        named, and where."""
        said = self.told(dict(facts))
        for name, value in said[0].items():
            for other, theirs in enumerate(said):
                if theirs.get(name) != value:
                    with suppress(RuntimeError):  # of a store that is gone: this one knows enough
                        self.seen_by_all()  # the first worker may hold the store in which others still read this
                    raise WorkersError(
                        f"{self.names[other]} has another {name} ({_short(theirs.get(name))}) than {self.names[0]} "
                        f"({_short(value)}); give all workers the same command, files and versions"
                    )

    def each(self, items: Sequence[T], work: Callable[[T], Any]) -> list[Any]:
        """`work(item)` of every item, JSON-able, at all workers: each is done by one of them."""
        mine = [work(item) for item in items[self.number :: self.count]]
        said = self.told(mine)
        return [said[number % self.count][number // self.count] for number in range(len(items))]

    def summed(self, counts: Tensor) -> Tensor:
        """The sum over workers of whole numbers on the CPU, at all of them: exact, whatever the order."""
        if self.link is None:
            return counts
        assert not counts.is_floating_point()
        total = None
        for found in self.in_order({"": counts}, self.count):
            total = found[""] if total is None else total + found[""]
        made = self.from_first(total)
        assert made is not None
        return made

    def from_first(self, tensor: Tensor | None) -> Tensor | None:
        """The first worker's tensor at all of them, as `all_from_first`; None where it has none."""
        return self.all_from_first({} if tensor is None else {"": tensor}).get("")

    def all_from_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first worker's named tensors at all of them: there as they are, elsewhere on the CPU. What others give is
        not looked at."""
        if self.link is None:
            return dict(tensors)
        return self._spread(tensors, self.told_by_first(_kinds(tensors)), 0, to_gpu=False)

    def of_all(self, tensors: Mapping[str, Tensor], to_gpu: bool = False) -> list[dict[str, Tensor]]:
        """The named tensors of each worker, in their order, at all of them: its own as they are, others on the CPU.

        to_gpu -- whether others are wanted on `gpu`, if there is one
        """
        if self.link is None:
            return [dict(tensors)]
        kinds = self.told(_kinds(tensors))
        return [self._spread(tensors, kinds[worker], worker, to_gpu) for worker in range(self.count)]

    def _spread(
        self, tensors: Mapping[str, Tensor], kinds: Mapping[str, Any], sender: int, to_gpu: bool
    ) -> dict[str, Tensor]:
        """One worker's named tensors at all of them."""
        if self.number != sender:
            return self._received({name: self._room(kind, to_gpu) for name, kind in kinds.items()}, sender)
        sent = [tensor.to(self._place(to_gpu)) for tensor in tensors.values()]
        for other in range(self.count):
            if other != sender:
                self._send(sent, other)
        return dict(tensors)

    def in_order(
        self, tensors: Mapping[str, Tensor], having: int, alike: bool = True, to: int = 0
    ) -> Iterator[Mapping[str, Tensor]]:
        """What each of the first `having` workers found, in their order, at the first worker; elsewhere nothing.

        tensors -- what this one found, on any device
        alike   -- whether all have the same names, types and shapes; else they are told first
        to      -- the worker that gets it in place of the first one; if it is none of those that have something, all
                   names, types and shapes are those of `tensors` there
        """
        own = {name: (_kind(tensor), self._straight(tensor)) for name, tensor in sorted(tensors.items())}
        kinds = [own] * having if alike else self.told(own)
        if self.number == to:
            for other in range(having):
                room = {} if other == to else {name: self._room(*kind) for name, kind in kinds[other].items()}
                yield tensors if other == to else self._received(room, other)
        elif self.number < having:
            self._send([tensors[name] for name in own], to)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor on the CPU to another worker, which receives it. Raises `WorkerLost`."""
        self._send([tensor], to)

    def received(self, into: Tensor, sender: int) -> Tensor:
        """`into`, a tensor on the CPU, filled with what another worker sends. Raises `WorkerLost`."""
        return self._received({"": into}, sender)[""]

    def _place(self, straight: bool) -> torch.device:
        return self.gpu if straight and self.gpu is not None else torch.device("cpu")

    def _room(self, kind: tuple[list[int], str], straight: bool) -> Tensor:
        """A tensor to be filled with what another worker sends, from GPU to GPU or not."""
        dtype = getattr(torch, kind[1].removeprefix("torch."))
        return torch.empty(kind[0], dtype=dtype, device=self._place(straight))

    def _straight(self, tensor: Tensor) -> bool:
        """Whether a tensor goes from GPU to GPU."""
        return self.gpu is not None and tensor.device == self.gpu

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        assert self.link is not None
        placed = [tensor.detach().to(self._place(self._straight(tensor))).contiguous() for tensor in tensors]
        try:
            self.link.send(placed, to)
        except RuntimeError as error:
            raise self._lost(to) from error

    def _received(self, into: dict[str, Tensor], sender: int) -> dict[str, Tensor]:
        assert self.link is not None
        try:
            self.link.receive([*into.values()], sender)
        except RuntimeError as error:
            raise self._lost(sender) from error
        return into

    def leave(self) -> None:
        """Come to the end together. The first worker ends last, since it may hold the store that others still read;
        it waits for `_LEAVE` seconds at most: the work is done."""
        self.told("done")
        if self.link is not None:
            self._left()

    def failed(self, line: str) -> None:
        """Say that this worker fails, and why, unless another one has said so before."""
        if self.link is not None and failure(self.link) is None:
            self.link.set(FAILED, json.dumps({"worker": self.number, "line": line}))

    def seen_by_all(self) -> None:
        """Let the first worker, which may hold the store, not end at a failure before the others have read why; it
        waits for `_LEAVE` seconds at most."""
        if self.link is not None:
            self._left()

    def _left(self) -> None:
        """Say that this worker needs nothing more; the first one waits until all have said so."""
        assert self.link is not None
        self.link.set(f"left/{self.number}", "")
        end = time.monotonic() + _LEAVE
        while self.first and time.monotonic() < end:
            if all(self.link.get(f"left/{other}") is not None for other in range(self.count)):
                return
            time.sleep(_POLL)

    def _say(self, value: Any) -> None:
        assert self.link is not None
        self._exchanges += 1
        key = f"{self._exchanges}/{self.number}"
        self.link.set(key, json.dumps(value))
        self._kept.append(key)

    def _waited(self, key: str, other: int) -> str:
        """What a worker has said under a key, be it before one failed. Raises `WorkerLost`."""
        assert self.link is not None
        began = time.monotonic()
        end = began + LIMIT
        try:
            while (value := self.link.get(key)) is None:
                if failure(self.link) is not None:
                    if (value := self.link.get(key)) is not None:  # said since this one last looked
                        return value
                    raise self._lost(other)
                if (now := time.monotonic()) > end:
                    raise WorkerLost(f"{self.names[other]} has not answered for {LIMIT:.0f} s; nothing is written")
                time.sleep(min(_POLL, _FIRST_POLL + _LATE * (now - began)))
        except RuntimeError as error:  # of the store, which the first worker or torchrun holds
            raise WorkerLost(f"{self.names[0]} is gone; nothing is written, and the same command goes on") from error
        return value

    def _lost(self, other: int) -> WorkerLost:
        """Why the work cannot go on, after an exchange with another worker failed."""
        assert self.link is not None
        end = time.monotonic() + _GRACE
        said = None
        while said is None and time.monotonic() < end:
            try:
                said = failure(self.link)
            except RuntimeError:
                break
            time.sleep(_POLL)
        if said is not None and said["worker"] != self.number:
            return WorkerLost(f"{self.names[said['worker']]} failed: {said['line']}")
        return WorkerLost(f"{self.names[other]} is gone; nothing is written, and the same command goes on")


ALONE = Workers()
"""One process that does all of the work."""


def failure(link: Link) -> dict[str, Any] | None:
    """What the first worker to fail has said, `worker` and `line`; None while none has."""
    said = link.get(FAILED)
    found: dict[str, Any] | None = None if said is None else json.loads(said)
    return found


def _kind(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[list[int], str]]:
    return {name: _kind(tensor) for name, tensor in tensors.items()}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
