"""What `sparsepack tune` measures of the links, keeps and changes; never how fast anything is."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.hybrid import measure_bandwidth as measuring
from sparsepack.runtime.hybrid.bandwidth import SCHEMA, profile_path, read_profile, write_profile
from sparsepack.runtime.hybrid.measure_bandwidth import MeasuredBandwidth
from sparsepack.runtime.tuning import check_capacity

OF = {"cpu_info": "a processor", "instruction_set": "scalar", "threads": 2, "hidden": 256}
FAST, SLOW = (
    BandwidthProfile(3.1e6, 2.7e6, 1.3e6, 4.7e-5, 3e12, 5e9, 8e9),
    BandwidthProfile(9e6, 8e6, 7e6, 4.7e-5, 4e12, 9e9, 9e9),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(of: dict[str, Any], bandwidth: BandwidthProfile) -> dict[str, Any]:
    check_capacity(profile_path(of), 1)
    return write_profile(of, MeasuredBandwidth(bandwidth, alone=SLOW, copies=1.0))


def test_what_was_measured_is_read_to_the_last_bit() -> None:
    assert read_profile(OF) is None
    kept = keep(OF, FAST)
    assert read_profile(OF) == FAST
    assert kept["path"] == str(profile_path(OF))
    assert kept["alone"] == asdict(SLOW)
    assert read_profile({**OF, "threads": 4}) is read_profile({**OF, "hidden": 512}) is None


KEPT = {"schema": SCHEMA, **OF, "together": asdict(FAST)}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0\0",
        "[" * 100_000,
        '{"schema": 1, "together": {"resident": 1',
        [],
        {**KEPT, "schema": SCHEMA + 1},
        {**KEPT, "cpu_info": "another processor"},
        {**KEPT, "threads": 3},
        {**KEPT, "together": None},
        {**KEPT, "together": {"resident": 1.0, "bus": 1.0, "worker": 1.0}},
        *(
            {**KEPT, "together": {**asdict(FAST), "resident": value}}
            for value in (0, -1, None, "fast", math.inf, math.nan)
        ),
    ],
    ids=lambda content: str(content)[:60],
)
def test_what_is_damaged_or_of_another_machine_is_ignored_and_replaced(content: Any) -> None:
    path = profile_path(OF)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(KEPT))
    assert read_profile(OF) == FAST
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert read_profile(OF) is None
    keep(OF, FAST)
    assert read_profile(OF) == FAST


def test_what_takes_turns_is_larger_than_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROTATION": 1 << 28, "TIMES_CACHES": 4, "LISTED": 2048}.items():
        monkeypatch.setattr(measuring, name, value)
    caches = {0: 1 << 28, 300 << 20: 1200 << 20, 1 << 40: 2 << 30}
    for size, expected in caches.items():
        monkeypatch.setattr(measuring, "last_caches", lambda size=size: size)
        count = measuring.count_for(8192)
        assert expected <= 9216 * count < expected + 9216 * 8 * 2048
        assert count % (8 * 2048) == 0
        assert measuring.count_for(512) <= 256 * 2048
