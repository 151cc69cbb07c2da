"""The table of collectors: what a row of it brings is counted, kept, read back and merged, without a line elsewhere."""

from dataclasses import replace

import pytest
import torch

from sparsepack.calibrate import collectors, folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.collector import Collector
from sparsepack.errors import CalibrationError

OPTIONS = CalibrateOptions(context=32, samples=4, sinks=2)
LARGEST = Collector(
    "site", ("largest",), torch.float32, (0,), lambda site: (site.x.abs().amax((0, 1)).cpu(),), torch.maximum
)


def test_no_two_collectors_write_one_tensor():
    for of_site in (True, False):
        names = [name for row in collectors.COLLECTORS if (row.at == "site") == of_site for name in row.names]
        assert len(names) == len(set(names))


def test_a_new_row_is_counted_kept_and_merged(small, text, tmp_path, monkeypatch):
    monkeypatch.setattr(collectors, "COLLECTORS", (*collectors.COLLECTORS, LARGEST))
    one = calibrate(small, text, tmp_path / "one", OPTIONS)
    calibrate(small, replace(text, sha256="again"), tmp_path / "other", replace(OPTIONS, seed=1, batch=1))
    both = folder.merge_folders(tmp_path / "one", tmp_path / "other", tmp_path / "both")
    parts = [folder.load(tmp_path / name).layers[2]["mlp_mid.largest"] for name in ("one", "other")]
    assert torch.equal(parts[0], one.layers[2]["mlp_mid.largest"])
    assert torch.equal(both.layers[2]["mlp_mid.largest"], torch.maximum(*parts))


def test_a_folder_without_what_a_collector_counts_is_refused(small, text, tmp_path, monkeypatch):
    calibrate(small, text, tmp_path / "c", OPTIONS)
    monkeypatch.setattr(collectors, "COLLECTORS", (*collectors.COLLECTORS, LARGEST))
    with pytest.raises(CalibrationError, match=r"layers\.0\.attn_in\.largest.*calibrate again"):
        folder.load(tmp_path / "c")
