"""`sparsepack inspect` and `verify`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import Existing, command, emit, json_output
from sparsepack.cli.shared import ARTIFACT


@command(short_help="Show what an artifact, calibration, table or trace holds.")
@click.argument("path", type=Existing("an artifact, a thresholds table, a calibration folder or a trace"))
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a checkpoint, a thresholds table, a calibration folder or a trace holds, and which
    programs can load an artifact."""
    from sparsepack.calibrate.collect import calibration_table
    from sparsepack.calibrate.thresholds import thresholds_table
    from sparsepack.calibrate.trace import trace_table
    from sparsepack.cli.tables import (
        artifact_table,
        channels_table,
        checkpoint_table,
        given_table,
        neurons_table,
        starved_note,
    )
    from sparsepack.inspection import detect_kind

    kind = detect_kind(path)
    shown: dict[str, list[Callable[[Any], str]]] = {
        "artifact": [artifact_table],
        "checkpoint": [checkpoint_table],
        "thresholds": [thresholds_table],
        "calibration": [
            calibration_table,
            channels_table,
            lambda found: neurons_table(found["neurons"]),
            given_table,
            starved_note,
        ],
        "trace": [trace_table, lambda found: neurons_table(found["neurons"])],
    }
    emit(
        kind.read(path), json_path, lambda found: "\n\n".join(filter(None, (part(found) for part in shown[kind.name])))
    )


@command(short_help="Check that an artifact is whole, and of which model.")
@click.argument("path", type=ARTIFACT)
@click.option("--against", metavar="MODEL", help="Compare every matrix with this checkpoint.")
@json_output
def verify(path: Path, against: str | None, json_path: str | None) -> None:
    """Check an artifact: every byte's hash, shapes, padding; with --against, that it is that model. Exit 1 if not."""
    from sparsepack.cli.tables import verification
    from sparsepack.formats.verify import verify as check

    report = check(path, against)
    emit(report.to_json(), json_path, verification)
    if not report.passed:
        sys.exit(1)
