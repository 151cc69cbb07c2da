"""Trained models: the hit rates there, beside what a study measured, and where placement cannot pay."""

import pytest

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace
from sparsepack.files.text import Text, read_text
from sparsepack.inspection import inspect
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate

OPTIONS = TraceOptions(sessions=2)
SILU = TraceOptions(sessions=3, tokens=512, prompt=64, share=0.5)


@pytest.fixture(scope="module")
def held_out(shared) -> Text:
    return read_text(str(shared / "text" / "books.validation.jsonl.xz"))


@pytest.fixture(scope="module")
def calibrated(shared, tmp_path_factory):
    books = read_text(str(shared / "text" / "books.calibration.jsonl.xz"))

    def made(model: str, options: CalibrateOptions) -> Calibration:
        return calibrate(shared / "models" / model, books, tmp_path_factory.mktemp("cal") / "c", options)

    return made


@pytest.mark.slow
def test_policies_serve_what_the_study_measured(shared, held_out, calibrated, tmp_path):
    """neuron_placement.md, B.1 and B.2, of twelve sessions and 72 windows; here are two, and eight of a quarter."""
    calibration = calibrated("books-26m-relu", CalibrateOptions(samples=8, context=512))
    made = trace(shared / "models" / "books-26m-relu", held_out, tmp_path / "t", OPTIONS)
    report = inspect(tmp_path / "t")["neurons"]
    assert report["pays"]
    assert report["density"] == pytest.approx(0.135, abs=0.01)
    options = SimulateOptions(cached="0.3", policy="static,static-same-share,slow,momentum,oracle-static")
    rows = {row["policy"]: row for row in simulate(made, calibration, options)["results"]}
    study = {"static": 0.634, "static-same-share": 0.458, "slow": 0.661, "momentum": 0.653, "oracle-static": 0.662}
    for name, rate in study.items():
        assert rows[name]["hit_rate"]["value"] == pytest.approx(rate, abs=0.025), name
    assert rows["slow"]["difference"]["value"] > 0.01
    assert rows["slow"]["hit_rate"]["value"] == pytest.approx(rows["oracle-static"]["hit_rate"]["value"], abs=0.005)
    assert rows["slow"]["moves"] < 0.003 * rows["slow"]["needed"]
    assert rows["momentum"]["moves"] == pytest.approx(249, rel=0.15)


@pytest.mark.long
def test_on_a_silu_model_placement_cannot_pay_and_inspect_says_so(shared, held_out, calibrated, tmp_path):
    calibration = calibrated("books-26m-silu", CalibrateOptions(samples=8, context=512))
    trace(shared / "models" / "books-26m-silu", held_out, tmp_path / "t", SILU, calibration)
    report = inspect(tmp_path / "t")["neurons"]
    assert report["density"] == pytest.approx(0.5, abs=0.02)
    assert not report["pays"]
    assert report["verdict"].startswith(
        "placement cannot pay: the hottest 30 % of the neurons of all other documents are 3"
    )
