"""Several processes pack together: the same artifact as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrated_models import small, small_calibration, text
from folders_for_tests import content
from forks_for_tests import on_devices
from linked import together

from sparsepack.calibrate.find_thresholds import make_thresholds
from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import WorkerLost, WorkersError
from sparsepack.formats.containers.write_tensors import write_files
from sparsepack.formats.plan import TensorFile
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.packing import PackRequest, pack
from sparsepack.workers.shard import Shard

__all__ = ["on_devices", "small", "small_calibration", "text"]


@pytest.fixture(scope="module")
def given(small: Checkpoint, small_calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thresholds of the model, and the model pruned."""
    folder = tmp_path_factory.mktemp("given")
    save(small_calibration, folder / "c")
    make_thresholds(small, folder / "c", AllocationOptions(sparsity=0.5, allocation="uniform"), folder / "t.json")
    prune(small, folder / "pruned", PruneOptions(keep=6, of=8, method="magnitude"))
    return folder


@pytest.mark.parametrize(
    ("format", "count"),
    [
        pytest.param("zigzag-q4_k", 2, id="a file by two"),
        pytest.param("slide-bf16", 3, id="a folder by three", marks=pytest.mark.long),
    ],
)
def test_devices_make_the_artifact_of_one(
    small: Checkpoint, given: Path, tmp_path: Path, format: str, count: int, on_devices: Callable[..., str]
) -> None:
    slid = format.startswith("slide")
    model, table = (str(given / "pruned"), None) if slid else (str(small.path), given / "t.json")
    for folder in ("alone", "together"):
        (tmp_path / folder).mkdir()
    calibration, fitting = None if slid else given / "c", RefitOptions(quantiser="round")
    asked = PackRequest(model, tmp_path / "alone" / "made", format, calibration, table, fitting=fitting)
    assert (pack(asked).score is None) == slid
    command = ["pack", model, "--format", format, "-o", str(tmp_path / "together" / "made")]
    if table is not None:
        command += ["--thresholds", str(table), "--calibration", str(calibration), "--quantiser", "round"]
    on_devices(count, *command)
    inside = "made" if slid else "."
    assert content(tmp_path / "together" / inside) == content(tmp_path / "alone" / inside)
    assert [path.name for path in (tmp_path / "together").iterdir()] == ["made"]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"allocation": AllocationOptions(sparsity=0.5)},
            "--sparsity finds thresholds, which pack does in one process",
        ),
        ({"fitting": RefitOptions(quantiser="gptq")}, "error feedback fits weights to the calibration in one process"),
    ],
)
def test_what_workers_cannot_share_is_refused(
    small: Checkpoint, given: Path, tmp_path: Path, asked: dict[str, Any], line: str
) -> None:
    request = PackRequest(str(small.path), tmp_path / "m.gguf", calibration=given / "c", **asked)
    with pytest.raises(WorkersError, match=line):
        pack(request, shard=Shard(0, 2))


def test_a_worker_that_does_not_reach_the_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()

    def work(shard: Shard) -> dict[str, str]:
        folder = tmp_path / ("here" if shard.first else "elsewhere")
        return write_files([TensorFile(folder / "f", b"head", [])], 1, shard=shard)

    first, second = together(2, work)
    assert "elsewhere: worker 1 of 2 on here does not find there what worker 0 of 2 on here writes" in str(second)
    assert isinstance(second, WorkersError)
    assert isinstance(first, WorkerLost)
