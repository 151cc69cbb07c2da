"""Where a run speaks: progress on stderr, results on stdout."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 150  # of what is piped or logged, where there is no terminal to ask


def say(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr, flush=True)


def results() -> "Console":
    """Stdout as rich writes it."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(title: str, *columns: str) -> "Table":
    """A plain table; a column whose name begins with ">" is set right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return made


def with_error(value: Any, digits: int) -> str:
    """`{"value", "stderr"}` as text; the error is left out where one window gives none."""
    text = f"{value['value']:.{digits}f}"
    return text if value["stderr"] is None else f"{text} ± {value['stderr']:.{digits}f}"
