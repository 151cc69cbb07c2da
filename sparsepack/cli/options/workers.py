"""`--devices`, and the workers that a verb's work is done by."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sparsepack.cli.options.shared import RUNS
from sparsepack.cli.options.verb import ARGUMENTS, group
from sparsepack.errors import UserError, WorkersError
from sparsepack.terminal import tell
from sparsepack.workers.environment import LAUNCHED, number_here, several
from sparsepack.workers.launch import devices_of, launch

if TYPE_CHECKING:
    from sparsepack.models.stock.forecast import Forecast
    from sparsepack.workers.forecast import PartsForecast
    from sparsepack.workers.workers import Workers


def _launched(context: click.Context, parameter: click.Parameter, devices: str | None) -> None:
    """Run the command by a worker for each device, and end as they do."""
    if devices is None or context.resilient_parsing:
        return
    found = devices_of(devices)
    if several():
        raise UserError("--devices: torchrun has started the workers already; leave it out")
    if context.get_parameter_source("device") not in (None, click.core.ParameterSource.DEFAULT):
        raise UserError(f"--devices {devices}: it does nothing with --device; leave one of them out")
    sys.exit(launch(context.meta[ARGUMENTS], found))


devices_option = group(
    RUNS,
    click.option(
        "--devices",
        metavar="LIST",
        expose_value=False,
        callback=_launched,
        help="Start a worker for each of these devices, GPUs by number (0,1,2,3) or cpu,cpu: the windows are dealt to "
        "them, and the result is the same.",
    ),
)
"""Verbs with this option also run under torchrun."""

dry_run_option = group(
    RUNS,
    click.option(
        "--dry-run",
        "dry_run",
        type=click.IntRange(1),
        metavar="N",
        help="Write nothing: say what it would take N workers like this process, from one measured block (default: "
        "run).",
    ),
)
"""How many workers a verb is asked to foresee the work of, in place of doing it."""


def tell_forecast(forecast: Callable[[int], "Forecast | PartsForecast"], workers: int) -> None:
    """Tell what the work would take so many workers. Raises `UserError` where this process is one of several."""
    if several():
        raise UserError("--dry-run: it measures in one process; leave --devices and torchrun out")
    from sparsepack.cli.tables.forecast import forecast_table

    tell(forecast_table(forecast(workers)))


@contextmanager
def workers_of(asked: dict[str, Any]) -> Iterator["Workers"]:
    """The workers that this process is one of; this process alone, where it was not started as one of several. Its
    device is put into `asked`; only the first worker tells how it goes on."""
    if not several():
        from sparsepack.workers.workers import ALONE

        yield ALONE
        return
    import os

    import torch

    from sparsepack.progress import be_quiet
    from sparsepack.workers.joined import joined

    if asked["device"] == "cuda":
        asked["device"] = f"cuda:{number_here() % torch.cuda.device_count()}"
    if asked["device"].startswith("mps") and not os.environ.get(LAUNCHED):
        raise WorkersError("--device mps: a machine has one; run this command without torchrun")
    with joined(asked["device"]) as workers:
        if not workers.first:
            be_quiet(True)
        yield workers
