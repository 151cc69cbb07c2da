"""Predictors of active neurons in a random model: what they find, and what the model computes that believes them."""

import json
from pathlib import Path
from typing import Any

import neuron_predictors
import pytest
import torch
from accuracy_windows import Windows, windows_of
from click.testing import CliRunner
from models_for_tests import TEXT, make_model
from neuron_predictors import Fitted, fit, masked, watch

from sparsepack.errors import UserError
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.models.checkpoint.checkpoint import Checkpoint

TIMES = (1.0, 1.5)
ADJACENT = "adjacent, rank 32"
"""An eighth of the model's width."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text to learn from and another."""
    folder = tmp_path_factory.mktemp("texts")
    for name, text in (("learned.txt", TEXT[:12000]), ("other.txt", TEXT[20000:24000])):
        (folder / name).write_text(text)
    return folder / "learned.txt", folder / "other.txt"


@pytest.fixture(scope="module")
def subject(relu: Checkpoint) -> Subject:
    return open_subject(str(relu.path))


@pytest.fixture(scope="module")
def layers(subject: Subject, files: tuple[Path, Path]) -> list[dict[str, Fitted]]:
    inputs, _ = windows_of(subject, str(files[0]), 40, context=128)
    return fit(subject, inputs, TIMES, epochs=2)


@pytest.fixture(scope="module")
def data(subject: Subject, files: tuple[Path, Path]) -> Windows:
    return windows_of(subject, str(files[1]), 3, context=128)


@pytest.fixture(scope="module")
def seen_by(subject: Subject, layers: Any, data: Windows) -> Any:
    """`watch` of the dense model."""
    return watch(subject, data, layers, TIMES)


@pytest.mark.parametrize("budget", TIMES)
def test_the_exact_gate_finds_all_and_changes_nothing(
    subject: Subject, layers: Any, data: Windows, seen_by: Any, budget: float
) -> None:
    found = masked(subject, data, layers, "exact gate", budget, seen_by[0])
    assert found["recall"] == {"value": 1.0, "stderr": 0.0}
    assert found["perplexity_ratio"] == {"value": 1.0, "stderr": 0.0}


def test_as_many_are_predicted_as_asked_on_other_text(seen_by: Any) -> None:
    for (name, budget), found in seen_by[1].items():
        # Eleven units, trained on so little, are all zero for some tokens: then everybody's score is the same.
        if "rank 11" not in name:
            assert found["predicted"]["value"] == pytest.approx(budget, rel=0.05), name


def test_two_bits_find_more_than_one_and_every_gate_more_than_frequency(seen_by: Any) -> None:
    recall = {name: found["recall"]["value"] for (name, budget), found in seen_by[1].items() if budget == 1.0}
    assert recall["gate in 2 bits"] > recall["gate in 1 bit"] > recall["frequency"]


def test_ranks_take_no_more_memory_than_the_copies(layers: Any) -> None:
    memory = {name: fitted.predictor.nbytes for name, fitted in layers[0].items()}
    for bits in ("2 bits", "1 bit"):
        copy = memory[f"gate in {bits}"]
        rank = copy // (2 * (256 + 500))
        assert copy * 0.9 < memory[f"gate of rank {rank}"] == memory[f"adjacent, rank {rank}"] <= copy


def test_what_is_not_predicted_is_left_out_and_later_layers_see_it(
    subject: Subject, layers: Any, data: Windows, seen_by: Any
) -> None:
    found = masked(subject, data, layers, "frequency", 1.0, seen_by[0])
    dense = seen_by[1]["frequency", 1.0]
    assert found["perplexity_ratio"]["value"] != 1.0
    assert found["active_by_layer"][0] == dense["active_by_layer"][0]
    assert found["active_by_layer"][1] != dense["active_by_layer"][1]


def test_an_adjacent_predictor_may_leave_the_first_layer_to_its_gate(seen_by: Any) -> None:
    by_token, exact = (seen_by[1][name, 1.0]["recall_by_layer"] for name in (ADJACENT, f"{ADJACENT}, first exact"))
    assert by_token[0] < exact[0] == 1.0
    assert by_token[1:] == exact[1:]


def test_a_gate_with_a_bias_is_refused(tmp_path: Path) -> None:
    model = open_subject(str(make_model(tmp_path / "m", "llama", hidden_act="relu", mlp_bias=True)))
    with pytest.raises(UserError, match="bias"):
        fit(model, torch.ones(10, 16, dtype=torch.long), TIMES, epochs=1)


def test_a_model_without_sparse_neurons_is_refused(tmp_path: Path) -> None:
    model = open_subject(str(make_model(tmp_path / "m", "llama")))
    with pytest.raises(UserError, match="as ReLU does"):
        fit(model, torch.ones(10, 16, dtype=torch.long), TIMES, epochs=1)


def test_the_script_prints_a_table_for_each_budget(relu: Checkpoint, files: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(relu.path),
        "--calibration-text",
        str(files[0]),
        "--text",
        str(files[1]),
        "--samples",
        "10",
    ]
    arguments += ["--tokens", "64", "--windows", "2", "--times", "1", "--times", "1.5", "--epochs", "1"]
    result = CliRunner().invoke(neuron_predictors.main, [*arguments, "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 0, result.output
    assert result.output.count("| exact gate ") == 2
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == result.output.count("\n| ") - 2  # less the heads of two tables
