"""Seconds that quantising with error feedback takes, block by block, of a model or of a random one of a Llama's shape.

What is timed is the pass of `pack --calibration` (`calibrate/refitting.py`) with nothing skipped: reading the weights,
running the windows, their products and factors, the columns one after the other, and the artifact's bytes. Windows are
random tokens, as many as `pack` takes; time does not depend on which. The first block pays for compiling kernels, and
is told apart. Without MODEL the shape is Llama 3.1 8B's, of which only so many blocks are made; the whole is
extrapolated.
"""

import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import click
import torch

from benchmarks.shared.checkpoints import make_shards
from benchmarks.shared.shapes import LLAMA_8B
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate import refitting as run
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.formats.zigzag.plan import encoded_site
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.workers.shard import Shard


@click.command()
@click.argument("model", required=False)
@click.option("--layers", default=4, show_default=True, help="Blocks that are made of the random model.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", type=int, help="Of torch and of our kernels.")
@click.option("--work", type=click.Path(path_type=Path), help="Where the random model and the state are put.")
@json_option
def main(
    model: str | None, layers: int, device: str, threads: int | None, work: Path | None, json_path: Path | None
) -> None:
    """Print the table."""
    if threads:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        whole = None
        if model is None:
            # A small vocabulary: it is the blocks whose columns are quantised with error feedback.
            whole, size = LLAMA_8B.layers, replace(LLAMA_8B, layers=layers, vocabulary=4096)
            make_shards(Path(folder) / "model", size, device)
            model = str(Path(folder) / "model")
        checkpoint, options = open_checkpoint(model), RefitOptions(quantiser="gptq", device=device)
        whole = whole or checkpoint.layers
        count, length = run.fitting_windows(checkpoint, options, (512, 2048))
        windows = torch.randint(checkpoint.config.vocab_size, (count, length), dtype=torch.int32)
        shard = Shard(folder=Path(folder) / "state").resume("error feedback", checkpoint.layers)
        ends, save = [time.perf_counter()], Shard.save_block

        def saved(self: Shard, *values: object, **named: object) -> None:
            save(self, *values, **named)  # type: ignore[arg-type]
            if device != "cpu":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

        with torch.no_grad(), patch.object(Shard, "save_block", saved):
            run._run(checkpoint, windows, SITES, partial(encoded_site, "Q4_K"), {}, options, shard)
        columns = sum(checkpoint.stacked_shape(site)[1] for site in SITES)
        weights = sum(rows * columns for rows, columns in map(checkpoint.stacked_shape, SITES))
    seconds = [after - before for before, after in pairwise(ends)]
    each = statistics.median(seconds[1:]) if len(seconds) > 1 else seconds[0]
    row = {
        "blocks": len(seconds),
        "tokens": count * length,
        "first_block": seconds[0],
        "block": each,
        "us_a_column": 1e6 * each / columns,
        "whole": seconds[0] + each * (whole - 1),
        "of_blocks": whole,
        "weights_a_block": weights,
    }
    click.echo("| tokens | first block | each other block | a column | whole model |\n|--:|--:|--:|--:|--:|")
    click.echo(
        f"| {row['tokens']:,} | {row['first_block']:.2f} s | {each:.3f} s | {row['us_a_column']:.0f} us | "
        f"{row['whole']:.1f} s ({whole} blocks of {weights / 1e6:.1f}M weights) |"
    )
    write_figures(json_path, [row])
