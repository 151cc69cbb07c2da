"""Tables as values, and what draws them: on a terminal, in Markdown and in HTML."""

import html as html_entities
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsepack.terminal import printable

if TYPE_CHECKING:
    from rich.text import Text

_PIPED_WIDTH = 150
"""Characters in a line of what is piped or logged, where there is no terminal to ask."""


@dataclass(frozen=True)
class Styled:
    """A text of which a terminal or a page shows more than its letters: "good", "bad", "soft" or "heading"."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Columns by name, rows of cells; a column stands right where all of its cells are numbers.

    title -- stands above; notes -- paragraphs below
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def right(self) -> list[bool]:
        """For every column, whether it stands right."""
        cells = ([str(row[n]) for row in self.rows] for n in range(len(self.columns)))
        return [any(column) and all(map(_is_number, column)) for column in cells]


Line = tuple[str | Styled, ...]
Part = str | Line | Table


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-"


def markdown(*parts: str | Table, cell: Callable[[str], str] | None = None) -> str:
    """Paragraphs and tables in Markdown, which reads well in a terminal too: columns are padded to one width.

    cell -- makes of a cell's text what stands in the table (default: `in_a_line`)
    """
    cell = cell or in_a_line
    return "\n\n".join(part if isinstance(part, str) else _markdown_table(part, cell) for part in parts)


def _markdown_table(table: Table, cell: Callable[[str], str]) -> str:
    cells = [[cell(str(value)) for value in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = table.right

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
    drawn = "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])
    return "\n\n".join(filter(None, (table.title, drawn, *table.notes)))


def in_a_line(text: str) -> str:
    """Text that ends no line and no cell of a Markdown table, and opens no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def html(table: Table) -> str:
    """A table in HTML; every cell is escaped. Right columns have the class `n`, styled cells that of their style.

    Each cell has the name of its column as `data-column`: a narrow page shows a row as a list of these.
    """
    right = table.right

    def cell(tag: str, number: int, value: Any) -> str:
        classes = ["n"] * right[number] + ([value.style] if isinstance(value, Styled) else [])
        named = f' class="{" ".join(classes)}"' if classes else ""
        column = f' data-column="{_escaped(table.columns[number])}"' if tag == "td" else ""
        return f"<{tag}{named}{column}>{_escaped(value)}"

    heads = "".join(cell("th", number, column) for number, column in enumerate(table.columns))
    rows = ("<tr>" + "".join(cell("td", number, value) for number, value in enumerate(row)) for row in table.rows)
    title = f"<h3>{_escaped(table.title)}</h3>\n" if table.title else ""
    notes = "".join(f'\n<p class="soft">{_escaped(note)}</p>' for note in table.notes)
    return f'{title}<div class="scroll"><table>\n<thead><tr>{heads}\n<tbody>{chr(10).join(rows)}\n</table></div>{notes}'


def _escaped(value: Any) -> str:
    return html_entities.escape(str(value))


def show(parts: Iterable[Part]) -> None:
    """Draw lines, which are never broken, and tables on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    for part in parts:
        if not isinstance(part, Table):
            console.print(_text(*part) if isinstance(part, tuple) else _text(part), soft_wrap=True)
            continue
        title = _text(Styled(part.title, "heading")) if part.title else None
        drawn = Drawn(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for column, right in zip(part.columns, part.right, strict=True):
            drawn.add_column(_text(column), justify="right" if right else "left")
        for row in part.rows:
            drawn.add_row(*map(_text, row))
        console.print(drawn)
        for note in part.notes:
            console.print(_text(note), soft_wrap=True)


def _text(*values: Any) -> "Text":
    """Values as rich's text, in which brackets are no markup."""
    from rich.text import Text

    styles = {"good": "green", "bad": "red", "soft": "dim", "heading": "bold"}
    return Text.assemble(*((printable(str(v)), styles[v.style] if isinstance(v, Styled) else "") for v in values))
