"""The thresholds table: exact on the way through a file, editable, and strict about what it takes."""

import base64
import json
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from sparsepack.calibrate import histogram
from sparsepack.calibrate.sequential import at_quantile, score, score_counts, second_half
from sparsepack.calibrate.threshold_table import Thresholds, read_thresholds
from sparsepack.errors import ThresholdsError
from sparsepack.models.family import SITES
from sparsepack.models.sites import CURVE_SHARES, SiteRule


@pytest.fixture
def table(small) -> Thresholds:
    """One row of every kind: a scalar, channel weights, offsets, steps, dense."""
    generator = torch.Generator().manual_seed(0)

    def row(layer, site):
        columns = small.stacked_shape(site)[1]
        weights = torch.rand(columns, generator=generator) / 3 if site in ("attn_in", "mlp_in") else None
        offset = torch.randn(columns, generator=generator) if site == "mlp_in" else None
        if site == "mlp_mid":
            return SiteRule()
        curve = tuple(n / 7 for n in range(len(CURVE_SHARES)))
        steps = torch.rand(5, generator=generator).sort().values if (layer, site) == (2, "attn_in") else None
        return SiteRule(1 / 3 + layer, offset, weights, 0.5 + layer / 7, 0.1 + 0.2, curve, steps=steps)

    rules = {(layer, site): row(layer, site) for layer in range(3) for site in SITES}
    head = (small.sha256, "c" * 64, "teal", "column-norm", 1 / 3, "sparse")
    weights = {(layer, site): 1 + n for n, (layer, site) in enumerate(rules)}
    return Thresholds(*head, rules, weights, frozenset(key for key in rules if key[1] != "mlp_mid"))


def same(one: SiteRule, other: SiteRule) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(SiteRule)]
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def test_a_table_comes_back_bit_for_bit(table, small, tmp_path):
    table.write(tmp_path / "t.json")
    again = read_thresholds(tmp_path / "t.json")
    assert list(again.rules) == list(table.rules)
    assert all(same(rule, again.rules[key]) for key, rule in table.rules.items())
    head = {name: value for name, value in vars(table).items() if name != "rules"}
    assert head == {name: value for name, value in vars(again).items() if name != "rules"}
    again.check_model(small)
    again.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()


def test_a_table_has_a_line_for_each_row(table, tmp_path):
    table.write(tmp_path / "t.json")
    lines = [line for line in (tmp_path / "t.json").read_text().splitlines() if '"site"' in line]
    assert [json.loads(line.rstrip(","))["site"] for line in lines] == list(SITES) * 3


def edited(table, path, change):
    value = table.to_json()
    change(value)
    path.write_text(json.dumps(value))
    return path


def test_a_threshold_can_be_edited_and_written_as_a_whole_number(table, tmp_path):
    def change(value):
        value["rows"][1] |= {"threshold": 2, "sparsity": 0.25}
        value["rows"][3] |= {"threshold": 0.5, "sparsity": 0.4}
        del value["rows"][0]["channel_weights"]

    again = read_thresholds(edited(table, tmp_path / "t.json", change))
    assert (again.rules[0, "attn_out"].threshold, again.rules[0, "attn_out"].sparsity) == (2.0, 0.25)
    assert again.rules[0, "mlp_mid"].limits.item() == 0.5
    assert again.rules[0, "attn_in"].channel_weights is None
    assert same(again.rules[0, "mlp_in"], table.rules[0, "mlp_in"])


def test_limits_are_the_threshold_over_the_channel_weights(table):
    assert table.rules[0, "mlp_mid"].dense
    assert table.rules[0, "attn_out"].limits.shape == ()
    rule = table.rules[0, "mlp_in"]
    assert torch.equal(rule.limits, torch.tensor(rule.threshold) / rule.channel_weights)


def test_a_rule_on_a_device_is_the_rule_that_an_artifact_holds(table):
    rule = table.rules[0, "mlp_in"]
    there = rule.to("cpu")
    assert torch.equal(there.limits, rule.limits)
    assert torch.equal(there.offset, rule.offset)
    assert not there.dense


def test_a_rule_knows_what_another_threshold_would_skip():
    scores = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).abs()
    rule = at_quantile(SiteRule(sparsity=0.5), histogram.count(scores))
    assert rule.expected() == rule.realised == pytest.approx(0.5, abs=1e-3)
    for threshold in (0.05, 0.3, 1.0, 1.7, 2.2):
        truth = float((scores <= threshold).float().mean())
        assert replace(rule, threshold=threshold).expected() == pytest.approx(truth, abs=0.005)
    assert replace(rule, threshold=9.0).expected() == 0.99
    assert replace(rule, curve=()).expected() is None
    assert replace(rule, threshold=0.0).expected() == 0
    assert SiteRule().expected() == 0


def test_exact_zeros_are_expected_to_be_skipped_at_a_threshold_of_zero():
    scores = torch.cat([torch.zeros(700), torch.rand(300)])
    rule = at_quantile(SiteRule(sparsity=0.5), histogram.count(scores))
    assert rule.threshold == 0
    assert rule.expected() == pytest.approx(0.7, abs=0.001)


def test_an_outlook_counts_every_site_and_one_that_somebody_made_sparse(table, tmp_path):
    def change(value):
        value["rows"][3]["threshold"] = 0.5  # mlp_mid, which was kept dense

    assert table.outlook() is not None
    assert table.may_skip() == table.sparse_sites
    again = read_thresholds(edited(table, tmp_path / "t.json", change))
    assert again.may_skip() == table.sparse_sites | {(0, "mlp_mid")}
    assert again.outlook() is None  # that site has no curve
    assert again.summary()["expected"] is None


def test_a_channel_without_weight_is_never_active():
    weights = torch.tensor([1.0, 0.0])
    for threshold in (0.5, 0.0):
        rule = SiteRule(threshold, channel_weights=weights, sparsity=0.5)
        assert rule.limits.tolist() == [threshold, torch.inf]


def test_a_threshold_of_zero_still_skips_exact_zeros():
    """In a ReLU model the quantile is often 0: such a site is sparse, not dense."""
    assert not SiteRule(0.0, sparsity=0.5, realised=0.8).dense
    assert SiteRule().dense


ROWS = [
    (lambda row: row.update(curve=[1.0]), r"row 2: curve; expected 21 numbers, none below the one before"),
    (lambda row: row.update(curve=list(range(21, 0, -1))), r"row 2: curve; expected 21 numbers"),
    (lambda row: row.update(curve=[0.0] * 20 + [10**400]), r"row 2: curve; expected 21 numbers, none"),
    (lambda row: row.update(weights=0), r"layer 0, attn_out: weights is 0; expected a whole number"),
    (lambda row: row.update(weights=10**400), r"layer 0, attn_out: weights is 10{59}; expected a whole number"),
    (lambda row: row.pop("site"), r"row 2: the field 'site' is missing"),
    (lambda row: row.pop("threshold"), r"row 2: the field 'threshold' is missing"),
    (lambda row: row.update(site="mlp"), r"row 2: site 'mlp'; expected one of attn_in"),
    (lambda row: row.update(site=3), r"row 2: site is 3; expected a string"),
    (lambda row: row.update(layer="0"), r"row 2: layer is '0'; expected a whole number"),
    (lambda row: row.update(layer=True), r"row 2: layer is True"),
    (lambda row: row.update(sparsity=1.0), r"row 2: sparsity 1.0"),
    (lambda row: row.update(sparsity=-0.1), r"row 2: sparsity -0.1"),
    (lambda row: row.update(sparsity=float("nan")), r"row 2: sparsity is nan"),
    (lambda row: row.update(sparsity="half"), r"row 2: sparsity is 'half'; expected a number"),
    (lambda row: row.update(threshold=-1), r"row 2: sparsity .*, threshold -1"),
    (lambda row: row.update(threshold=float("inf")), r"row 2: threshold is inf"),
    (lambda row: row.update(threshold=float("nan")), r"row 2: threshold is nan"),
    (lambda row: row.update(threshold=None), r"row 2: threshold is None; expected a number"),
    (lambda row: row.update(realised=[]), r"row 2: realised is \[\]"),
    (lambda row: row.update(offset="%%%"), r"row 2: offset is not base64"),
    (lambda row: row.update(offset=[1.0]), r"row 2: offset is not base64"),
    (lambda row: row.update(channel_weights="AAA="), r"row 2: channel_weights is not base64 of float32"),
    (lambda row: row.update(offset=base64.b64encode(b"\x00\x00\x80\x7f").decode()), r"row 2: offset .* not finite"),
]


@pytest.mark.parametrize(("change", "message"), ROWS, ids=[message for _, message in ROWS])
def test_a_bad_row_is_named_with_its_field(table, tmp_path, change, message):
    path = edited(table, tmp_path / "t.json", lambda value: change(value["rows"][1]))
    with pytest.raises(ThresholdsError, match=message) as caught:
        read_thresholds(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


TABLES = [
    (lambda value: value.update(schema=2), "not a thresholds table of schema 1"),
    (lambda value: value.update(kind="calibration"), "not a thresholds table of schema 1"),
    (lambda value: value.pop("model_sha256"), "the field 'model_sha256' is missing"),
    (lambda value: value.update(model_sha256=7), "model_sha256 is 7; expected a string"),
    (lambda value: value.update(sparsity="half"), "sparsity is 'half'; expected a number"),
    (lambda value: value.update(rows={"a": 1}), "rows is {'a': 1}; expected a list"),
    (lambda value: value.update(rows=["a"]), "row 1: the field 'layer' is missing"),
]


@pytest.mark.parametrize(("change", "message"), TABLES, ids=[message for _, message in TABLES])
def test_a_bad_table_is_one_line(table, tmp_path, change, message):
    path = edited(table, tmp_path / "t.json", change)
    with pytest.raises(ThresholdsError, match=message) as caught:
        read_thresholds(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_table_is_one_line(tmp_path):
    for content in ("", "{", "[]", "3"):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ThresholdsError, match="not a thresholds table"):
            read_thresholds(tmp_path / "t.json")
    with pytest.raises(ThresholdsError, match=r"none.json: cannot be read \(No such file or directory\)"):
        read_thresholds(tmp_path / "none.json")


def test_a_table_of_another_model_is_refused(table, tiny):
    with pytest.raises(ThresholdsError, match="the thresholds are of another model"):
        table.check_model(tiny)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], r"the row of layer 2, mlp_mid is missing"),
        (lambda rows: [*rows, rows[0]], "a row that stands twice"),
        (lambda rows: [{**rows[0], "layer": 3}, *rows[1:]], r"the row of layer 0, attn_in is missing"),
        (lambda rows: [{**rows[0], "channel_weights": "AAAAAA=="}, *rows[1:]], "has 1 channels, the model 256"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(table, small, tmp_path, change, message):
    path = edited(table, tmp_path / "t.json", lambda value: value.update(rows=change(value["rows"])))
    with pytest.raises(ThresholdsError, match=message):
        read_thresholds(path).check_model(small)


def test_a_summary_is_the_table_without_its_vectors(table):
    summary = table.summary()
    json.dumps(summary)
    assert summary["rows"][0]["channel_weights"] is True
    assert summary["rows"][1]["channel_weights"] is False
    assert summary["rows"][1]["threshold"] == table.rules[0, "attn_out"].threshold


@pytest.mark.parametrize("rows", [slice(0, 0), slice(1, None), slice(4, None), slice(0, -1)])
def test_a_table_with_missing_rows_is_refused_also_without_its_model(table, tmp_path, rows):
    path = edited(table, tmp_path / "t.json", lambda value: value.update(rows=value["rows"][rows]))
    with pytest.raises(ThresholdsError, match="is missing"):
        read_thresholds(path)


@pytest.mark.parametrize("wrong", [10**400, "x" * 100_000, [1] * 100_000, "a\nb"])
def test_a_head_that_is_too_much_is_one_short_line(table, tmp_path, wrong):
    for name in ("sparsity", "criterion"):
        path = edited(table, tmp_path / "t.json", lambda value, name=name: value.update({name: wrong}))
        with pytest.raises(ThresholdsError, match=name) as caught:
            read_thresholds(path)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gpu_counts_the_scores_that_torch_computes(weighted: bool) -> None:
    x = second_half(torch.randn(3, 37, 259, device="cuda", dtype=torch.bfloat16))
    choice = SiteRule(channel_weights=torch.rand(259) if weighted else None)
    assert torch.equal(score_counts(x, choice), histogram.count(score(x, choice)))
