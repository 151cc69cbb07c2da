"""Several processes prune together: the same checkpoint as one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrated_models import small, small_calibration, text
from folders_for_tests import content
from forks_for_tests import on_devices

from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.errors import WorkersError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.workers.shard import Shard

__all__ = ["on_devices", "small", "small_calibration", "text"]


@pytest.mark.long  # test_goes_on_together.py prunes with workers that are threads
@pytest.mark.parametrize(
    ("method", "permute", "count"), [("sparsegpt", True, 2), ("sparsegpt", False, 3), ("wanda", False, 3)]
)
def test_devices_make_the_checkpoint_of_one(
    small: Checkpoint,
    small_calibration: Calibration,
    tmp_path: Path,
    method: str,
    permute: bool,
    count: int,
    on_devices: Callable[..., str],
) -> None:
    save(small_calibration, tmp_path / "c")
    options = PruneOptions(keep=2, of=4, method=method, permute=permute, windows=5, batch=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has: factors of products differ in their last bits by it
    try:
        prune(small, tmp_path / "alone", options, tmp_path / "c")
    finally:
        torch.set_num_threads(threads)
    asked = ["--keep", "2", "--of", "4", "--method", method, "--windows", "5", "--batch", "1"]
    asked += ["--permute"] if permute else []
    command = ["prune", str(small.path), *asked, "--calibration", str(tmp_path / "c"), "-o", str(tmp_path / "p")]
    on_devices(count, *command)
    assert content(tmp_path / "p") == content(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "c", "p"]


def test_magnitude_is_refused_for_several(small: Checkpoint, tmp_path: Path) -> None:
    options = PruneOptions(keep=2, of=4, method="magnitude")
    with pytest.raises(WorkersError, match="method magnitude runs no text that workers could share"):
        prune(small, tmp_path / "p", options, shard=Shard(0, 2))
