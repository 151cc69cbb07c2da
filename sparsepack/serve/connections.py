"""How many connections a server has at a time, and how long each may take for a request.

A process has so many descriptors, and a connection that sends nothing takes one as long as it stays. So there is a
limit, and where it is reached the connection that has been waiting longest gives way to a new one: first one that is
between two requests, then one whose request has not arrived. One that gets an answer never does.
"""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsepack.errors import UserError
from sparsepack.progress import say
from sparsepack.serve.refusals import Refusal
from sparsepack.terminal import event_loop_exception_handler

MAX_CONNECTIONS = 1024
"""So many connections there are at most where there are descriptors for more."""

ACCEPTED_AT_ONCE = 8
"""So many connections asyncio takes from the system before any of them is counted."""

LISTEN_BACKLOG = 1024
"""So many connections wait in the system until they are taken."""

SPARE_DESCRIPTORS = 48
"""For connections that are taken and not yet counted, or counted out and not yet closed, and for files."""

FOR_HEALTH = 16
"""One in so many connections, and four at least, are for requests that are answered at once, as `/health`."""

IDLE, HEAD, BODY, ANSWER = range(4)
"""What a connection waits for: the next request, the rest of a request's head, that of its body, its answer."""


def max_connections(option: int | None) -> int:
    """How many connections a server has at most. Raises `UserError` where the process has no descriptors for them."""
    free = _free_descriptors()
    if option is None:
        return max(8, MAX_CONNECTIONS if free is None else min(MAX_CONNECTIONS, free))
    if free is not None and option > free:
        remedy = f"give --connections of at most {free}" if free > 0 else "close files"
        raise UserError(f"--connections {option}: `ulimit -n` leaves {max(free, 0)}; {remedy}, or raise that limit")
    return option


def _free_descriptors() -> int | None:
    """Descriptors that this process may still open, without some to spare; None: nobody tells."""
    try:
        import resource  # not on every system
    except ModuleNotFoundError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = next((each for each in (Path("/proc/self/fd"), Path("/dev/fd")) if each.is_dir()), None)
    used = 64 if folder is None else len(os.listdir(folder))
    return None if soft == resource.RLIM_INFINITY else soft - used - SPARE_DESCRIPTORS


class OncePerSecond:
    """Says a line once a second at most, with how often it was to be said since."""

    def __init__(self, tell: Callable[[str], None] = say) -> None:
        self._say = tell
        self._said = float("-inf")
        self._count = 0

    def __call__(self, line: str) -> None:
        self._count += 1
        if (now := time.monotonic()) >= self._said + 1:
            self._say(f"{line} ({self._count} times)" if self._count > 1 else line)
            self._said, self._count = now, 0


class Connections:
    """The connections of one server, by what they wait for; of one event loop.

    most    -- how many there are at a time
    seconds -- in which the head of a request must have arrived
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.capacity, self.seconds = most, seconds
        self.answers = most - max(4, most // FOR_HEALTH)  # that may be on their way at a time
        # Each has the oldest first.
        self._idle: dict[LimitedProtocol, None] = {}
        self._receiving: dict[LimitedProtocol, None] = {}
        self._answering: dict[LimitedProtocol, None] = {}
        self._by_phase = {IDLE: self._idle, HEAD: self._receiving, BODY: self._receiving, ANSWER: self._answering}
        self._say = OncePerSecond()

    def __len__(self) -> int:
        return len(self._idle) + len(self._receiving) + len(self._answering)

    def move(self, connection: "LimitedProtocol", phase: int | None) -> None:
        """Let a connection be the last that began to wait for something; None: it has gone."""
        to = None if phase is None else self._by_phase[phase]
        for each in (self._idle, self._receiving, self._answering):
            if each is not to:
                each.pop(connection, None)
        if to is not None:
            to.setdefault(connection)  # a body has the age of its head

    def evict_one(self) -> None:
        """Close the connection that matters least where there are too many: it may be the newest."""
        if len(self) <= self.capacity:
            return
        self._say(
            f"{self.capacity} connections, the limit by --connections or `ulimit -n`: one is closed for a new one"
        )
        connection = next(iter(self._idle or self._receiving or self._answering))
        self.move(connection, None)
        connection.transport.abort()

    def check_capacity(self) -> None:
        """Raise `Refusal` 503 where so many answers are on their way that another would leave nothing for others."""
        if len(self._answering) > self.answers:
            message = f"{self.answers} answers are on their way; try again"
            raise Refusal(503, message, code="queue_full", retry_after=1)


class LimitedProtocol(H11Protocol):
    """uvicorn's connection, which is counted and has a time for each request's head and body."""

    limits: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._enter(HEAD)
        self.limits.evict_one()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(HEAD)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(IDLE)

    def _look(self, otherwise: int) -> None:
        """See what the connection waits for."""
        answered = self.cycle is None or self.cycle.response_complete
        phase = BODY if self.conn.their_state is h11.SEND_BODY else otherwise if answered else ANSWER
        if phase != self._phase and self._phase is not None:
            self._enter(phase)

    def _enter(self, phase: int | None) -> None:
        """Begin to wait for something; None: nothing comes any more."""
        self._phase = phase
        self.limits.move(self, phase)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A body has its time where it is read, and twice as much where it is not: the answer may be there first.
        if (times := {HEAD: 1, BODY: 2}.get(phase or 0)) is not None:
            self._timer = self.loop.call_later(times * self.limits.seconds, self.transport.abort)


def limited_protocol(connections: Connections) -> type[LimitedProtocol]:
    """uvicorn's protocol for one server."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": connections})


class Quiet(logging.Filter):
    """Lets a warning pass once a second, so that nobody fills a log by sending what is no request."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged: errors are."""
        now = time.monotonic()
        passes = record.levelno > logging.WARNING or now >= self._passed.get(str(record.msg), 0.0) + 1
        if passes:
            self._passed[str(record.msg)] = now
        return passes


def loop_exception_handler() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An event loop's exception handler that says once a second that there are no descriptors, and all else."""
    say_out = OncePerSecond()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            say_out(f"no connection is taken: {error.strerror}; raise `ulimit -n`, or give fewer --connections")
        else:
            event_loop_exception_handler(loop, context)

    return handle
