"""What learning takes of a model, on a tiny one: the script takes the same steps as the product."""

import json
from pathlib import Path

import global_cost
import pytest
from click.testing import CliRunner


@pytest.mark.parametrize("basis", [False, True])
def test_a_step_is_timed_with_a_basis_and_without(tmp_path: Path, basis: bool) -> None:
    asked = ["--size", "tiny", "--device", "cpu", "--steps", "1", "--batch", "1", "--length", "16"]
    path = tmp_path / "cost.json"
    made = CliRunner().invoke(global_cost.main, [*asked, *["--basis"] * basis, "--json", str(path)])
    assert made.exit_code == 0, made.output
    found = json.loads(path.read_text())
    assert found["basis"] == basis
    assert len(found["seconds_a_step"]) == 2
    assert all(each > 0 for each in found["seconds_a_step"])
