"""The model card says what the manifest and the results say, of this artifact and no other."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from artifacts_for_tests import plan_zigzag
from commands_for_tests import fails, succeeds
from markdown_it import MarkdownIt

from sparsepack.errors import UserError
from sparsepack.eval.results import with_error
from sparsepack.formats.inspect import describe
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.publish.card import MARK, model_card, table
from sparsepack.tables import Table
from sparsepack.terminal import printable
from tests.formats.forged import edited, forge


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
        "target 25 %",
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


def forged(path: Path, **changes: object) -> Path:
    """An artifact with right hashes whose manifest says something else."""
    plan = plan_zigzag(open_checkpoint("shipped:tiny"), {})
    forge(plan, values=edited(plan.values, "sparsepack.manifest", **changes)).write(path, overwrite=True)
    return path


HOSTILE = (
    "[click](https://evil.example)",
    "![pixel](https://evil.example/p.png)",
    "https://evil.example/x and www.evil.example, me@evil.example",
    "<img src=https://evil.example/p.png>",
    "`` ` [a](https://evil.example) `",
    "x | y\n# heading\n[a]: https://evil.example",
    "\x1b]8;;https://evil.example\x07\u202etxet",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_names_of_a_manifest_are_data_in_a_card(tmp_path: Path, hostile: str) -> None:
    path = forged(
        tmp_path / "m.gguf",
        model={"name": hostile, "sha256": hostile, "model_type": hostile},
        notes=[hostile],
        versions={hostile: hostile},
        calibration={"sha256": hostile},
        recipe={"calibrate": {"text": [hostile]}},
        pruning={"method": hostile, "permute": True, "model": hostile, "model_sha256": hostile},
    )
    card = model_card(path)
    body = card.split("---\n", 2)[2].replace(MARK, "")
    parsed = MarkdownIt("commonmark").enable("table").parse(body)
    tokens = [token for block in parsed for token in (block, *(block.children or ()))]
    assert not {token.type for token in tokens} & {"link_open", "image", "html_inline", "html_block"}
    assert sum(token.type == "heading_open" for token in tokens) == 3
    texts = [token.content for token in tokens if token.type == "text"]
    assert [text for text in texts if "://" in text or "www." in text or "@" in text] == []
    assert printable(card) == card


def test_a_command_of_a_card_runs_nothing_else(tmp_path: Path) -> None:
    name = "x; touch owned $(id)"
    card = model_card(forged(tmp_path / "m.gguf", model={"name": name, "sha256": "0", "model_type": "llama"}))
    (line,) = [line for line in card.splitlines() if "--against" in line]
    assert shlex.split(line)[-2:] == ["--against", name]


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": []},
        {"recipe": {"calibrate": 3}},
        {"recipe": {"calibrate": {"text": {"a": 1}}}},
        {"recipe": {"calibrate": {"text": [[1]]}}},
        {"calibration": {}},
        {"versions": [1]},
        {"versions": {"torch": {}}},
    ],
    ids=str,
)
def test_a_forged_manifest_is_refused_in_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    assert "not understood" in fails("card", forged(tmp_path / "m.gguf", **changes))


def test_a_recipe_that_says_no_text_has_a_card(tmp_path: Path) -> None:
    for recipe in ({}, {"calibrate": None}, {"calibrate": {}}):
        assert "calibration" not in model_card(forged(tmp_path / "m.gguf", recipe=recipe)).split("## Accuracy")[0]


def test_a_page_and_a_table_of_a_card_open_no_html_and_no_cell() -> None:
    drawn = table(Table(["name"], [["<script>alert(1)</script> | a"]], notes=["<b>"]))
    assert "| `<script>alert(1)</script> \\| a` |" in drawn
    assert "`<b>`" in drawn


def test_the_command_writes_the_file_once(work: Path, tmp_path: Path) -> None:
    asked = ("card", work / "model.gguf", "-o", tmp_path / "README.md")
    succeeds(*asked)
    assert "exists already" in fails(*asked)
    succeeds(*asked, "--overwrite", "--name", "Mine")
    assert "# Mine\n" in (tmp_path / "README.md").read_text()
