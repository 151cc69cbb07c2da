"""`tune --device mps` on this processor: what it measures is kept, and used from then on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from metal_stand_in import stand_in
from operations_for_tests import packed

from sparsepack.runtime.metal import backend as tune
from sparsepack.runtime.metal import products as tile_config
from sparsepack.runtime.metal.products import MetalTileConfig, load_zigzag

SHAPES = [(300, 40), (512, 32)]


@pytest.fixture(autouse=True)
def _few_grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("SPLITS", (2, 3)), ("SIMDGROUPS", (1,)), ("ROUNDS", 1), ("ROTATION", 1)):
        monkeypatch.setattr(tune, name, value)
    tile_config.tuned.cache_clear()
    yield
    tile_config.tuned.cache_clear()


def test_the_fastest_grid_of_each_shape_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_zigzag(packed(*SHAPES[0]), "cpu").config == MetalTileConfig(32, 2), "the paper's"
    monkeypatch.setattr(tune._Trial, "nanoseconds", lambda trial, config: 100.0 - 10 * config.splits)
    with stand_in():
        found = tune.measure(SHAPES, torch.device("cpu"), gates={SHAPES[1]})
    assert [(row["rows"], row["columns"], row["splits"], row["simdgroups"]) for row in found["shapes"]] == [
        (300, 40, 3, 1),
        (512, 32, 3, 1),
    ]
    assert found["gpu_info"] == tile_config.gpu_name()
    assert load_zigzag(packed(*SHAPES[0]), "cpu").config == MetalTileConfig(3, 1)
    assert load_zigzag(packed(256, 40), "cpu").config == MetalTileConfig(32, 2)


@pytest.mark.parametrize("gate", [False, True])
def test_what_is_timed_is_the_product_and_what_follows_it(gate: bool) -> None:
    with stand_in() as stream:
        trial = tune._Trial(SHAPES[1], torch.device("cpu"), gate)
        stream.order.launched.clear()
        assert trial.nanoseconds(MetalTileConfig(2, 1)) > 0
    assert stream.order.launched == ["zigzag_gemv", "collect_gated" if gate else "collect"] * 2
    assert stream.waited == 2, "before the clock starts, and before it stops"


@pytest.mark.parametrize("row", [{}, {"splits": 0, "simdgroups": 2}, {"splits": 65, "simdgroups": 2}, {"splits": "x"}])
def test_what_cannot_be_a_grid_is_no_configuration(row: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError)):
        tile_config.tile_config_of(row)
