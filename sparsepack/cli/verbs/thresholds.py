"""`sparsepack thresholds`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.cli.command import OUTPUT, PATH, group, overwrite_flag, verb
from sparsepack.cli.shared import (
    CALIBRATION,
    allocation,
    allocation_options,
    compute,
    devices_option,
    dry_run_option,
    tell_forecast,
    workers_of,
)
from sparsepack.terminal import tell


@verb(short_help="Find from which size on a channel counts, for a sparsity.")
@click.argument("model")
@click.option("--calibration", type=CALIBRATION, required=True, help="A folder made by `sparsepack calibrate`.")
@allocation
@group(OUTPUT, click.option("-o", "--output", type=PATH, required=True, help="The table to make, as JSON."))
@compute
@devices_option
@dry_run_option
@overwrite_flag
def thresholds(model: str, calibration: Path, output: Path, overwrite: bool, dry_run: int | None, **asked: Any) -> None:
    """Find the thresholds of MODEL for a sparsity: a table to print, edit, and give to `pack` or `eval`.

    A run that was killed goes on where it stopped when the same command is given again; so does `pack --sparsity`.
    With --devices, or under torchrun, several workers share the windows; the table has the same bytes.
    """
    if asked["sparsity"] is None:
        raise click.UsageError("give --sparsity, for example 0.5")
    _options(asked).check()
    if dry_run is not None:
        from sparsepack.calibrate.find_thresholds import forecast

        tell_forecast(partial(forecast, model, calibration, _options(asked)), dry_run)
        return
    from sparsepack.calibrate.find_thresholds import make_thresholds
    from sparsepack.cli.tables import thresholds_table

    with workers_of(asked) as workers:
        table = make_thresholds(model, calibration, _options(asked), output, overwrite, workers)
        if not workers.first:
            return
    tell(thresholds_table(table.summary()))


def _options(asked: dict[str, Any]) -> AllocationOptions:
    found = allocation_options({**asked})
    assert found is not None
    return found
