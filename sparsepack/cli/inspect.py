"""`sparsepack inspect`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options import emit, json_output
from sparsepack.cli.verb import Existing, verb


@verb(short_help="Show what an artifact, calibration, table or trace holds.")
@click.argument("path", type=Existing("an artifact, a thresholds table, a calibration folder or a trace"))
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a checkpoint, a thresholds table, a calibration folder or a trace holds, and which
    programs can load an artifact."""
    from sparsepack.cli import tables
    from sparsepack.cli.channels import channels_table
    from sparsepack.cli.checkpoint import checkpoint_table
    from sparsepack.cli.neurons import neurons_table
    from sparsepack.inspection import kind_of

    kind = kind_of(path)
    shown: dict[str, list[Callable[[Any], str]]] = {
        "artifact": [tables.artifact_table],
        "checkpoint": [checkpoint_table],
        "thresholds": [tables.thresholds_table],
        "calibration": [tables.calibration_table, channels_table, lambda found: neurons_table(found["neurons"])],
        "trace": [tables.trace_table, lambda found: neurons_table(found["neurons"])],
    }
    emit(kind.read(path), json_path, lambda found: "\n\n".join(part(found) for part in shown[kind.name]))
