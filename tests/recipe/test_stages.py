"""Stages: what is skipped, what runs again, and what an interruption leaves."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from recipes_for_tests import STAGES, ran, write_recipe

from sparsepack.data import TINY_MODEL
from sparsepack.errors import OutputError
from sparsepack.files.atomic import _temporary
from sparsepack.files.hashing import fingerprint
from sparsepack.recipe import run as runner
from sparsepack.recipe import run_recipe


def test_a_first_run_runs_every_stage_and_reports_what_it_measured(finished_once):
    _, work, outcome = finished_once
    assert ran(outcome) == list(STAGES)
    assert outcome.passed
    assert json.loads((work / "report.json").read_text()) == outcome.report
    rows = [row for evaluation in outcome.report["evaluations"] for row in evaluation["perplexity"]]
    assert [(row["text"], row["protocol"]) for row in rows] == [("shipped:heldout", p) for p in ("decode", "dense")]
    assert all(row["kl_divergence"]["value"] > 0 for row in rows)
    assert {row["scored"] for row in rows} == {"second half"}  # decode scores no more, and both stand in one table
    assert len({(row["targets"], row["source_perplexity"]) for row in rows}) == 1
    assert outcome.report["generate"]["text"]
    assert outcome.report["verify"]["passed"]


def test_a_second_run_runs_nothing_and_gives_the_same_report(finished_once, finished, capsys):
    recipe, _, first = finished_once
    second = run_recipe(recipe, work=finished)
    assert ran(second) == []
    assert "pack: up to date" in capsys.readouterr().err
    assert second.report["evaluations"] == first.report["evaluations"]
    assert second.passed


def test_what_a_disk_did_not_let_go_of_is_removed_by_the_next_run(finished_once, finished):
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = _temporary(finished / "calibration").name.removesuffix(str(os.getpid()))
    left = finished / f"{mine}{ended.pid}"
    left.mkdir()
    (left / "calibration.safetensors").write_bytes(b"old")
    assert ran(run_recipe(finished_once[0], work=finished)) == []
    assert not left.exists()


def test_the_artifact_carries_the_part_of_the_recipe_that_made_it(finished_once):
    from sparsepack.formats.inspect import describe

    made_from = describe(finished_once[1] / "model.gguf")["provenance"]["recipe"]
    assert made_from["activation_sparsity"]["sparsity"] == 0.5
    assert "eval" not in made_from


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("generate.tokens=3", ["generate"]),
        ("gates.file_bytes.max=2000000", []),
        ("description=another", []),
        ("eval.windows=2", ["eval"]),
        pytest.param("pack.output_type=f16", ["pack", "verify", "eval", "generate"], marks=pytest.mark.long),
        pytest.param(
            "activation_sparsity.sparsity=0.4",
            ["thresholds", "pack", "verify", "eval", "generate"],
            marks=pytest.mark.long,
        ),
        ("calibrate.seed=1", list(STAGES)),
    ],
)
def test_a_changed_setting_reruns_its_stage_and_all_downstream(finished_once, finished, override, expected):
    plan = run_recipe(finished_once[0], [override], work=finished, dry_run=True).report
    assert [stage["name"] for stage in plan["stages"] if stage["status"] == "would run"] == expected
    if "calibrate" not in expected:
        assert ran(run_recipe(finished_once[0], [override], work=finished)) == expected


def test_a_changed_or_lost_output_is_made_again(finished_once, finished):
    (finished / "eval.json").unlink()
    with (finished / "model.gguf").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert ran(run_recipe(finished_once[0], work=finished)) == ["pack", "eval"]


def test_files_whose_times_alone_changed_are_recognised_by_their_bytes(finished_once, finished):
    for path in finished.rglob("*"):
        os.utime(path, (0, 0))
    assert ran(run_recipe(finished_once[0], work=finished)) == []


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(recipe_file, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stages = [replace(stage, run=interrupted) if stage.name == "pack" else stage for stage in runner.STAGES]
        patch.setattr(runner, "STAGES", stages)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe_file, work=tmp_path / "work")
    assert not (tmp_path / "work" / "model.gguf").exists()
    assert ran(run_recipe(recipe_file, work=tmp_path / "work")) == list(STAGES[2:])


def test_an_output_whose_stage_was_not_recorded_is_made_again(finished_once, finished):
    state = json.loads((finished / "state.json").read_text())
    del state["stages"]["eval"]
    (finished / "state.json").write_text(
        json.dumps({**state, "sha256": fingerprint([state["recipe"], state["stages"]])})
    )
    assert ran(run_recipe(finished_once[0], work=finished)) == ["eval"]


def test_a_state_that_was_changed_is_said_and_means_that_nothing_is_known(finished_once, finished, capsys):
    state = json.loads((finished / "state.json").read_text())
    state["stages"]["eval"]["outputs"] = {}
    (finished / "state.json").write_text(json.dumps(state))
    plan = run_recipe(finished_once[0], work=finished, dry_run=True).report
    assert {stage["status"] for stage in plan["stages"]} == {"would run"}
    assert "changed since it was written" in capsys.readouterr().err


@pytest.mark.long
def test_what_the_stages_leave_does_not_depend_on_where_the_work_folder_is(finished_once, tmp_path):
    recipe, work, _ = finished_once
    run_recipe(recipe, work=tmp_path / "another")
    for path in work.rglob("*"):
        if path.is_file() and path.name not in ("state.json", "report.json"):
            assert path.read_bytes() == (tmp_path / "another" / path.relative_to(work)).read_bytes(), path


@pytest.mark.parametrize(
    "content", ["{", '{"schema": 2}', '{"schema": 1, "stages": {"pack": {}}}', "[]", "[" * 100_000]
)
def test_a_damaged_state_is_said_and_means_that_nothing_is_known(finished_once, finished, content, capsys):
    (finished / "state.json").write_text(content)
    outcome = run_recipe(finished_once[0], work=finished, dry_run=True)
    assert {stage["status"] for stage in outcome.report["stages"]} == {"would run"}
    assert "state.json: not understood" in capsys.readouterr().err


def test_files_that_no_recipe_made_are_not_overwritten(tmp_path):
    without = dict.fromkeys(("calibrate", "activation_sparsity", "eval", "generate", "gates"))
    recipe_file = write_recipe(tmp_path, verify=False, **without)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model.gguf").write_text("mine")
    with pytest.raises(OutputError, match=r"model\.gguf: no recipe made this file"):
        run_recipe(recipe_file, work=tmp_path / "work")
    assert (tmp_path / "work" / "model.gguf").read_text() == "mine"
    assert run_recipe(recipe_file, work=tmp_path / "work", overwrite=True).passed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "other"}, "name tiny, not other"),
        ({"model": "a copy"}, None),
        ({"file": "other.yaml"}, "file tiny.yaml, not other.yaml"),
    ],
    ids=["name", "model", "file"],
)
def test_the_outputs_of_another_recipe_are_not_overwritten_without_a_word(
    finished_once, finished, tmp_path, changes, expected
):
    recipe, overrides = finished_once[0], []
    if "file" in changes:
        recipe = Path(shutil.copy(recipe, tmp_path / changes["file"]))
    elif "model" in changes:
        model = shutil.copytree(TINY_MODEL, tmp_path / "copy")
        overrides, expected = [f"model={model}"], f"model shipped:tiny, not {model}"
    else:
        overrides = ["name=other"]
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for dry_run in (True, False):
        with pytest.raises(OutputError, match="holds the outputs of another recipe") as caught:
            run_recipe(recipe, overrides, work=finished, dry_run=dry_run)
        assert expected in str(caught.value)
        assert "--overwrite" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    if "name" not in changes:
        return
    run_recipe(recipe, overrides, work=finished, overwrite=True)
    run_recipe(recipe, overrides, work=finished)  # which is now its own
    with pytest.raises(OutputError):
        run_recipe(finished_once[0], work=finished)


def test_without_pack_the_model_itself_is_evaluated_with_its_thresholds(finished_once, finished):
    overrides = ["pack=null", "verify=false", "generate=null", "gates.file_bytes=null"]
    outcome = run_recipe(finished_once[0], overrides, work=finished)
    assert ran(outcome) == ["eval"]
    decode, dense = (evaluation["perplexity"][0] for evaluation in outcome.report["evaluations"])
    assert decode["realised_sparsity"]["overall"] > 0.3
    assert dense["perplexity_ratio"]["value"] == pytest.approx(1)


def test_an_artifact_is_evaluated_by_a_backend_and_gated_by_what_that_gives(finished_once, finished):
    gates = "gates={perplexity_ratio: {max: 1.0001}}"
    outcome = run_recipe(finished_once[0], ["eval.backend=reference", "eval.protocols=decode", gates], work=finished)
    assert ran(outcome) == ["eval"]
    (found,) = outcome.report["evaluations"]
    assert found["compute"]["runtime"] == "reference"
    (gate,) = [gate for gate in outcome.report["gates"] if gate["gate"] == "perplexity_ratio"]
    assert gate["measured"] == found["perplexity"][0]["perplexity_ratio"]["value"]
    assert not outcome.passed


def test_a_dense_recipe_needs_no_calibration(finished_once, finished):
    overrides = ["calibrate=null", "activation_sparsity=null", "eval.protocols=[]", "gates.realised_sparsity=null"]
    outcome = run_recipe(finished_once[0], overrides, work=finished)
    assert ran(outcome) == ["pack", "verify", "eval", "generate"]
    assert [evaluation["protocol"] for evaluation in outcome.report["evaluations"]] == ["dense"]


def test_bench_runs_on_the_evaluation_text_and_says_whose_speed_it_is(finished_once, finished, capsys):
    overrides = ["bench={prompt: 8, generate: 4, repetitions: 1}"]
    outcome = run_recipe(finished_once[0], overrides, work=finished)
    assert ran(outcome) == ["bench"]
    assert outcome.report["bench"]["text"] == "shipped:heldout"
    out = capsys.readouterr().out
    assert "decode of 4 tokens, dense" in out
    assert "decode of 4 tokens, sparse" in out
    assert "runtime: " in out
