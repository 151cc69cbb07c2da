"""Training by several workers: the same steps as one, whatever their number, and whoever goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from linked import together

from sparsepack.calibrate import training
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.training import PART, Training, check_share
from sparsepack.errors import WorkersError
from sparsepack.workers.shard import Shard
from sparsepack.workers.state import State

WINDOWS = torch.randint(50, (9, 16), generator=torch.Generator().manual_seed(0))
OPTIONS = AllocationOptions(sparsity=0.5, allocation="global", steps=6, batch=5, length=8)


class Killed(Exception):
    pass


def trained(shard: Shard, state: Path | None = None, killed_at: int | None = None) -> list[torch.Tensor]:
    """The parameters after all steps, or `Killed` before one of them."""
    first = torch.linspace(-1, 1, 50).requires_grad_(True)
    second = torch.ones(3, requires_grad=True)
    shard = replace(shard, folder=state).resume("fingerprint")
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}]
    run = Training(groups, OPTIONS, shard, PART)
    run.pause = 0.0

    def loss(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if killed_at is not None and run.step == killed_at:
            raise Killed
        assert len(ids) == PART
        return (first[ids] ** 2).mean() * second.sum(), torch.sigmoid(first[ids] * second[0]).mean()

    run.run("steps", WINDOWS, loss)
    return [first.detach(), second.detach()]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_workers_take_the_steps_of_one(count: int) -> None:
    alone = trained(Shard())
    for found in together(count, trained):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))
    assert not torch.equal(alone[1], torch.ones(3))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1)])
def test_another_number_of_workers_goes_on_with_the_same_bits(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "pause_after", lambda _: 0.0)
    died = together(before, lambda shard: trained(shard, tmp_path / "s", killed_at=3))
    assert all(isinstance(error, Exception) for error in died)
    assert State(tmp_path / "s", "fingerprint").parts["learning"]["step"] == 3
    for found in together(after, lambda shard: trained(shard, tmp_path / "s")):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, trained(Shard()), strict=True))


def test_more_workers_than_windows_in_a_step_are_refused() -> None:
    check_share(4, 4)
    with pytest.raises(WorkersError, match="5 workers for 4 windows in a step: some would be idle; start 4 at most"):
        check_share(5, 4)
