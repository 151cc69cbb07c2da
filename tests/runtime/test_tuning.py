"""What `tune` finds is kept, or nothing is measured."""

import resource

import pytest

from sparsepack.errors import OutputError
from sparsepack.runtime.tuning import measure_shapes


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
