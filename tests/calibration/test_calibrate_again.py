"""A calibration that was killed goes on where it stopped, and ends the same."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders_for_tests import content
from forks_for_tests import in_a_fork
from models_for_tests import TEXT
from pairwise import each_value

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.workers import state as unfinished
from sparsepack.workers.shard import Shard

OPTIONS = CalibrateOptions(context=48, samples=6)


class Killed(BaseException):
    pass


@pytest.fixture
def uninterrupted(small, text, tmp_path):
    (tmp_path / "whole").mkdir()
    calibrate(small, text, tmp_path / "whole" / "c", OPTIONS)
    return content(tmp_path / "whole" / "c")


@pytest.fixture
def blocks_read(monkeypatch):
    read = []
    load = BlockStream.load
    monkeypatch.setattr(BlockStream, "load", lambda self, layer: read.append(layer) or load(self, layer))
    return read


def _calibrate_until_killed(monkeypatch, where, name, dies, *arguments) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, dies)
        with pytest.raises(Killed):
            calibrate(*arguments, OPTIONS)


@each_value({"when": ["before its state is saved", "after its state is saved"], "block": [0, 1, 2]})
def test_a_killed_run_goes_on_and_ends_the_same(
    small, text, tmp_path, monkeypatch, uninterrupted, blocks_read, block, when
):
    save = Shard.save_block

    def dies(self, layer, *rest):
        if layer == block and when.startswith("before"):
            raise Killed
        save(self, layer, *rest)
        if layer == block:
            raise Killed

    _calibrate_until_killed(monkeypatch, Shard, "save_block", dies, small, text, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    blocks_read.clear()
    calibrate(small, text, tmp_path / "c", OPTIONS)
    assert blocks_read == list(range(block + when.startswith("after"), 3))
    assert content(tmp_path / "c") == uninterrupted
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "whole"]


def test_a_run_killed_while_it_writes_its_state_goes_on_from_the_block_before(
    small, text, tmp_path, monkeypatch, uninterrupted, blocks_read
):
    write = unfinished.write_json

    def dies(path, value):
        if value["parts"]["blocks"]["done"] == 2:
            raise Killed
        write(path, value)

    _calibrate_until_killed(monkeypatch, unfinished, "write_json", dies, small, text, tmp_path / "c")
    blocks_read.clear()
    calibrate(small, text, tmp_path / "c", OPTIONS)
    assert blocks_read == [1, 2]
    assert content(tmp_path / "c") == uninterrupted


def _ended_by_sigkill_in_block(layer: int, model: str, output: Path) -> None:
    """A fork's life: a calibration that saves the state of this block, and no more."""
    torch.set_num_threads(1)  # as the tests begin
    unfinished.SAVE_EVERY = 0.0
    save = Shard.save_block

    def dies(self, at, *rest):
        save(self, at, *rest)
        if at == layer:
            os.kill(os.getpid(), signal.SIGKILL)

    Shard.save_block = dies
    calibrate(open_checkpoint(model), Text("topics", (TEXT[:6000],), "topics"), output, OPTIONS)


@pytest.mark.long
def test_a_run_ended_by_sigkill_goes_on_and_ends_the_same(small, text, tmp_path, uninterrupted, blocks_read):
    with pytest.raises(ChildProcessError, match=f"{-signal.SIGKILL}"):
        in_a_fork(_ended_by_sigkill_in_block, 1, small.name, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    blocks_read.clear()
    calibrate(small, text, tmp_path / "c", OPTIONS)
    assert blocks_read == [2]
    assert content(tmp_path / "c") == uninterrupted


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"sinks": 2}, {"samples": 5}, {"batch": 1}, {"context": 32}, {"dtype": "bfloat16"}, {"text": 1}],
)
def test_the_state_of_other_settings_is_not_used(small, text, tmp_path, monkeypatch, blocks_read, other):
    save = Shard.save_block

    def dies(self, layer, *rest):
        save(self, layer, *rest)
        raise Killed

    _calibrate_until_killed(monkeypatch, Shard, "save_block", dies, small, text, tmp_path / "c")
    blocks_read.clear()
    changed = Text("topics", (TEXT[3000:9000],), "others") if other.pop("text", 0) else text
    calibrate(small, changed, tmp_path / "c", replace(OPTIONS, **other))
    assert blocks_read == [0, 1, 2]
