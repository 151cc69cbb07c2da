"""The results of a run on stdout, as rich draws them: they are read on a terminal, where a failed gate is red."""

import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

_WIDTH = 150  # of what is piped or logged, where there is no terminal to ask


def results() -> Console:
    """Stdout as rich writes it."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(title: str, *columns: str) -> Table:
    """A plain table; a column whose name begins with ">" is set right."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return made


def print_lines(lines: Iterable[RenderableType]) -> None:
    """Print lines, never broken, and tables."""
    console = results()
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str))
