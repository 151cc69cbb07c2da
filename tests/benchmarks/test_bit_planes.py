"""The simulation of planes: what a run is, levels that refine each other, and a table on a small model."""

from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from benchmarks import bit_planes
from benchmarks.bit_planes import nested, run_of


def test_a_run_says_levels_options_and_bits() -> None:
    run = run_of("2,4,6+g64+rows@3.4")
    assert (run.levels, run.group, run.bits) == ((2, 4, 6), 64, 3.4)
    assert run.scale_bits == pytest.approx(12 / 64 + 32 / 256)
    with pytest.raises(click.BadParameter, match=r"2,4,6\+rows@3.4"):
        run_of("2,4,6")


@pytest.mark.parametrize("options", ["", "+sym+g16", "+rows+points", "+g64+affine", "+f16+g128"])
def test_each_level_is_nearer_than_the_one_before(options: str) -> None:
    w = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    errors = [float((each - w).norm() / w.norm()) for each in nested(w, run_of(f"2,4,6{options}@3"))]
    assert errors[0] < 0.45
    assert errors[1] < 0.3 * errors[0]
    assert errors[2] < 0.3 * errors[1]


def test_a_table_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "t.txt"
    text.write_text(TEXT[:60000])
    monkeypatch.setattr(bit_planes, "windows_of_half", lambda subject, text, count: (torch.randint(300, (2, 65)),) * 2)
    monkeypatch.setattr(bit_planes, "windows_of", lambda subject, text, count: (torch.randint(300, (2, 64)),) * 2)
    runs = ["2,4,6+rows+fisher@3.4", "4+all@3.4", "2,4,6+gptq+all@3.4"]
    arguments = [make_model(tmp_path / "m"), *runs, "--text", text, "--calibration-text", text, "--context", 64]
    done = CliRunner().invoke(bit_planes.main, [*map(str, arguments), "--work", str(tmp_path / "w")])
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ") for line in done.output.splitlines() if "@" in line]
    assert [row[0].strip("| ") for row in rows] == runs
    assert [row[1] for row in rows] == ["6.50", "4.50", "6.50"]
