"""What `tune` finds is kept, or nothing is measured."""

import resource

import pytest

from sparsepack.errors import OutputError
from sparsepack.runtime.tuning import measure_shapes, read_rows


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
