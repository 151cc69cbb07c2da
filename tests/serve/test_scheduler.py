"""The queue before the engine: order, bounds, fairness, cancelling, and what goes wrong."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.scheduler import Closing, QueueFull, Scheduler
from sparsepack.serve.ticket import Event, Failure, Finish, GenerationRequest, TextDelta, Ticket

END = Finish("stop", 1, 0)


def request(number: int) -> GenerationRequest:
    return GenerationRequest((number,), GenerateOptions())


class Batch:
    """Makes texts, one at a time unless told otherwise, each when a test lets it."""

    def __init__(self, room: int = 1) -> None:
        self.let, self.began, self.order = threading.Semaphore(0), threading.Semaphore(0), []
        self.cancelled = threading.Event()
        self.capacity, self.tickets = room, []

    @property
    def has_room(self) -> bool:
        return len(self.tickets) < self.capacity

    def join(self, ticket: Ticket) -> None:
        self.order.append(ticket.request.ids[0])
        self.tickets.append(ticket)
        self.began.release()

    def advance(self) -> None:
        for ticket in [ticket for ticket in self.tickets if ticket.cancelled]:
            self.cancelled.set()
            self.tickets.remove(ticket)
        if self.tickets and self.let.acquire(timeout=0.01):
            ticket = self.tickets.pop(0)
            ticket.put(TextDelta(str(ticket.request.ids[0])))
            ticket.put(END)


async def found(ticket: object) -> list[Event | None]:
    return [event async for event in ticket.events()]  # type: ignore[attr-defined]


@pytest.fixture
def batch() -> Batch:
    return Batch()


@pytest.fixture
def scheduler(batch: Batch) -> Iterator[Scheduler]:
    made = Scheduler(batch, 3)
    yield made
    assert made.close(10)


async def test_texts_come_in_their_order(scheduler: Scheduler, batch: Batch) -> None:
    tickets = [scheduler.submit(request(n)) for n in range(4)]
    batch.let.release(4)
    assert [await found(ticket) for ticket in tickets] == [[TextDelta(str(n)), END] for n in range(4)]
    assert batch.order == [0, 1, 2, 3]


async def test_a_full_queue_takes_no_more_until_there_is_a_place(scheduler: Scheduler, batch: Batch) -> None:
    tickets = [scheduler.submit(request(n)) for n in range(4)]
    batch.began.acquire()
    with pytest.raises(QueueFull) as full:
        scheduler.submit(request(4))
    assert 1 <= full.value.seconds <= 60
    tickets[2].cancel()
    scheduler.submit(request(5))
    batch.let.release(4)
    await found(tickets[3])


async def test_a_cancelled_text_is_not_made_or_ends(scheduler: Scheduler, batch: Batch) -> None:
    first, second, third = (scheduler.submit(request(n)) for n in range(3))
    batch.began.acquire()
    second.cancel()
    first.cancel()
    first.cancel()
    assert batch.cancelled.wait(10)
    batch.let.release()
    assert await found(third) == [TextDelta("2"), END]
    assert batch.order == [0, 2]


async def test_as_many_texts_are_made_together_as_the_batch_has_room_for(batch: Batch, scheduler: Scheduler) -> None:
    batch.capacity = 3
    tickets = [scheduler.submit(request(n)) for n in range(5)]
    for _ in range(3):
        batch.began.acquire()
    assert (scheduler.running, scheduler.waiting) == (3, 2)
    tickets[1].cancel()
    batch.began.acquire()
    assert batch.order == [0, 1, 2, 3]
    batch.let.release(4)
    await found(tickets[4])


async def test_a_client_that_asks_for_much_does_not_keep_others_waiting(scheduler: Scheduler, batch: Batch) -> None:
    greedy = [scheduler.submit(request(n), "greedy") for n in range(3)]
    batch.began.acquire()
    other = scheduler.submit(request(7), "other")
    batch.let.release(4)
    await found(greedy[2])
    await found(other)
    assert batch.order.index(7) == 2, "one of the greedy client was made, one was next"


async def test_the_last_of_a_greedy_client_makes_room_in_a_full_queue(scheduler: Scheduler, batch: Batch) -> None:
    greedy = [scheduler.submit(request(n), "greedy") for n in range(4)]
    batch.began.acquire()
    other = scheduler.submit(request(7), "other")
    (told,) = await found(greedy[3])
    assert isinstance(told, Failure)
    assert isinstance(told.error, QueueFull)
    with pytest.raises(QueueFull):
        scheduler.submit(request(4), "greedy")
    scheduler.submit(request(8), "third")
    with pytest.raises(QueueFull):
        scheduler.submit(request(9), "fourth")
    batch.let.release(4)
    assert await found(other) == [TextDelta("7"), END]


async def test_a_mistake_of_the_maker_is_told_to_all_and_ends_the_worker(batch: Batch) -> None:
    scheduler = Scheduler(batch, 3)
    bad, waiting = scheduler.submit(request(1)), scheduler.submit(request(2))
    batch.began.acquire()
    batch.advance = lambda: 1 / 0  # type: ignore[method-assign]
    for ticket, kind in ((bad, ZeroDivisionError), (waiting, Closing)):
        (failed,) = await found(ticket)
        assert isinstance(failed, Failure)
        assert isinstance(failed.error, kind)
    assert scheduler.close(10)
    assert not scheduler.usable


async def test_a_text_that_the_maker_cannot_begin_is_told_too(batch: Batch) -> None:
    batch.join = lambda ticket: 1 / 0  # type: ignore[method-assign]
    scheduler = Scheduler(batch, 3)
    (failed,) = await found(scheduler.submit(request(1)))
    assert isinstance(failed, Failure)
    assert isinstance(failed.error, ZeroDivisionError)
    assert scheduler.close(10)


async def test_whoever_waits_is_told_that_the_server_ends(scheduler: Scheduler, batch: Batch) -> None:
    made, waiting = scheduler.submit(request(0)), scheduler.submit(request(1))
    batch.began.acquire()
    scheduler.drain()
    (told,) = await found(waiting)
    assert isinstance(told, Failure)
    assert isinstance(told.error, Closing)
    with pytest.raises(Closing):
        scheduler.submit(request(2))
    batch.let.release()
    assert await found(made) == [TextDelta("0"), END]


async def test_a_text_in_the_making_is_broken_off_and_told(scheduler: Scheduler, batch: Batch) -> None:
    made = scheduler.submit(request(0))
    batch.began.acquire()
    scheduler.abort()
    (told,) = await found(made)
    assert isinstance(told, Failure)
    assert batch.cancelled.wait(10)


async def test_patience_ends_where_nothing_comes(scheduler: Scheduler, batch: Batch) -> None:
    ticket = scheduler.submit(request(0))
    events = ticket.events(0.01)
    assert await anext(events) is None
    batch.let.release()
    assert [event async for event in events if event is not None] == [TextDelta("0"), END]


def test_a_loop_that_has_ended_does_not_keep_the_worker(batch: Batch) -> None:
    scheduler = Scheduler(batch, 3)

    async def submit() -> None:
        scheduler.submit(request(0))

    asyncio.run(submit())
    batch.let.release()
    assert scheduler.close(10)
    assert "sparsepack-engine" not in {thread.name for thread in threading.enumerate()}
