"""Several processes rotate together: the same checkpoint as one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrated_models import small, small_calibration, text
from folders_for_tests import content
from forks_for_tests import on_devices

from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import rotate
from sparsepack.errors import WorkersError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.workers.shard import Shard

__all__ = ["on_devices", "small", "small_calibration", "text"]

LEARNT = {"steps": 3, "batch": 3, "length": 24}


@pytest.mark.long  # test_goes_on_together.py rotates with workers that are threads
@pytest.mark.parametrize(
    ("options", "count"),
    [
        (RotateOptions("pca", segments=2), 2),
        (RotateOptions("hadamard"), 3),
        (RotateOptions("learnt", **LEARNT), 2),
    ],
    ids=["pca", "hadamard", "learnt"],
)
def test_devices_make_the_checkpoint_of_one(
    small: Checkpoint,
    small_calibration: Calibration,
    tmp_path: Path,
    options: RotateOptions,
    count: int,
    on_devices: Callable[..., str],
) -> None:
    save(small_calibration, tmp_path / "c")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has
    try:
        rotate(small, tmp_path / "c", tmp_path / "alone", options)
    finally:
        torch.set_num_threads(threads)
    asked = ["--basis", options.basis]
    asked += ["--segments", "2"] if options.segments == 2 else []
    asked += [f"--{name}={value}" for name, value in LEARNT.items()] if options.basis == "learnt" else []
    command = ["rotate", str(small.path), *asked, "--calibration", str(tmp_path / "c"), "-o", str(tmp_path / "r")]
    on_devices(count, *command)
    assert content(tmp_path / "r") == content(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "c", "r"]


def test_more_workers_than_blocks_are_refused(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path
) -> None:
    save(small_calibration, tmp_path / "c")
    with pytest.raises(WorkersError, match="4 workers for 3 blocks"):
        rotate(small, tmp_path / "c", tmp_path / "r", RotateOptions(), shard=Shard(0, 4))
