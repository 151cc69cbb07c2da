"""One thread that makes texts, several at a time, and the bounded queue before it, in which clients take turns.

Texts come from an event loop and go back to it piece by piece. What a client has not taken yet waits in its ticket: at
most the pieces of one text, so that the engine never waits for a reader.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from math import ceil
from typing import Generic, TypeVar

from sparsepack.serve.batch import ContinuousBatch
from sparsepack.serve.ticket import Failure, GenerationRequest, Ticket

T = TypeVar("T")


class FairQueue(Generic[T]):
    """What waits, each of some client. Clients take turns, so that one that asks for much keeps nobody else waiting
    longer than another client would; what waits of one client comes in the order in which it was put in.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of the turns; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, client: str, item: T, most: int) -> T | None:
        """Let something wait. Where `most` wait already, the newest of the client with the most of them makes room, if
        that client then has no less than this one: it is returned. Raises `IndexError` where nothing makes room."""
        evicted = self._evict(client) if self._count >= most else None
        self._of.setdefault(client, deque()).append(item)
        self._count += 1
        return evicted

    def take(self) -> T:
        """The next, which waits no longer. Raises `IndexError` where nothing waits."""
        if not self._of:
            raise IndexError("nothing waits")
        client, items = self._of.popitem(last=False)
        self._count -= 1
        item = items.popleft()
        if items:
            self._of[client] = items  # its next turn comes after everybody else's
        return item

    def remove(self, item: T) -> None:
        """Take something out, if it is there."""
        for client, items in self._of.items():
            if item in items:
                items.remove(item)
                self._count -= 1
                if not items:
                    del self._of[client]
                return

    def clear(self) -> list[T]:
        """Take everything out."""
        everything = [item for items in self._of.values() for item in items]
        self._of.clear()
        self._count = 0
        return everything

    def _evict(self, client: str) -> T:
        greediest = max(self._of, key=lambda other: len(self._of[other]), default=client)
        if len(self._of.get(greediest, ())) < len(self._of.get(client, ())) + 2:
            raise IndexError("nothing makes room")
        self._count -= 1
        return self._of[greediest].pop()


ENDING = "the server is ending"


class QueueFull(Exception):
    """So many texts wait that no more are taken; there may be a place in `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {seconds} seconds")
        self.seconds = seconds


class Closing(Exception):
    """The scheduler takes no more texts."""


class Scheduler:
    """Makes texts in a thread of its own, in the order in which they come, those of different clients in turns.

    batch   -- makes them
    waiting -- texts that may wait while others are made

    The thread begins at once and runs until `close`.
    """

    def __init__(self, batch: ContinuousBatch, waiting: int) -> None:
        self._batch, self._most = batch, waiting
        self._queue: FairQueue[Ticket] = FairQueue()
        self._joining: Ticket | None = None  # on its way from the queue to the batch
        self._seconds = 1.0  # after which a text leaves, about
        self._closing = self._broken_off = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="sparsepack-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many texts are being made."""
        joining, tickets = self._joining, self._batch.tickets
        return len(tickets) + (joining is not None and joining not in tickets)

    @property
    def capacity(self) -> int:
        """How many texts are made together at most."""
        return self._batch.capacity

    @property
    def bits_read(self) -> float:
        """How many bits of a weight with planes decoded tokens read, as `ContinuousBatch.bits_read`."""
        return self._batch.bits_read

    @property
    def busy(self) -> bool:
        """Whether a text is being made."""
        return self.running > 0

    @property
    def usable(self) -> bool:
        """Whether it takes texts and its thread lives."""
        return not self._closing and self._thread.is_alive()

    def submit(self, request: GenerationRequest, client: str = "", domain: str = "") -> Ticket:
        """Put a text of a client into the queue, from an event loop; computed prefixes are shared within `domain`.
        Raises `QueueFull`, or `Closing`.

        Where the queue is full of one client's texts, the last of them makes room for another client, and is told so.
        """
        ticket = Ticket(request, client, domain, self.discard)
        with self._change:
            if not self.usable:
                raise Closing(ENDING)
            full = QueueFull(min(60, ceil(self._seconds)))
            # What has room in the batch does not wait, though the thread may not have taken it out yet.
            most = self._most + max(0, self.capacity - self.running)
            try:
                evicted = self._queue.put(client, ticket, most)
            except IndexError:
                raise full from None
            self._change.notify()
        if evicted is not None:
            evicted.put(Failure(full))
        return ticket

    def discard(self, ticket: Ticket) -> None:
        """Take a text out of the queue, if it is there."""
        with self._change:
            self._queue.remove(ticket)

    def drain(self) -> None:
        """Take no more texts, and tell those that wait; those that are being made go on."""
        with self._change:
            self._closing = True
            waiting = self._queue.clear()
            self._change.notify()
        for ticket in waiting:
            ticket.put(Failure(Closing(ENDING)))

    def abort(self) -> None:
        """End the texts that are being made, and tell so."""
        self._broken_off = True
        self._end_all(Closing(ENDING))

    def close(self, seconds: float | None = None) -> bool:
        """End the thread, and the texts that it makes; whether it ended in so many seconds."""
        self.drain()
        self.abort()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _end_all(self, error: Exception) -> None:
        """End the texts in the making, and one on its way to the batch."""
        for ticket in (*self._batch.tickets, self._joining):
            if ticket is not None and not ticket.cancelled:
                ticket.put(Failure(error))
                ticket.cancel()

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:  # the batch tells what goes wrong with a text: this is a mistake of ours
            logging.getLogger(__name__).error("the engine's thread failed", exc_info=error)
            self._end_all(error if isinstance(error, Exception) else RuntimeError(str(error)))
            self.drain()

    def _run(self) -> None:
        left = time.monotonic()
        while True:
            self._admit()
            if self._broken_off:
                self._end_all(Closing(ENDING))  # one may just have been on its way in
            if not (before := len(self._batch.tickets)):
                with self._change:
                    if self._closing:
                        return
                    self._change.wait_for(lambda: len(self._queue) or self._closing)
                left = time.monotonic()
                continue
            self._batch.advance()
            if (gone := before - len(self._batch.tickets)) > 0:
                now = time.monotonic()
                self._seconds += 0.2 * ((now - left) / gone - self._seconds)
                left = now

    def _admit(self) -> None:
        """Let texts join while there are some, and room for them."""
        while self._batch.has_room:
            with self._change:
                if not len(self._queue):
                    return
                self._joining = self._queue.take()
            self._batch.join(self._joining)
            self._joining = None
