"""Traces: who is active against the stock model, kept, read back, merged; what is damaged or foreign is refused."""

import json
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from models_for_tests import TEXT, make_model

from sparsepack.calibrate import trace_file as traces
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace
from sparsepack.cli.app import main
from sparsepack.errors import CalibrationError, OutputError, PlacementError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.tokenizer.windows import rolling_windows, session_windows
from sparsepack.workers.shard import Shard

OPTIONS = TraceOptions(sessions=3, tokens=48, prompt=8)


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def products(checkpoint, ids):
    """act(gate) * up of the stock model: of each block [sessions, tokens, neurons]."""
    model, found = load_model(checkpoint), {}
    for layer, block in enumerate(model.model.layers):
        block.mlp.down_proj.register_forward_pre_hook(lambda _, inputs, n=layer: found.update({n: inputs[0]}))
    with torch.inference_mode():
        model.model(torch.from_numpy(ids).long())
    return [found[layer].numpy() for layer in range(checkpoint.layers)]


def test_active_are_those_whose_activation_times_up_is_not_zero_in_the_stock_model(relu, traced):
    ids = np.stack([traced.ids(session) for session in range(3)])
    for layer, expected in enumerate(products(relu, ids)):
        found = np.stack([traced.active(session, layer) for session in range(3)])
        assert found.shape == expected.shape == (3, 47, 500)
        # Batched products may differ in the last bit: hardly ever on which side of zero.
        assert (found != (expected != 0)).sum() <= 3
        assert 0.2 < found.mean() < 0.8
    assert np.array_equal(traced.session(1)[:, 500:1000], traced.active(1, 1))


def test_sessions_are_from_the_middles_of_documents(relu, texts, traced):
    for session, document in zip(range(3), (0, 2, 3), strict=True):
        ids = relu.tokenizer(texts.documents[document], add_special_tokens=False)["input_ids"]
        start = (len(ids) - 48) // 2
        assert traced.ids(session).tolist() == ids[start : start + 47]
        assert traced.manifest["sessions"][session] == {"text": 0, "document": document, "tokens": 47, "prompt": 8}


def test_where_documents_are_too_few_sessions_are_spread_over_the_text(relu, texts):
    windows, documents = session_windows(relu.tokenizer, texts, 48, 5)
    every = rolling_windows(relu.tokenizer, texts, 48)[0]
    assert documents == [None] * 5
    assert windows[0].tolist() == every[0].tolist()
    assert windows[4].tolist() == every[-1].tolist()
    alone = Text("one", (TEXT[:3000],), "one")
    assert session_windows(relu.tokenizer, alone, 48, 1)[1] == [0]


def test_of_many_documents_those_evenly_spread_are_taken(relu):
    many = Text("many", tuple(TEXT[n * 300 : n * 300 + 300] for n in range(20)), "many", count=20)
    assert session_windows(relu.tokenizer, many, 32, 4)[1] == [0, 5, 10, 15]


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_bit_sets_are_read_as_they_were_written(tmp_path_factory, neurons, tokens, seed):
    active = np.random.default_rng(seed).random((tokens, neurons)) < 0.3
    path = tmp_path_factory.mktemp("bits") / "t"
    manifest = {"model": {"layers": 1}, "intermediate": neurons, "sessions": [{"tokens": tokens, "prompt": 0}]}
    ids = np.arange(tokens)
    files = {traces.ids_file(0): traces.packed_ids(ids), traces.layer_file(0, 0): traces.packed_bits(active)}
    made = traces.save(manifest, files.items(), path)
    assert np.array_equal(made.active(0, 0), active)
    assert np.array_equal(made.ids(0), ids)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("block", [0, 2])
def test_a_killed_run_goes_on_and_ends_the_same(relu, texts, traced, tmp_path, monkeypatch, block):
    save = Shard.save_block

    def dies(self, layer, *rest):
        save(self, layer, *rest)
        if layer == block:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "save_block", dies)
        with pytest.raises(Killed):
            trace(relu, texts, tmp_path / "t", OPTIONS)
    assert not (tmp_path / "t").exists()
    run = []
    monkeypatch.setattr(Shard, "save_block", lambda self, *rest: run.append(rest[0]) or save(self, *rest))
    trace(relu, texts, tmp_path / "t", OPTIONS)
    assert run == list(range(block + 1, 3))
    assert content(tmp_path / "t") == content(traced.path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_a_trace_of_larger_batches_has_the_same_bits(relu, texts, traced, tmp_path):
    other = trace(relu, texts, tmp_path / "t", replace(OPTIONS, batch=3))
    assert (other.session(2) != traced.session(2)).sum() <= 3


@pytest.fixture
def silu(tmp_path):
    return open_checkpoint(make_model(tmp_path / "silu", "qwen2", num_hidden_layers=2))


def test_a_model_whose_neurons_are_never_zero_is_refused(silu, texts, tmp_path):
    with pytest.raises(
        PlacementError, match=r"100\.0% of the neurons of block 0 .*silu.*--share and --calib"
    ) as caught:
        trace(silu, texts, tmp_path / "t", OPTIONS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_a_share_of_them_is_traced_by_the_thresholds_of_a_calibration(silu, texts, tmp_path, relu):
    made = calibrate(silu, texts, tmp_path / "c", CalibrateOptions(context=48, samples=0))
    found = trace(silu, texts, tmp_path / "t", replace(OPTIONS, share=0.4), made)
    thresholds = found.manifest["rule"]["thresholds"]
    ids = np.stack([found.ids(session) for session in range(3)])
    for layer, product in enumerate(products(silu, ids)):
        expected = np.abs(product) > thresholds[layer]
        active = np.stack([found.active(session, layer) for session in range(3)])
        assert (active != expected).sum() <= 3
        assert active.mean() == pytest.approx(0.4, abs=0.03)
    told = CliRunner().invoke(main, ["inspect", str(tmp_path / "t")]).output
    assert "active: above a threshold that 40 % pass" in told
    nearly_all = trace(silu, texts, tmp_path / "n", replace(OPTIONS, share=0.998), made)
    assert nearly_all.active(0, 0).mean() > 0.99
    with pytest.raises(PlacementError, match=r"--share 0\.4: its thresholds come from a calibration"):
        trace(silu, texts, tmp_path / "u", replace(OPTIONS, share=0.4))
    with pytest.raises(PlacementError, match="for the thresholds of --share alone"):
        trace(silu, texts, tmp_path / "u", OPTIONS, made)
    with pytest.raises(CalibrationError, match="calibrate this model"):
        trace(relu, texts, tmp_path / "u", replace(OPTIONS, share=0.4), made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 47}, "nothing would be decoded"),
        ({"sessions": 0}, "sessions 0: expected at least 1"),
        ({"share": 1.0}, r"share 1\.0: expected above 0 and below 1"),
        ({"tokens": 513}, "was made for at most 512"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(relu, texts, tmp_path, changes, message):
    with pytest.raises(PlacementError, match=message) as caught:
        trace(relu, texts, tmp_path / "t", replace(OPTIONS, **changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_merged_traces_have_the_sessions_of_both(relu, texts, traced, tmp_path):
    other = trace(relu, Text("others", (TEXT[9000:11000],), "others"), tmp_path / "o", replace(OPTIONS, sessions=2))
    merged = traces.merge_folders(traced.path, other.path, tmp_path / "m")
    assert len(traces.load(tmp_path / "m").sessions) == 5
    for session in range(3):
        assert np.array_equal(merged.session(session), traced.session(session))
    assert np.array_equal(merged.session(4), other.session(1))
    assert np.array_equal(merged.ids(4), other.ids(1))
    assert [row["text"] for row in merged.manifest["sessions"]] == [0, 0, 0, 1, 1]
    for first, second in ((traced, traced), (merged, other)):
        with pytest.raises(PlacementError, match="would count twice"):
            traces.merge_folders(first.path, second.path, tmp_path / "n")
    model = open_checkpoint(
        make_model(tmp_path / "f", "qwen2", seed=5, num_hidden_layers=3, hidden_act="relu", intermediate_size=500)
    )
    foreign = trace(model, texts, tmp_path / "x", OPTIONS)
    with pytest.raises(PlacementError, match=r"cannot merge: model\.sha256 is"):
        traces.merge_folders(traced.path, foreign.path, tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_no_trace_is_made_of_more_sessions_than_are_read(traced, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MOST_SESSIONS", 5)
    with pytest.raises(PlacementError, match="cannot merge: 6 sessions; a trace holds at most 5"):
        traces.merge_folders(traced.path, traced.path, tmp_path / "m")


@pytest.fixture
def copy(traced, tmp_path):
    shutil.copytree(traced.path, tmp_path / "t")
    return tmp_path / "t"


def test_a_damaged_bit_set_is_refused(copy, traced, tmp_path):
    file = copy / "session-00001" / "layer-00002.zlib"
    good = file.read_bytes()
    bomb = zlib.compress(bytes(1 << 26))
    for bad in (good[:-3], good + b"x", bomb, b"", zlib.compress(bytes(47 * 63))):
        file.write_bytes(bad)
        with pytest.raises(PlacementError, match=r"layer-00002\.zlib: missing, or changed since .*; trace again"):
            traces.load(copy).active(1, 2)
    with pytest.raises(PlacementError, match="missing, or changed"):
        traces.merge_folders(copy, traced.path, tmp_path / "m")
    file.unlink()
    with pytest.raises(PlacementError, match="missing, or changed"):
        traces.load(copy).session(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(schema=2), "schema 2; this sparsepack reads schema 1"),
        (lambda value: value["model"].pop("layers"), "damaged"),
        (lambda value: value.update(sessions=[]), "damaged"),
        (lambda value: value["sessions"][1].update(prompt=47), "session 1: a prompt of 47 of 47 tokens"),
        (lambda value: value["sessions"][1].update(text=1), "session 1: of text 1, there are 1"),
        (lambda value: value.update(intermediate="many"), "damaged"),
        (lambda value: value.update(rule={"active": "threshold"}), "rule: threshold, of a share of None"),
        (
            lambda value: value["sessions"][0].update(tokens=1 << 24, prompt=0) or value.update(intermediate=1 << 20),
            "session 0: 16777216 tokens of 1048576 neurons",
        ),
        (lambda value: value["versions"].update(torch="\ud800"), "damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(copy, change, message):
    value = json.loads((copy / "trace.json").read_text())
    change(value)
    (copy / "trace.json").write_text(json.dumps(value))
    with pytest.raises(PlacementError, match=message) as caught:
        traces.load(copy)
    assert "\n" not in str(caught.value)


def test_what_is_no_trace_is_refused_and_only_traces_are_replaced(relu, texts, tmp_path):
    with pytest.raises(PlacementError, match=r"no trace\.json in it"):
        traces.load(tmp_path)
    precious = tmp_path / "work"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match=r"without trace\.json; it is not replaced"):
        trace(relu, texts, precious, OPTIONS, overwrite=True)


def test_the_command_line_traces_merges_and_inspects(relu, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT[:3000])
    (tmp_path / "b.txt").write_text(TEXT[5000:8000])
    run = CliRunner().invoke
    asked = ("--sessions", "2", "--tokens", "32", "--prompt", "4")
    for name in "ab":
        given = ["trace", relu.name, "--text", str(tmp_path / f"{name}.txt"), "-o", str(tmp_path / name), *asked]
        done = run(main, given)
        assert done.exit_code == 0, done.output
        assert "2 of 31 tokens, the first 4 of them prompt; 0 from the middle" in done.output
    done = run(main, ["trace", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    assert "4 of 31 tokens" in run(main, ["inspect", str(tmp_path / "c")]).output
    assert run(main, ["trace", relu.name, "-o", str(tmp_path / "d")]).exit_code == 2
