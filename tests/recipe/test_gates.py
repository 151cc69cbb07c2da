"""Gates: every row is judged, the worst is shown, and a failed one fails the run."""

import json
import math

import pytest

from sparsepack.cli import main
from sparsepack.errors import RecipeError
from sparsepack.recipe import run_recipe
from sparsepack.recipe.gates import Gates, Verdict, judge
from sparsepack.recipe.load import FOLDER
from sparsepack.recipe.report import show_verdicts


def row(protocol, ratio, realised=0.5, text="t"):
    return {
        "text": text,
        "protocol": protocol,
        "perplexity": {"value": 10 * ratio, "stderr": 1.0},
        "perplexity_ratio": {"value": ratio, "stderr": None},
        "bits_per_byte": ratio,
        "realised_sparsity": {"overall": realised, "of_sparse_sites": realised},
    }


def tasks(**metrics):
    values = {name: {"value": value, "stderr": None} for name, value in metrics.items()}
    return {"tasks": {"blimp": {"metrics": values}}, "groups": {}}


RESULTS = {
    "evaluations": [
        {
            "protocol": "decode",
            "perplexity": [row("decode", 1.1), row("decode", 1.3, 0.4, "u")],
            "tasks": tasks(acc=0.7),
        },
        {"protocol": "dense", "perplexity": [row("dense", 1.0, 0.0)], "tasks": tasks(acc=0.8)},
    ],
    "pack": {"file_bytes": 1000, "bits_per_weight": {"file": 4.8, "blocks": 4.5}},
    "verify": None,
    "eval_pruned": None,
}


def judged(**gates):
    return judge(Gates.model_validate(gates), RESULTS)


def test_a_gate_applies_to_every_row_and_shows_the_worst():
    (verdict,) = judged(perplexity_ratio={"max": 1.2})
    assert (verdict.measured, verdict.where, verdict.passed) == (1.3, "u, decode", False)
    assert judged(perplexity_ratio={"max": 1.3})[0].passed


def test_min_and_max_are_two_verdicts_each_on_its_own_worst_row():
    least, most = judged(bits_per_byte={"min": 1.05, "max": 1.35})
    assert (least.measured, least.passed, least.limit) == (1.0, False, "at least 1.05")
    assert (most.measured, most.passed, most.limit) == (1.3, True, "at most 1.35")


def test_dense_rows_do_not_count_for_realised_sparsity():
    (verdict,) = judged(realised_sparsity={"min": 0.4})
    assert (verdict.measured, verdict.passed) == (0.4, True)


def test_file_gates_read_the_file():
    bits, size = judged(bits_per_weight={"max": 4.7}, file_bytes={"max": 1000})
    assert (bits.measured, bits.passed) == (4.8, False)
    assert size.passed


def test_task_gates_name_task_and_metric():
    (verdict,) = judged(tasks={"blimp": {"acc": {"min": 0.75}}})
    assert (verdict.gate, verdict.measured, verdict.where) == ("tasks.blimp.acc", 0.7, "blimp, decode")
    assert not verdict.passed
    with pytest.raises(RecipeError, match=r"gates\.tasks\.blimp\.accuracy: not measured; there are acc"):
        judged(tasks={"blimp": {"accuracy": {"min": 0.5}}})


def test_names_are_shown_as_they_are(capsys):
    show_verdicts([Verdict("tasks.a[/b][c].acc", 0.5, "at least 0.4", "d[/e]", True)])
    assert "tasks.a[/b][c].acc" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_value_that_is_no_number_fails_its_gate(value):
    results = {**RESULTS, "evaluations": [{"protocol": "decode", "perplexity": [], "tasks": tasks(acc=value)}]}
    for limit in ({"min": -1e9}, {"max": 1e9}):
        assert not judge(Gates.model_validate({"tasks": {"blimp": {"acc": limit}}}), results)[0].passed


def test_a_failed_verification_fails_without_any_gate():
    (verdict,) = judge(None, {**RESULTS, "verify": {"problems": ["a", "b"]}})
    assert not verdict.passed
    assert judge(None, RESULTS) == []


def test_pushing_the_sparsity_up_fails_a_gate_and_keeps_the_report(finished_once, finished, capsys):
    recipe, _, _ = finished_once
    overrides = ["activation_sparsity.sparsity=0.9", "gates={perplexity_ratio: {max: 1.3}}"]
    outcome = run_recipe(recipe, overrides, work=finished)
    assert not outcome.passed
    assert outcome.report["passed"] is False
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.slow
def test_the_ci_recipe_passes_as_it_stands_and_fails_when_pushed(tmp_path):
    assert run_recipe(FOLDER / "ci.yaml", work=tmp_path / "work").passed
    further = ["activation_sparsity.sparsity=0.7", "eval.windows=2"]
    pushed = run_recipe(FOLDER / "ci.yaml", further, work=tmp_path / "work")
    assert not pushed.passed
    failed = {gate["gate"] for gate in pushed.report["gates"] if not gate["passed"]}
    assert {"perplexity_ratio", "kl_divergence", "top_token_agreement", "realised_sparsity"} == failed


def test_one_file_has_one_sparsity_in_gates_evaluation_and_bench(finished_once, finished, tmp_path, capsys):
    """Of all block weights; and beside it, since a block is kept dense, of the sites that may be sparse."""
    overrides = [
        "activation_sparsity.ignore=blk.0.*",
        "bench={prompt: 0, generate: 24, repetitions: 1}",
        "gates={realised_sparsity: {max: 0.4}, realised_sparsity_of_sparse_sites: {min: 0.4}}",
    ]
    report = run_recipe(finished_once[0], overrides, work=finished).report
    out = capsys.readouterr().out
    measured = {gate["gate"]: gate["measured"] for gate in report["gates"]}
    overall, of_sparse_sites = measured["realised_sparsity"], measured["realised_sparsity_of_sparse_sites"]
    text = ("--perplexity", "shipped:heldout", "--context", "64", "--windows", "3")
    main(["eval", str(finished / "model.gguf"), *text, "--json", str(tmp_path / "eval.json")], standalone_mode=False)
    (row,) = json.loads((tmp_path / "eval.json").read_text())["perplexity"]
    realised = row["realised_sparsity"]
    assert (realised["overall"], realised["of_sparse_sites"]) == pytest.approx((overall, of_sparse_sites))
    assert overall == pytest.approx(of_sparse_sites * 2 / 3)  # two of three blocks
    shown = f"{100 * overall:.1f} % {100 * of_sparse_sites:.1f} % (50.0 %)"
    assert shown in " ".join(out.split())
    assert shown in " ".join(capsys.readouterr().out.replace("|", " ").split())
    sparse = report["bench"]["tests"][-1]
    assert sparse["realised_sparsity"] == pytest.approx(sparse["realised_sparsity_of_sparse_sites"] * 2 / 3)
