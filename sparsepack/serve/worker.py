"""One thread that makes one text after the other, and the bounded queue before it.

Texts come from an event loop and go back to it piece by piece. What a client has not taken yet waits in its ticket: at
most the pieces of one text, so that the engine never waits for a reader.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from math import ceil

from sparsepack.runtime.options import GenerateOptions
from sparsepack.runtime.sampling import TokenLogprob


@dataclass(frozen=True)
class TextRequest:
    """A text to continue, checked.

    ids     -- of the prompt; they and `options.tokens` more fit into the engine's context
    options -- how many tokens at most, how they are chosen, what ends the text
    """

    ids: tuple[int, ...]
    options: GenerateOptions


@dataclass(frozen=True)
class Piece:
    """A piece of text, of whole characters.

    logprobs -- of the tokens that were made since the piece before, where the request asks for them
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The text is made.

    reason -- "stop": the model or a stop string ended it; "length": as many tokens are made as were asked for
    tokens -- that the model made, those of a stop string included, its end of text not
    cached -- of the prompt's tokens, those that the engine still had from the text before
    logprobs -- of the last tokens, which gave no piece of their own
    """

    reason: str
    tokens: int
    cached: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Failed:
    """The text cannot be made."""

    error: Exception


Event = Piece | Ended | Failed
MakeText = Callable[[TextRequest, Callable[[], bool]], Iterator[Event]]
"""The function makes a text, given the request and a function that tells whether nobody wants the text any more; the
text ends then, or with `Ended`. The function runs in the worker's thread, one call at a time."""


ENDING = "the server is ending"


class QueueFull(Exception):
    """So many texts wait that no more are taken; there may be a place in `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {seconds} seconds")
        self.seconds = seconds


class Closing(Exception):
    """The worker takes no more texts."""


class Ticket:
    """A text on its way; made by `TextWorker.submit` for the event loop that runs then."""

    def __init__(self, worker: "TextWorker", request: TextRequest) -> None:
        self.request = request
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancelled = threading.Event()

    async def events(self, patience: float | None = None) -> AsyncIterator[Event | None]:
        """The pieces as they are made, then `Ended` or `Failed`; None where nothing comes for `patience` seconds."""
        event: Event | None = None
        while event is None or isinstance(event, Piece):
            try:
                async with asyncio.timeout(patience):
                    event = await self._events.get()
            except TimeoutError:
                event = None
            yield event

    def cancel(self) -> None:
        """Nobody waits for the text any more. May be called at any time, more than once."""
        self._cancelled.set()
        self._worker.forget(self)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the text any more."""
        return self._cancelled.is_set()

    def tell(self, event: Event) -> None:
        """Hand an event to the event loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            self._cancelled.set()


class TextWorker:
    """Makes texts in a thread of its own, in the order in which they come.

    make    -- makes one
    waiting -- texts that may wait while one is made

    The thread begins at once and runs until `close`.
    """

    def __init__(self, make: MakeText, waiting: int) -> None:
        self._make, self._waiting = make, waiting
        self._queue: deque[Ticket] = deque()
        self._made: Ticket | None = None
        self._seconds = 1.0  # that a text takes, about
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="sparsepack-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether a text is being made."""
        return self._made is not None

    @property
    def usable(self) -> bool:
        """Whether it takes texts and its thread lives."""
        return not self._closing and self._thread.is_alive()

    def submit(self, request: TextRequest) -> Ticket:
        """Put a text into the queue, from an event loop. Raises `QueueFull`, or `Closing`."""
        ticket = Ticket(self, request)
        with self._change:
            if not self.usable:
                raise Closing(ENDING)
            if len(self._queue) + self.busy > self._waiting:
                raise QueueFull(min(60, ceil(self._seconds)))
            self._queue.append(ticket)
            self._change.notify()
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Take a text out of the queue, if it is there."""
        with self._change:
            if ticket in self._queue:
                self._queue.remove(ticket)

    def refuse_more(self) -> None:
        """Take no more texts, and tell those that wait; the one that is being made goes on."""
        with self._change:
            self._closing = True
            waiting = list(self._queue)
            self._queue.clear()
            self._change.notify()
        for ticket in waiting:
            ticket.tell(Failed(Closing(ENDING)))

    def break_off(self) -> None:
        """End the text that is being made, if there is one, and tell so."""
        if (made := self._made) is not None:
            made.tell(Failed(Closing(ENDING)))
            made.cancel()

    def close(self, seconds: float | None = None) -> bool:
        """End the thread, and the text that it makes; whether it ended in so many seconds."""
        self.refuse_more()
        self.break_off()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _next(self) -> Ticket | None:
        with self._change:
            self._made = None
            self._change.wait_for(lambda: self._queue or self._closing)
            if self._queue:
                self._made = self._queue.popleft()
            return self._made

    def _work(self) -> None:
        while ticket := self._next():
            began = time.monotonic()
            try:
                for event in self._make(ticket.request, lambda: ticket.cancelled):
                    ticket.tell(event)
            except Exception as error:  # whatever it is, the next text may go well
                ticket.tell(Failed(error))
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            del ticket
