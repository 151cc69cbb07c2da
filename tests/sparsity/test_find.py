"""From a target to thresholds: the sparsity that is realised, and what the allocations make of it."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from accuracy import divergence, realised, windows_of
from models_for_tests import make_model
from pairwise import each_value

from sparsepack.calibrate import histogram, teal
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.uniform import weights_of
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.sites import SiteRule, chosen_sites
from sparsepack.workers.exchange import EACH_ALONE


def _books(shared):
    """A piece from within each of twelve whole books."""
    books = read_text(str(shared / "text" / "books.validation.jsonl.xz"))
    return replace(books, documents=tuple(book[50_000:60_000] for book in books.documents))


@pytest.fixture(scope="module")
def unseen(silu, shared):
    """Windows of whole books that neither the model nor the calibration saw."""
    return windows_of(silu, _books(shared), 512, 12)


@pytest.fixture(scope="module")
def other_windows(tiny, tiny_calibration):
    """Windows of the calibration's text that are not in the calibration."""
    used = {tuple(row) for row in tiny_calibration.windows.tolist()}
    inputs, targets = windows_of(tiny, read_text("shipped:train"), 128, 40)
    fresh = torch.tensor([tuple(row) not in used for row in inputs.tolist()])
    assert fresh.sum() > 20
    return inputs[fresh], targets[fresh]


@pytest.mark.parametrize("criterion", ["magnitude", "column-norm"])
def test_realised_sparsity_is_near_the_target_on_other_windows(tiny, tiny_calibration, other_windows, criterion):
    table = find_thresholds(tiny, tiny_calibration, AllocationOptions(0.5, "uniform", criterion))
    overall, sites = realised(open_subject(tiny.name, table), other_windows)
    assert abs(overall - 0.5) < 0.01
    assert len(sites) == 12
    assert max(abs(value - 0.5) for value in sites.values()) < 0.04
    assert all(row.realised == pytest.approx(0.5, abs=1e-3) for row in table.rules.values())


@pytest.mark.long
@pytest.mark.parametrize("criterion", ["magnitude", "column-norm"])
def test_realised_sparsity_is_within_two_points_on_unseen_text_of_the_same_kind(
    silu, silu_calibration, unseen, criterion
):
    table = find_thresholds(silu, silu_calibration, AllocationOptions(0.5, "uniform", criterion))
    overall, sites = realised(open_subject(silu.name, table), unseen)
    assert abs(overall - 0.5) < 0.01
    by_kind = defaultdict(list)
    for (_, site), value in sites.items():
        by_kind[site].append(value)
    assert len(sites) == 32
    assert all(abs(sum(values) / 8 - 0.5) < 0.01 for values in by_kind.values())
    # Single sites of the first and last block follow the text more; 8 windows of 512 tokens are few.
    assert sum(abs(value - 0.5) < 0.02 for value in sites.values()) >= 29
    assert max(abs(value - 0.5) for value in sites.values()) < 0.04
    assert all(row.realised == pytest.approx(0.5, abs=1e-3) for row in table.rules.values())


@pytest.mark.long
def test_thresholds_taken_on_dense_activations_realise_more_than_nominal(silu, silu_calibration, unseen):
    """An independent reference found 0.51 at 0.50 over all sites, and 0.55 at the attention output."""
    table = find_thresholds(silu, silu_calibration, AllocationOptions(0.5, "uniform", upstream="dense"))
    overall, sites = realised(open_subject(silu.name, table), unseen)
    assert 0.505 < overall < 0.53
    attn_out = sum(value for (_, site), value in sites.items() if site == "attn_out") / 8
    assert 0.53 < attn_out < 0.58


def test_dense_upstream_thresholds_are_the_calibrations_own_quantiles(small, small_calibration):
    for criterion in ("magnitude", "column-norm"):
        options = AllocationOptions(0.3, "uniform", criterion, upstream="dense")
        for (layer, site), row in find_thresholds(small, small_calibration, options).rules.items():
            counts = small_calibration.layers[layer][f"{site}.histogram.{criterion}"]
            assert row.threshold == histogram.quantile(counts, 0.3)
            assert (row.channel_weights is None) == (criterion == "magnitude")


def test_column_norms_are_those_of_the_stacked_matrix(small, small_calibration):
    table = find_thresholds(small, small_calibration, AllocationOptions(0.5, "uniform", "column-norm"))
    for key, row in table.rules.items():
        stacked = small.stacked(*key)[0].float()
        torch.testing.assert_close(row.channel_weights, stacked.norm(dim=0))


def test_ignored_sites_stay_dense_and_the_others_are_sparse(small, small_calibration, text):
    options = AllocationOptions(0.5, "uniform", ignore=("blk.0.*", "*.attn_out"))
    table = find_thresholds(small, small_calibration, options)
    dense = {key for key, rule in table.rules.items() if rule.dense}
    assert dense == {(0, site) for site in SITES} | {(1, "attn_out"), (2, "attn_out")}
    _, sites = realised(open_subject(small.name, table), windows_of(small, text, 64, 8))
    assert set(sites) == table.sparse_sites == set(table.rules) - dense
    share = weights_of(small, list(table.rules))
    sparse = sum(share[key] for key in table.sparse_sites)
    assert (table.outlook().overall, table.outlook().of_sparse_sites) == pytest.approx((0.5 * sparse, 0.5), abs=0.01)


def test_a_target_of_zero_leaves_the_model_dense(small, small_calibration):
    for allocation in ("uniform", "teal", "global"):
        table = find_thresholds(small, small_calibration, AllocationOptions(0.0, allocation=allocation))
        assert all(rule.dense for rule in table.rules.values())
        assert not open_subject(small.name, table).sparse


@pytest.fixture(scope="module")
def calibrated(text, tmp_path_factory):
    """(kv_heads) -> a random model of 4 heads and its calibration."""

    @cache
    def make(kv_heads):
        folder = tmp_path_factory.mktemp("heads")
        checkpoint = open_checkpoint(make_model(folder / "m", "llama", num_key_value_heads=kv_heads))
        return checkpoint, calibrate(checkpoint, text, folder / "c", CalibrateOptions(context=32, samples=4))

    return make


def _sizes(kv_heads):
    """Parameters of each site, from the configuration: hidden 256, 4 heads of 64, FFN 512."""
    return {
        "attn_in": 256 * (256 + 2 * 64 * kv_heads),
        "attn_out": 256 * 256,
        "mlp_in": 2 * 256 * 512,
        "mlp_mid": 256 * 512,
    }


@each_value({"upstream": ["sparse", "dense"], "kv_heads": [1, 4]})
def test_teal_gives_every_block_the_target_by_parameters(calibrated, kv_heads, upstream):
    checkpoint, calibration = calibrated(kv_heads)
    table = find_thresholds(checkpoint, calibration, AllocationOptions(0.4, "teal", upstream=upstream))
    sizes = _sizes(kv_heads)
    for layer in range(2):
        rows = {site: rule for (at, site), rule in table.rules.items() if at == layer}
        assert list(rows) == list(SITES)
        mean = sum(row.sparsity * sizes[site] for site, row in rows.items()) / sum(sizes.values())
        assert mean == pytest.approx(0.4, abs=1e-6)
        assert len({row.sparsity for row in rows.values()}) > 1


@pytest.mark.parametrize("target", [pytest.param(0.94, marks=pytest.mark.long), 0.97])
def test_teal_reaches_high_targets_too(calibrated, target):
    """The last steps are larger than what is left at the small sites."""
    checkpoint, calibration = calibrated(1)
    table = find_thresholds(checkpoint, calibration, AllocationOptions(target, "teal"))
    sizes = _sizes(1)
    for layer in range(2):
        mean = sum(r.sparsity * sizes[site] for (at, site), r in table.rules.items() if at == layer) / sum(
            sizes.values()
        )
        assert mean == pytest.approx(target, abs=1e-6)
        assert all(row.sparsity <= 0.97 for row in table.rules.values())


def test_teal_spends_the_target_on_the_sites_it_may_touch(calibrated):
    checkpoint, calibration = calibrated(4)
    options = AllocationOptions(0.4, "teal", include=("blk.1.attn_in", "blk.1.mlp_mid"))
    found = find_thresholds(checkpoint, calibration, options).rules
    rows = {key: rule.sparsity for key, rule in found.items()}
    sizes = _sizes(4)
    chosen = [(1, "attn_in"), (1, "mlp_mid")]
    mean = sum(rows[key] * sizes[key[1]] for key in chosen) / sum(sizes[site] for _, site in chosen)
    assert mean == pytest.approx(0.4, abs=1e-6)
    assert all(value == 0 for key, value in rows.items() if key not in chosen)


@pytest.mark.long
@torch.no_grad()
def test_teal_lowers_the_error_of_real_blocks_at_equal_sparsity(silu, silu_calibration):
    stream, base = BlockStream(silu), dict.fromkeys(SITES, SiteRule())
    weights = weights_of(silu, chosen_sites(silu.sites, (), ()))
    hidden = stream.embed(silu_calibration.windows[:2, :128].long())
    for layer in range(2):
        stream.load(layer)
        exact = stream(hidden)

        def error(sparsities, layer=layer, hidden=hidden, exact=exact):
            return float(teal.second_half(teal.run_at(stream, layer, hidden, sparsities, base) - exact).norm())

        given = teal.greedy_sparsities(stream, layer, hidden, weights, 0.5, base, EACH_ALONE)
        assert error(given) < 0.95 * error(dict.fromkeys(SITES, 0.5))
        assert given["mlp_mid"] > 0.5
        hidden = exact


LEARNING = AllocationOptions(0.7, "global", steps=12, batch=2, length=128)
"""At this sparsity uniform thresholds lose much, and few steps win much of that back: learnt ones have 0.88 to 0.90 of
the divergence whatever the seed. At a sparsity of 0.5 they have 0.94 to 0.99, by the seed or the processor."""


def _check_learnt(tiny, calibration, windows, options):
    """A table learnt with these options, which holds their sparsity and diverges clearly less than a uniform one."""
    table = find_thresholds(tiny, calibration, options)
    overall, _ = realised(open_subject(tiny.name, table), windows)
    assert abs(overall - 0.7) < 0.02
    uniform = find_thresholds(tiny, calibration, AllocationOptions(0.7, "uniform"))
    assert divergence(tiny, table, windows) < 0.95 * divergence(tiny, uniform, windows)
    return table


def test_learnt_thresholds_hold_the_sparsity_and_lower_the_divergence(tiny, tiny_calibration, other_windows):
    learnt = _check_learnt(tiny, tiny_calibration, other_windows, LEARNING)
    weights = weights_of(tiny, chosen_sites(tiny.sites, (), ()))
    target = sum(rule.sparsity * weights[key] for key, rule in learnt.rules.items())
    assert target == pytest.approx(0.7, abs=1e-6)
    assert all(row.offset is None and row.channel_weights is not None for row in learnt.rules.values())


def test_learning_is_the_same_for_the_same_seed_and_another_for_another(tiny, tiny_calibration):
    few = replace(LEARNING, steps=4, batch=1, length=32, windows=2)
    one, again, other = (
        find_thresholds(tiny, tiny_calibration, replace(few, seed=seed)).to_json() for seed in (0, 0, 1)
    )
    assert one == again
    assert one != other


@pytest.mark.long
def test_learnt_offsets_are_kept_and_move_with_training(tiny, tiny_calibration, other_windows):
    table = _check_learnt(tiny, tiny_calibration, other_windows, replace(LEARNING, offsets=True))
    assert all(row.offset is not None and row.offset.abs().max() > 0 for row in table.rules.values())


def test_learning_leaves_ignored_sites_dense(tiny, tiny_calibration):
    options = replace(LEARNING, steps=2, batch=1, ignore=("blk.0.*",))
    table = find_thresholds(tiny, tiny_calibration, options)
    assert {key for key, rule in table.rules.items() if rule.dense} == {(0, site) for site in SITES}


@pytest.fixture(scope="module")
def relu(shared, tmp_path_factory):
    checkpoint = open_checkpoint(shared / "models" / "books-26m-relu")
    books = read_text(str(shared / "text" / "books.calibration.jsonl.xz"))
    options = CalibrateOptions(context=256, samples=4)
    return checkpoint, calibrate(checkpoint, books, tmp_path_factory.mktemp("relu") / "c", options)


@pytest.fixture(scope="module")
def random_relu(text, tmp_path_factory):
    """A model of which half of the down inputs are exactly 0."""
    folder = tmp_path_factory.mktemp("relu")
    checkpoint = open_checkpoint(make_model(folder / "m", hidden_act="relu"))
    return checkpoint, calibrate(checkpoint, text, folder / "c", CalibrateOptions(context=64, samples=8))


def test_exact_zeros_beyond_the_target_are_skipped_at_a_threshold_of_zero(random_relu):
    checkpoint, calibration = random_relu
    table = find_thresholds(checkpoint, calibration, AllocationOptions(0.3, "uniform"))
    down = [rule for (_, site), rule in table.rules.items() if site == "mlp_mid"]
    assert all(row.threshold == 0 and row.sparsity == 0.3 for row in down)
    assert all(0.35 < row.realised < 0.65 for row in down)


@pytest.mark.long
def test_in_a_relu_model_the_down_input_is_left_as_sparse_as_it_is(relu, shared):
    """More exact zeros than asked for: the threshold is 0, and the realised sparsity says what is skipped."""
    checkpoint, calibration = relu
    table = find_thresholds(checkpoint, calibration, AllocationOptions(0.5, "uniform"))
    down = [rule for (_, site), rule in table.rules.items() if site == "mlp_mid"]
    assert all(row.threshold == 0 and row.sparsity == 0.5 for row in down)
    assert all(0.65 < row.realised < 0.97 for row in down)
    overall, sites = realised(open_subject(checkpoint.name, table), windows_of(checkpoint, _books(shared), 256, 6))
    for key, row in table.rules.items():
        assert sites[key] == pytest.approx(row.realised, abs=0.06)
    assert overall > 0.52


@pytest.mark.parametrize("allocation", ["teal", "global"])
def test_other_allocations_cope_with_exact_zeros(random_relu, allocation):
    checkpoint, calibration = random_relu
    learnt = {"steps": 2, "batch": 1, "length": 64} if allocation == "global" else {}
    options = AllocationOptions(0.5, allocation, windows=2, **learnt)
    table = find_thresholds(checkpoint, calibration, options)
    rules = [rule for rule in table.rules.values() if not rule.dense]
    assert len(rules) == 8
    assert all(bool(rule.limits.isfinite().all()) for rule in rules)
