"""`--dry-run N`: what the work would take N workers, from one block, and nothing written."""

import time
from pathlib import Path

import pytest
import torch
from brief_search import orders_are_searched_briefly
from calibrated_models import small, small_calibration, text
from commands_for_tests import fails, succeeds

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import forecast
from sparsepack.calibrate.folder import Calibration, save
from sparsepack.errors import WorkersError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import forecast as measured_by_eval
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import Forecast, forecast_blocks
from sparsepack.packing import PackRequest, pack
from sparsepack.packing_forecast import forecast as parts_of_pack
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.shard import Shard

__all__ = ["orders_are_searched_briefly", "small", "small_calibration", "text"]

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
    assert found.batch_seconds + found.alone_seconds > 0
    assert found.memory_bytes > block


def test_a_block_takes_as_long_as_what_bounds_it() -> None:
    values = dict.fromkeys(Forecast.__annotations__, 1) | {"layers": 10, "read_seconds": 2.0}
    bound_by_arithmetic = Forecast(**values | {"batch_seconds": 3.0, "rounds": 4, "alone_seconds": 0.5})
    assert bound_by_arithmetic.seconds == 2 + 10 * 12.5
    bound_by_reading = Forecast(**values | {"batch_seconds": 0.5, "rounds": 1, "alone_seconds": 1.25})
    assert bound_by_reading.seconds == 2 + 10 * 2


def test_what_a_batch_takes_is_told_from_what_a_block_takes_beside(small: Checkpoint) -> None:
    """Of a block that takes 0.3 s whatever it runs, and 0.1 s for each batch."""
    seen = []

    def run_block(hidden: torch.Tensor) -> None:
        seen.append(len(hidden))
        time.sleep(0.3 + 0.1 * len(hidden) / 2)

    windows = torch.zeros(7, 8, dtype=torch.int64)
    found = forecast_blocks(small, BlockStream(small), windows, Shard(0, 2).split(7, 2), run_block)
    assert seen == [2, 2, 4]
    assert found.batch_seconds == pytest.approx(0.1, abs=0.08)
    assert found.alone_seconds == pytest.approx(0.3, abs=0.08)
    assert found.computing_seconds == 2 * found.batch_seconds + found.alone_seconds


VERBS = {
    "prune": ("--keep", "2", "--of", "4", "--windows", "5", "--batch", "1", "--permute"),
    "thresholds": ("--sparsity", "0.5", "--allocation", "teal", "--windows", "5"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_run_a_calibrations_text_say_it(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path, verb: str
) -> None:
    save(small_calibration, tmp_path / "c")
    asked = [verb, str(small.path), "--calibration", tmp_path / "c", *VERBS[verb], "-o", tmp_path / "made"]
    said = succeeds(*asked, "--dry-run", "3")
    assert "workers   3, 5 windows of" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]
    assert "10 workers for" in fails(*asked, "--dry-run", "10")


def test_eval_says_it_from_batches_that_it_scores(small: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a word and another " * 400)
    asked = ["eval", str(small.path), "--perplexity", tmp_path / "text.txt", "--windows", "5", "--context", "32"]
    found = measured_by_eval(
        EvalRequest(str(small.path), perplexity=(str(tmp_path / "text.txt"),), windows=5, context=32, batch=2), 2
    )
    assert found.parts == "5 windows of 32 tokens, 2 of 3 batches at most each"
    assert found.bytes_read == sum(file.stat().st_size for file in small.path.glob("*.safetensors"))
    assert found.seconds == pytest.approx(found.dealt_seconds / 2 + found.alone_seconds)
    assert "5 windows of 32 tokens" in succeeds(*asked, "--dry-run", "3")
    assert "6 workers for 5 batches" in fails(*asked, "--dry-run", "6")
    assert "leave --tasks out" in fails("eval", str(small.path), "--tasks", "hellaswag", "--dry-run", "1")


@pytest.mark.parametrize(("verb", "parts"), [("rotate", "3 blocks"), ("pack", "groups of tensors")])
def test_verbs_that_deal_blocks_say_it(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path, verb: str, parts: str
) -> None:
    save(small_calibration, tmp_path / "c")
    asked = [verb, str(small.path), "-o", tmp_path / "made"]
    asked += ["--calibration", tmp_path / "c"] if verb == "rotate" else ["--format", "f32"]
    said = succeeds(*asked, "--dry-run", "3")
    assert [line.partition(" ")[0] for line in said.splitlines()] == [
        "measured", "workers", "time", "read", "written", "memory",
    ]  # fmt: skip
    assert parts in said
    assert [*tmp_path.iterdir()] == [tmp_path / "c"]


def test_what_is_said_to_be_written_is_what_is_written(small: Checkpoint, tmp_path: Path) -> None:
    request = PackRequest(str(small.path), tmp_path / "f32.gguf", format="f32")
    found = parts_of_pack(request, 2)
    pack(request)
    assert found.bytes_written == request.output.stat().st_size
    assert found.dealt_seconds > 0
    assert found.memory_bytes > 0


def test_parts_are_shared_and_the_rest_is_not() -> None:
    values = dict.fromkeys(PartsForecast.__annotations__, 1) | {"dealt_seconds": 12.0, "alone_seconds": 3.0}
    assert [PartsForecast(**values | {"workers": count}).seconds for count in (1, 2, 4)] == [15.0, 9.0, 6.0]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["rotate", "--basis", "learnt", "--calibration"], "basis learnt trains the whole model"),
        (["pack", "--sparsity", "0.5", "--calibration"], "finds thresholds"),
        (["prune", "--keep", "2", "--of", "4", "--method", "magnitude"], "method magnitude runs no text"),
        (
            ["prune", "--keep", "2", "--of", "4", "--include", "blk.1.mlp_in", "--calibration"],
            "the first block, which is measured, is not pruned",
        ),
        (["thresholds", "--sparsity", "0.5", "--allocation", "global", "--calibration"], "trains the whole model"),
        (
            ["thresholds", "--sparsity", "0.5", "--allocation", "uniform", "--dense-upstream", "--calibration"],
            "runs no text",
        ),
    ],
)
def test_what_cannot_be_measured_by_a_block_is_refused(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path, asked: list[str], line: str
) -> None:
    save(small_calibration, tmp_path / "c")
    verb, *flags = asked
    flags += [str(tmp_path / "c")] if flags[-1] == "--calibration" else []
    assert line in fails(verb, str(small.path), *flags, "-o", tmp_path / "made", "--dry-run", "2")


def test_one_process_is_told_what_pack_does_before(
    small: Checkpoint, small_calibration: Calibration, tmp_path: Path
) -> None:
    save(small_calibration, tmp_path / "c")
    asked = ["pack", str(small.path), "--calibration", tmp_path / "c", "-o", tmp_path / "made", "--dry-run", "1"]
    rounded = ("--quantiser", "round")
    assert "--dry-run: pack finds thresholds before" in fails(*asked, "--sparsity", "0.5", *rounded)
    assert "--dry-run: pack fits weights before" in fails(*asked, "--quantiser", "gptq")


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
