"""Groups: each way to form them gives every neuron one, and METIS is asked about text that is not played."""

import sys

import numpy as np
import pytest

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.errors import PlacementError, UserError
from sparsepack.simulation.groups import ORDERS, Known, grouped_frequency, groups_of, needed_of
from sparsepack.simulation.options import ORDERS as NAMES
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import simulate

METIS = SimulateOptions(cached="0.2", policy="static,momentum", group=10, order="metis")


def test_the_options_name_every_order():
    assert tuple(ORDERS) == NAMES


@pytest.mark.parametrize("order", NAMES)
def test_every_neuron_has_one_group(traced, order):
    if order == "metis":
        pytest.importorskip("pymetis")
    frequency = np.stack([traced.active(0, block).mean(0) for block in range(traced.layers)])
    groups = groups_of(Known(frequency, traced), order, 20)
    assert groups.shape == (3, 25, 20)
    assert (np.sort(groups.reshape(3, -1), axis=1) == np.arange(500)).all()
    assert (np.diff(groups, axis=2) > 0).all()
    assert (np.diff(groups[:, :, 0], axis=1) > 0).all()
    needed = needed_of(traced, 0, groups)
    active = traced.active(0, 1)
    assert (needed[:, 1, 4] == active[:, groups[1, 4]].sum(1)).all()
    assert grouped_frequency(frequency, groups)[1, 4] == pytest.approx(frequency[1, groups[1, 4]].mean())


def test_metis_forms_groups_of_another_text_than_is_played(traced, other_text):
    pytest.importorskip("pymetis")
    by_metis = simulate(traced, other_text, METIS)
    assert by_metis == simulate(traced, other_text, METIS)
    assert by_metis["group"] == {"neurons": 10, "order": "metis"}
    static, momentum = by_metis["results"]
    assert 0 < static["hit_rate"]["value"] < 1
    assert momentum["moves"] > 0


def test_metis_needs_a_trace_as_calibration(relu, traced, texts, tmp_path):
    calibration = calibrate(relu, texts, tmp_path / "c", CalibrateOptions(context=48, samples=8))
    with pytest.raises(PlacementError, match=r"--order metis: the calibration counts each neuron alone") as caught:
        simulate(traced, calibration, METIS)
    assert "\n" not in str(caught.value)


def test_without_pymetis_one_line_names_the_extra(traced, other_text, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(UserError, match=r"pip install 'sparsepack\[metis\]'") as caught:
        simulate(traced, other_text, METIS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["random", "metis"])
def test_an_order_without_groups_is_refused(traced, other_text, order):
    with pytest.raises(PlacementError, match=f"order {order}: it does nothing with group 1"):
        simulate(traced, other_text, SimulateOptions(order=order))
