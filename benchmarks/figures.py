"""The file that a benchmark writes its figures to."""

import json
from pathlib import Path
from typing import Any

import click

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file, too."
)


def write_figures(path: Path | None, figures: Any) -> None:
    """Write figures as JSON, where a file was asked for."""
    if path:
        path.write_text(json.dumps(figures, indent=1))
