"""What a calibration says of tokens that attention misses: counted, merged, shown."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.statistics import MEASURED, missed
from sparsepack.cli.commands.inspect import inspect
from sparsepack.errors import CalibrationError

OPTIONS = CalibrateOptions(context=40, samples=5, sinks=3)
NAMES = ("missed", "missed_positions")


def test_what_is_missed_grows_with_fewer_tokens(tiny_calibration):
    for layer in missed(tiny_calibration):
        assert len(layer) == len(MEASURED)
        assert 0 < layer[0] < layer[1] < layer[2] < layer[3] < 1


def test_merged_calibrations_have_the_means_of_both(small, text, small_calibration, tmp_path):
    other = calibrate(small, text, tmp_path / "c", CalibrateOptions(context=64, samples=3, seed=1))
    merged = folder.merge(small_calibration, other)
    for name in NAMES:
        parts = [each.layers[1][f"attention.{name}"] for each in (small_calibration, other, merged)]
        assert torch.equal(parts[0] + parts[1], parts[2])
    assert missed(merged)[1][0] == pytest.approx((8 * missed(small_calibration)[1][0] + 3 * missed(other)[1][0]) / 11)


@pytest.mark.parametrize(
    ("name", "value"),
    [("missed_positions", [0.0] * 4), ("missed", [5e9] * 4)],
)
def test_what_is_no_mean_of_shares_is_refused(small_calibration, name, value):
    changed = {f"attention.{name}": torch.tensor(value, dtype=torch.float64)}
    layers = (small_calibration.layers[0] | changed, *small_calibration.layers[1:])
    with pytest.raises(CalibrationError, match=r"of block 0 is no mean of shares; calibrate again"):
        missed(replace(small_calibration, layers=layers))


@pytest.mark.parametrize("value", [torch.zeros(3, dtype=torch.float64), torch.full((4,), -1.0, dtype=torch.float64)])
def test_a_folder_with_counts_that_are_none_is_refused(small_calibration, tmp_path, value):
    layers = (small_calibration.layers[0] | {"attention.missed": value}, *small_calibration.layers[1:])
    folder.save(replace(small_calibration, layers=layers), tmp_path / "c")
    with pytest.raises(CalibrationError, match=r"attention\.missed is .*calibrate again"):
        folder.load(tmp_path / "c")


def test_inspect_shows_it_beside_the_channels(small_calibration, tmp_path):
    folder.save(small_calibration, tmp_path / "c")
    told = CliRunner().invoke(inspect, [str(tmp_path / "c")])
    head, row = [line for line in told.output.splitlines() if line.startswith("| ")][:2]
    assert "| 1/4 misses | 1/8 misses | 1/16 misses | 1/32 misses |" in head
    assert row.count("|") == head.count("|")
    written = json.loads(CliRunner().invoke(inspect, [str(tmp_path / "c"), "--json", "-"]).output)["attention_tokens"]
    assert written["shares"] == ["1/4", "1/8", "1/16", "1/32"]
    assert [row["missed"] for row in written["layers"]] == [list(layer) for layer in missed(small_calibration)]
