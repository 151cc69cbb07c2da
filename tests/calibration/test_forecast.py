"""`calibrate --dry-run`: what a run would take, from one block, and nothing written."""

from pathlib import Path

import pytest
import torch
from calibrated_models import small, text
from commands_for_tests import fails, succeeds

from sparsepack.calibration.forecast import Forecast, forecast
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.errors import WorkersError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint

__all__ = ["small", "text"]

OPTIONS = CalibrateOptions(context=64, samples=7)


@pytest.mark.parametrize(("workers", "rounds", "own"), [(1, 4, 7), (2, 2, 4), (3, 2, 3), (4, 1, 2)])
def test_windows_are_shared_and_the_model_is_read_whole(
    small: Checkpoint, text: Text, workers: int, rounds: int, own: int
) -> None:
    found = forecast(small, text, OPTIONS, workers)
    width, source = int(small.config.hidden_size), small.source
    block = sum(
        source.dtypes[name].itemsize * shape.numel()
        for name, shape in ((name, torch.Size(shape)) for name, shape in source.shapes.items())
        if name.startswith(small.family.block(0) + ".")
    )
    assert found.block_bytes == block
    assert found.bytes_read == 3 * block + small.tensor(small.family.embedding).nbytes
    assert (found.rounds, found.batches, found.windows) == (rounds, 4, 7)
    assert found.hidden_bytes == own * 63 * width * 4  # without a BOS token a window of 64 has 63 inputs
    assert found.whole_bytes == (0 if workers == 1 else 7 * 63 * width * 4)
    assert found.read_seconds > 0
    assert found.batch_seconds > 0
    assert found.memory_bytes > block


def test_a_block_takes_as_long_as_what_bounds_it() -> None:
    values = dict.fromkeys(Forecast.__annotations__, 1)
    bound_by_arithmetic = Forecast(**values | {"layers": 10, "read_seconds": 2.0, "batch_seconds": 3.0, "rounds": 4})
    assert bound_by_arithmetic.seconds == 2 + 10 * 12
    bound_by_reading = Forecast(**values | {"layers": 10, "read_seconds": 2.0, "batch_seconds": 0.5, "rounds": 1})
    assert bound_by_reading.seconds == 2 + 10 * 2


def test_more_workers_than_batches_are_refused(small: Checkpoint, text: Text) -> None:
    with pytest.raises(WorkersError, match="5 workers for 4 batches"):
        forecast(small, text, OPTIONS, 5)


def test_the_command_says_it_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["calibrate", "shipped:tiny", "--text", "shipped:train", "--samples", "8", "-o", tmp_path / "c"]
    said = succeeds(*asked, "--dry-run", "2")
    assert "workers   2, 8 windows of" in said
    assert "2 of 4 batches at most each" in said
    assert [line.partition(" ")[0] for line in said.splitlines()] == ["measured", "workers", "time", "read", "memory"]
    assert not list(tmp_path.iterdir())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "--dry-run: it measures in one process" in fails(*asked, "--dry-run", "2")
