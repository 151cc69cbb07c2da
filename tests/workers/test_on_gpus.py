"""Workers on GPUs write the bytes of one process: two that share a GPU, and on a machine with several one for each."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrated_models import small, text
from folders_for_tests import content

from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint

__all__ = ["small", "text"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPUS = torch.cuda.device_count()
DEVICES = "0,0" if GPUS == 1 else ",".join(map(str, range(min(GPUS, 3))))
"""Three at most: so many blocks has the model."""

Make = Callable[[str, Path, list[str]], None]


@pytest.fixture(scope="module")
def make(small: Checkpoint, text: Text, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A function that runs a verb with an output and devices, on a calibration and thresholds of one process."""
    given = tmp_path_factory.mktemp("given")
    (given / "text.txt").write_text("".join(text.documents))
    calibration, table = ["--calibration", str(given / "c")], ["--thresholds", str(given / "t.json")]
    sparse = ["--sparsity", "0.5", "--windows", "6"]
    learnt = ["--allocation", "global", "--steps", "4", "--batch", "4", "--length", "48"]
    some = ["--context", "48", "--windows", "6"]
    arguments = {
        "calibrate": ["--text", str(given / "text.txt"), "--context", "48", "--samples", "7"],
        "thresholds": [*calibration, *sparse],
        "global": [*calibration, *sparse, *learnt],
        "prune": [*calibration, "--keep", "2", "--of", "4", "--windows", "6"],
        "rotate": calibration,
        "pack": ["--format", "f32"],
        "eval": [*table, "--perplexity", str(given / "text.txt"), *some],
    }

    def run(verb: str, output: Path, devices: list[str]) -> None:
        name = {"global": "thresholds"}.get(verb, verb)
        command = [name, str(small.path), *arguments[verb], "--json" if verb == "eval" else "-o", str(output)]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(
            [sys.executable, "-m", "sparsepack", *command, *devices], env=path, capture_output=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr.decode()

    run("calibrate", given / "c", ["--device", "cuda:0"])
    run("thresholds", given / "t.json", ["--device", "cuda:0"])
    return run


@pytest.mark.parametrize("verb", ["calibrate", "thresholds", "global", "prune", "rotate", "pack", "eval"])
def test_workers_on_gpus_write_the_bytes_of_one(make: Make, verb: str, tmp_path: Path) -> None:
    make(verb, tmp_path / "alone", ["--device", "cuda:0"])
    alone = _bytes(tmp_path / "alone")
    make(verb, tmp_path / "together", ["--devices", DEVICES])
    assert _bytes(tmp_path / "together") == alone


def _bytes(path: Path) -> dict[str, bytes]:
    return content(path) if path.is_dir() else {"": path.read_bytes()}
