"""Windows are dealt in parts, each to one worker, and come back in their order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linked import together

from sparsepack.errors import WorkersError
from sparsepack.workers import PARTS
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.workers import Workers


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 23), st.integers(1, 5))
def test_every_part_has_one_worker_and_rounds_are_in_order(count: int, rows: int, size: int) -> None:
    whole = torch.arange(rows)
    parts = list(torch.split(whole, size))
    each = [Dealt(Workers(number, count), rows, size) for number in range(count)]
    own = [list(torch.split(dealt.own(whole), size)) if dealt.own_runs else [] for dealt in each]
    in_order = []
    for number in range(each[0].rounds):
        having = each[0].having(number)
        assert [len(parts_of) > number for parts_of in own] == [n < having for n in range(count)]
        in_order += [own[worker][number] for worker in range(having)]
    assert [part.tolist() for part in in_order] == [part.tolist() for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "rows", "size"), [(1, 7, 2), (2, 7, 2), (3, 7, 2), (3, 3, 1), (2, 8, 4)])
def test_rows_that_were_dealt_come_back_and_are_dealt_anew(
    count: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(rows, 3, 2).to(dtype)

    def work(workers: Workers) -> list[bool]:
        dealt = Dealt(workers, rows, size)
        own = dealt.own(whole)
        back = dealt.gathered(own)
        again = dealt.scattered(back)
        assert again is not None
        assert (back is None) == (not workers.first)
        return [torch.equal(again, own), back is None or torch.equal(back, whole)]

    assert together(count, work) == [[True, True]] * count


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("rows", "batch"), [(7, 2), (35, 1), (40, 2), (128, 2), (64, 4), (49, 3)])
def test_each_batch_is_told_of_and_every_round_of_parts_by_all_workers(count: int, rows: int, batch: int) -> None:
    count = min(count, Dealt.for_sums(Workers(), rows, batch).parts)
    for number in range(count):
        dealt = Dealt.for_sums(Workers(number, count), rows, batch)
        assert dealt.parts <= PARTS
        runs: list[int] = []
        parts: list[int] = []
        done = dealt.after_each(runs.append, parts.append)
        for _ in torch.split(dealt.own(torch.arange(rows)), batch):
            done()
        assert len(runs) == dealt.own_runs
        assert len(parts) == dealt.rounds
        assert number or (sum(runs), sum(parts)) == (dealt.runs, dealt.parts)
        with pytest.raises(StopIteration):
            done()


def test_nothing_kept_is_nothing_dealt() -> None:
    assert together(2, lambda workers: Dealt(workers, 4, 1).scattered(None)) == [None, None]


def test_more_workers_than_batches_are_refused() -> None:
    Dealt(Workers(0, 4), 7, 2).check("--samples")
    with pytest.raises(WorkersError, match="5 workers for 4 batches of 2 windows"):
        Dealt(Workers(0, 5), 7, 2).check("--samples")
