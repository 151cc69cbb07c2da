"""The queue before the engine: order, bounds, fairness, cancelling, and what goes wrong."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.worker import Closing, Ended, Event, Failed, Piece, QueueFull, TextRequest, TextWorker, Ticket

END = Ended("stop", 1, 0)


def request(number: int) -> TextRequest:
    return TextRequest((number,), GenerateOptions())


class Maker:
    """Makes texts, one at a time unless told otherwise, each when a test lets it."""

    def __init__(self, room: int = 1) -> None:
        self.let, self.began, self.order = threading.Semaphore(0), threading.Semaphore(0), []
        self.cancelled = threading.Event()
        self.most, self.wanted = room, []

    @property
    def room(self) -> bool:
        return len(self.wanted) < self.most

    def join(self, ticket: Ticket) -> None:
        self.order.append(ticket.request.ids[0])
        self.wanted.append(ticket)
        self.began.release()

    def advance(self) -> None:
        for ticket in [ticket for ticket in self.wanted if ticket.cancelled]:
            self.cancelled.set()
            self.wanted.remove(ticket)
        if self.wanted and self.let.acquire(timeout=0.01):
            ticket = self.wanted.pop(0)
            ticket.tell(Piece(str(ticket.request.ids[0])))
            ticket.tell(END)


async def found(ticket: object) -> list[Event | None]:
    return [event async for event in ticket.events()]  # type: ignore[attr-defined]


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def worker(maker: Maker) -> Iterator[TextWorker]:
    made = TextWorker(maker, 3)
    yield made
    assert made.close(10)


async def test_texts_come_in_their_order(worker: TextWorker, maker: Maker) -> None:
    tickets = [worker.submit(request(n)) for n in range(4)]
    maker.let.release(4)
    assert [await found(ticket) for ticket in tickets] == [[Piece(str(n)), END] for n in range(4)]
    assert maker.order == [0, 1, 2, 3]


async def test_a_full_queue_takes_no_more_until_there_is_a_place(worker: TextWorker, maker: Maker) -> None:
    tickets = [worker.submit(request(n)) for n in range(4)]
    maker.began.acquire()
    with pytest.raises(QueueFull) as full:
        worker.submit(request(4))
    assert 1 <= full.value.seconds <= 60
    tickets[2].cancel()
    worker.submit(request(5))
    maker.let.release(4)
    await found(tickets[3])


async def test_a_cancelled_text_is_not_made_or_ends(worker: TextWorker, maker: Maker) -> None:
    first, second, third = (worker.submit(request(n)) for n in range(3))
    maker.began.acquire()
    second.cancel()
    first.cancel()
    first.cancel()
    assert maker.cancelled.wait(10)
    maker.let.release()
    assert await found(third) == [Piece("2"), END]
    assert maker.order == [0, 2]


async def test_as_many_texts_are_made_together_as_the_maker_has_room_for(maker: Maker, worker: TextWorker) -> None:
    maker.most = 3
    tickets = [worker.submit(request(n)) for n in range(5)]
    for _ in range(3):
        maker.began.acquire()
    assert (worker.making, worker.waiting) == (3, 2)
    tickets[1].cancel()
    maker.began.acquire()
    assert maker.order == [0, 1, 2, 3]
    maker.let.release(4)
    await found(tickets[4])


async def test_a_client_that_asks_for_much_does_not_keep_others_waiting(worker: TextWorker, maker: Maker) -> None:
    greedy = [worker.submit(request(n), "greedy") for n in range(3)]
    maker.began.acquire()
    other = worker.submit(request(7), "other")
    maker.let.release(4)
    await found(greedy[2])
    await found(other)
    assert maker.order.index(7) == 2, "one of the greedy client was made, one was next"


async def test_the_last_of_a_greedy_client_makes_room_in_a_full_queue(worker: TextWorker, maker: Maker) -> None:
    greedy = [worker.submit(request(n), "greedy") for n in range(4)]
    maker.began.acquire()
    other = worker.submit(request(7), "other")
    (told,) = await found(greedy[3])
    assert isinstance(told, Failed)
    assert isinstance(told.error, QueueFull)
    with pytest.raises(QueueFull):
        worker.submit(request(4), "greedy")
    worker.submit(request(8), "third")
    with pytest.raises(QueueFull):
        worker.submit(request(9), "fourth")
    maker.let.release(4)
    assert await found(other) == [Piece("7"), END]


async def test_a_mistake_of_the_maker_is_told_to_all_and_ends_the_worker(maker: Maker) -> None:
    worker = TextWorker(maker, 3)
    bad, waiting = worker.submit(request(1)), worker.submit(request(2))
    maker.began.acquire()
    maker.advance = lambda: 1 / 0  # type: ignore[method-assign]
    for ticket, kind in ((bad, ZeroDivisionError), (waiting, Closing)):
        (failed,) = await found(ticket)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, kind)
    assert worker.close(10)
    assert not worker.usable


async def test_a_text_that_the_maker_cannot_begin_is_told_too(maker: Maker) -> None:
    maker.join = lambda ticket: 1 / 0  # type: ignore[method-assign]
    worker = TextWorker(maker, 3)
    (failed,) = await found(worker.submit(request(1)))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ZeroDivisionError)
    assert worker.close(10)


async def test_whoever_waits_is_told_that_the_server_ends(worker: TextWorker, maker: Maker) -> None:
    made, waiting = worker.submit(request(0)), worker.submit(request(1))
    maker.began.acquire()
    worker.refuse_more()
    (told,) = await found(waiting)
    assert isinstance(told, Failed)
    assert isinstance(told.error, Closing)
    with pytest.raises(Closing):
        worker.submit(request(2))
    maker.let.release()
    assert await found(made) == [Piece("0"), END]


async def test_a_text_in_the_making_is_broken_off_and_told(worker: TextWorker, maker: Maker) -> None:
    made = worker.submit(request(0))
    maker.began.acquire()
    worker.break_off()
    (told,) = await found(made)
    assert isinstance(told, Failed)
    assert maker.cancelled.wait(10)


async def test_patience_ends_where_nothing_comes(worker: TextWorker, maker: Maker) -> None:
    ticket = worker.submit(request(0))
    events = ticket.events(0.01)
    assert await anext(events) is None
    maker.let.release()
    assert [event async for event in events if event is not None] == [Piece("0"), END]


def test_a_loop_that_has_ended_does_not_keep_the_worker(maker: Maker) -> None:
    worker = TextWorker(maker, 3)

    async def submit() -> None:
        worker.submit(request(0))

    asyncio.run(submit())
    maker.let.release()
    assert worker.close(10)
    assert "sparsepack-engine" not in {thread.name for thread in threading.enumerate()}
