"""What may be asked for: options in range, and sites by name and pattern."""

from dataclasses import replace

import pytest

from sparsepack.errors import CalibrationError, ThresholdsError
from sparsepack.models.families import SITES
from sparsepack.sparsity.allocation import site_name, sparse_sites, weights_of
from sparsepack.sparsity.find import find_thresholds
from sparsepack.sparsity.options import AllocationOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0: expected at least 0 and below 1"),
        ({"sparsity": -0.1}, r"sparsity -0\.1"),
        ({"sparsity": 50}, "sparsity 50"),
        ({"sparsity": float("nan")}, "sparsity nan"),
        ({"allocation": "greedy"}, "'greedy': expected one of uniform, teal, global"),
        ({"criterion": "wina"}, "'wina': expected one of magnitude, column-norm"),
        ({"upstream": "wet"}, "'wet': expected one of sparse, dense"),
        ({"windows": 0}, "windows 0: expected at least 1"),
        ({"allocation": "global", "steps": 0}, "steps 0"),
        ({"allocation": "global", "batch": 0}, "batch 0"),
        ({"allocation": "global", "length": 1}, "length 1: expected at least 2"),
        ({"offsets": True}, "they need --allocation global"),
        ({"allocation": "global", "upstream": "dense"}, "no dense upstream"),
    ],
)
def test_an_option_out_of_range_is_one_line(small, small_calibration, changes, message):
    options = replace(AllocationOptions(0.5), **changes)
    with pytest.raises(ThresholdsError, match=message) as caught:
        find_thresholds(small, small_calibration, options)
    assert "\n" not in str(caught.value)


def test_a_calibration_of_another_model_gives_no_thresholds(tiny, small_calibration):
    with pytest.raises(CalibrationError, match="calibrate this model"):
        find_thresholds(tiny, small_calibration, AllocationOptions(0.5))


@pytest.mark.parametrize(
    ("include", "ignore", "expected"),
    [
        ((), (), [(layer, site) for layer in range(3) for site in SITES]),
        (("blk.1.mlp_mid",), (), [(1, "mlp_mid")]),
        (("blk.*.mlp_mid", "blk.0.*"), (), [*[(0, site) for site in SITES], (1, "mlp_mid"), (2, "mlp_mid")]),
        (("re:blk\\.[12]\\.attn_.*",), ("*.attn_out",), [(1, "attn_in"), (2, "attn_in")]),
        ((), ("blk.0.*", "blk.2.*", "re:.*mlp.*"), [(1, "attn_in"), (1, "attn_out")]),
    ],
)
def test_patterns_choose_sites_in_order_of_execution(small, include, ignore, expected):
    assert sparse_sites(small, include, ignore) == expected


@pytest.mark.parametrize("which", ["include", "ignore"])
def test_a_pattern_that_matches_nothing_gives_the_nearest_names(small, which):
    lists = {"include": (), "ignore": (), which: ("blk.1.mlp_middle",)}
    with pytest.raises(
        ThresholdsError, match=rf"{which} 'blk\.1\.mlp_middle' matches no site; nearest: blk\.1\.mlp_mid"
    ):
        sparse_sites(small, **lists)
    with pytest.raises(ThresholdsError, match="nearest: blk"):
        sparse_sites(small, **{**lists, which: ("re:blk.9.*",)})
    with pytest.raises(ThresholdsError, match=r"'re:\(' *: not a regular expression"):
        sparse_sites(small, **{**lists, which: ("re:(",)})


def test_nothing_left_to_be_sparse_is_an_error(small):
    with pytest.raises(ThresholdsError, match="no site is left"):
        sparse_sites(small, ("blk.0.*",), ("blk.*",))


def test_weights_are_shares_of_the_parameters(small):
    """Qwen2 of hidden 256, 4 heads of 64, 2 of keys and values, FFN 512."""
    sizes = {"attn_in": 256 * (256 + 128 + 128), "attn_out": 256 * 256, "mlp_in": 256 * 1024, "mlp_mid": 512 * 256}
    sites = [(0, "attn_in"), (0, "attn_out"), (2, "mlp_in"), (1, "mlp_mid")]
    weights = weights_of(small, sites)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights == {key: pytest.approx(sizes[key[1]] / sum(sizes.values())) for key in sites}


def test_a_site_has_one_name():
    assert site_name(3, "mlp_mid") == "blk.3.mlp_mid"
