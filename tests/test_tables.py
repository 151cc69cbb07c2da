"""One table, drawn three ways."""

import pytest

from sparsepack.cli.commands.inspect import verification
from sparsepack.tables import Styled, Table, html, markdown, show

TABLE = Table(["name", "share"], [["a | [b]", "1.5 %"], ["<i>", Styled("10 %", "bad")]], "title", ["a note"])


def test_markdown_pads_columns_and_sets_numbers_right() -> None:
    assert markdown("before", TABLE).splitlines() == [
        "before",
        "",
        "title",
        "",
        "| name     | share |",
        "|----------|------:|",
        "| a \\| [b] | 1.5 % |",
        "| &lt;i>   |  10 % |",
        "",
        "a note",
    ]


def test_columns_of_which_some_cells_are_no_numbers_stand_left() -> None:
    rows = [["a", "1", "-", "2 GB"], ["b", "2", "+3 %", "unknown"]]
    assert Table(["name", "count", "change", "size"], rows).right == [False, True, True, False]
    assert Table(["name"], []).right == [False]


def test_html_escapes_cells_and_marks_numbers_and_styles() -> None:
    page = html(TABLE)
    assert '<tr><td data-column="name">&lt;i&gt;<td class="n bad" data-column="share">10 %' in page
    assert "<h3>title</h3>" in page
    assert '<p class="soft">a note</p>' in page


def test_brackets_are_no_markup_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show([TABLE, ("a [red]", Styled("line", "soft"))])
    out = capsys.readouterr().out
    assert "a | [b]" in out
    assert "a [red]line" in out
    assert out.index("title") < out.index("name") < out.index("a note")


def test_of_many_problems_of_an_artifact_the_first_are_told_and_how_many_more_there_are() -> None:
    report = {"path": "a", "passed": False, "tensors": [], "checked": []}
    told = [verification({**report, "problems": [f"a: wrong {n}" for n in range(count)]}) for count in (8, 10)]
    assert "more problems" not in told[0]
    assert told[1].splitlines()[0] == "a: FAILED: wrong 0"
    assert "wrong 7" in told[1]
    assert "wrong 8" not in told[1]
    assert "and 2 more problems, which --json lists" in told[1]
