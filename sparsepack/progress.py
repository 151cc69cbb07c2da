"""Progress bars with remaining time, on stderr so that results on stdout stay clean."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Report `steps` more units of work done."""

    def __call__(self, steps: int = 1) -> None: ...


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show a bar of `total` units, `done` of them finished already; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total, completed=done)

        def advance(steps: int = 1) -> None:
            bars.advance(task, steps)

        yield advance


def say(*lines: str) -> None:
    """Lines on stderr; nothing where there are none."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
