"""Signs of life end a worker when another one gives none any more."""

import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest

from sparsepack.workers import alive
from sparsepack.workers.alive import signs_of_life, store_answers
from sparsepack.workers.launch import LAUNCHED
from sparsepack.workers.shard import Shard

LOST_AFTER = 20
"""Seconds by the clock of `ended`."""

NAMES = ("worker 0 of 2 on here", "worker 1 of 2 on there")


class Board:
    """A store in which the other worker gives signs of life, or does not; `many` is set when this one has given more of
    them than a worker is waited for that gives none."""

    def __init__(self, other_lives: bool, gone: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.other_lives, self.gone, self.many = other_lives, gone, threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("connection refused")
        self.values[key] = value
        if key == "alive/0" and int(value) >= 2 * LOST_AFTER:
            self.many.set()

    def get(self, key: str) -> str | None:
        return str(time.monotonic()) if self.other_lives and key == "alive/1" else self.values.get(key)

    def send(self, *_: object) -> None:
        raise AssertionError

    receive = forget = send


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have been ended. The clock goes on by a second whenever it is looked at, so that no
    worker is lost because others hold the cores."""
    happened, ticks = threading.Event(), itertools.count()
    monkeypatch.setattr(alive.os, "_exit", lambda status: happened.set())
    monkeypatch.setattr(alive, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    monkeypatch.setattr(alive, "EVERY", 0.01)
    monkeypatch.setattr(alive, "LOST", float(LOST_AFTER))
    monkeypatch.setattr(alive, "_LAST_WORD", 0.1)
    return happened


def test_a_worker_without_signs_of_life_is_named(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    with signs_of_life(Shard(0, 2, None, NAMES), Board(other_lives=False)):
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert said.startswith(
        "sparsepack: worker 1 of 2 on there has given no sign of life for 20 seconds; nothing is writ"
    )
    assert said.count("\n") == 1


def test_a_store_that_is_gone_is_the_first_workers(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    with signs_of_life(Shard(1, 2, None, NAMES), Board(other_lives=True, gone=True)):
        assert ended.wait(60)
    assert capfd.readouterr().err.startswith("sparsepack: worker 0 of 2 on here is gone")


class Store:
    """Calls of a store, counted: it answers unless it `hangs`."""

    def __init__(self, hangs: bool) -> None:
        self.hangs, self.looks, self.many = hangs, 0, threading.Event()

    @property
    def calls(self) -> int:
        self.looks += 1
        if self.looks > 10 * LOST_AFTER:
            self.many.set()
        return 1 if self.hangs else self.looks


@pytest.mark.parametrize("hangs", [True, False])
def test_a_store_that_does_not_answer_is_that_of_a_lost_worker(
    hangs: bool, ended: threading.Event, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that serves the store hangs: whoever looks for signs of life there is never answered."""
    monkeypatch.setattr(alive, "LOST", 0.2)
    store = Store(hangs)
    with store_answers("worker 0 of 2", [Store(False), store]):
        assert (ended if hangs else store.many).wait(60)
        assert ended.is_set() == hangs
    said = capfd.readouterr().err
    assert said.startswith("sparsepack: worker 0 of 2 has given no sign of life for" if hangs else "")
    assert said.count("\n") == hangs


def test_signs_of_life_are_given_and_seen(ended: threading.Event) -> None:
    board = Board(other_lives=True)
    with signs_of_life(Shard(0, 2, None, NAMES), board):
        assert board.many.wait(60)
        assert not ended.is_set()


def test_a_failure_of_another_ends_a_worker_that_is_at_work(
    ended: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    board = Board(other_lives=True)
    Shard(1, 2, board, NAMES).failed("no memory is left")
    with signs_of_life(Shard(0, 2, None, NAMES), board):
        assert ended.wait(60)
    assert capfd.readouterr().err == "sparsepack: worker 1 of 2 on there failed: no memory is left\n"


def test_a_failure_of_ones_own_does_not_end_one(ended: threading.Event) -> None:
    board = Board(other_lives=True)
    Shard(0, 2, board, NAMES).failed("no memory is left")
    with signs_of_life(Shard(0, 2, None, NAMES), board):
        assert board.many.wait(60)
        assert not ended.is_set()


@pytest.mark.parametrize("gone", [True, False])
def test_a_worker_ends_whose_launcher_is_gone_before_it_began(
    gone: bool, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED, str(os.getpid() if gone else os.getppid()))  # no process is its own parent
    board = Board(other_lives=True)
    with signs_of_life(Shard(0, 2, None, NAMES), board):
        assert (ended if gone else board.many).wait(60)
        assert ended.is_set() == gone


def test_whoever_comes_to_the_end_is_not_ended(ended: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, end = threading.Event(), alive._end
    monkeypatch.setattr(alive, "_end", lambda *given: (ends.set(), end(*given)))
    monkeypatch.setattr(alive, "_LAST_WORD", 60.0)
    with signs_of_life(Shard(0, 2, None, NAMES), Board(other_lives=False)):
        assert ends.wait(60)
    assert not ended.is_set()
