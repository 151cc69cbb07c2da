"""Work side by side: results in order, errors told, no thread left."""

import os
import signal
import threading
import time

import pytest

from sparsepack.files.tensors import parallel_map

AT_ONCE = [1, 2, 5]
MANY = 1000
"""So many items are not begun while whoever waits for the threads is without a core."""


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def slow_first(item: int) -> int:
    """The first takes longest, so that later ones overtake it."""
    time.sleep(0.05 if item == 0 else 0)
    return item * item


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_results_come_in_the_order_of_the_items(at_once):
    seen = []
    found = parallel_map(slow_first, range(20), at_once, lambda: seen.append(None))
    assert found == [n * n for n in range(20)]
    assert len(seen) == 20
    assert parallel_map(slow_first, [], at_once, lambda: None) == []


def test_one_at_a_time_stays_in_the_callers_thread():
    assert parallel_map(lambda _: threading.get_ident(), range(3), 1, lambda: None) == [threading.get_ident()] * 3


def test_as_many_are_begun_as_asked_and_no_more():
    together, lock, most, now = threading.Barrier(3), threading.Lock(), 0, 0

    def work(item: int) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        together.wait(10)  # breaks unless three are here at a time
        with lock:
            now -= 1

    parallel_map(work, range(9), 3, lambda: None)
    assert most == 3


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_the_first_error_in_order_is_raised_and_what_is_not_begun_dropped(at_once, kind):
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item in (3, 4):
            raise kind(str(item))
        time.sleep(0.05)

    with pytest.raises(kind, match="3"):
        parallel_map(work, range(MANY), at_once, lambda: None)
    assert len(begun) < MANY


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_an_error_in_what_follows_a_result_drops_the_rest_too(at_once):
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05)

    def fail() -> None:
        raise OSError("told")

    with pytest.raises(OSError, match="told"):
        parallel_map(work, range(MANY), at_once, fail)
    assert len(begun) < MANY


def test_ctrl_c_reaches_whoever_waits_for_the_threads():
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05)
        if item == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(MANY), 2, lambda: None)
    assert len(begun) < MANY
