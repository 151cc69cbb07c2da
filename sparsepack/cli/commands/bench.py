"""`sparsepack bench`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.bench.options import BenchSettings
from sparsepack.cli.command import command, emit, from_options, group, json_output, options_from
from sparsepack.cli.shared import (
    ARTIFACT,
    RUNS,
    backend_option,
    device_option,
    engine_flags,
    engine_options,
    slots,
)
from sparsepack.runtime.options import EngineOptions


@command(short_help="Measure tokens per second, dense and sparse.")
@click.argument("path", type=ARTIFACT)
@from_options(BenchSettings, "-p", "--prompt")
@from_options(BenchSettings, "-n", "--generate")
@from_options(BenchSettings, "-r", "--repetitions")
@click.option("--text", help="Run this text's tokens (default: random ones, which skip less than text does).")
@options_from(BenchSettings, "--seed", "--batch")
@slots
@engine_flags
@device_option
@backend_option
@group(RUNS, from_options(EngineOptions, "--threads"))
@json_output
def bench(path: Path, text: str | None, json_path: str | None, **asked: Any) -> None:
    """Measure tokens per second of an artifact, dense and sparse in turns, with the bytes that each token needs.

    With --cached or --vram also how many of the active neurons of a token had slots, what a token took of each memory,
    and how long the device waited for the worker.

    Of a slid folder, with --device cuda: the products of its Linears at 64 to 16384 tokens, beside dense BF16, INT8 and
    FP8 and other patterns; of the options, --repetitions and --device count.
    """
    settings = BenchSettings(engine=engine_options(asked), **asked)
    from sparsepack.bench.run import bench as measure
    from sparsepack.bench.run import bench_table, linears_table

    result = measure(path, settings, text)
    emit(result, json_path, linears_table if "products" in result else bench_table)
