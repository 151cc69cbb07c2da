"""Several processes find thresholds together: the same bytes as one, by each allocation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrated_models import small, small_calibration, text
from forks_for_tests import on_devices

from sparsepack.calibrate.find_thresholds import find_thresholds, make_thresholds
from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import WorkersError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.workers.shard import Shard

__all__ = ["on_devices", "small", "small_calibration", "text"]


@pytest.fixture(scope="module")
def kept(small_calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibration, a folder."""
    folder = tmp_path_factory.mktemp("calibration") / "c"
    save(small_calibration, folder)
    return folder


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (["--allocation", "uniform", "--criterion", "column-norm"], 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (["--allocation", "teal", "--windows", "5"], 3),
                (["--allocation", "teal", "--dense-upstream"], 2),
                (["--allocation", "global", "--steps", "3", "--batch", "5", "--length", "24", "--offsets"], 3),
            )
        ),
    ],
)
def test_devices_make_the_table_of_one(
    small: Checkpoint, kept: Path, tmp_path: Path, asked: list[str], count: int, on_devices: Callable[..., str]
) -> None:
    values = dict(zip((name.strip("-") for name in asked[::2]), asked[1::2], strict=False))
    options = AllocationOptions(
        sparsity=0.4,
        allocation=values["allocation"],
        criterion=values.get("criterion", "magnitude"),
        windows=int(values.get("windows", 16)),
        upstream="dense" if "--dense-upstream" in asked else "sparse",
        offsets="--offsets" in asked,
        **{name: int(values[name]) for name in ("steps", "batch", "length") if name in values},
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has: gradients differ in their last bits by it
    try:
        make_thresholds(small, kept, options, tmp_path / "alone.json")
    finally:
        torch.set_num_threads(threads)
    command = ["thresholds", str(small.path), "--calibration", str(kept), "--sparsity", "0.4", *asked]
    on_devices(count, *command, "-o", str(tmp_path / "t.json"))
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.json", "t.json"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (AllocationOptions(sparsity=0.5, allocation="global", batch=1), "2 workers for 1 windows in a step"),
        (AllocationOptions(sparsity=0.5, windows=2), "2 workers for 1 batches of 2 windows"),
    ],
)
def test_what_workers_cannot_share_is_refused(
    small: Checkpoint, small_calibration: Calibration, options: AllocationOptions, line: str
) -> None:
    with pytest.raises(WorkersError, match=line):
        find_thresholds(small, small_calibration, options, shard=Shard(0, 2))
