"""Folders of calibrations: read back, merged, damaged, replaced."""

import json
from dataclasses import replace

import pytest
import torch
from folders_for_tests import content
from models_for_tests import make_model
from safetensors.torch import load_file, save_file

from sparsepack.calibrate import collection as run
from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import Calibration
from sparsepack.errors import CalibrationError, OutputError
from sparsepack.files.hashing import sha256_file
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

OPTIONS = CalibrateOptions(context=48, samples=6)


def test_a_calibration_is_read_back_as_it_was(small_calibration, tmp_path):
    again = folder.load(folder.save(small_calibration, tmp_path / "c") and tmp_path / "c")
    assert again.sha256 == small_calibration.sha256
    assert torch.equal(again.windows, small_calibration.windows)
    assert torch.equal(again.held_out, small_calibration.held_out)
    assert len(again.held_out) == again.manifest["tokens"]["held_out"] == 8
    for one, other in zip(again.layers, small_calibration.layers, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def _sharded(monkeypatch, small, text, tmp_path, parts) -> list[Calibration]:
    """Calibrations of slices of the same windows, each with a text name of its own."""
    windows, held_out = run.chosen_windows(small, text, OPTIONS)
    made = []
    for number, part in enumerate(parts):
        with monkeypatch.context() as patch:
            patch.setattr(run, "chosen_windows", lambda *_, part=part: (windows[part], held_out))
            shard = replace(text, name=f"part {number}", sha256=str(number))
            made.append(calibrate(small, shard, tmp_path / f"part {number}", OPTIONS))
    return made


def test_merged_shards_are_one_run_bit_for_bit_in_the_counts(small, text, tmp_path, monkeypatch):
    parts = _sharded(monkeypatch, small, text, tmp_path, [slice(0, 4), slice(4, 6), slice(0, 6)])
    merged, whole = folder.merge(parts[0], parts[1]), parts[2]
    for ours, theirs in zip(merged.layers, whole.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if ".histogram." in name:
                assert value.dtype == torch.int64
                assert torch.equal(value, theirs[name]), name
            else:
                torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=0)
    assert torch.equal(merged.windows, whole.windows)
    assert torch.equal(merged.held_out, whole.held_out)
    assert {**merged.manifest["tokens"]} == {**whole.manifest["tokens"]}
    assert [t["name"] for t in merged.manifest["texts"]] == ["part 0", "part 1"]
    folder.save(merged, tmp_path / "merged")
    assert folder.load(tmp_path / "merged").sha256 not in {part.sha256 for part in parts}


def test_a_merged_calibration_holds_out_nothing_that_one_of_both_has_counted(small, text, tmp_path):
    """Of one text, by two seeds."""
    one, other = (
        calibrate(small, replace(text, sha256=str(seed)), tmp_path / str(seed), replace(OPTIONS, samples=12, seed=seed))
        for seed in (0, 1)
    )
    merged = folder.merge(one, other)
    counted = {tuple(row) for row in merged.windows.tolist()}
    rows = [tuple(row[:-1]) for row in merged.held_out.tolist()]
    assert 0 < len(rows) == merged.manifest["tokens"]["held_out"] < 16
    assert len(set(rows)) == len(rows)
    assert not counted & set(rows)


def test_a_calibration_from_before_has_no_windows_held_out(small_calibration, tmp_path):
    tokens = {name: value for name, value in small_calibration.manifest["tokens"].items() if name != "held_out"}
    old = replace(
        small_calibration,
        manifest={**small_calibration.manifest, "tokens": tokens},
        held_out=small_calibration.held_out[:0],
    )
    folder.save(old, tmp_path / "old")
    again = folder.load(tmp_path / "old")
    assert again.held_out.shape == (0, 64)
    other = replace(small_calibration, manifest={**small_calibration.manifest, "statistics_sha256": "other"})
    assert torch.equal(folder.merge(again, other).held_out, small_calibration.held_out)


def test_other_windows_held_out_than_the_manifest_counts_are_refused(small_calibration, tmp_path):
    folder.save(replace(small_calibration, held_out=small_calibration.held_out[:3]), tmp_path / "c")
    with pytest.raises(CalibrationError, match=r"held_out is torch.int32 \[3, 64\], expected int32 \[8, 64\]"):
        folder.load(tmp_path / "c")


@pytest.mark.parametrize("change", [lambda ids: ids.long(), lambda ids: ids[0], lambda ids: ids[:0]])
def test_windows_that_hold_no_tokens_are_refused(small_calibration, tmp_path, change):
    folder.save(small_calibration, tmp_path / "c")
    path = tmp_path / "c" / "calibration.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "windows": change(tensors["windows"])}, path)
    _edited(tmp_path / "c" / "calibration.json", lambda value: value.update(statistics_sha256=sha256_file(path)))
    with pytest.raises(CalibrationError, match=r"windows are torch.int.*, expected int32 \[windows, context\]"):
        folder.load(tmp_path / "c")


def test_what_cannot_be_merged_is_refused(small, text, tmp_path, small_calibration, monkeypatch):
    one, other = _sharded(monkeypatch, small, text, tmp_path, [slice(0, 2), slice(2, 4)])
    both = folder.merge(one, other)
    for first, second in ((one, one), (both, one), (both, other), (one, both)):
        with pytest.raises(CalibrationError, match="every token would count twice"):
            folder.merge(first, second)
    with pytest.raises(CalibrationError, match=r"tokens\.context is 48 in the first and 64 in the second"):
        folder.merge(one, small_calibration)
    model = make_model(tmp_path / "model", "qwen2", num_hidden_layers=3, seed=5)
    foreign = calibrate(open_checkpoint(model), text, tmp_path / "foreign", OPTIONS)
    with pytest.raises(CalibrationError, match=r"model\.sha256 is"):
        folder.merge(one, foreign)


def test_a_calibration_of_another_model_is_refused(tiny, small_calibration):
    with pytest.raises(CalibrationError, match="calibrate this model") as caught:
        small_calibration.check_model(tiny)
    assert small_calibration.manifest["model"]["name"] in str(caught.value)


def _edited(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_damaged_calibration_is_refused(small_calibration, tmp_path):
    path = tmp_path / "c"

    def fresh():
        return folder.save(small_calibration, path, overwrite=True)

    def refused() -> str:
        with pytest.raises(CalibrationError) as caught:
            folder.load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    fresh()
    statistics, manifest = path / "calibration.safetensors", path / "calibration.json"
    data = bytearray(statistics.read_bytes())
    data[-1] ^= 1
    statistics.write_bytes(data)
    assert "changed since it was written" in refused()
    statistics.unlink()
    assert "missing or changed" in refused()
    fresh()
    _edited(manifest, lambda value: value.update(schema=2))
    assert "schema 2; this sparsepack reads schema 1" in refused()
    fresh()
    _edited(manifest, lambda value: value["model"].update(layers=9))
    assert "damaged" in refused()
    fresh()
    _edited(manifest, lambda value: value["model"].update(layers="many"))
    assert "damaged" in refused()
    fresh()
    _edited(manifest, lambda value: value.pop("model"))
    assert "damaged" in refused()
    fresh()
    _edited(manifest, lambda value: value["versions"].update(torch="\ud800"))
    assert "damaged" in refused()
    manifest.write_text("{")
    assert "damaged" in refused()
    manifest.unlink()
    assert "no calibration.json in it" in refused()


@pytest.mark.parametrize("lost", ["calibration.json", "calibration.safetensors"])
def test_a_calibration_that_lost_a_file_is_replaced(small_calibration, tmp_path, lost):
    folder.save(small_calibration, tmp_path / "c")
    whole = content(tmp_path / "c")
    (tmp_path / "c" / lost).unlink()
    folder.save(small_calibration, tmp_path / "c", overwrite=True)
    assert content(tmp_path / "c") == whole


def test_a_calibration_that_stood_aside_when_its_run_was_killed_is_read(small_calibration, tmp_path):
    (tmp_path / ".c.replaced").mkdir()
    (tmp_path / ".c.replaced" / "sparsepack-replaces").touch()
    folder.save(small_calibration, tmp_path / ".c.replaced" / "replaced")
    assert torch.equal(folder.load(tmp_path / "c").windows, small_calibration.windows)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_overwriting_replaces_calibrations_only(small, text, small_calibration, tmp_path):
    precious = tmp_path / "work"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match=r"without calibration\.json; it is not replaced"):
        calibrate(small, text, precious, OPTIONS, overwrite=True)
    with pytest.raises(OutputError, match=r"without calibration\.json; it is not replaced"):
        folder.save(small_calibration, precious, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years"
    folder.save(small_calibration, tmp_path / "c")
    with pytest.raises(OutputError, match="exists already"):
        calibrate(small, text, tmp_path / "c", OPTIONS)
    calibrate(small, text, tmp_path / "c", OPTIONS, overwrite=True)
    assert folder.load(tmp_path / "c").manifest["tokens"]["context"] == 48
