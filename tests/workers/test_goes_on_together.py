"""Pruning and rotating that one number of workers began goes on with another, to the same bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from calibrated_models import small, small_calibration, text
from folders_for_tests import content
from linked import together

from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import rotate
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.workers import state as states
from sparsepack.workers.shard import ALONE, Shard
from sparsepack.workers.state import unfinished_path

__all__ = ["small", "small_calibration", "text"]

Make = Callable[[Path, Shard], object]


class Killed(Exception):
    pass


@pytest.fixture(params=["prune", "rotate"])
def make(request: pytest.FixtureRequest, small: Checkpoint, small_calibration: Calibration, tmp_path: Path) -> Make:
    save(small_calibration, tmp_path / "c")
    if request.param == "prune":
        options = PruneOptions(keep=2, of=4, method="wanda", windows=5, batch=1)
        return lambda output, shard: prune(small.path, output, options, tmp_path / "c", shard=shard)
    return lambda output, shard: rotate(
        small.path, tmp_path / "c", output, RotateOptions("pca", segments=2), shard=shard
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), *(pytest.param(*counts, marks=pytest.mark.long) for counts in ((1, 2), (3, 1)))],
)
def test_another_number_of_workers_goes_on(
    make: Make, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "alone", ALONE)
    monkeypatch.setattr(states, "SAVE_EVERY", 0.0)
    save_block, begun = Shard.save_block, []

    def dies(self: Shard, layer: int, *rest: object, **values: object) -> None:
        if layer == 1:
            raise Killed
        save_block(self, layer, *rest, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "save_block", dies)
        assert all(isinstance(each, Exception) for each in together(before, lambda some: make(tmp_path / "made", some)))
    assert not (tmp_path / "made").exists()
    assert (unfinished_path(tmp_path / "made") / "state.json").exists()

    def from_there(self: Shard, layer: int, *rest: object, **values: object) -> None:
        begun.append(layer)
        save_block(self, layer, *rest, **values)

    monkeypatch.setattr(Shard, "save_block", from_there)
    for each in together(after, lambda some: make(tmp_path / "made", some)):
        assert not isinstance(each, Exception), each
    assert min(begun) == 1
    assert content(tmp_path / "made") == content(tmp_path / "alone")
