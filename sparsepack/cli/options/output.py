"""What verbs write: options that say where to, and results as tables and as JSON."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.messages.streams import json_text
from sparsepack.cli.options.verb import group
from sparsepack.terminal import printable, tell

OUTPUT = "Output"
"""The heading that these options have in the help."""


def _writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Refuse a file for the result that cannot be written before there is one."""
    from sparsepack.files.atomic import check_output

    if path and path != "-":
        check_output(Path(path), overwrite=True)
    return path


overwrite_flag = group(OUTPUT, click.option("--overwrite", is_flag=True, help="Replace an output that exists."))
json_output = group(
    OUTPUT,
    click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=_writable,
        help="Write the result as JSON; - for standard output.",
    ),
)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    tell(json_text(value, indent=2))


def emit(result: Any, json_path: str | None, table: Callable[[Any], str]) -> None:
    """Print a result as a table, and write it as JSON to a file; for `-` print JSON alone."""
    from sparsepack.files.atomic import write_json

    if json_path == "-":
        print_json(result)
        return
    tell(printable(table(result)))
    if json_path:
        write_json(Path(json_path), result)
