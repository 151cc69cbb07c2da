"""Every figure of the README and of the pages on accuracy and speed is one of RESULTS.md, perhaps rounded."""

import re
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PAGES = [ROOT / "README.md", ROOT / "docs" / "accuracy.md", ROOT / "docs" / "performance.md"]

NOT_MEASURED = {
    "README.md": {"3.11", "2.0", "414"},  # of Python, of the license, of GLM-4-0414
    "accuracy.md": set(),
    "performance.md": set(),
}


def figures(text: str) -> set[Decimal]:
    """The numbers of two digits or more of a text: not those of links, of code, or within a name."""
    text = re.sub(r"^    .*$|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return {Decimal(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w-)", text) if len(found) > 1}


def rounded(exact: Decimal, figure: Decimal) -> bool:
    """Whether a figure is an exact one to fewer digits."""
    return abs(exact - figure) <= Decimal(1).scaleb(int(figure.as_tuple().exponent)) / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page: Path) -> None:
    measured = figures(re.sub(r"`", "", RESULTS.read_text(encoding="utf-8")))
    claimed = figures(page.read_text(encoding="utf-8"))
    unknown = {str(figure) for figure in claimed if not any(rounded(exact, figure) for exact in measured)}
    assert unknown - NOT_MEASURED[page.name] == set()
