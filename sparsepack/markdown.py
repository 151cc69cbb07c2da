"""Tables in Markdown, which read well in a terminal and paste into an issue."""

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with columns padded to one width; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(header))]
    right = [bool(rows) and all(_is_number(str(row[n])) for row in rows) for n in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-" or text == "-"
