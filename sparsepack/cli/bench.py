"""`sparsepack bench`."""

from pathlib import Path
from typing import Any

import click

from sparsepack.bench.options import BenchSettings
from sparsepack.cli.options import PATH, backend_option, device_option, emit, json_output, seed_option, thread_count


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "-p",
    "--prompt",
    "n_prompt",
    default=BenchSettings.n_prompt,
    show_default=True,
    help="Tokens of the prefill test; 0: none.",
)
@click.option(
    "-n",
    "--generate",
    "n_gen",
    default=BenchSettings.n_gen,
    show_default=True,
    help="Tokens of the decoding test; 0: none.",
)
@click.option("-r", "--repetitions", default=BenchSettings.repetitions, show_default=True)
@click.option("--text", help="Run this text's tokens; random ones skip less than text does.")
@seed_option
@click.option(
    "--batch",
    type=click.IntRange(1, 8),
    default=BenchSettings.batch,
    show_default=True,
    help="Decode so many sequences together, skipping what is inactive in all of them; with --device cuda.",
)
@device_option
@backend_option
@thread_count
@json_output
def bench(path: Path, text: str | None, json_path: str | None, **asked: Any) -> None:
    """Measure tokens per second of an artifact, dense and sparse in turns, with the bytes that each token needs."""
    from sparsepack.bench.run import bench as measure
    from sparsepack.bench.table import bench_table

    emit(measure(path, BenchSettings(**asked), text), json_path, bench_table)
