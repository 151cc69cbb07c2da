"""Signs of life end a worker when another one gives none any more."""

import os
import threading
import time

import pytest

from sparsepack.workers import alive
from sparsepack.workers.alive import signs_of_life
from sparsepack.workers.environment import LAUNCHED
from sparsepack.workers.workers import Workers

NAMES = ("worker 0 of 2 on here", "worker 1 of 2 on there")


class Board:
    """A store in which the other worker gives signs of life, or does not."""

    def __init__(self, other_lives: bool, gone: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.other_lives, self.gone = other_lives, gone

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("connection refused")
        self.values[key] = value

    def get(self, key: str) -> str | None:
        return str(time.monotonic()) if self.other_lives and key == "alive/1" else self.values.get(key)

    def send(self, *_: object) -> None:
        raise AssertionError

    receive = forget = send


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have been ended."""
    happened = threading.Event()
    monkeypatch.setattr(alive.os, "_exit", lambda status: happened.set())
    monkeypatch.setattr(alive, "EVERY", 0.02)
    monkeypatch.setattr(alive, "LOST", 0.4)
    monkeypatch.setattr(alive, "_LAST_WORD", 0.1)
    return happened


def test_a_worker_without_signs_of_life_is_named(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    with signs_of_life(Workers(0, 2, None, NAMES), Board(other_lives=False)):
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert said.startswith(
        "sparsepack: worker 1 of 2 on there has given no sign of life for 0 seconds; nothing is writ"
    )
    assert said.count("\n") == 1


def test_a_store_that_is_gone_is_the_first_workers(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    with signs_of_life(Workers(1, 2, None, NAMES), Board(other_lives=True, gone=True)):
        assert ended.wait(60)
    assert capfd.readouterr().err.startswith("sparsepack: worker 0 of 2 on here is gone")


def test_signs_of_life_are_given_and_seen(ended: threading.Event) -> None:
    board = Board(other_lives=True)
    with signs_of_life(Workers(0, 2, None, NAMES), board):
        time.sleep(1.0)
        assert not ended.is_set()
    assert int(board.values["alive/0"]) > 1


def test_a_failure_of_another_ends_a_worker_that_is_at_work(
    ended: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    board = Board(other_lives=True)
    Workers(1, 2, board, NAMES).failed("no memory is left")
    with signs_of_life(Workers(0, 2, None, NAMES), board):
        assert ended.wait(60)
    assert capfd.readouterr().err == "sparsepack: worker 1 of 2 on there failed: no memory is left\n"


def test_a_failure_of_ones_own_does_not_end_one(ended: threading.Event) -> None:
    board = Board(other_lives=True)
    Workers(0, 2, board, NAMES).failed("no memory is left")
    with signs_of_life(Workers(0, 2, None, NAMES), board):
        time.sleep(0.5)
        assert not ended.is_set()


@pytest.mark.parametrize("gone", [True, False])
def test_a_worker_ends_whose_launcher_is_gone_before_it_began(
    gone: bool, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED, str(os.getpid() if gone else os.getppid()))  # no process is its own parent
    with signs_of_life(Workers(0, 2, None, NAMES), Board(other_lives=True)):
        assert ended.wait(60 if gone else 0.5) == gone


def test_whoever_comes_to_the_end_is_not_ended(ended: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "_LAST_WORD", 60.0)
    with signs_of_life(Workers(0, 2, None, NAMES), Board(other_lives=False)):
        time.sleep(0.8)
    assert not ended.is_set()
