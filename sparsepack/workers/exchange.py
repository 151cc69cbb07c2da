"""How the workers that share one piece of work exchange what they found.

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

AllGather = Callable[[Any], list[Any]]
"""What `Exchange.all_gather` does, for functions that exchange nothing else."""

Each = Callable[..., list[Any]]
"""What `Exchange.each` does."""

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
        """Send tensors to a worker, each on the CPU or on the worker's own GPU, where that is `Exchange.gpu`. A GPU is
        not waited for. Raises RuntimeError where that worker is gone."""

    def receive(self, into: Sequence[Tensor], sender: int) -> None:
        """Fill tensors with what a worker sends, each on the device where that one has it. Raises RuntimeError where
        that worker is gone."""


@dataclass
class _Spoken:
    """How many exchanges there were, how many of them since all have last spoken, and the store's keys of what this
    worker said that others may still read."""

    exchanges: int = 0
    unheard: int = 0
    kept: list[str] = field(default_factory=list)


@dataclass
class Exchange:
    """One of the workers of one piece of work. Number 0 is the first: it alone writes the result.

    Every worker takes part in every exchange, in the same order.

    rank       -- the number of this one, from 0
    world_size -- how many they are
    link       -- None for one that is alone
    names      -- what each is called in messages: "worker 1 of 2 on HOST"
    gpu        -- this worker's GPU, where each has one of its own: tensors there go straight to those of others. None:
                  all go over the CPU's memory
    """

    rank: int = 0
    world_size: int = 1
    link: Link | None = None
    names: tuple[str, ...] = ("this process",)
    gpu: torch.device | None = None
    _spoken: _Spoken = field(default_factory=_Spoken)  # by all shares of this worker

    @property
    def first(self) -> bool:
        """Whether this is the worker that writes the result."""
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """What each worker says, in their order: JSON-able values."""
        if self.link is None:
            return [value]
        before, self._spoken.kept, self._spoken.unheard = self._spoken.kept, [], 0
        self._say(value)
        number = self._spoken.exchanges
        said = [json.loads(self._waited(f"{number}/{other}", other)) for other in range(self.world_size)]
        for key in before:  # whoever speaks now has read what was said before
            self.link.forget(key)
        return said

    def broadcast(self, value: Any) -> Any:
        """What the first worker says, a JSON-able value; what others give is not looked at."""
        if self.link is None:
            return value
        if self._spoken.unheard == _UNHEARD:
            self.all_gather(None)
        self._spoken.unheard += 1
        if self.first:
            self._say(value)
            return value
        self._spoken.exchanges += 1
        return json.loads(self._waited(f"{self._spoken.exchanges}/0", 0))

    def agree(self, facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Raise `WorkersError` at all workers unless they have the same facts, JSON-able, or given by a function that
        one alone does not call; the first that differs is named, and where."""
        if self.link is None:
            return
        said = self.all_gather(dict(facts() if callable(facts) else facts))
        for name, value in said[0].items():
            for other, theirs in enumerate(said):
                if theirs.get(name) != value:
                    with suppress(RuntimeError):  # of a store that is gone: this one knows enough
                        self.seen_by_all()  # the first worker may hold the store in which others still read this
                    raise WorkersError(
                        f"{self.names[other]} has another {name} ({_short(theirs.get(name))}) than {self.names[0]} "
                        f"({_short(value)}); give all workers the same command, files and versions"
                    )

    def each(
        self,
        items: Sequence[T],
        work: Callable[[T], Any],
        done: Callable[[Sequence[T]], object] | None = None,
        facts: Callable[[], Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """`work(item)` of every item, JSON-able, at all workers: each is done by one of them.

        done  -- called after each of this one's items, with those that all have worked on meanwhile, or nearly so
        facts -- on which they `agree` before
        """
        if facts is not None:
            self.agree(facts)
        mine = []
        for start in range(0, len(items), self.world_size):
            here = items[start : start + self.world_size]
            if self.rank < len(here):
                mine.append(work(here[self.rank]))
                if done is not None:
                    done(here)
        said = self.all_gather(mine)
        return [said[number % self.world_size][number // self.world_size] for number in range(len(items))]

    def all_reduce(self, counts: Tensor) -> Tensor:
        """The sum over workers of whole numbers on the CPU, at all of them: exact, whatever the order."""
        if self.link is None:
            return counts
        assert not counts.is_floating_point()
        total = None
        for found in self.gather_in_order({"": counts}, self.world_size):
            total = found[""] if total is None else total + found[""]
        return self.broadcast_tensors({} if total is None else {"": total})[""]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first worker's named tensors at all of them: there as they are, elsewhere on the CPU. What others give is
        not looked at."""
        if self.link is None:
            return dict(tensors)
        return self._spread(tensors, self.broadcast(_kinds(tensors)), 0, to_gpu=False)

    def all_gather_tensors(self, tensors: Mapping[str, Tensor], to_gpu: bool = False) -> list[dict[str, Tensor]]:
        """The named tensors of each worker, in their order, at all of them: its own as they are, others on the CPU.

        to_gpu -- whether others are wanted on `gpu`, if there is one
        """
        if self.link is None:
            return [dict(tensors)]
        kinds = self.all_gather(_kinds(tensors))
        return [self._spread(tensors, kinds[worker], worker, to_gpu) for worker in range(self.world_size)]

    def _spread(
        self, tensors: Mapping[str, Tensor], kinds: Mapping[str, Any], sender: int, to_gpu: bool
    ) -> dict[str, Tensor]:
        """One worker's named tensors at all of them."""
        if self.rank != sender:
            room = {name: self._room(kind, to_gpu) for name, kind in kinds.items()}
            self.receive([*room.values()], sender)
            return room
        sent = [tensor.to(self._place(to_gpu)) for tensor in tensors.values()]
        for other in range(self.world_size):
            if other != sender:
                self.send(sent, other)
        return dict(tensors)

    def gather_in_order(
        self, tensors: Mapping[str, Tensor], having: int, alike: bool = True, to: int = 0
    ) -> Iterator[Mapping[str, Tensor]]:
        """What each of the first `having` workers found, in their order, at the first worker; elsewhere nothing.

        tensors -- what this one found, on any device
        alike   -- whether all have the same names, types and shapes; else they are told first
        to      -- the worker that gets it in place of the first one; if it is none of those that have something, all
                   names, types and shapes are those of `tensors` there
        """
        own = {name: (_kind(tensor), self._straight(tensor)) for name, tensor in sorted(tensors.items())}
        kinds = [own] * having if alike else self.all_gather(own)
        if self.rank == to:
            for other in range(having):
                found = tensors
                if other != to:
                    found = {name: self._room(*kind) for name, kind in kinds[other].items()}
                    self.receive([*found.values()], other)
                yield found
        elif self.rank < having:
            self.send([tensors[name] for name in own], to)

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to another worker, which receives them. Raises `WorkerLost`."""
        assert self.link is not None
        placed = [tensor.detach().to(self._place(self._straight(tensor))).contiguous() for tensor in tensors]
        try:
            self.link.send(placed, to)
        except RuntimeError as error:
            raise self._lost(to) from error

    def receive(self, into: Sequence[Tensor], sender: int) -> None:
        """Fill tensors with what another worker sends. Raises `WorkerLost`."""
        assert self.link is not None
        try:
            self.link.receive(into, sender)
        except RuntimeError as error:
            raise self._lost(sender) from error

    def _place(self, straight: bool) -> torch.device:
        return self.gpu if straight and self.gpu is not None else torch.device("cpu")

    def _room(self, kind: tuple[list[int], str], straight: bool) -> Tensor:
        """A tensor to be filled with what another worker sends, from GPU to GPU or not."""
        dtype = getattr(torch, kind[1].removeprefix("torch."))
        return torch.empty(kind[0], dtype=dtype, device=self._place(straight))

    def _straight(self, tensor: Tensor) -> bool:
        """Whether a tensor goes from GPU to GPU."""
        return self.gpu is not None and tensor.device == self.gpu

    def leave(self) -> None:
        """Come to the end together. The first worker ends last, since it may hold the store that others still read;
        it waits for `_LEAVE` seconds at most: the work is done."""
        self.all_gather("done")
        self.seen_by_all()

    def failed(self, line: str) -> None:
        """Say that this worker fails, and why, unless another one has said so before."""
        if self.link is not None and failure(self.link) is None:
            self.link.set(FAILED, json.dumps({"worker": self.rank, "line": line}))

    def seen_by_all(self) -> None:
        """Let the first worker, which may hold the store, not end at a failure before the others have read why; it
        waits for `_LEAVE` seconds at most."""
        if self.link is None:
            return
        self.link.set(f"left/{self.rank}", "")
        end = time.monotonic() + _LEAVE
        while self.first and time.monotonic() < end:
            if all(self.link.get(f"left/{other}") is not None for other in range(self.world_size)):
                return
            time.sleep(_POLL)

    def _say(self, value: Any) -> None:
        assert self.link is not None
        self._spoken.exchanges += 1
        key = f"{self._spoken.exchanges}/{self.rank}"
        self.link.set(key, json.dumps(value))
        self._spoken.kept.append(key)

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
        if said is not None and said["worker"] != self.rank:
            return WorkerLost(f"{self.names[said['worker']]} failed: {said['line']}")
        return WorkerLost(f"{self.names[other]} is gone; nothing is written, and the same command goes on")


EACH_ALONE: Each = Exchange().each
"""Of one process that does all of the work."""


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
