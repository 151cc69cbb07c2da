"""The model card says what the manifest and the results say, of this artifact and no other."""

import json
from pathlib import Path

import pytest
import yaml
from commands_for_tests import fails, succeeds

from sparsepack.errors import UserError
from sparsepack.eval.standard_error import with_error
from sparsepack.formats.inspect import describe
from sparsepack.publish.card import MARK, model_card
from sparsepack.publish.templates import render


def test_the_card_names_model_format_calibration_and_figures(work: Path) -> None:
    card = model_card(work / "model.gguf", [work / "report.json"])
    report = json.loads((work / "report.json").read_text())
    description = describe(work / "model.gguf")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["tags"] == ["sparsepack", "zigzag-q4_k", "activation-sparsity", "gguf"]
    assert MARK in card
    for expected in (
        description["provenance"]["model"]["sha256"],
        description["provenance"]["calibration"]["sha256"],
        f"{description['file_bytes']:,} bytes",
        "target 50 %",
        "on shipped:train",
    ):
        assert expected in card
    for evaluation in report["evaluations"]:
        for row in evaluation["perplexity"]:
            assert f"| {row['text']} | {row['protocol']} |" in " ".join(card.split())
            assert with_error(row["kl_divergence"], 4) in card
    for test in report["bench"]["tests"]:
        assert f"{test['avg_ts']:.1f} ±" in card


def test_without_results_the_card_says_how_to_measure(work: Path) -> None:
    card = model_card(work / "model.gguf")
    assert "Not measured when this card was made" in card
    assert "sparsepack eval model.gguf" in card
    assert "## Speed" not in card


def test_results_of_eval_and_bench_serve_too(work: Path, tmp_path: Path) -> None:
    report = json.loads((work / "report.json").read_text())
    evaluation, bench = tmp_path / "eval.json", tmp_path / "bench.json"
    evaluation.write_text(json.dumps(report["evaluations"][0]))
    bench.write_text(json.dumps(report["bench"]))
    assert model_card(work / "model.gguf", [evaluation, bench]).count("| shipped:heldout |") == 1
    assert "## Speed" in model_card(work / "model.gguf", [bench])


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"source_sha256": "0" * 64}, "measured on another model"), ({"kind": "q4_k"}, "measured on q4_k")],
)
def test_results_of_something_else_are_refused(work: Path, tmp_path: Path, changed: dict[str, str], said: str) -> None:
    report = json.loads((work / "report.json").read_text())
    report["evaluations"][0]["subject"] |= changed
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=said):
        model_card(work / "model.gguf", [tmp_path / "report.json"])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "evaluation"}', '{"kind": "evaluation", "subject": 3}', "{"]
)
def test_what_is_no_result_is_refused_in_one_line(work: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match=r"other\.json: ") as refused:
        model_card(work / "model.gguf", [tmp_path / "other.json"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "damage", [{"perplexity": [{}]}, {"perplexity": 3}, {"tasks": {"tasks": {"t": {}}}}, {"perplexity": ["x"]}], ids=str
)
def test_a_damaged_result_is_refused_in_one_line(work: Path, tmp_path: Path, damage: dict[str, object]) -> None:
    report = json.loads((work / "report.json").read_text())
    (tmp_path / "eval.json").write_text(json.dumps(report["evaluations"][0] | damage))
    (tmp_path / "bench.json").write_text(json.dumps(report["bench"] | {"tests": [{}]}))
    for name in ("eval.json", "bench.json"):
        with pytest.raises(UserError, match=rf"{name}: damaged, or of another sparsepack") as refused:
            model_card(work / "model.gguf", [tmp_path / name])
        assert "\n" not in str(refused.value)


def test_a_stranger_s_words_open_no_html_and_no_cell(work: Path) -> None:
    description = describe(work / "model.gguf")
    description["notes"] = ["<script>alert(1)</script> | a\n# heading"]
    card = render(
        "card.md.jinja", mark="", head="", heading="x", artifact=description, file="m", measured=[], speed=[],
        programs="", version="0",
    )  # fmt: skip
    assert "<script" not in card
    assert "&lt;script>alert(1)&lt;/script> \\| a # heading" in card


def test_the_command_writes_the_file_once(work: Path, tmp_path: Path) -> None:
    asked = ("card", work / "model.gguf", "-o", tmp_path / "README.md")
    succeeds(*asked)
    assert "exists already" in fails(*asked)
    succeeds(*asked, "--overwrite", "--name", "Mine")
    assert "# Mine\n" in (tmp_path / "README.md").read_text()
