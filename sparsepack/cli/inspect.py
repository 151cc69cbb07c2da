"""`sparsepack inspect`."""

from pathlib import Path

import click

from sparsepack.cli.options import PATH, emit, json_output


@click.command()
@click.argument("path", type=PATH)
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a thresholds table or a calibration folder holds, and which programs can load it."""
    from sparsepack.cli.tables import inspection_table
    from sparsepack.inspect import inspect as look_into

    emit(look_into(path), json_path, inspection_table)
