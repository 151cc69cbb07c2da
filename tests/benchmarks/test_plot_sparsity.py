"""The picture of accuracy against sparsity shows what the table beside it says."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from plot_sparsity import main

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("books-26m-silu.sparsity*.json"))


def _table(text: str) -> dict[str, list[float]]:
    """The rows of a table of RESULTS.md without Q4_K weights: the loss in percent at each target."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    rows = re.search(rf"^\| {text}, at a target of .*\n.*\n((?:\|.*\n)*)", results, re.MULTILINE)
    assert rows is not None
    found = {}
    for line in rows[1].splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if "Q4_K" not in name:
            found[name.strip("`")] = [float(cell.removesuffix(" %")) for cell in cells if cell != "-"]
    return found


def test_the_picture_has_a_line_for_every_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    lines: list[tuple[str, list[float]]] = []
    real = Axes.plot

    def spied(self: Axes, *given: list[float], **named: str) -> object:
        lines.append((named["label"], [round(loss, 2) for loss in given[1][1:]]))
        return real(self, *given, **named)

    monkeypatch.setattr(Axes, "plot", spied)
    done = CliRunner().invoke(main, [*map(str, FILES), "-o", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert lines == [*_table("WikiText-2").items(), *_table("books").items()]
