"""The division of offloaded neurons between links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.placement.machine import BandwidthProfile, over_the_bus

speeds = st.floats(1e3, 1e7)
counts = st.integers(0, 60)
EQUAL = BandwidthProfile(1.0, 1.0, 1.0)


@given(
    resident=counts, offloaded=counts, bandwidth=st.builds(BandwidthProfile, speeds, speeds, speeds, st.floats(0, 1e-2))
)
def test_no_other_division_is_faster(resident: int, offloaded: int, bandwidth: BandwidthProfile) -> None:
    bus = over_the_bus(resident, offloaded, bandwidth)
    best = min(bandwidth.seconds(resident, offloaded, other) for other in range(offloaded + 1))
    assert bandwidth.seconds(resident, offloaded, bus) <= best * (1 + 1e-9)
    assert bus == over_the_bus(resident, offloaded, bandwidth)


def test_where_the_device_computes_all_nothing_is_handed_over() -> None:
    bandwidth = BandwidthProfile(resident=100.0, bus=10.0, worker=50.0, handover=5.0)
    assert bandwidth.seconds(100, 10, 10) == pytest.approx(2.0)
    assert bandwidth.seconds(100, 10, 9) == pytest.approx(5.02)


def test_where_all_are_equally_fast_both_sides_have_as_much() -> None:
    assert over_the_bus(resident=10, offloaded=10, bandwidth=EQUAL) == 0
    assert over_the_bus(resident=0, offloaded=10, bandwidth=EQUAL) == 5
    assert over_the_bus(resident=4, offloaded=10, bandwidth=EQUAL) == 3
    assert over_the_bus(resident=0, offloaded=0, bandwidth=EQUAL) == 0


def test_where_handing_over_costs_more_than_all_else_nothing_is_handed_over() -> None:
    assert over_the_bus(resident=4, offloaded=10, bandwidth=BandwidthProfile(1.0, 1.0, 1.0, handover=30.0)) == 10
