"""Levels of planes: what they cost, the price that gives the bits asked for, artifacts, and engine and `eval` alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import make_model
from torch import Tensor

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import save
from sparsepack.calibrate.planes import level_costs, plane_shares, slopes
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.refit_inputs import SiteSums
from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions, thresholds_table
from sparsepack.cli.app import main
from sparsepack.errors import PackingError, ThresholdsError, UserError
from sparsepack.eval.subject import open_subject
from sparsepack.files.gguf import read_gguf
from sparsepack.files.text import Text
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.inspect import describe
from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.open import read_packed
from sparsepack.formats.verify import verify
from sparsepack.formats.zigzag import plan
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sites import SiteRule, levels_read
from sparsepack.packing import Found, PackRequest, pack, plan_of
from sparsepack.packing_forecast import forecast
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference import products

FORMAT = "zigzag-q6_p"
BITS = 6.25


@pytest.fixture(scope="module")
def source(tmp_path_factory, text) -> Path:
    """A random model `m`, its calibration `c`, and `p.gguf`, of which a token reads 3.4 bits."""
    folder = tmp_path_factory.mktemp("planes")
    checkpoint = open_checkpoint(make_model(folder / "m", "qwen2"))
    calibrate(checkpoint, text, folder / "c", CalibrateOptions(context=64, samples=8, held_out=2))
    pack(PackRequest(str(folder / "m"), folder / "p.gguf", FORMAT, folder / "c", bits=3.4))
    return folder


@pytest.fixture
def request_(source, tmp_path) -> PackRequest:
    return PackRequest(str(source / "m"), tmp_path / "m.gguf", FORMAT, source / "c", bits=3.4)


def test_levels_are_counted_by_thresholds_that_inputs_exceed() -> None:
    limits = torch.tensor([[1.0, 0.0], [2.0, 0.5], [2.0, torch.inf]])
    x = torch.tensor([[0.5, 0.0], [1.0, 0.1], [-1.5, -0.5], [2.5, 9.0], [torch.nan, torch.nan]])
    assert levels_read(x, limits).tolist() == [[0, 0], [0, 1], [1, 1], [3, 2], [0, 0]]
    rule = SiteRule(2.0, channel_weights=torch.tensor([4.0, 1.0, 0.0]), steps=torch.tensor([1.0, 3.0, torch.inf]))
    assert rule.limits.tolist() == [[0.5, 2.0, torch.inf], [1.5, 6.0, torch.inf], [torch.inf] * 3]
    assert rule.of_levels
    assert rule.to("cpu").limits.equal(rule.limits)
    assert not SiteRule(limits[0]).of_levels


def test_slopes_are_those_of_the_convex_hull() -> None:
    """The second column's first level saves less for each bit than its second: both are read from the same input on."""
    costs = torch.tensor([[16.0, 16.0], [4.0, 15.0], [1.0, 1.0], [0.0, 0.9]])
    found = slopes(costs, [2.0, 2.0, 2.0])
    assert torch.allclose(found, torch.tensor([[6.0, 3.75], [1.5, 3.75], [0.5, 0.05]]))
    assert torch.equal(slopes(costs.flip(0), [2.0, 2.0, 2.0]), torch.zeros(3, 2)), "what costs more is never read"


def test_a_level_costs_the_square_of_its_error_at_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 7, generator=generator)
    gradients, of_rows = torch.randn(2, 5, 7, generator=generator), torch.rand(300, generator=generator)
    costs = level_costs(weight, "Q6_P", gradients, of_rows)
    assert torch.allclose(costs[0], gradients.square().mean((0, 1)))
    expected = (of_rows[:, None] * weight.square()).sum(0)
    for level, share in ((1, 0.12), (2, 0.03), (3, 0.0075), (4, 0.0019), (5, 0.00045)):
        assert torch.allclose(costs[level], share * expected, rtol=0.5), level


def test_sums_for_error_feedback_know_what_is_read_at_each_level() -> None:
    generator = torch.Generator().manual_seed(0)
    x, threshold = torch.randn(3, 40, 7, generator=generator), torch.rand(7, generator=generator) / 2
    threshold[2] = torch.inf
    costs = torch.rand(9, generator=generator)
    rule = SiteRule(threshold, sparsity=0.5, row_costs=costs, steps=torch.tensor([1.0, 2.0, 2.5, 4.0, 5.0]))
    sums = SiteSums(torch.randn(9, 7, generator=generator), rule, 0.7)
    for part in x.split(2):
        sums.add(part)
    known = sums.inputs(0.1)
    flat, levels = x.flatten(0, 1), levels_read(x.flatten(0, 1), rule.limits)
    read = torch.where(levels > 0, flat, 0)
    assert known.lost is None
    assert known.inputs.row_costs is rule.row_costs
    assert known.inputs.products is not None
    assert torch.allclose(known.inputs.products, read.T @ read / 120, atol=1e-5)
    assert known.inputs.levels is not None
    of_level = torch.stack([torch.where(levels == level, flat.square(), 0).sum(0) for level in range(6)])
    others = [0, 1, 3, 4, 5, 6]
    assert torch.allclose(known.inputs.levels[:, others], (of_level / of_level[1:].sum(0))[:, others])
    assert (known.inputs.levels[1:, 2] == 0).all()


def test_errors_are_fed_back_unless_told_otherwise(request_, source) -> None:
    assert describe(source / "p.gguf")["refit"]["quantiser"] == "gptq"
    pack(replace(request_, fitting=RefitOptions(quantiser="round"), score=False))
    assert describe(request_.output)["refit"] is None


def test_steps_of_levels_are_shares_of_the_bits() -> None:
    assert plane_shares("Q6_P") == [72 / 200, *[32 / 200] * 4]
    assert BLOCKS["Q6_P"].level_bytes == (72, 104, 136, 168, 200)
    assert BLOCKS["Q4_K"].level_bytes == ()


@pytest.mark.parametrize("bits", [2.3, 4.5])
def test_calibration_text_reads_the_bits_asked_for(small, small_calibration, bits) -> None:
    options = AllocationOptions(1 - bits / BITS, block="Q6_P")
    table = find_thresholds(small, small_calibration, options)
    outlook = table.outlook()
    assert outlook is not None
    assert BITS * (1 - outlook.overall) == pytest.approx(bits, abs=0.01)
    for rule in table.rules.values():
        assert rule.of_levels
        assert (rule.limits[1:] >= rule.limits[:-1]).all()
    assert len({round(rule.realised, 2) for rule in table.rules.values()}) > 3


def test_a_table_is_read_as_it_was_written(small, small_calibration, tmp_path) -> None:
    table = find_thresholds(small, small_calibration, AllocationOptions(0.5, block="Q6_P"))
    table.write(tmp_path / "t.json")
    for key, rule in read_thresholds(tmp_path / "t.json").rules.items():
        assert torch.equal(rule.limits, table.rules[key].limits)
    assert "calibration text: 50.0 % of the bits of all block weights" in thresholds_table(table.summary())


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen2_moe", marks=pytest.mark.long)])
def test_a_table_that_was_found_by_itself_makes_the_same_weights(family, text, tmp_path) -> None:
    """Costs of rows are in it, and thresholds of each expert."""
    model, calibration, table = str(make_model(tmp_path / "m", family)), tmp_path / "c", tmp_path / "t.json"
    calibrate(model, text, calibration, CalibrateOptions(context=64, samples=8))
    command = ["thresholds", model, "--calibration", str(calibration), "--format", FORMAT]
    done = CliRunner().invoke(main, [*command, "--sparsity", "0.456", "-o", str(table)])
    assert done.exit_code == 0, done.output
    assert "of the bits of all block weights" in done.output
    request = PackRequest(model, tmp_path / "p.gguf", FORMAT, calibration, score=False)
    pack(replace(request, bits=3.4))
    pack(replace(request, thresholds=table, output=tmp_path / "q.gguf"))
    expected, found = (read_gguf(tmp_path / name) for name in ("p.gguf", "q.gguf"))
    assert expected.tensors.keys() == found.tensors.keys()
    assert all((expected.bytes(name) == found.bytes(name)).all() for name in expected.tensors)
    assert "row_costs" not in str(describe(tmp_path / "q.gguf")["thresholds"])


def test_what_finds_levels_is_not_forecast(source) -> None:
    command = ["thresholds", str(source / "m"), "--calibration", str(source / "c"), "--format", FORMAT]
    done = CliRunner().invoke(main, [*command, "--sparsity", "0.5", "-o", "t.json", "--dry-run", "1"])
    assert done.exit_code == 2
    assert "--dry-run: levels of planes take one pass forward and one back" in done.output
    done = CliRunner().invoke(main, [*command, "--sparsity", "0.5", "-o", "t.json", "--windows", "3"])
    assert done.exit_code == 2
    assert "windows" in done.output
    assert "format" in done.output


def test_a_table_whose_experts_do_not_divide_is_refused(small, small_calibration, tmp_path) -> None:
    path = tmp_path / "t.json"
    find_thresholds(small, small_calibration, AllocationOptions(0.5, block="Q6_P")).write(path)
    path.write_text(path.read_text().replace('"steps":', '"experts": 3, "steps":', 1))
    with pytest.raises(ThresholdsError, match="channel weights do not divide by 3 experts"):
        read_thresholds(path)


@pytest.mark.parametrize("costs", [torch.ones(3), -torch.ones(512)])
def test_a_table_of_other_costs_of_rows_is_refused(small, small_calibration, tmp_path, costs) -> None:
    table = find_thresholds(small, small_calibration, AllocationOptions(0.5, block="Q6_P"))
    assert len(table.rules[0, "attn_in"].row_costs) == 512
    rules = {**table.rules, (0, "attn_in"): replace(table.rules[0, "attn_in"], row_costs=costs)}
    replace(table, rules=rules).write(tmp_path / "t.json")
    request = PackRequest(str(small.path), tmp_path / "m.gguf", FORMAT, thresholds=tmp_path / "t.json")
    with pytest.raises(ThresholdsError, match=f"attn_in: row_costs are {len(costs)} numbers, expected 512 from 0 on"):
        pack(request)


def test_the_artifact_is_the_model_and_says_what_is_read(source) -> None:
    path = source / "p.gguf"
    assert verify(path, str(source / "m")).passed
    found = describe(path)
    assert found["score"]["decode"]["kl_divergence"]["value"] > found["score"]["dense"]["kl_divergence"]["value"] > 0
    tensors = read_gguf(path).tensors
    info = tensors["blk.0.attn_in.weight"]
    assert (info.type, info.shape[-1]) == ("I8", 200)
    assert tensors["blk.0.attn_in.threshold"].shape == (info.shape[1],)
    assert tensors["blk.0.attn_in.steps"].shape == (5,)


def test_engine_and_eval_read_the_same(source) -> None:
    """The engine's products by levels, position by position and at once, are the stock model's with its hooks.

    An input may lie within float32's rounding of a limit between levels, on one processor or another: in one of three
    sequences it may then be read at another level.
    """
    subject = open_subject(str(source / "p.gguf"))
    engine = Engine(read_packed(source / "p.gguf"), context=64, backend="reference")
    same = []
    for seed in (1, 2, 3):
        ids = torch.randint(300, (24,), generator=torch.Generator().manual_seed(seed))
        engine.reset()
        at_once = engine.teacher_forced(ids.tolist(), 10)
        activity = engine.activity()
        engine.reset()
        steps = torch.stack([engine.prefill(ids[:10].tolist()), *(engine.step(int(each)) for each in ids[10:])])
        for scorer in (subject.scorer(), subject.task_scorer()):
            hidden = scorer.hidden(ids[None], None, torch.tensor([10]))
            expected = scorer.head(slice(None))(hidden)[0]
            logits = all(
                (found - last).abs().max() < 2e-4 for found, last in ((at_once, expected), (steps, expected[9:]))
            )
            unread = scorer.realised().items()
            same.append(logits and all(activity[key] == pytest.approx(1 - share, abs=1e-6) for key, share in unread))
        assert 0.3 < sum(activity.values()) / len(activity) < 0.8
    assert sum(same) >= 4
    assert sum(same) % 2 == 0, "both scorers read what the engine reads"


def test_several_sequences_read_a_column_at_the_level_of_its_largest_input(source) -> None:
    matrix = read_packed(source / "p.gguf").layers[0].sites["mlp_in"].matrix
    loaded = products.load_zigzag(matrix)
    x = torch.randn(4, matrix.columns, generator=torch.Generator().manual_seed(2))
    levels = torch.arange(matrix.columns).remainder(6).to(torch.uint8).expand(4, -1)
    expected: Tensor = sum(torch.where(levels == level, x, 0) @ decode_matrix(matrix, level).T for level in range(1, 6))
    assert torch.allclose(products.planes_matmul(loaded, x, levels), expected, atol=1e-4)
    engine = Engine(read_packed(source / "p.gguf"), context=64, backend="reference", sequences=2)
    for sequence in (0, 1):
        engine.prefill([5, 6, 7], sequence)
    alone = Engine(read_packed(source / "p.gguf"), context=64, backend="reference")
    alone.prefill([5, 6, 7])
    assert torch.allclose(engine.step_all([8, 8])[0], alone.step(8), atol=1e-4)


def test_the_controller_keeps_the_share_of_bits(source) -> None:
    """With limits that are twice as high as the target's it comes down to fewer unread bits."""
    packed = read_packed(source / "p.gguf")
    layers = [
        replace(layer, attention={name: _twice(site) for name, site in layer.attention.items()})
        for layer in packed.layers
    ]
    held = Engine(replace(packed, layers=tuple(layers)), context=64, backend="reference", hold=True)
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    held.prefill(ids[:8])
    for id in ids[8:]:
        held.step(id)
    assert held.scales[0] < 0.95


def _twice(site: Any) -> Any:
    return replace(site, rule=replace(site.rule, threshold=2 * site.rule.threshold))


def test_sparsity_is_the_share_of_bits_that_is_not_read(source, tmp_path) -> None:
    request = PackRequest(str(source / "m"), tmp_path / "m.gguf", FORMAT, source / "c", score=False)
    pack(replace(request, allocation=AllocationOptions(1 - 3.4 / BITS)))
    expected, found = (read_packed(path).rules for path in (source / "p.gguf", tmp_path / "m.gguf"))
    assert all(torch.equal(found[key].limits, rule.limits) for key, rule in expected.items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kl": 0.1}, "give --bits or --kl, not both"),
        ({"bits": None, "loss": "3 percent"}, "--loss '3 percent': expected a share of the perplexity, as 3% or 0.03"),
        ({"bits": None, "loss": "0%"}, "expected a share of the perplexity"),
        ({"bits": None, "kl": 1e-9}, "--kl 1e-09: with all 6.25 bits of zigzag-q6_p read, KL is"),
        ({"bits": 6.4}, "zigzag-q6_p has 6.25 in all; expected fewer"),
        ({"bits": 0.0}, "bits 0.0: expected above 0 and at most 16"),
        ({"allocation": AllocationOptions(0.5)}, "give --bits or --sparsity, not both"),
        ({"calibration": None}, "--bits needs --calibration"),
        ({"fitting": RefitOptions(refit=True)}, "format zigzag-q6_p: --refit fits weights to inputs that are skipped"),
        ({"format": "zigzag-q4_k"}, "bits 3.4: it is for format zigzag-q6_p or planes-q6_p, not zigzag-q4_k"),
    ],
)
def test_requests_that_cannot_be_are_refused(request_, changes, says) -> None:
    with pytest.raises(PackingError) as caught:
        pack(replace(request_, **changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "most"), [({"kl": 0.01}, 0.01), ({"loss": "20%"}, 1.2)])
def test_bits_are_found_at_which_as_much_is_lost_as_was_allowed(
    tiny, tiny_calibration, tmp_path, capsys, option, most
) -> None:
    save(tiny_calibration, tmp_path / "c")
    made = pack(PackRequest("shipped:tiny", tmp_path / "m.gguf", FORMAT, tmp_path / "c", **option))
    assert made.score is not None
    assert made.score["windows"] >= 4
    figure = "kl_divergence" if "kl" in option else "perplexity_ratio"
    found = made.score["decode"][figure]["value"]
    assert found == pytest.approx(most, rel=0.5 if "kl" in option else 0.15), "other windows of the same text"
    tries = [line for line in capsys.readouterr().err.splitlines() if "bits of a weight read" in line]
    assert made.thresholds is not None
    outlook = made.thresholds.outlook()
    assert outlook is not None
    bits = [float(line.split(" bits")[0].split()[-1]) for line in tries]
    assert min(abs(each - BITS * (1 - outlook.overall)) for each in bits) < 0.02
    assert {path.name for path in tmp_path.iterdir()} == {"c", "m.gguf"}


def test_text_that_a_model_does_not_know_keeps_its_likeliest_tokens(tmp_path, capsys) -> None:
    """Its perplexity hardly rises, so that KL decides."""
    letters = torch.randint(97, 123, (12000,), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    text = Text("letters", (bytes(letters.tolist()).decode(),), "letters")
    calibrate("shipped:tiny", text, tmp_path / "c", CalibrateOptions(context=64, samples=8, held_out=8))
    made = pack(PackRequest("shipped:tiny", tmp_path / "m.gguf", FORMAT, tmp_path / "c", loss="5%"))
    assert made.score is not None
    assert made.score["decode"]["perplexity_ratio"]["value"] < 1.05
    assert made.score["decode"]["kl_divergence"]["value"] == pytest.approx(0.1, rel=0.4)
    assert "half of KL" in capsys.readouterr().err


def test_bits_are_found_without_a_score(request_) -> None:
    made = pack(replace(request_, score=False))
    assert made.score is None
    assert made.thresholds is not None


def test_what_finds_thresholds_is_not_forecast(request_) -> None:
    with pytest.raises(PackingError, match="--dry-run: pack fits weights before it packs"):
        forecast(request_)


def test_a_search_needs_text_that_was_held_out(source, text, tmp_path) -> None:
    calibrate(str(source / "m"), text, tmp_path / "c", CalibrateOptions(context=64, samples=4, held_out=1))
    with pytest.raises(PackingError, match="1, expected 2 at least; calibrate again with --held-out 8"):
        pack(PackRequest(str(source / "m"), tmp_path / "m.gguf", FORMAT, tmp_path / "c", kl=0.1))


def test_thresholds_of_levels_fit_no_other_format(small, small_calibration, tmp_path) -> None:
    find_thresholds(small, small_calibration, AllocationOptions(0.5, block="Q6_P")).write(tmp_path / "t.json")
    request = PackRequest(str(small.path), tmp_path / "m.gguf", "zigzag-q4_k", thresholds=tmp_path / "t.json")
    with pytest.raises(PackingError, match="thresholds of 5 levels, this format has none"):
        pack(request)
    with pytest.raises(ThresholdsError, match="found by fisher and sparse alone"):
        AllocationOptions(0.5, "uniform", block="Q6_P").check()


def test_thresholds_that_fall_are_refused(small, small_calibration, tmp_path, monkeypatch) -> None:
    table = find_thresholds(small, small_calibration, AllocationOptions(0.5, block="Q6_P"))
    key = (1, "attn_out")
    steps = table.rules[key].steps
    assert steps is not None
    rules = {**table.rules, key: replace(table.rules[key], steps=steps.flip(0))}
    replace(table, rules=rules).write(tmp_path / "t.json")
    with pytest.raises(ThresholdsError, match=r"row 6: steps .* none below the one before"):
        pack(PackRequest(str(small.path), tmp_path / "m.gguf", FORMAT, thresholds=tmp_path / "t.json"))
    request = PackRequest(str(small.path), tmp_path / "m.gguf", FORMAT)
    with pytest.raises(PackingError, match="steps of levels fall"):
        plan_of(small, request, Found(replace(table, rules=rules)))
    monkeypatch.setattr(plan, "check_rules", lambda *_: None)
    with pytest.raises(PackingError, match="falls from level to level"):
        plan_of(small, request, Found(replace(table, rules=rules))).write(tmp_path / "m.gguf")


def test_engines_without_planes_say_which_have_them(source) -> None:
    without = replace(find_backend("cpu"), blocks=("Q4_K",))
    with pytest.raises(
        UserError, match="the cpu backend has no kernels for zigzag matrices of Q6_P; use backend reference"
    ):
        check_features(without, EngineOptions(), read_packed(source / "p.gguf"))


def test_a_model_with_planes_generates_on_a_processor(source) -> None:
    done = CliRunner().invoke(main, ["generate", str(source / "p.gguf"), "--backend", "cpu", "--prompt", "a"])
    assert done.exit_code == 0, done.output


def test_options_of_planes_take_their_format(source, tmp_path) -> None:
    command = ["pack", str(source / "m"), "--calibration", str(source / "c"), "-o", str(tmp_path / "m.gguf")]
    done = CliRunner().invoke(main, [*command, "--bits", "3.4", "--no-score"])
    assert done.exit_code == 0, done.output
    assert read_packed(tmp_path / "m.gguf").block == "Q6_P"
    done = CliRunner().invoke(main, [*command, "--loss", "3%", "--format", "zigzag-q4_k", "--overwrite"])
    assert done.exit_code == 2
    assert "--loss 3%: it is for --format zigzag-q6_p or planes-q6_p, not zigzag-q4_k" in done.output
