"""Windows are share in parts, each to one worker, and come back in their order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linked import together

from sparsepack.errors import WorkersError
from sparsepack.workers import PARTS
from sparsepack.workers.shard import ALONE, Shard


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 23), st.integers(1, 5))
def test_every_part_has_one_worker_and_rounds_are_in_order(count: int, rows: int, size: int) -> None:
    whole = torch.arange(rows)
    parts = list(torch.split(whole, size))
    each = [Shard(number, count).split(rows, size) for number in range(count)]
    own = [list(torch.split(share.own(whole), size)) if share.own_runs else [] for share in each]
    in_order = []
    for number in range(each[0].rounds):
        having = each[0].having(number)
        assert [len(parts_of) > number for parts_of in own] == [n < having for n in range(count)]
        in_order += [own[worker][number] for worker in range(having)]
    assert [part.tolist() for part in in_order] == [part.tolist() for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "rows", "size"), [(1, 7, 2), (2, 7, 2), (3, 7, 2), (3, 3, 1), (2, 8, 4)])
def test_rows_that_were_share_come_back_and_are_share_anew(
    count: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(rows, 3, 2).to(dtype)

    def work(shard: Shard) -> list[bool]:
        share = shard.split(rows, size)
        own = share.own(whole)
        back = share.gather(own)
        again = share.scatter(back)
        assert again is not None
        assert (back is None) == (not shard.first)
        return [torch.equal(again, own), back is None or torch.equal(back, whole)]

    assert together(count, work) == [[True, True]] * count


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("rows", "batch"), [(7, 2), (35, 1), (40, 2), (128, 2), (64, 4), (49, 3)])
def test_each_batch_is_told_of_and_every_round_of_parts_by_all_workers(count: int, rows: int, batch: int) -> None:
    count = min(count, ALONE.split_for_sums(rows, batch).parts)
    for number in range(count):
        share = Shard(number, count).split_for_sums(rows, batch)
        assert share.parts <= PARTS
        runs: list[int] = []
        parts: list[int] = []
        done = share.after_each(runs.append, parts.append)
        for _ in torch.split(share.own(torch.arange(rows)), batch):
            done()
        assert len(runs) == share.own_runs
        assert len(parts) == share.rounds
        assert number or (sum(runs), sum(parts)) == (share.runs, share.parts)
        with pytest.raises(StopIteration):
            done()


def test_nothing_kept_is_nothing_share() -> None:
    assert together(2, lambda shard: shard.split(4, 1).scatter(None)) == [None, None]


def test_more_workers_than_batches_are_refused() -> None:
    Shard(0, 4).split(7, 2).check("--samples")
    with pytest.raises(WorkersError, match="5 workers for 4 batches of 2 windows"):
        Shard(0, 5).split(7, 2).check("--samples")
