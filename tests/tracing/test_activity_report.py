"""What inspect says of who is active: density, spread, concentration, drift, and whether placement can pay."""

import json

import pytest
import torch
from click.testing import CliRunner

from sparsepack.calibrate.activity_report import activity_report
from sparsepack.calibrate.statistics import Activity
from sparsepack.cli.app import main


def activity(active, squares=0, tokens=100):
    return Activity(torch.tensor(active), tokens, squares)


def test_hottest_neurons_are_ranked_within_a_block_and_across_all():
    hot, cold = activity([90, 10, 0, 0, 0, 0, 0, 0, 0, 0]), activity([10] * 10)
    report = activity_report([(hot, cold)])
    assert report["layers"][0]["hottest"] == [0.9, 1, 1, 1]
    assert report["layers"][1]["hottest"] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert report["hottest"] == pytest.approx([0.5, 0.6, 0.7, 0.9])
    assert report["density"] == pytest.approx(0.1)
    assert report["pays"]
    assert report["verdict"] == "placement can pay: the hottest 30 % of the neurons are 70 % of what is active"
    assert report["drift"] is None


def test_spread_is_the_standard_deviation_over_tokens(traced):
    sessions = [traced.activity(session) for session in range(3)]
    report = activity_report(sessions)
    for layer in range(3):
        share = torch.cat([torch.from_numpy(traced.active(session, layer)) for session in range(3)]).double().mean(1)
        assert report["layers"][layer]["density"] == pytest.approx(float(share.mean()))
        assert report["layers"][layer]["spread"] == pytest.approx(float(share.std(correction=0)))


def test_drift_tells_documents_that_differ_from_those_that_do_not():
    one, other = activity([50] * 3 + [1] * 7), activity([1] * 7 + [50] * 3)
    same = activity_report([(one,), (one,)])["drift"]
    assert same["own"] == same["others"]
    drift = activity_report([(one,), (other,)])["drift"]
    assert drift["own"] > 0.9
    assert drift["others"] < 0.05


def test_documents_that_choose_others_say_that_placement_cannot_pay():
    one, other = activity([50] * 3 + [1] * 7), activity([1] * 7 + [50] * 3)
    report = activity_report([(one,), (other,)])
    assert not report["pays"]
    assert report["verdict"].startswith(
        "placement cannot pay: the hottest 30 % of the neurons of all other documents are 2 % of what is active in one;"
    )
    assert activity_report([(one,), (one,)])["pays"]


@pytest.mark.parametrize(
    ("active", "sentence"),
    [
        ([100] * 10, r"placement cannot pay: 100.0 % of the neurons are active for every token, there is nothing"),
        ([51] * 5 + [49] * 5, "placement cannot pay: the hottest 30 % of the neurons are 31 % of what is active; any"),
    ],
)
def test_where_placement_cannot_pay_a_sentence_says_so(active, sentence):
    report = activity_report([(activity(active),)])
    assert not report["pays"]
    assert report["verdict"].startswith(sentence)


def test_inspect_shows_a_trace(traced):
    told = CliRunner().invoke(main, ["inspect", str(traced.path)])
    assert told.exit_code == 0, told.output
    assert "| block | active | spread | hottest 10 % |" in told.output
    assert "| all   |" in told.output
    assert "placement can" in told.output
    written = json.loads(CliRunner().invoke(main, ["inspect", str(traced.path), "--json", "-"]).output)
    assert written["kind"] == "trace"
    assert len(written["neurons"]["layers"]) == 3
    assert "files" not in written
