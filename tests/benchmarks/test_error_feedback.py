"""The benchmark of error feedback on the shipped tiny model."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import error_feedback


def test_the_time_of_a_whole_model_is_that_of_its_blocks(tmp_path: Path) -> None:
    arguments = ["shipped:tiny", "--work", str(tmp_path), "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(error_feedback.main, arguments)
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["blocks"] == row["of_blocks"]
    assert row["whole"] >= row["first_block"] + row["block"] > 0
    assert f"{row['whole']:.1f} s ({row['blocks']} blocks" in result.output
