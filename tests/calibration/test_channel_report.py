"""What `inspect` says of a calibration's channels, on importances whose answers are known."""

import json

import pytest
import torch
from click.testing import CliRunner

from sparsepack.calibrate import folder
from sparsepack.calibrate.statistics import Importance, channel_report, token_report
from sparsepack.cli.commands.inspect import channels_table, inspect


def _same(value: torch.Tensor) -> Importance:
    return Importance(value, value, value)


def test_shares_are_of_the_heaviest_channels_mean_of_the_heads():
    product = torch.ones(2, 64, dtype=torch.float64)
    product[0, 5:13] = 101  # 808 of 864
    report = channel_report([_same(product)])
    assert (report["head_dim"], report["counts"], report["compared"], report["chance"]) == (64, [8, 16, 32], 16, 0.25)
    expected = [(top + 800) / 864 / 2 + top / 64 / 2 for top in (8, 16, 32)]
    assert report["layers"][0]["share"] == pytest.approx(expected)


def _heavy_from(*first: int) -> torch.Tensor:
    """A head each, whose 16 heaviest channels of 64 begin at these."""
    value = torch.rand(len(first), 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for head, start in enumerate(first):
        value[head, start : start + 16] += 1
    return value


def test_overlaps_are_of_the_heaviest_channels_mean_of_all_pairs():
    layer = Importance(query=_heavy_from(0, 16, 32), key=_heavy_from(0, 8, 16), product=_heavy_from(0, 0, 0))
    row = channel_report([layer])["layers"][0]
    assert row["heads_agree"] == {"query": 0, "key": pytest.approx((0.5 + 0 + 0.5) / 3), "product": 1}
    assert row["key_agrees"] == pytest.approx((1 + 0.5 + 0) / 3)


def test_heads_that_have_nothing_to_do_with_each_other_agree_by_chance():
    value = torch.rand(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = channel_report([_same(value)])
    assert report["layers"][0]["heads_agree"]["key"] == pytest.approx(report["chance"], abs=0.02)


def test_statistics_that_mix_heads_and_positions_are_reported():
    """As in the paper's code: q*k [B, heads, S, D] is taken for [B * S, heads, D]."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(4, 1, 64, generator=generator) ** 4  # each head has its own heavy channels
    values = (size * torch.randn(2, 4, 256, 64, generator=generator)).abs()
    apart = values.sum((0, 2), dtype=torch.float64)
    mixed = values.reshape(-1, 4, 64).sum(0, dtype=torch.float64)
    report = channel_report([_same(apart), Importance(apart, apart, mixed)])
    assert report["alike"] == [1]
    assert report["layers"][0]["heads_agree"]["product"] < 0.5


@pytest.mark.parametrize(("head_dim", "counts", "compared"), [(8, [2], 2), (16, [8], 4), (32, [8, 16], 16)])
def test_small_heads_have_fewer_counts(head_dim, counts, compared):
    report = channel_report([_same(torch.zeros(1, head_dim, dtype=torch.float64))])
    assert (report["counts"], report["compared"]) == (counts, compared)
    row = report["layers"][0]
    assert row["heads_agree"] == {"query": None, "key": None, "product": None}, "there is one head"
    assert row["share"] == [0] * len(counts)


def test_inspect_shows_a_row_for_each_block(small_calibration, tmp_path):
    folder.save(small_calibration, tmp_path / "c")
    told = CliRunner().invoke(inspect, [str(tmp_path / "c")])
    assert told.exit_code == 0
    assert "64 in each head" in told.output
    assert "25% by chance" in told.output
    channels, _ = told.output.split("neurons, over")
    rows = [line for line in channels.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["block", "0", "1", "2"]
    written = CliRunner().invoke(inspect, [str(tmp_path / "c"), "--json", "-"])
    report = json.loads(written.output)["attention_channels"]
    assert len(report["layers"]) == 3


def test_mixed_up_heads_are_named(small_calibration):
    report = channel_report([_same(_heavy_from(0, 0)), _same(_heavy_from(0, 20)), _same(_heavy_from(7, 7))])
    tokens = token_report(small_calibration)
    told = channels_table({**small_calibration.manifest, "attention_channels": report, "attention_tokens": tokens})
    assert "heads of blocks 0, 2 have nearly the same heavy channels" in told
