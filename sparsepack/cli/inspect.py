"""`sparsepack inspect`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.options import PATH, emit, json_output


@click.command()
@click.argument("path", type=PATH)
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a thresholds table, a calibration folder or a trace holds, and which programs can load an
    artifact."""
    from sparsepack.inspect import inspect as look_into

    emit(look_into(path), json_path, _shown)


def _shown(result: Mapping[str, Any]) -> str:
    """Of an artifact unless its kind says otherwise."""
    from sparsepack.cli.channels import channels_table
    from sparsepack.cli.neurons import neurons_table
    from sparsepack.cli.tables import artifact_table, calibration_table, thresholds_table, trace_table

    if result["kind"] == "calibration":
        return f"{calibration_table(result)}\n\n{channels_table(result)}\n\n{neurons_table(result['neurons'])}"
    if result["kind"] == "trace":
        return f"{trace_table(result)}\n\n{neurons_table(result['neurons'])}"
    return thresholds_table(result) if result["kind"] == "thresholds" else artifact_table(result)
