"""Exchanges among workers: everybody gets what was said, in order, and sees who failed."""

import time
from typing import Any

import pytest
import torch
from linked import ThreadLink, together

from sparsepack.errors import CheckpointError, WorkerLost, WorkersError
from sparsepack.workers import workers as module
from sparsepack.workers.workers import ALONE, Workers

COUNTS = [1, 2, 3, 5]


@pytest.mark.parametrize("count", COUNTS)
def test_all_are_told_what_each_says_in_their_order(count: int) -> None:
    def work(workers: Workers) -> Any:
        return workers.told({"n": workers.number}), workers.told_by_first(["first", workers.number])

    assert together(count, work) == [([{"n": n} for n in range(count)], ["first", 0])] * count


def test_one_alone_exchanges_nothing() -> None:
    assert ALONE.told("x") == ["x"]
    assert ALONE.told_by_first("x") == "x"
    ALONE.agree({"model": "a"})
    assert [*ALONE.in_order({"x": torch.ones(1)}, 1)] == [{"x": torch.ones(1)}]


@pytest.mark.parametrize("having", [1, 2, 3])
def test_what_was_found_comes_to_the_first_in_order(having: int) -> None:
    def work(workers: Workers) -> list[list[float]]:
        mine = {"b": torch.full((2,), float(workers.number)), "a": torch.full((1, 3), workers.number + 10)}
        return [[*found["a"][0].tolist(), *found["b"].tolist()] for found in workers.in_order(mine, having)]

    first, *others = together(3, work)
    assert first == [[n + 10] * 3 + [n] * 2 for n in range(having)]
    assert others == [[], []]


@pytest.mark.parametrize("having", [1, 2, 3])
@pytest.mark.parametrize("to", [0, 1, 2])
def test_any_worker_may_get_what_was_found_in_order(having: int, to: int) -> None:
    def work(workers: Workers) -> list[float]:
        mine = {"x": torch.full((2,), float(workers.number))}
        return [found["x"][1].item() for found in workers.in_order(mine, having, to=to)]

    assert together(3, work) == [[*range(having)] if number == to else [] for number in range(3)]


def test_what_each_has_comes_to_all_by_its_names() -> None:
    def work(workers: Workers) -> list[dict[str, list[int]]]:
        mine = {f"{name} of {workers.number}": torch.arange(workers.number) for name in "ba"[: workers.number]}
        return [{name: x.tolist() for name, x in each.items()} for each in workers.of_all(mine)]

    wanted = [{}, {"b of 1": [0]}, {"b of 2": [0, 1], "a of 2": [0, 1]}]
    assert together(3, work) == [wanted] * 3
    assert [*ALONE.of_all({"x": torch.ones(1)})[0]] == ["x"]


def test_one_that_has_nothing_to_send_may_come_when_all_others_have_ended() -> None:
    def work(workers: Workers) -> list[list[str]]:
        told = workers.told
        if workers.first:

            def late(value: Any) -> list[Any]:
                found = told(value)
                while len(workers.link.board.ended) < 2:  # type: ignore[union-attr]
                    workers.link.board.let_others()  # type: ignore[union-attr]
                return found

            workers.told = late  # type: ignore[method-assign]
        return [[*each] for each in workers.of_all({} if workers.first else {"x": torch.ones(1)})]

    assert together(3, work) == [[[], ["x"], ["x"]]] * 3


@pytest.mark.parametrize("other", [0, 1, 2])
def test_facts_that_differ_are_named_with_who_has_them(other: int) -> None:
    def work(workers: Workers) -> None:
        workers.agree({"version": "1", "model": "abc" if workers.number != other else "xyz" * 30})

    for error in together(3, work):
        assert isinstance(error, WorkersError)
        assert f"worker {other or 1} of 3 on here has another model (" in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 250


@pytest.mark.parametrize("late", [0, 1, 2])
def test_one_that_sees_late_what_others_said_finds_a_difference_itself(late: int) -> None:
    """It looks before they say it, and goes on when one of them has failed over it. The first, which may hold the
    store, ends last."""
    looked: list[str] = []
    ended: list[int] = []

    def work(workers: Workers) -> None:
        link = workers.link
        assert isinstance(link, ThreadLink)
        get, board = link.get, link.board

        def late_at_others(key: str) -> str | None:
            if not {key, module.FAILED}.isdisjoint(board.values) or key == module.FAILED:
                return get(key)
            looked.append(key)
            while module.FAILED not in board.values:
                board.let_others()
            return None

        if workers.number == late:
            link.get = late_at_others  # type: ignore[method-assign]
        while workers.number != late and not looked:
            board.let_others()
        try:
            workers.agree({"model": workers.first})
        finally:
            ended.append(workers.number)

    assert all(isinstance(error, WorkersError) for error in together(3, work))
    assert looked
    assert ended[-1] == 0


def test_one_that_fails_is_named_by_all_others_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.5)

    def work(workers: Workers) -> None:
        if workers.number == 1:
            raise CheckpointError("block 3 is damaged")
        workers.told("x")

    first, one, two = together(3, work)
    assert isinstance(one, CheckpointError)
    for error in (first, two):
        assert isinstance(error, WorkerLost)
        assert str(error) == "worker 1 of 3 on here failed: block 3 is damaged"


def test_one_that_ends_without_a_word_is_named_by_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.1)

    def work(workers: Workers) -> None:
        if workers.first:
            workers.received(torch.empty(1), 1)

    error = together(2, work)[0]
    assert isinstance(error, WorkerLost)
    assert str(error).startswith("worker 1 of 2 on here is gone")


def test_an_exchange_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 0.3)
    error = together(2, lambda workers: workers.told("x") if workers.first else None)[0]
    assert isinstance(error, WorkerLost)
    assert "worker 1 of 2 on here has not answered" in str(error)


@pytest.mark.parametrize("count", COUNTS)
def test_whole_numbers_are_summed_and_work_is_shared(count: int) -> None:
    def work(workers: Workers) -> Any:
        counts = torch.arange(5) + 2**60 // (workers.number + 1)
        calls: list[int] = []
        squares = workers.each(range(7), lambda item: calls.append(item) or item**2)
        return workers.summed(counts).tolist(), squares, calls

    found = together(count, work)
    total = sum(2**60 // (number + 1) for number in range(count))
    for sums, squares, _ in found:
        assert sums == [count * n + total for n in range(5)]
        assert squares == [n**2 for n in range(7)]
    assert sorted(item for _, _, calls in found for item in calls) == list(range(7))


@pytest.mark.parametrize("tensor", [None, torch.randn(3, 2), torch.randn(4).bfloat16(), torch.empty(0, 3)])
def test_a_tensor_of_the_first_comes_to_all(tensor: torch.Tensor | None) -> None:
    for found in together(3, lambda workers: workers.from_first(tensor if workers.first else None)):
        assert (found is None) if tensor is None else torch.equal(found, tensor) and found.dtype == tensor.dtype


def test_the_first_worker_ends_last() -> None:
    """It may hold the store: one that has to wait for a core still reads what the others said."""
    read: list[int] = []  # by the slow one

    def work(workers: Workers) -> bool:
        if workers.number == 1:
            told = workers.told

            def slowly(value: Any) -> list[Any]:
                found = told(value)
                time.sleep(0.3)
                read.append(1)
                return found

            workers.told = slowly  # type: ignore[method-assign]
        workers.leave()
        return bool(read)

    assert together(3, work)[0] is True
    ALONE.leave()


def test_the_first_worker_does_not_wait_for_ever_for_one_that_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE", 0.2)

    def work(workers: Workers) -> None:
        if workers.first:
            workers.leave()
        else:
            workers.told("done")

    assert together(2, work) == [None, None]


@pytest.mark.parametrize("count", [2, 3])
def test_what_was_said_is_not_kept_for_ever(count: int) -> None:
    kept: list[int] = []

    def work(workers: Workers) -> list[int]:
        found = []
        for number in range(300):
            found.append(workers.told_by_first(number if workers.first else None))
            if number % 50 == 0:
                assert workers.told(number) == [number] * count
            assert isinstance(workers.link, ThreadLink)
            kept.append(len(workers.link.board.values))
        return found

    assert together(count, work) == [[*range(300)]] * count
    assert max(kept) <= module._UNHEARD + 3 * count


def test_the_first_worker_that_fails_does_not_end_before_all_have_read_why() -> None:
    """It may hold the store."""
    ended: list[int] = []

    def work(workers: Workers) -> None:
        if workers.first:
            workers.failed("no memory is left")
        else:
            time.sleep(0.2 * workers.number)
            with pytest.raises(WorkerLost, match="worker 0 of 3 on here failed: no memory is left"):
                workers.told("x")
        workers.seen_by_all()
        ended.append(workers.number)

    assert together(3, work) == [None] * 3
    assert sorted(ended) == [0, 1, 2]
    assert ended[-1] == 0
