"""The queue before the engine: order, bounds, cancelling, and what goes wrong."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.worker import Closing, Ended, Event, Failed, Piece, QueueFull, TextRequest, TextWorker

END = Ended("stop", 1, 0)


def request(number: int) -> TextRequest:
    return TextRequest((number,), GenerateOptions())


class Maker:
    """Makes texts when a test lets it."""

    def __init__(self) -> None:
        self.let, self.began, self.order = threading.Semaphore(0), threading.Semaphore(0), []
        self.cancelled = threading.Event()

    def __call__(self, asked: TextRequest, unwanted: Callable[[], bool]) -> Iterator[Event]:
        self.order.append(asked.ids[0])
        self.began.release()
        while not self.let.acquire(timeout=0.01):
            if unwanted():
                self.cancelled.set()
                return
        if asked.ids[0] == 13:
            raise ValueError("thirteen")
        yield Piece(str(asked.ids[0]))
        yield END


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


async def test_a_text_that_fails_does_not_keep_the_next_from_being_made(worker: TextWorker, maker: Maker) -> None:
    bad, good = worker.submit(request(13)), worker.submit(request(1))
    maker.let.release(2)
    (failed,) = await found(bad)
    assert isinstance(failed, Failed)
    assert str(failed.error) == "thirteen"
    assert await found(good) == [Piece("1"), END]


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
