"""The verb: what it computes from a trace and a calibration, what it shows, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from traces_for_tests import reversed_words

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.statistics import activity
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.trace_file import merge_folders
from sparsepack.calibrate.tracing import trace
from sparsepack.cli.app import main
from sparsepack.errors import PlacementError
from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.machine import MACHINES, SHAPES, seconds_per_token
from sparsepack.placement.options import POLICIES as NAMES
from sparsepack.placement.placement import across_blocks
from sparsepack.placement.policies import POLICIES
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate


@pytest.fixture(scope="module")
def calibration(relu, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("cal") / "c"
    calibrate(relu, texts, path, CalibrateOptions(context=48, samples=8))
    return path


def test_the_options_name_every_policy():
    assert tuple(POLICIES) == NAMES


def test_static_is_the_share_of_activations_of_the_neurons_calibration_saw_most_often(traced, calibration):
    result = simulate(traced, calibration, SimulateOptions(cached="0.25,1", policy="static,slow"))
    frequency = torch.stack([each.frequency for each in activity(folder.load(calibration))]).numpy()
    resident = across_blocks(frequency, 375).resident.ravel()
    decoded = [traced.session(session)[8:] for session in range(3)]
    expected = [each[:, resident].sum() / each.sum() for each in decoded]
    pooled = sum(each[:, resident].sum() for each in decoded) / sum(each.sum() for each in decoded)
    row = result["results"][0]
    assert (row["policy"], row["cached"], row["places"]) == ("static", 0.25, 375)
    assert row["hit_rate"]["value"] == pytest.approx(pooled)
    assert row["hit_rate"]["stderr"] == pytest.approx(np.std(expected, ddof=1) / 3**0.5, rel=1e-4)
    assert row["needed"] == pytest.approx(sum(each.sum() for each in decoded) / (3 * 39))
    assert row["host_reads"]["value"] == pytest.approx(row["needed"] * (1 - pooled))
    reads = [(each.sum() - each[:, resident].sum()) / len(each) for each in decoded]
    assert row["host_reads"]["stderr"] == pytest.approx(np.std(reads, ddof=1) / 3**0.5, rel=1e-4)
    assert result["density"] == pytest.approx(row["needed"] / 1500)
    all_cached = [each for each in result["results"] if each["cached"] == 1]
    assert [each["hit_rate"]["value"] for each in all_cached] == [1, 1]
    assert [each["value"] for each in result["bounds"] if each["cached"] == 1] == pytest.approx([1, 1])


def test_differences_are_paired_by_session(traced, calibration):
    result = simulate(traced, calibration, SimulateOptions(cached="0.25", policy="lru,static"))
    first, other = result["results"]
    assert first["difference"] == {"value": 0, "stderr": 0}
    assert other["policy"] == "lru"
    assert 0 < other["difference"]["stderr"] < 0.1


def test_all_that_is_said_is_said_for_every_policy(traced, calibration):
    result = simulate(traced, calibration, SimulateOptions(cached="0.1", policy=",".join(NAMES)))
    assert [row["policy"] for row in result["results"]] == list(NAMES)
    for row in result["results"]:
        assert 0 <= row["unused"] <= row["moves"]
        assert row["hit_rate"]["value"] - row["moves"] / row["needed"] <= result["bounds"][0]["value"] + 1e-9


def test_groups_move_together(traced, calibration):
    alone = simulate(traced, calibration, SimulateOptions(cached="0.2", policy="static,momentum"))
    for order in ("frequency", "random"):
        options = SimulateOptions(cached="0.2", policy="static,momentum", group=5, order=order)
        grouped = simulate(traced, calibration, options)
        assert grouped["bounds"] == []
        assert grouped["results"][0]["needed"] == alone["results"][0]["needed"]
        assert round(grouped["results"][1]["moves"] * 3 * 39) % 5 == 0
        if order == "random":
            assert grouped["results"][0]["hit_rate"]["value"] < alone["results"][0]["hit_rate"]["value"]
    with pytest.raises(PlacementError, match="--group 7: 500 neurons of a block do not divide"):
        simulate(traced, calibration, SimulateOptions(group=7))


def test_a_machine_says_how_fast(traced, calibration):
    options = SimulateOptions(machine="pcie5", vram="24GB", policy="static,slow")
    result = simulate(traced, calibration, options)
    parts = SHAPES["70b"].parts
    room = 24e9 - parts.cache - parts.work_within(24_000_000_000).bytes
    room -= parts.output + sum(parts.attention) + sum(parts.gates)
    share = room / parts.records * 64 / 65  # one slot in 65 is kept for those who come
    assert [row["cached"] for row in result["results"]] == pytest.approx([share, share], abs=1e-4)
    for row in result["results"]:
        assert row["tokens_per_second"]["and_bus"] >= row["tokens_per_second"]["processor"] > 0
    assert result["machine"]["dense_split"] == pytest.approx([5.0], abs=0.15)
    assert simulate(traced, calibration, SimulateOptions(policy="static"))["machine"] is None


def test_of_groups_neurons_are_told(traced, calibration):
    options = SimulateOptions(cached="0.2", policy="lru", group=4, machine="pcie4", shape="13b")
    result = simulate(traced, calibration, options)
    row = result["results"][0]
    for name in ("moves", "unused"):
        total = row[name] * 3 * 39
        assert total > 0
        assert total / 4 == pytest.approx(round(total / 4))
    parts = SHAPES["13b"].parts
    about = (result["density"], row["hit_rate"]["value"], row["moves"] / 1500)
    for name, over_the_bus in (("processor", False), ("and_bus", True)):
        rates = MACHINES["pcie4"].rates(parts.record)
        token = seconds_per_token(rates, plan_of_share(parts, 0.2), *about, over_the_bus)
        assert row["tokens_per_second"][name] == pytest.approx(token.rate)


def test_what_is_the_best_for_single_neurons_is_not_played_with_groups(traced, calibration):
    # One neuron of a group that is needed would take the place of a group of which many are.
    assert "belady" in simulate(traced, calibration, SimulateOptions(cached="0.2"))["policies"]
    grouped = simulate(traced, calibration, SimulateOptions(cached="0.2", group=5))
    assert "oracle-static" in grouped["policies"]
    assert "belady" not in grouped["policies"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SimulateOptions(policy="belady", group=5), "--policy belady, --group 5: it is the best for single neurons"),
        (SimulateOptions(cached="0.1,many"), r"--cached 0\.1,many: expected shares from 0 to 1"),
        (SimulateOptions(cached="1.5"), "expected shares from 0 to 1"),
        (SimulateOptions(cached="nan"), "expected shares from 0 to 1"),
        (SimulateOptions(policy="static,fast"), "--policy fast: expected one of static, static-same-share"),
        (SimulateOptions(vram="24GB"), "vram 24GB: it does nothing without machine"),
        (SimulateOptions(vram="24", machine="pcie5"), "--vram 24: expected gigabytes or megabytes, as in 24GB"),
        (SimulateOptions(vram="1GB", machine="pcie5"), r"keys and values take 1\.35GB of it .* give at least 1\.4GB"),
        (SimulateOptions(machine="abacus"), "--machine abacus: expected one of"),
        (SimulateOptions(group=0), "group 0: expected at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(traced, calibration, options, message):
    with pytest.raises(PlacementError, match=message) as caught:
        simulate(traced, calibration, options)
    assert "\n" not in str(caught.value)


def test_a_calibration_of_another_model_is_refused(traced, small_foreign):
    with pytest.raises(PlacementError, match=r"the calibration is of a model with the weights .* expected both of one"):
        simulate(traced, small_foreign)


def test_another_trace_can_say_how_often_each_neuron_is_active(traced, other_text):
    result = simulate(traced, other_text, SimulateOptions(cached="0.25", policy="static"))
    frequency = np.stack([other_text.session(session) for session in range(3)]).mean((0, 1)).reshape(3, 500)
    resident = across_blocks(frequency, 375).resident.ravel()
    decoded = np.concatenate([traced.session(session)[8:] for session in range(3)])
    assert result["results"][0]["hit_rate"]["value"] == pytest.approx(decoded[:, resident].sum() / decoded.sum())
    assert result["calibration"]["sha256"] == other_text.sha256


def test_a_trace_is_not_scored_by_itself_nor_by_one_that_has_a_session_of_it(traced, other_text, tmp_path):
    merged = merge_folders(other_text.path, traced.path, tmp_path / "both")
    for calibration in (traced, merged):
        told = f"--calibration {calibration.path}: a session of {traced.path} is in it too, .* give a trace of other"
        with pytest.raises(PlacementError, match=told) as caught:
            simulate(traced, calibration)
        assert "\n" not in str(caught.value)


def test_counts_of_what_is_not_zero_give_no_places_to_what_is_above_a_threshold(relu, texts, calibration, tmp_path):
    options = TraceOptions(sessions=3, tokens=48, prompt=8, share=0.2)
    above = trace(relu, texts, tmp_path / "t", options, calibration)
    with pytest.raises(PlacementError, match="give as --calibration a trace of other text that was made with the same"):
        simulate(above, calibration)
    other = trace(relu, reversed_words(texts), tmp_path / "other", options, calibration)
    assert simulate(above, other, SimulateOptions(cached="0.3", policy="static"))["density"] < 0.3


@pytest.fixture
def small_foreign(calibration):
    made = folder.load(calibration)
    return replace(made, manifest={**made.manifest, "model": {**made.manifest["model"], "sha256": "0" * 64}})


def test_the_command_line_shows_tables_and_writes_json(traced, calibration, tmp_path):
    given = ["simulate", str(traced.path), "--calibration", str(calibration), "--cached", "0.1,0.3"]
    done = CliRunner().invoke(main, [*given, "--policy", "static,slow,belady", "--machine", "pcie4", "--shape", "13b"])
    assert done.exit_code == 0, done.output
    assert "3 sessions; a token needs" in done.output
    assert "| policy                       |" in done.output
    assert "| bound on hits - 1 x moves    |" in done.output
    assert "difference from static, paired by session" in done.output
    assert "tokens per second of a 13b model on pcie4" in done.output
    assert "| dense, split by weights |" in done.output
    done = CliRunner().invoke(main, [*given, "--policy", "slow", "--json", "-"])
    assert [row["policy"] for row in json.loads(done.output)["results"]] == ["slow", "slow"]
