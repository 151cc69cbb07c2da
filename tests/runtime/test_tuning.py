"""What `tune` finds is kept, or nothing is measured."""

import resource

import pytest
from homes_for_tests import without_a_home

from sparsepack.errors import OutputError
from sparsepack.runtime.tuning import measure_shapes, read_rows, tuning_path


def test_a_cache_of_many_brackets_is_ignored_and_rewritten(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" * 100_000)
    assert read_rows(path, 1, dict) == {}
    measure_shapes([(256, 512)], path, {"schema": 1}, {}, lambda shape: {"rows": shape[0], "columns": shape[1]})
    assert list(read_rows(path, 1, dict)) == [(256, 512)]


def test_without_a_home_nothing_was_measured_and_one_line_says_where_to_keep_it(monkeypatch):
    without_a_home(monkeypatch)
    path = tuning_path("cpu", 1)
    assert read_rows(path, 1, dict) == {}
    with pytest.raises(OutputError, match="set XDG_CACHE_HOME"):
        measure_shapes([(256, 256)], path, {}, {}, dict)


def test_a_cache_without_room_is_told_before_anything_is_measured(tmp_path):
    def measured(shape):
        raise AssertionError("measured in vain")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match=r"full.*XDG_CACHE_HOME"):
            measure_shapes([(256, 256)], tmp_path / "cache" / "x.json", {}, {}, measured)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_at_once_keep_the_rows_of_both(tmp_path):
    path, head = tmp_path / "x.json", {"schema": 1}

    def row(shape):
        return {"rows": shape[0], "columns": shape[1]}

    def disturbed(shape):  # another process measures another shape while this one is measured
        measure_shapes([(512, 256)], path, head, {}, row)
        return row(shape)

    measure_shapes([(256, 256)], path, head, {}, disturbed)
    assert set(read_rows(path, 1, bool)) == {(256, 256), (512, 256)}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_measured_anew_takes_the_place_of_what_was_known(tmp_path):
    path, head = tmp_path / "x.json", {"schema": 1}

    def row(tile):
        return {"rows": 256, "columns": 256, "tile": tile}

    measure_shapes([(256, 256)], path, head, {}, lambda shape: row(2))
    known = read_rows(path, 1, bool)
    measure_shapes([(256, 256)], path, head, known, lambda shape: row(4))
    assert read_rows(path, 1, bool) == {(256, 256): row(4)}
