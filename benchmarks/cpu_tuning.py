"""What tuning a CPU's layouts gains, and takes: the default, what an engine finds at its first load, what `tune` finds.

Greedy decoding with half of the weights skipped, and with none, all layouts in turns. Weights are random, of a released
model's shape; each side keeps what it measured in a cache folder of its own.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch

from benchmarks.cpu_decode import decode_ours
from benchmarks.shared import machine
from benchmarks.shared.random_models import random_model
from benchmarks.shared.shapes import BILLION, QWEN_0_5B, SMALL, random_ids
from benchmarks.shared.thresholds import find_thresholds, with_thresholds
from benchmarks.shared.timing import interleave, json_option, median_ratio, write_figures
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cpu.machine import cpu_info, default_threads
from sparsepack.runtime.cpu.tile_config import CpuTileConfig, tile_config, tuned
from sparsepack.runtime.cpu.tune import AUTOTUNE, measure
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape, zigzag_matrices

SIZES = {size.name: size for size in (SMALL, QWEN_0_5B, BILLION)}
DEFAULT, AT_LOAD, THOROUGH = "default", "at the first load", "tune"
SKIPPED, PROMPT, NEW = 0.5, 32, 32


def load(packed: PackedModel, side: str, threads: int, block: str) -> tuple[Engine, float, dict[Shape, CpuTileConfig]]:
    """Return an engine with the layouts of a side, the seconds that finding them took, and what they are."""
    shapes = {(matrix.rows, matrix.columns) for _, matrix in zigzag_matrices(packed)}
    options = EngineOptions(threads=threads, context=PROMPT + NEW)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, AUTOTUNE: str(int(side == AT_LOAD))}
        tuned.cache_clear()
        start = time.perf_counter()
        if side == THOROUGH:
            measure(shapes, threads, block)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        engine = Engine(packed, options, backend="cpu")
        if side == AT_LOAD:
            first = time.perf_counter() - start
            start = time.perf_counter()
            engine = Engine(packed, options, backend="cpu")
            seconds = first - (time.perf_counter() - start)
        return engine, seconds, {shape: tile_config(shape, threads, block) for shape in sorted(shapes)}


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default=SMALL.name, show_default=True)
@click.option("--block", type=click.Choice(["Q4_K", "Q6_P"]), default="Q4_K", show_default=True)
@click.option("--threads", type=int, default=None)
@click.option("--rounds", default=9, show_default=True)
@json_option
def main(size: str, block: str, threads: int | None, rounds: int, json_path: Path | None) -> None:
    """Print the table."""
    threads = threads or default_threads()
    torch.set_num_threads(threads)
    click.echo(machine.setting_line(machine.setting()))
    packed = random_model(SIZES[size], device="cpu", block=block)
    packed = with_thresholds(packed, find_thresholds(packed, [SKIPPED])[SKIPPED])
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    found = {side: load(packed, side, threads, block) for side in (DEFAULT, AT_LOAD, THOROUGH)}
    runs = {
        (side, dense): lambda engine=engine, dense=dense: decode_ours(engine, dense, prompt, NEW)
        for side, (engine, _, _) in found.items()
        for dense in (True, False)
    }
    speeds = interleave(runs, rounds, warm_up=1)
    click.echo(f"\n{size}, {block}, {threads} threads, {rounds} rounds; {cpu_info()}\n")
    click.echo("| layouts | tuning, s | dense, t/s (x default) | half skipped, t/s (x default) | span, tile by shape |")
    click.echo("|---|--:|--:|--:|---|")
    for side, (_, seconds, configs) in found.items():
        cells = [
            f"{statistics.median(speeds[side, dense]):.1f} "
            f"({median_ratio(speeds[side, dense], speeds[DEFAULT, dense]):.3f})"
            for dense in (True, False)
        ]
        layouts = ", ".join(f"{rows}x{columns}: {c.span}, {c.tile}" for (rows, columns), c in configs.items())
        click.echo(f"| {side} | {seconds:.2f} | {' | '.join(cells)} | {layouts} |")
    figures = [{"side": side, "dense": dense, "speeds": of} for (side, dense), of in speeds.items()]
    write_figures(json_path, {"size": size, "block": block, "threads": threads, "runs": figures, **machine.setting()})


if __name__ == "__main__":
    main()
