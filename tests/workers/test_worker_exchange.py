"""Exchanges among workers: everybody gets what was said, in order, and sees who failed."""

import time
from typing import Any

import pytest
import torch
from linked import ThreadLink, together

from sparsepack.errors import CheckpointError, WorkerLost, WorkersError
from sparsepack.workers import exchange as module
from sparsepack.workers.shard import ALONE, Shard

COUNTS = [1, 2, 3, 5]


@pytest.mark.parametrize("count", COUNTS)
def test_all_are_told_what_each_says_in_their_order(count: int) -> None:
    def work(shard: Shard) -> Any:
        return shard.all_gather({"n": shard.rank}), shard.broadcast(["first", shard.rank])

    assert together(count, work) == [([{"n": n} for n in range(count)], ["first", 0])] * count


def test_one_alone_exchanges_nothing() -> None:
    assert ALONE.all_gather("x") == ["x"]
    assert ALONE.broadcast("x") == "x"
    ALONE.agree({"model": "a"})
    assert [*ALONE.gather_in_order({"x": torch.ones(1)}, 1)] == [{"x": torch.ones(1)}]


@pytest.mark.parametrize("having", [1, 2, 3])
def test_what_was_found_comes_to_the_first_in_order(having: int) -> None:
    def work(shard: Shard) -> list[list[float]]:
        mine = {"b": torch.full((2,), float(shard.rank)), "a": torch.full((1, 3), shard.rank + 10)}
        return [[*found["a"][0].tolist(), *found["b"].tolist()] for found in shard.gather_in_order(mine, having)]

    first, *others = together(3, work)
    assert first == [[n + 10] * 3 + [n] * 2 for n in range(having)]
    assert others == [[], []]


@pytest.mark.parametrize("having", [1, 2, 3])
@pytest.mark.parametrize("to", [0, 1, 2])
def test_any_worker_may_get_what_was_found_in_order(having: int, to: int) -> None:
    def work(shard: Shard) -> list[float]:
        mine = {"x": torch.full((2,), float(shard.rank))}
        return [found["x"][1].item() for found in shard.gather_in_order(mine, having, to=to)]

    assert together(3, work) == [[*range(having)] if number == to else [] for number in range(3)]


def test_what_each_has_comes_to_all_by_its_names() -> None:
    def work(shard: Shard) -> list[dict[str, list[int]]]:
        mine = {f"{name} of {shard.rank}": torch.arange(shard.rank) for name in "ba"[: shard.rank]}
        return [{name: x.tolist() for name, x in each.items()} for each in shard.all_gather_tensors(mine)]

    wanted = [{}, {"b of 1": [0]}, {"b of 2": [0, 1], "a of 2": [0, 1]}]
    assert together(3, work) == [wanted] * 3
    assert [*ALONE.all_gather_tensors({"x": torch.ones(1)})[0]] == ["x"]


def test_one_that_has_nothing_to_send_may_come_when_all_others_have_ended() -> None:
    def work(shard: Shard) -> list[list[str]]:
        told = shard.all_gather
        if shard.first:

            def late(value: Any) -> list[Any]:
                found = told(value)
                while len(shard.link.board.ended) < 2:  # type: ignore[union-attr]
                    shard.link.board.let_others()  # type: ignore[union-attr]
                return found

            shard.all_gather = late  # type: ignore[method-assign]
        return [[*each] for each in shard.all_gather_tensors({} if shard.first else {"x": torch.ones(1)})]

    assert together(3, work) == [[[], ["x"], ["x"]]] * 3


@pytest.mark.parametrize("other", [0, 1, 2])
def test_facts_that_differ_are_named_with_who_has_them(other: int) -> None:
    def work(shard: Shard) -> None:
        shard.agree({"version": "1", "model": "abc" if shard.rank != other else "xyz" * 30})

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

    def work(shard: Shard) -> None:
        link = shard.link
        assert isinstance(link, ThreadLink)
        get, board = link.get, link.board

        def late_at_others(key: str) -> str | None:
            if not {key, module.FAILED}.isdisjoint(board.values) or key == module.FAILED:
                return get(key)
            looked.append(key)
            while module.FAILED not in board.values:
                board.let_others()
            return None

        if shard.rank == late:
            link.get = late_at_others  # type: ignore[method-assign]
        while shard.rank != late and not looked:
            board.let_others()
        try:
            shard.agree({"model": shard.first})
        finally:
            ended.append(shard.rank)

    assert all(isinstance(error, WorkersError) for error in together(3, work))
    assert looked
    assert ended[-1] == 0


def test_one_that_fails_is_named_by_all_others_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.5)

    def work(shard: Shard) -> None:
        if shard.rank == 1:
            raise CheckpointError("block 3 is damaged")
        shard.all_gather("x")

    first, one, two = together(3, work)
    assert isinstance(one, CheckpointError)
    for error in (first, two):
        assert isinstance(error, WorkerLost)
        assert str(error) == "worker 1 of 3 on here failed: block 3 is damaged"


def test_one_that_ends_without_a_word_is_named_by_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.1)

    def work(shard: Shard) -> None:
        if shard.first:
            shard.receive([torch.empty(1)], 1)

    error = together(2, work)[0]
    assert isinstance(error, WorkerLost)
    assert str(error).startswith("worker 1 of 2 on here is gone")


def test_an_exchange_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 0.3)
    error = together(2, lambda shard: shard.all_gather("x") if shard.first else None)[0]
    assert isinstance(error, WorkerLost)
    assert "worker 1 of 2 on here has not answered" in str(error)


@pytest.mark.parametrize("count", COUNTS)
def test_whole_numbers_are_summed_and_work_is_shared(count: int) -> None:
    def work(shard: Shard) -> Any:
        counts = torch.arange(5) + 2**60 // (shard.rank + 1)
        calls: list[int] = []
        squares = shard.each(range(7), lambda item: calls.append(item) or item**2)
        return shard.all_reduce(counts).tolist(), squares, calls

    found = together(count, work)
    total = sum(2**60 // (number + 1) for number in range(count))
    for sums, squares, _ in found:
        assert sums == [count * n + total for n in range(5)]
        assert squares == [n**2 for n in range(7)]
    assert sorted(item for _, _, calls in found for item in calls) == list(range(7))


@pytest.mark.parametrize("tensor", [None, torch.randn(3, 2), torch.randn(4).bfloat16(), torch.empty(0, 3)])
def test_a_tensor_of_the_first_comes_to_all(tensor: torch.Tensor | None) -> None:
    given = {} if tensor is None else {"": tensor}
    for named in together(3, lambda shard: shard.broadcast_tensors(given if shard.first else {})):
        found = named.get("")
        assert (found is None) if tensor is None else torch.equal(found, tensor) and found.dtype == tensor.dtype


def test_the_first_worker_ends_last() -> None:
    """It may hold the store: one that has to wait for a core still reads what the others said."""
    read: list[int] = []  # by the slow one

    def work(shard: Shard) -> bool:
        if shard.rank == 1:
            told = shard.all_gather

            def slowly(value: Any) -> list[Any]:
                found = told(value)
                time.sleep(0.3)
                read.append(1)
                return found

            shard.all_gather = slowly  # type: ignore[method-assign]
        shard.leave()
        return bool(read)

    assert together(3, work)[0] is True
    ALONE.leave()


def test_the_first_worker_does_not_wait_for_ever_for_one_that_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE", 0.2)

    def work(shard: Shard) -> None:
        if shard.first:
            shard.leave()
        else:
            shard.all_gather("done")

    assert together(2, work) == [None, None]


@pytest.mark.parametrize("count", [2, 3])
def test_what_was_said_is_not_kept_for_ever(count: int) -> None:
    kept: list[int] = []

    def work(shard: Shard) -> list[int]:
        found = []
        for number in range(300):
            found.append(shard.broadcast(number if shard.first else None))
            if number % 50 == 0:
                assert shard.all_gather(number) == [number] * count
            assert isinstance(shard.link, ThreadLink)
            kept.append(len(shard.link.board.values))
        return found

    assert together(count, work) == [[*range(300)]] * count
    assert max(kept) <= module._UNHEARD + 3 * count


def test_the_first_worker_that_fails_does_not_end_before_all_have_read_why() -> None:
    """It may hold the store."""
    ended: list[int] = []

    def work(shard: Shard) -> None:
        if shard.first:
            shard.failed("no memory is left")
        else:
            time.sleep(0.2 * shard.rank)
            with pytest.raises(WorkerLost, match="worker 0 of 3 on here failed: no memory is left"):
                shard.all_gather("x")
        shard.seen_by_all()
        ended.append(shard.rank)

    assert together(3, work) == [None] * 3
    assert sorted(ended) == [0, 1, 2]
    assert ended[-1] == 0
