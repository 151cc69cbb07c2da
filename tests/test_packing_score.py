"""`pack` scores what it lost on the windows that a calibration holds out, within bounds, and warns of much."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

import sparsepack
from sparsepack import packing_score
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import Calibration, load, save
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
from sparsepack.cli.app import main
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import Text
from sparsepack.formats.inspect import describe
from sparsepack.formats.manifest import SCORE, SCORE_PLACEHOLDER, with_score
from sparsepack.formats.open import open_artifact
from sparsepack.formats.orders import zigzag
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer.windows import inputs_and_targets
from sparsepack.packing import Found, Packed, PackRequest, pack
from sparsepack.packing_forecast import forecast
from sparsepack.packing_score import Cost, pieces, scoring_of, warning_of
from sparsepack.publish.card import model_card

HALF = AllocationOptions(0.5)
ROUND = RefitOptions(quantiser="round")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model `m` and its calibration `c`."""
    folder = tmp_path_factory.mktemp("score")
    checkpoint = open_checkpoint(make_model(folder / "m", "qwen2"))
    options = CalibrateOptions(context=64, samples=4, held_out=3)
    calibrate(checkpoint, Text("t", (TEXT[:4000],), ""), folder / "c", options)
    return folder


@pytest.fixture
def asked(source: Path, tmp_path: Path) -> PackRequest:
    return PackRequest(str(source / "m"), tmp_path / "m.gguf", calibration=source / "c", allocation=HALF, fitting=ROUND)


@pytest.fixture(scope="module")
def packed(source: Path) -> Packed:
    return pack(
        PackRequest(str(source / "m"), source / "m.gguf", calibration=source / "c", allocation=HALF, fitting=ROUND)
    )


def evaluated(artifact: Path, model: Path, tokens: torch.Tensor, protocol: str) -> dict[str, Any]:
    """What `eval` finds on windows."""
    subject, reference = open_subject(str(artifact)), open_subject(str(model))
    inputs, targets = inputs_and_targets(subject.tokenizer, tokens.long())
    scores = score_windows(subject.scorer(), inputs, targets, protocol, reference.scorer(), second_half=True)
    return summarise(scores, 1)


@pytest.mark.parametrize("protocol", ["dense", "decode"])
def test_the_score_is_what_eval_measures_on_the_same_windows(source: Path, packed: Packed, protocol: str) -> None:
    assert packed.score is not None
    expected = evaluated(packed.path, source / "m", load(source / "c").held_out, protocol)
    for name, figure in packed.score[protocol].items():
        assert figure == {key: pytest.approx(value, rel=1e-4, abs=1e-9) for key, value in expected[name].items()}
    assert packed.score["decode"] != packed.score["dense"]
    assert (packed.score["windows"], packed.score["context"]) == (3, 64)


def test_the_score_is_kept_in_the_file_and_shown_wherever_the_file_is(packed: Packed) -> None:
    assert describe(packed.path)["score"] == packed.score
    assert verify(packed.path).passed
    ratio = packed.score["decode"]["perplexity_ratio"]["value"]  # type: ignore[index]
    shown = f"held-out text (3 windows of 64 tokens), decode, as tokens are generated: perplexity {ratio:.3f} ±"
    assert shown in CliRunner().invoke(main, ["inspect", str(packed.path)]).output
    assert f"| perplexity {ratio:.3f} ±" in model_card(packed.path)


def test_equal_inputs_make_equal_bytes(asked: PackRequest, packed: Packed) -> None:
    pack(asked)
    assert asked.output.read_bytes() == packed.path.read_bytes()


def test_without_a_score_nothing_of_it_is_in_the_file(asked: PackRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(*_: object) -> None:
        raise AssertionError("scored in vain")

    monkeypatch.setattr(packing_score, "score_artifact", scored)
    made = pack(replace(asked, score=False))
    assert (made.score, made.unscored, made.warning) == (None, None, None)
    assert SCORE not in open_artifact(asked.output).manifest


@pytest.mark.parametrize("format", ["zigzag-q4_k", "q4_k", "slide-int8"])
def test_every_kind_of_format_is_scored(source: Path, tmp_path: Path, format: str) -> None:
    """A folder's tensors that are scored are those that it is sealed with; inputs in 8 bits count."""
    model, pruned = source / "m", {}
    if format.startswith("slide"):
        model = tmp_path / "pruned"
        sparsepack.prune(source / "m", model, PruneOptions(6, 8, method="magnitude"))
        text, options = Text("t", (TEXT[:4000],), ""), CalibrateOptions(context=64, samples=4, held_out=3)
        calibrate(open_checkpoint(model), text, tmp_path / "c", options)
        pruned = {"calibration": tmp_path / "c"}
    asked = PackRequest(str(model), tmp_path / "m.gguf", format, source / "c", fitting=ROUND)
    asked = replace(asked, **pruned)
    score = pack(asked).score
    assert score is not None
    assert "decode" not in score
    assert score["dense"]["kl_divergence"]["value"] > 0
    assert describe(asked.output)["score"] == score
    assert verify(asked.output, against=model).passed


def test_neurons_are_scored(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama", hidden_act="relu", hidden_size=256, intermediate_size=256)
    text, options = Text("t", (TEXT[:4000],), ""), CalibrateOptions(context=64, samples=4)
    calibrate(open_checkpoint(model), text, tmp_path / "c", options)
    asked = PackRequest(str(model), tmp_path / "m.gguf", "neuron-q4_k", tmp_path / "c", fitting=ROUND)
    score = pack(asked).score
    assert score is not None
    assert score == describe(asked.output)["score"]


def test_a_damaged_packing_warns(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = zigzag.pack
    monkeypatch.setattr(zigzag, "pack", lambda weight, *rest: encode(torch.zeros_like(weight), *rest))
    monkeypatch.setattr(packing_score, "WARN_FROM", 1.0001)  # a random model predicts as badly without its blocks
    asked = PackRequest(str(source / "m"), tmp_path / "m.gguf", calibration=source / "c", fitting=ROUND)
    warning = pack(asked).warning
    assert warning is not None
    assert "rounding weights; take --quantiser gptq" in warning


def figures(dense: float | None, decode: float | None) -> dict[str, Any]:
    return {"dense": {"perplexity_ratio": {"value": dense}}, "decode": {"perplexity_ratio": {"value": decode}}}


FITTED = RefitOptions(quantiser="gptq")


@pytest.mark.parametrize(
    ("dense", "decode", "changes", "remedy"),
    [
        (1.01, 1.049, {}, None),
        (
            1.01,
            1.05,
            {},
            "dense +1.0 % and decode +5.0 %: most of it by skipping; take a smaller --sparsity than",
        ),
        (
            1.01,
            1.05,
            {"allocation": AllocationOptions(0.5, "uniform")},
            "most of it by skipping; take --allocation fisher, or a smaller",
        ),
        (1.01, 1.5, {"allocation": AllocationOptions(0.5, "global")}, "--offsets, or a smaller --sparsity than 0.5"),
        (1.01, 1.5, {"allocation": AllocationOptions(0.5, "global", offsets=True)}, "take a smaller --sparsity"),
        (
            1.01,
            1.5,
            {"allocation": None, "thresholds": Path("t.json")},
            "what t.json skips; take thresholds of a smaller",
        ),
        (1.01, 1.5, {"allocation": None, "sparse_attention": AttentionOptions("double")}, "more than --tokens"),
        (1.06, 1.08, {}, "rounding weights; take --quantiser gptq"),
        (1.06, 1.08, {"fitting": FITTED}, "quantising weights to Q4_K; take --format f32"),
        (1.3, 1.3, {"format": "slide-int8", "fitting": FITTED}, "quantising weights to I8; take --format slide-bf16"),
        (1.3, 1.3, {"format": "f32"}, "verify --against"),
        (None, None, {}, "dense beyond all bounds and decode beyond all bounds: most of it by rounding weights"),
        (1.01, None, {}, "decode beyond all bounds: most of it by skipping"),
    ],
)
def test_a_warning_names_what_would_bring_most_back(
    dense: float, decode: float, changes: dict[str, Any], remedy: str | None
) -> None:
    request = replace(
        PackRequest("m", Path("m.gguf"), calibration=Path("c"), allocation=HALF, fitting=ROUND), **changes
    )
    warning = warning_of(figures(dense, decode), request, torch.float32)
    if remedy is None:
        assert warning is None
    else:
        assert warning is not None
        assert remedy in warning
        assert "\n" not in warning


def test_fewer_and_shorter_windows_are_scored_of_a_large_model() -> None:
    held_out = torch.arange(8 * 2048).reshape(8, 2048)
    assert torch.equal(pieces(held_out, 10**9), held_out)
    assert pieces(held_out, 5 * 2048).shape == (5, 2048)
    assert pieces(held_out, 3 * 2048).shape == (6, 1024)
    assert pieces(held_out, 700).shape == (2, 256)
    assert pieces(held_out, 255).shape == (0, 256)
    assert pieces(held_out[:2, :64], 100).shape == (1, 64)
    assert pieces(held_out, 3 * 2048, shortest=2048).shape == (3, 2048)
    assert pieces(held_out, 700, shortest=2048).shape == (1, 512)


def test_so_many_tokens_are_scored_as_pass_through_all_models_within_the_limit() -> None:
    cost = Cost(limit=10.0, reading=1.0, rate=100.0, passes=3)
    assert cost.tokens == 300
    assert cost.seconds(cost.tokens) == cost.limit
    assert cost._replace(limit=0.5).tokens == 0


def test_windows_in_which_attention_reads_all_are_told(source: Path, asked: PackRequest) -> None:
    sparse = AttentionOptions("double", tokens="1/4", sinks=2, recent=4, min_context=64)
    asked = replace(asked, allocation=None, sparse_attention=sparse)
    made = pack(asked)
    assert made.score is not None
    assert made.unscored is not None
    assert "of up to 64 tokens (--min-context) all are read, and windows have 64" in made.unscored
    assert "calibrate with a --context of 128, or measure it by `sparsepack eval" in made.unscored
    within = replace(asked, sparse_attention=replace(sparse, min_context=32), overwrite=True)
    assert pack(within).unscored is None


def test_where_no_window_fits_one_line_names_eval(
    source: Path, asked: PackRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packing_score.RATES, "cpu", 1e4)  # type: ignore[arg-type]
    made = pack(asked)
    assert made.score is None
    assert made.unscored is not None
    assert "a window of 64 tokens would take about" in made.unscored
    assert f"sparsepack eval {asked.output} --perplexity TEXT --against {source / 'm'}`" in made.unscored
    assert describe(asked.output)["score"] is None
    assert verify(asked.output).passed


def test_a_tenth_of_a_long_packing_is_for_the_score(source: Path, asked: PackRequest) -> None:
    checkpoint = open_checkpoint(source / "m")
    found = Found(held_out=torch.zeros(8, 2048, dtype=torch.int32), calibrated=(128, 2048))
    weights = 1_000_000_000 // sum(shape[0] * shape[-1] for shape in checkpoint.source.shapes.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(packing_score.RATES, "cpu", packing_score.RATES["cpu"] / weights)  # type: ignore[arg-type]
        few = scoring_of(checkpoint, replace(asked, allocation=None), found).windows
        fitted = scoring_of(
            checkpoint, replace(asked, allocation=None, fitting=RefitOptions(refit=True)), found
        ).windows
    assert few is not None
    assert fitted is not None
    assert few.numel() < fitted.numel()


def test_without_windows_held_out_one_line_says_how_to_get_a_score(
    source: Path, asked: PackRequest, tmp_path: Path
) -> None:
    old: Calibration = load(source / "c")
    tokens = {name: value for name, value in old.manifest["tokens"].items() if name != "held_out"}
    save(replace(old, manifest={**old.manifest, "tokens": tokens}, held_out=old.held_out[:0]), tmp_path / "old")
    made = pack(replace(asked, calibration=tmp_path / "old"))
    assert made.score is None
    assert f"{tmp_path / 'old'} has no windows held out; calibrate again, or measure it by `sparsepack eval" in str(
        made.unscored
    )
    without = pack(replace(asked, calibration=None, allocation=None, overwrite=True))
    assert "not scored without a calibration; measure it by `sparsepack eval" in str(without.unscored)


def test_the_command_shows_the_score_and_warns_on_stderr(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(packing_score, "WARN_FROM", 0.0)
    command = [
        "pack",
        str(source / "m"),
        "--calibration",
        str(source / "c"),
        "--sparsity",
        "0.9",
        "--quantiser",
        "round",
    ]
    shown = CliRunner().invoke(main, [*command, "-o", str(tmp_path / "m.gguf")])
    assert shown.exit_code == 0
    assert "held-out text (3 windows of 64 tokens), dense, nothing skipped: perplexity" in shown.stdout
    assert "WARNING: held-out text loses perplexity, dense " in shown.stderr
    quiet = CliRunner().invoke(main, [*command, "--no-score", "-o", str(tmp_path / "n.gguf")])
    assert quiet.exit_code == 0
    assert "held-out" not in quiet.output


def test_a_score_takes_the_place_of_as_many_bytes() -> None:
    header = json.dumps({"a": 1, "score": SCORE_PLACEHOLDER, "b": 2}).encode()
    figure = {"value": -1.2346e-300, "stderr": 1.2346e300}
    names = ("perplexity_ratio", "kl_divergence", "top_token_agreement")
    longest = {"windows": 10**9, "context": 10**9, "source_perplexity": 1.2345e300}
    longest |= {protocol: dict.fromkeys(names, figure) for protocol in ("dense", "decode")}
    for score in (None, longest):
        filled = with_score(header, score)
        assert len(filled) == len(header)
        assert json.loads(filled) == {"a": 1, "score": score, "b": 2}


def test_a_forecast_counts_scoring(source: Path, asked: PackRequest) -> None:
    dense = replace(asked, allocation=None)
    assert forecast(dense).alone_seconds > 0
    assert forecast(replace(dense, score=False, calibration=None)).alone_seconds == 0
