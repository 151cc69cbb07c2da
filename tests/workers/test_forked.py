"""Forks work on items: results in order, the first error, bounded memory, and nobody is left behind."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from sparsepack.errors import PackingError, WorkerLost
from sparsepack.workers.forked import forked_map

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_results_are_in_the_order_of_the_items(count: int, processes: int) -> None:
    steps: list[int] = []
    weights = torch.randn(count, 40)
    found = forked_map(
        lambda number: (float(weights[number].square().sum()), torch.get_num_threads(), os.getpid()),
        range(count),
        [number % 3 for number in range(count)],
        processes,
        10,
        lambda: steps.append(1),
    )
    assert [value for value, _, _ in found] == [float(row.square().sum()) for row in weights]
    assert len(steps) == count
    assert {threads for _, threads, _ in found} <= {1}
    assert os.getpid() not in {process for _, _, process in found}
    assert multiprocessing.active_children() == []


def test_the_first_error_in_order_is_raised_and_all_before_it_are_done(tmp_path: Path) -> None:
    def work(number: int) -> None:
        if number in (3, 6):
            raise PackingError(f"blk.{number}: weights are not finite")
        (tmp_path / str(number)).touch()

    with pytest.raises(PackingError, match=r"blk\.3"):
        forked_map(work, range(8), range(8), 2, 100, lambda: None)  # the largest first: 6 fails before 3 is begun
    assert {"0", "1", "2"} <= {path.name for path in tmp_path.iterdir()}
    assert multiprocessing.active_children() == []


def test_items_are_begun_in_their_order_but_the_largest_first() -> None:
    sizes = [1, 1, 9, 1, 2, 12]
    order = forked_map(lambda number: time.monotonic_ns(), range(6), sizes, 1, 100, lambda: None)
    assert sorted(range(6), key=order.__getitem__) == [2, 5, 0, 1, 3, 4]


def test_items_worked_on_together_take_no_more_than_is_allowed(tmp_path: Path) -> None:
    sizes = [5, 30, 4, 3, 8, 2, 6, 1]

    def work(number: int) -> int:
        mine = tmp_path / str(number)
        mine.touch()
        time.sleep(0.05)
        together = sum(sizes[int(path.name)] for path in tmp_path.iterdir())
        mine.unlink()
        return together

    found = forked_map(work, range(len(sizes)), sizes, 4, 12, lambda: None)
    assert found[1] == 30  # alone, since it is larger than is allowed
    assert max(found[:1] + found[2:]) <= 12


def test_a_fork_that_is_killed_is_said() -> None:
    with pytest.raises(WorkerLost, match=r"ended \(status -9\), perhaps for want of memory"):
        forked_map(
            lambda number: os.kill(os.getpid(), 9) if number == 1 else None, range(3), [1] * 3, 2, 9, lambda: None
        )
    assert multiprocessing.active_children() == []
