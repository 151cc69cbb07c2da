"""One pass over text: what is counted, going on after a kill, and merging."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from models_for_tests import TEXT, make_model

from sparsepack.calibration import folder, run
from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.criteria import column_norms
from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.cli.tables.manifests import calibration_table
from sparsepack.errors import CalibrationError, OutputError, TextError
from sparsepack.files import resume as unfinished
from sparsepack.files.resume import ResumeState
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.whole import load_model
from sparsepack.models.tokenizer.windows import rolling_windows

OPTIONS = CalibrateOptions(context=48, samples=6)


def content(path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}


def test_the_manifest_states_the_types_of_weights_and_arithmetic_and_the_default_is_float32s_numbers(
    small, text, tmp_path
):
    made = {
        dtype: calibrate(small, text, tmp_path / dtype, replace(OPTIONS, dtype=dtype))
        for dtype in ("auto", "float32", "bfloat16")
    }
    assert OPTIONS.dtype == "auto"
    assert made["auto"].manifest["compute"] == {"device": "cpu", "dtype": "float32", "weights": "bfloat16", "batch": 2}
    assert content(tmp_path / "auto") == content(tmp_path / "float32")
    assert made["bfloat16"].manifest["compute"]["dtype"] == "bfloat16"
    assert "float32 on cpu; weights stored in bfloat16" in calibration_table(made["auto"].manifest)
    for statistics in made["bfloat16"].layers:
        kinds = {value.dtype for value in statistics.values()}
        assert kinds == {torch.int64, torch.float64}, "sums are exact whatever the blocks are computed in"


def test_hidden_states_of_all_windows_exist_once(small, text, tmp_path, monkeypatch):
    """Each block's outputs take the place of its inputs."""
    places = []
    call = BlockStream.__call__
    monkeypatch.setattr(BlockStream, "__call__", lambda self, x: places.append(x.data_ptr()) or call(self, x))
    calibrate(small, text, tmp_path / "c", OPTIONS)
    batches = len(places) // small.layers
    assert batches == 3
    assert places == places[:batches] * small.layers


def test_statistics_are_those_of_the_stock_model_without_the_sinks(small, text, tmp_path):
    """Counts, second moments and attention sums, against hooks on the whole model."""
    made = calibrate(small, text, tmp_path / "c", replace(OPTIONS, sinks=3))
    model, seen = load_model(small), {}
    blocks = list(enumerate(model.model.layers))
    queries = []
    for block in model.model.layers:
        block.self_attn.q_proj.register_forward_hook(lambda _, __, output: queries.append(output))
    with torch.inference_mode():
        with site_hooks(blocks, small.family, lambda layer, site, x: seen.update({(layer, site): x[:, 3:]})):
            model.model(made.windows.long())
        for layer, block in blocks:
            for site in SITES:
                statistics, x = made.layers[layer], seen[layer, site]
                norms = column_norms(block, small.family.projections[site])
                for name, values in (("magnitude", x.abs()), ("column-norm", x.abs() * norms)):
                    counts = statistics[f"{site}.histogram.{name}"]
                    assert int(counts.sum()) == x.numel()
                    # Batched products may differ in the last bit: a few values cross a bin's edge.
                    assert (counts - histogram.count(values)).abs().sum() < 0.01 * x.numel()
                moment = x.double().square().flatten(0, 1).sum(0)
                torch.testing.assert_close(statistics[f"{site}.second_moment"], moment, rtol=1e-4, atol=1e-6)
    # Rotation keeps the length of a pair of channels, whatever the position.
    query = queries[0].unflatten(-1, (4, 64))[:, 3:].double().square().sum((0, 1))
    found = made.layers[0]["attention.query_square"]
    assert found.shape == query.shape == (4, 64)
    torch.testing.assert_close(found[:, :32] + found[:, 32:], query[:, :32] + query[:, 32:], rtol=1e-4, atol=1e-6)
    assert made.layers[0]["attention.key_abs"].shape == (2, 64)


def test_the_manifest_says_what_was_run(small, text, tmp_path):
    made = calibrate(small, text, tmp_path / "c", OPTIONS)
    tokens = made.manifest["tokens"]
    # Without a BOS a window of 48 tokens has 47 positions.
    assert (tokens["windows"], tokens["run"], tokens["counted"], tokens["sinks_left_out"]) == (6, 282, 258, 24)
    assert made.manifest["model"]["sha256"] == small.sha256
    assert made.manifest["texts"] == [{"name": "topics", "sha256": "topics", "documents": 1}]
    assert {"torch", "transformers"} <= set(made.manifest["versions"])
    assert sorted(content(tmp_path / "c")) == ["calibration.json", "calibration.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_calibration_is_read_back_as_it_was(small_calibration, tmp_path):
    again = folder.load(folder.save(small_calibration, tmp_path / "c") and tmp_path / "c")
    assert again.sha256 == small_calibration.sha256
    assert torch.equal(again.windows, small_calibration.windows)
    for one, other in zip(again.layers, small_calibration.layers, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_samples_are_drawn_by_the_seed_and_all_windows_in_order(small, text):
    every = run._chosen_windows(small, text, replace(OPTIONS, samples=0))
    drawn = [run._chosen_windows(small, text, replace(OPTIONS, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(every, rolling_windows(small.tokenizer, text, 48)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0]) == 6
    rows = {tuple(row) for row in every.tolist()}
    assert all(tuple(row) in rows for row in drawn[2].tolist())


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


@pytest.mark.parametrize("when", ["before its state is saved", "after its state is saved"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_killed_run_goes_on_and_ends_the_same(
    small, text, tmp_path, monkeypatch, uninterrupted, blocks_read, block, when
):
    save = ResumeState.save_block

    def dies(self, layer, *rest):
        if layer == block and when.startswith("before"):
            raise Killed
        save(self, layer, *rest)
        if layer == block:
            raise Killed

    _calibrate_until_killed(monkeypatch, ResumeState, "save_block", dies, small, text, tmp_path / "c")
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


_CHILD = """
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(int(sys.argv[3]))
from models_for_tests import TEXT
from sparsepack.calibration import run
from sparsepack.files.resume import ResumeState
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
save = ResumeState.save_block
def dies(self, layer, *rest):
    save(self, layer, *rest)
    if layer == 1:
        os.kill(os.getpid(), signal.SIGKILL)
ResumeState.save_block = dies
text = Text("topics", (TEXT[:6000],), "topics")
run.calibrate(open_checkpoint(sys.argv[1]), text, Path(sys.argv[2]), run.CalibrateOptions(context=48, samples=6))
"""


def test_a_run_ended_by_sigkill_goes_on_and_ends_the_same(small, text, tmp_path, uninterrupted, blocks_read):
    path = os.pathsep.join(sys.path)
    arguments = [small.name, str(tmp_path / "c"), str(torch.get_num_threads())]
    child = subprocess.run([sys.executable, "-c", _CHILD, *arguments], env={**os.environ, "PYTHONPATH": path})
    assert child.returncode == -signal.SIGKILL
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
    save = ResumeState.save_block

    def dies(self, layer, *rest):
        save(self, layer, *rest)
        raise Killed

    _calibrate_until_killed(monkeypatch, ResumeState, "save_block", dies, small, text, tmp_path / "c")
    blocks_read.clear()
    changed = Text("topics", (TEXT[3000:9000],), "others") if other.pop("text", 0) else text
    calibrate(small, changed, tmp_path / "c", replace(OPTIONS, **other))
    assert blocks_read == [0, 1, 2]


def _sharded(monkeypatch, small, text, tmp_path, parts) -> list[Calibration]:
    """Calibrations of slices of the same windows, each with a text name of its own."""
    windows = run._chosen_windows(small, text, OPTIONS)
    made = []
    for number, part in enumerate(parts):
        with monkeypatch.context() as patch:
            patch.setattr(run, "_chosen_windows", lambda *_, part=part: windows[part])
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
    assert {**merged.manifest["tokens"]} == {**whole.manifest["tokens"]}
    assert [t["name"] for t in merged.manifest["texts"]] == ["part 0", "part 1"]
    folder.save(merged, tmp_path / "merged")
    assert folder.load(tmp_path / "merged").sha256 not in {part.sha256 for part in parts}


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
    folder.save(small_calibration, tmp_path / ".c.replaced")
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 4}, "context > sinks"),
        ({"context": 5}, "without a BOS token a window has 4 positions"),
        ({"context": 1, "sinks": 0}, "context 1: expected at least 2"),
        ({"context": 513}, "made for at most 512"),
        ({"sinks": -1}, "sinks -1"),
        ({"samples": -1}, "samples -1"),
        ({"batch": 0}, "batch 0"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(small, text, tmp_path, changes, message):
    with pytest.raises(CalibrationError, match=message) as caught:
        calibrate(small, text, tmp_path / "c", replace(OPTIONS, **changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_text_that_is_too_short_is_refused(small, tmp_path):
    with pytest.raises(TextError, match="fewer than one window"):
        calibrate(small, Text("short", ("A few words.",), ""), tmp_path / "c", OPTIONS)


def test_a_token_beyond_the_vocabulary_is_refused(small, text, tmp_path, monkeypatch):
    beyond = torch.full((6, 47), 512)
    monkeypatch.setattr(run, "drawn_windows", lambda *_: beyond)
    with pytest.raises(TextError, match="token 512 is beyond the model's vocabulary of 512"):
        calibrate(small, text, tmp_path / "c", OPTIONS)
