"""How much a token skips: one definition, with a second figure only where sites were kept dense."""

import pytest

from sparsepack.models.activity import Skipped, bits_read, shown, skipped, sparse_sites_of
from sparsepack.models.sites import SiteRule

WEIGHTS = {(0, "attn_in"): 100, (0, "mlp_in"): 300, (1, "attn_in"): 100, (1, "mlp_in"): 300}


def test_dense_sites_count_in_the_whole_and_not_in_the_sparse_sites():
    sparse = [(1, "attn_in"), (1, "mlp_in")]
    found = skipped(WEIGHTS, {(1, "attn_in"): 0.5, (1, "mlp_in"): 0.5}, sparse)
    assert found == Skipped(overall=0.25, of_sparse_sites=0.5)


def test_a_site_that_may_be_sparse_and_skips_nothing_counts_in_both():
    found = skipped(WEIGHTS, {(1, "mlp_in"): 0.5}, list(WEIGHTS))
    assert found == Skipped(150 / 800, 150 / 800)


def test_a_site_that_skips_is_a_sparse_site_though_nobody_said_so():
    assert skipped(WEIGHTS, {(0, "attn_in"): 0.5, (1, "attn_in"): 0.0}, []) == Skipped(50 / 800, 0.5)


def test_nothing_skips_where_nothing_may():
    assert skipped(WEIGHTS, {}, []) == Skipped(0.0, 0.0)


def test_both_are_shown_where_they_differ():
    assert shown(0.5, 0.5) == "50.0 %"
    assert shown(0.434, 0.496) == "43.4 % (49.6 % of sparse sites)"


def test_bits_that_are_read_stand_beside_the_target():
    assert bits_read(6.375, 0.25, 0.5) == "4.78 bits read (target 3.19)"
    assert bits_read(6.375, 0.0) == "6.38 bits read"
    assert bits_read(6.375, 0.0, 0.0) == "6.38 bits read (target 6.38)"


def test_an_artifact_names_its_sparse_sites():
    rules = {(0, "attn_in"): SiteRule(0.5, sparsity=0.5)}
    rows = [{"layer": n, "site": "mlp_in", "may_be_sparse": n == 0} for n in range(2)]
    assert sparse_sites_of({"thresholds": {"rows": rows}}, rules) == {(0, "attn_in"), (0, "mlp_in")}


@pytest.mark.parametrize("table", [None, [], {}, {"rows": 3}, {"rows": [3, {"may_be_sparse": True, "layer": []}]}])
def test_a_strange_manifest_names_none(table):
    rules = {(0, "attn_in"): SiteRule(0.5, sparsity=0.5)}
    assert sparse_sites_of({"thresholds": table}, rules) == {(0, "attn_in")}
