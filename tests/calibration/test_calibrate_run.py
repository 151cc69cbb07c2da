"""One pass over text: what is counted, and what is refused."""

from dataclasses import replace

import pytest
import torch
from folders_for_tests import content
from simulated_graph import SimulatedRecorder

from sparsepack.calibrate import collection as run
from sparsepack.calibrate import collector as kernels
from sparsepack.calibrate import collectors as residual
from sparsepack.calibrate import histogram
from sparsepack.calibrate.collect import CalibrateOptions, calibration_table
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.collector import column_norms
from sparsepack.errors import CalibrationError, TextError
from sparsepack.files.text import Text
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.fused import OWN_CODE, apply_rope_by_torch
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.tokenizer.windows import rolling_windows

OPTIONS = CalibrateOptions(context=48, samples=6)


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
                norms = column_norms(block, small.family, site)
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


def test_samples_are_drawn_by_the_seed_and_all_windows_in_order(small, text):
    every = run.chosen_windows(small, text, replace(OPTIONS, samples=0, held_out=0))[0]
    drawn = [run.chosen_windows(small, text, replace(OPTIONS, seed=seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(every, rolling_windows(small.tokenizer, text, 48)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0]) == 6
    rows = {tuple(row) for row in every.tolist()}
    assert all(tuple(row) in rows for row in drawn[2].tolist())


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
    monkeypatch.setattr(run, "drawn_windows", lambda *_: (beyond, beyond[:0]))
    with pytest.raises(TextError, match="token 512 is beyond the model's vocabulary of 512"):
        calibrate(small, text, tmp_path / "c", OPTIONS)


@pytest.mark.parametrize(("samples", "batch"), [(18, 1), (7, 2)])
def test_a_recorded_run_of_a_block_counts_what_its_own_runs_count(small, text, tmp_path, monkeypatch, samples, batch):
    """With parts of two batches and of one, and a last batch that is smaller."""
    options = replace(OPTIONS, samples=samples, batch=batch)
    expected = calibrate(small, text, tmp_path / "expected", options)
    recorder, runs = SimulatedRecorder(), []
    call = BlockStream.__call__
    monkeypatch.setattr(run, "recorder_on", lambda _: recorder)
    monkeypatch.setattr(BlockStream, "__call__", lambda self, x: runs.append(x) or call(self, x))
    found = calibrate(small, text, tmp_path / "found", options)
    for here, there in zip(found.layers, expected.layers, strict=True):
        assert here.keys() == there.keys()
        assert [name for name in here if not torch.equal(here[name], there[name])] == []
    assert content(tmp_path / "found") == content(tmp_path / "expected")
    batches, smaller = -(-samples // batch), samples % batch > 0
    assert recorder.recorded == small.layers
    assert recorder.repeated == small.layers * (batches - 1 - smaller)
    assert len(runs) == small.layers * (2 + smaller)


def test_parts_that_are_done_at_once_change_no_bit(small, text, tmp_path, monkeypatch):
    """Under watched attention and the hooks of sites, in the type that kernels are for."""
    options = replace(OPTIONS, dtype="bfloat16")
    calibrate(small, text, tmp_path / "stock", options)
    ran = []

    def apply_rope(query, key, *angles):
        ran.append("heads")
        return apply_rope_by_torch(query, *angles), apply_rope_by_torch(key, *angles)

    def silu_times(gate, up):
        ran.append("gate")
        return torch.nn.functional.silu(gate) * up

    parts = replace(OWN_CODE, apply_rope=apply_rope, silu_times=silu_times)
    monkeypatch.setattr(run, "parts_on", lambda _: parts)
    calibrate(small, text, tmp_path / "parts", options)
    assert ran == ["heads", "gate"] * 3 * small.layers
    assert content(tmp_path / "parts") == content(tmp_path / "stock")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_a_gpu_counts_the_same_with_kernels_for_parts_and_with_a_recorded_run(
    small, text, tmp_path, monkeypatch, batch
):
    """To the last bit; kernels for norms may add in another order than stock code, so they are left out at first."""
    options = replace(OPTIONS, samples=20, batch=batch, device="cuda", dtype="bfloat16")
    every = kernels.parts_on(torch.device("cuda"))
    assert every is not None
    rows = {"stock": None, "parts": replace(every, norm_rows=OWN_CODE.norm_rows), "norms": every, "recorded": every}
    for name, parts in rows.items():
        with monkeypatch.context() as patch:
            if name != "recorded":
                patch.setattr(run, "recorder_on", lambda _: None)
            patch.setattr(run, "parts_on", lambda _, parts=parts: parts)
            patch.setattr(residual, "parts_on", lambda _, parts=parts: parts)
            calibrate(small, text, tmp_path / name, options)
    assert content(tmp_path / "parts") == content(tmp_path / "stock")
    assert content(tmp_path / "recorded") == content(tmp_path / "norms")
