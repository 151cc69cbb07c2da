"""What bounds a stage is said from measured times."""

import math

import pytest
import torch

from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import bound_line
from sparsepack.workers import shard as shards
from sparsepack.workers.shard import ALONE


@pytest.mark.parametrize(
    ("read", "moved", "waited", "saved", "told"),
    [
        (
            50.0,
            50.0,
            2.0,
            1.0,
            "bound by arithmetic: arithmetic 1 min 37 sPRODUCTS, waiting for blocks 2 s",
        ),
        (
            60.0,
            20.0,
            80.0,
            1.0,
            "bound by the disk: arithmetic 19 sPRODUCTS, waiting for blocks 1 min 20 s",
        ),
        (20.0, 60.0, 80.0, 1.0, "bound by memory: arithmetic 19 s"),
        (1.0, 1.0, 1.0, 60.0, "bound by the disk: arithmetic 39 s"),
        (
            0.0,
            0.0,
            0.0,
            0.0,
            "bound by arithmetic: arithmetic 1 min 40 sPRODUCTS, waiting for blocks 0 s",
        ),
    ],
)
def test_what_took_most_is_what_bounds(read: float, moved: float, waited: float, saved: float, told: str) -> None:
    stream = BlockStream(open_checkpoint("shipped:tiny"))
    ahead = stream.ahead
    ahead.read_seconds, ahead.moved_seconds, ahead.waited_seconds = read, moved, waited
    ahead.read_bytes = 5_000_000_000
    line = bound_line(stream, 100.0, saved)
    assert line.startswith(f"1 min 40 s, {told.replace('PRODUCTS', ' (products at 0 TFLOP/s)')}")
    assert "\n" not in line
    if read == 50.0:
        assert "read 5.00 GB at 0.1 GB/s" in line


def test_short_work_says_nothing_and_long_work_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard, bound = ALONE.resume("", 2), lambda seconds, saving: "all is well"
    with shard.blocks("calibrating", bound=bound) as (unfinished, _):
        assert [*unfinished] == [0, 1]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shards, "EVERY", 0.0)
    with shard.blocks("calibrating", bound=bound):
        pass
    assert capsys.readouterr().err == "calibrating: all is well\n"


def test_operations_are_those_of_tokens_with_the_weights_of_blocks() -> None:
    checkpoint = open_checkpoint("shipped:tiny")
    stream = BlockStream(checkpoint)
    for layer in range(2):
        stream.load(layer)
        stream.pass_on(torch.zeros(3, 5, checkpoint.config.hidden_size), 2, lambda: None)
    stream.unload()
    weights = sum(math.prod(checkpoint.stacked_shape(site, 0)) for site in SITES)
    told = bound_line(stream, 1e-3 * weights, 0.0)
    assert f"(products at {2 * 2 * 3 * 5 / 1e-3 / 1e12:.3g} TFLOP/s)" in told
