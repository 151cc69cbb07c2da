"""What `sparsepack tune` finds, keeps and changes; never how fast anything is."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from native_build import instruction_set_params

from sparsepack.cli import main
from sparsepack.errors import OutputError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.open import read_packed
from sparsepack.runtime.cpu import tune as tuning
from sparsepack.runtime.cpu.machine import FORCED, instruction_set
from sparsepack.runtime.cpu.tile_config import (
    SCHEMA,
    CpuTileConfig,
    default_tile_config,
    read_tuning,
    tile_config,
    tuned,
    tuning_path,
)
from sparsepack.runtime.cpu.tune import AUTOTUNE, measure
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import random_blocks

pytestmark = [mark for parameter in instruction_set_params()[:1] for mark in parameter.marks]
SHAPE, OTHER = (1100, 24), (300, 16)
NEVER_MEASURED = CpuTileConfig(span=2, tile=64)
"""What `SHAPE` gets then."""
ROW = {"rows": SHAPE[0], "columns": SHAPE[1], "span": 1, "tile": 24}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and so little work that a test takes milliseconds."""
    for name, value in {"SPANS": (1, 2), "TILES": (24, 48), "CALLS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned.cache_clear()
    return tmp_path / "cache"


def keep(content: Any, threads: int = 1) -> None:
    """Put content where what was measured on this machine is kept: text, or what becomes JSON."""
    path = tuning_path(instruction_set(), threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    tuned.cache_clear()


def kept_shapes(threads: int = 1) -> list[tuple[int, int]]:
    return list(read_tuning(tuning_path(instruction_set(), threads)))


def test_what_was_measured_is_kept_whole_below_the_cache_folder(cache: Path) -> None:
    result = measure([SHAPE, OTHER, SHAPE], threads=1)
    path = tuning_path(instruction_set(), 1)
    assert result.pop("path") == str(path)
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]
    assert json.loads(path.read_text()) == result
    assert (result["schema"], result["instruction_set"], result["threads"]) == (SCHEMA, instruction_set(), 1)
    assert [(row["rows"], row["columns"]) for row in result["shapes"]] == [SHAPE, OTHER]
    for row in result["shapes"]:
        assert row["span"] in (1, 2)
        assert row["tile"] in (24, 48)
        assert 0 < row["microseconds"] <= row["slowest_microseconds"]
        assert row["bytes_per_second"] > 0


def test_other_shapes_stay_in_the_file() -> None:
    measure([SHAPE], threads=1)
    result = measure([OTHER], threads=1)
    assert [(row["rows"], row["columns"]) for row in result["shapes"]] == [OTHER]
    assert kept_shapes() == [SHAPE, OTHER]
    measure([SHAPE], threads=1)
    assert kept_shapes() == [SHAPE, OTHER]


def test_what_was_found_is_used_from_then_on() -> None:
    assert tile_config(SHAPE, 1) == NEVER_MEASURED
    row = measure([SHAPE], threads=1)["shapes"][0]
    assert tile_config(SHAPE, 1) == CpuTileConfig(row["span"], row["tile"]) != NEVER_MEASURED


def test_a_matrix_of_one_weight_is_measured_too() -> None:
    assert measure([(1, 1)], threads=1)["shapes"][0]["span"] == 1


def test_another_number_of_threads_has_a_file_of_its_own() -> None:
    measure([SHAPE], threads=2)
    assert kept_shapes(threads=2) == [SHAPE]
    assert kept_shapes(threads=1) == []
    assert tile_config(SHAPE, 1) == NEVER_MEASURED
    assert tile_config(SHAPE, 2) != NEVER_MEASURED


def test_another_instruction_set_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keep({"schema": SCHEMA, "shapes": [ROW]})
    best = instruction_set()
    assert tile_config(SHAPE, 1) == CpuTileConfig(1, 24)
    monkeypatch.setenv(FORCED, "scalar")
    assert (tile_config(SHAPE, 1) == NEVER_MEASURED) == (best != "scalar")


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"schema": 1, "shapes": [{"rows": 1100',
        "\0\0",
        [],
        {"shapes": [ROW]},
        {"schema": SCHEMA + 1, "shapes": [ROW]},
        {"schema": SCHEMA},
        {"schema": SCHEMA, "shapes": 7},
        {"schema": SCHEMA, "shapes": [ROW, None]},
        {"schema": SCHEMA, "shapes": [{**ROW, "rows": "many"}]},
        {"schema": SCHEMA, "shapes": [{"rows": 1100, "columns": 24, "span": 1}]},
        *({"schema": SCHEMA, "shapes": [{**ROW, "span": span}]} for span in (0, -1, 17, None, float("inf"))),
        *({"schema": SCHEMA, "shapes": [{**ROW, "tile": tile}]} for tile in (0, 4, 20, 264, float("nan"))),
    ],
    ids=str,
)
def test_a_file_that_is_damaged_of_another_schema_or_impossible_is_ignored_and_replaced(content: Any) -> None:
    keep({"schema": SCHEMA, "shapes": [ROW]})
    assert tile_config(SHAPE, 1) == CpuTileConfig(1, 24)
    keep(content)
    assert tile_config(SHAPE, 1) == NEVER_MEASURED
    measure([OTHER], threads=1)
    assert kept_shapes() == [OTHER]


def test_a_folder_that_cannot_be_made_is_an_error_before_anything_is_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(tuning._Trial, "time", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match=r"cache/sparsepack: cannot be made .*; set XDG_CACHE_HOME"):
        measure([SHAPE], threads=1)


def test_the_command_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsepack.tuning.SHAPES", (SHAPE, OTHER))
    table = CliRunner().invoke(main, ["tune", "--threads", "1"])
    assert table.exit_code == 0, table.output
    path = str(tuning_path(instruction_set(), 1))
    for expected in ("1100 x 24", "300 x 16", "GB/s", f"{instruction_set()}, 1 thread, ", f"kept in {path}"):
        assert expected in table.stdout
    measured = CliRunner().invoke(main, ["tune", "--threads", "1", "--json", "-"])
    assert measured.exit_code == 0, measured.output
    result = json.loads(measured.stdout)
    assert result["path"] == path
    assert [(row["rows"], row["columns"]) for row in result["shapes"]] == [SHAPE, OTHER]


def test_the_command_measures_the_matrices_of_artifacts(tmp_path: Path) -> None:
    packed = tmp_path / "m.gguf"
    assert CliRunner().invoke(main, ["pack", "shipped:tiny", "-o", str(packed)]).exit_code == 0
    measured = CliRunner().invoke(main, ["tune", str(packed), "--threads", "1", "--json", "-"])
    assert measured.exit_code == 0, measured.output
    shapes = [(row["rows"], row["columns"]) for row in json.loads(measured.stdout)["shapes"]]
    assert shapes == kept_shapes()
    assert len(set(shapes)) == len(shapes) <= 4  # each once, however many layers have it


def test_planes_have_a_file_of_their_own() -> None:
    assert tile_config(SHAPE, 1, "Q6_P") == NEVER_MEASURED
    row = measure([SHAPE], threads=1, block="Q6_P")["shapes"][0]
    assert tile_config(SHAPE, 1, "Q6_P") == CpuTileConfig(row["span"], row["tile"]) != NEVER_MEASURED
    assert tile_config(SHAPE, 1) == NEVER_MEASURED
    assert row["bytes_per_second"] == pytest.approx(SHAPE[0] * SHAPE[1] * 3.4 / 8 / row["microseconds"] * 1e6)


def test_the_command_measures_artifacts_with_planes(tmp_path: Path) -> None:
    packed, whole = tmp_path / "m.gguf", tmp_path / "whole.gguf"
    for path, format in ((packed, "zigzag-q6_p"), (whole, "zigzag-q4_k")):
        made = CliRunner().invoke(main, ["pack", "shipped:tiny", "--format", format, "-o", str(path)])
        assert made.exit_code == 0, made.output
    measured = CliRunner().invoke(main, ["tune", str(packed), "--threads", "1"])
    assert measured.exit_code == 0, measured.output
    assert "3.4 bits of a weight read" in measured.stdout
    assert kept_shapes() == []
    assert read_tuning(tuning_path(instruction_set(), 1, "Q6_P"))
    both = CliRunner().invoke(main, ["tune", str(packed), str(whole), "--threads", "1"])
    assert both.exit_code == 2
    assert "files with Q4_K and Q6_P: tune those of each type by themselves" in both.stderr


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    assert CliRunner().invoke(main, ["pack", "shipped:tiny", "-o", str(path)]).exit_code == 0
    return path


def load(path: Path, threads: int = 1) -> None:
    tuned.cache_clear()  # as another process would begin
    Engine(read_packed(path), EngineOptions(threads=threads), backend="cpu")


def test_an_engine_measures_new_shapes_once_and_says_so(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "LEAST_BYTES", 0)
    monkeypatch.setenv(AUTOTUNE, "0")
    load(packed)
    assert kept_shapes() == []
    monkeypatch.delenv(AUTOTUNE)
    load(packed)
    found = kept_shapes()
    assert len(found) == 4
    path = tuning_path(instruction_set(), 1)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("tuned 4 shapes of matrices") and str(path) in line] == said
    before = path.read_bytes()
    load(packed)
    assert (path.read_bytes(), capsys.readouterr().err) == (before, "")
    load(packed, threads=2)
    assert kept_shapes(threads=2) == found


def test_an_engine_measures_no_longer_than_it_may_and_leaves_the_default_for_a_gain(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LEAST_BYTES": 0, "SECONDS": 0.0}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.delenv(AUTOTUNE)
    load(packed)
    assert len(kept_shapes()) == 4
    assert all(tile_config(shape, 1) == default_tile_config(shape) for shape in kept_shapes())
    small = PackedMatrix(random_blocks(SHAPE), MatrixFormat("Q4_K", "zigzag"), *SHAPE)
    trial = tuning._Trial(small, 1)

    def take(self: Any, configs: list[CpuTileConfig], calls: int) -> None:
        for config in configs:
            self.samples[config] = [90 if config == faster else 100 - config.tile // 24]

    monkeypatch.setattr(tuning._Trial, "time", take)
    faster = CpuTileConfig(span=1, tile=48)
    chosen = tuning._quick(trial, float("inf"))
    assert (chosen["span"], chosen["tile"]) == (2, 64)


def test_where_nothing_can_be_kept_an_engine_says_so_and_runs(
    packed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "LEAST_BYTES", 0)
    monkeypatch.delenv(AUTOTUNE)
    cache.write_text("a file")
    load(packed)
    assert "not tuned for this machine" in capsys.readouterr().err
