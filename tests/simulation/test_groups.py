"""Groups: each way to form them gives every neuron one."""

import numpy as np
import pytest

from sparsepack.errors import PlacementError
from sparsepack.placement.options import SINGLE
from sparsepack.simulation.options import ORDERS as NAMES
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.run import ORDERS, grouped_frequency, groups_of, needed_of, simulate


def test_the_options_name_every_order():
    assert tuple(ORDERS) == NAMES


@pytest.mark.parametrize("order", NAMES)
def test_every_neuron_has_one_group(traced, order):
    frequency = np.stack([traced.active(0, block).mean(0) for block in range(traced.layers)])
    groups = groups_of(frequency, order, 20)
    assert groups.shape == (3, 25, 20)
    assert (np.sort(groups.reshape(3, -1), axis=1) == np.arange(500)).all()
    assert (np.diff(groups, axis=2) > 0).all()
    assert (np.diff(groups[:, :, 0], axis=1) > 0).all()
    needed = needed_of(traced, 0, groups)
    active = traced.active(0, 1)
    assert (needed[:, 1, 4] == active[:, groups[1, 4]].sum(1)).all()
    assert grouped_frequency(frequency, groups)[1, 4] == pytest.approx(frequency[1, groups[1, 4]].mean())


def test_an_order_without_groups_is_refused(traced, other_text):
    with pytest.raises(PlacementError, match="order random: it does nothing with group 1"):
        simulate(traced, other_text, SimulateOptions(order="random"))


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_best_for_single_neurons_only_is_refused_for_groups(traced, other_text, name):
    with pytest.raises(PlacementError, match=f"--policy {name}, --group 2: .* single neurons only"):
        simulate(traced, other_text, SimulateOptions(policy=f"static,{name}", group=2))
    assert name not in SimulateOptions(group=2).policies
    assert name in SimulateOptions(policy=name).policies
