"""Seconds that packing takes on 1, 2, 4 ... cores, by format, with and without error feedback: how it scales.

Each number of cores is a process of its own that may use no others. Without error feedback whole models are packed, to
`--work`, from a checkpoint whose hash is taken meanwhile. With error feedback it is the pass of `pack --calibration`
(`calibrate/refitting.py`) with nothing skipped, on random tokens, of a model of fewer blocks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.shared.checkpoints import make_shards
from benchmarks.shared.shapes import BILLION, TINY
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate import refitting
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.formats.table import FORMATS
from sparsepack.formats.zigzag.plan import encoded_site
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.packing import PackRequest, pack
from sparsepack.workers.shard import Shard

ROOT = Path(__file__).parents[1]


def feedback_seconds(folder: Path, format: str, windows: int) -> float:
    """Return the seconds of error feedback through a model, on so many windows of 512 tokens."""
    checkpoint, options = open_checkpoint(str(folder)), RefitOptions(quantiser="gptq")
    tokens = torch.randint(checkpoint.config.vocab_size, (windows, 512), dtype=torch.int32)
    encode = partial(encoded_site, FORMATS[format].matrices.block)
    with tempfile.TemporaryDirectory(dir=folder) as state, torch.no_grad():
        shard = Shard(folder=Path(state)).resume("error feedback", checkpoint.layers)
        start = time.perf_counter()
        refitting._run(checkpoint, tokens, SITES, encode, {}, options, shard)
        return time.perf_counter() - start


def seconds_here(work: Path, formats: Sequence[str], windows: int) -> dict[str, float]:
    """Return the seconds of each format, and with error feedback, on the cores that this process may use."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pack(
        PackRequest(str(work / "small"), work / "small.gguf", score=False, overwrite=True)
    )  # imports what packing needs
    found = {}
    for format in formats:
        start = time.perf_counter()
        pack(PackRequest(str(work / "model"), work / f"{format}.gguf", format, score=False, overwrite=True))
        found[format] = time.perf_counter() - start
        if windows and FORMATS[format].fits:
            found[f"{format}, error feedback"] = feedback_seconds(work / "small", format, windows)
    return found


@click.command()
@click.option("--cores", "counts", default="1,2,4,8,16", show_default=True)
@click.option("--formats", default="zigzag-q4_k,zigzag-q6_k,zigzag-q6_p", show_default=True)
@click.option("--layers", type=int, help="Of the model that is packed (default: all 16 of its shape, of 1.1 billion).")
@click.option("--feedback-layers", default=2, show_default=True)
@click.option("--windows", default=8, show_default=True, help="Of 512 tokens, for error feedback; 0: leave it out.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--tiny", is_flag=True, help="A model of a few hundred thousand parameters, to try the benchmark.")
@click.option("--here", type=click.Path(path_type=Path), hidden=True)
@json_option
def main(
    counts: str,
    formats: str,
    layers: int | None,
    feedback_layers: int,
    windows: int,
    work: Path,
    tiny: bool,
    here: Path | None,
    json_path: Path | None,
) -> None:
    """Print the table."""
    names = formats.split(",")
    if here is not None:
        click.echo(json.dumps(seconds_here(here, names, windows)))
        return
    size = TINY if tiny else BILLION
    rows = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        make_shards(Path(folder) / "model", replace(size, layers=layers or size.layers))
        make_shards(Path(folder) / "small", replace(size, layers=feedback_layers, vocabulary=4096))
        allowed = sorted(os.sched_getaffinity(0))
        for count in map(int, counts.split(",")):
            if count > len(allowed):
                continue
            command = ["taskset", "-c", ",".join(map(str, allowed[:count])), sys.executable, "-m", "benchmarks"]
            command += ["pack_threads", "--here", folder, "--formats", formats, "--windows", str(windows)]
            said = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
            rows[count] = json.loads(said.splitlines()[-1])
            click.echo(f"{count} cores: {rows[count]}", err=True)
    first = min(rows)
    click.echo(f"| seconds | {' | '.join(map(str, rows))} | {first} / {max(rows)} |\n|---|{'--:|' * (len(rows) + 1)}")
    for name in rows[first]:
        taken = [row[name] for row in rows.values()]
        click.echo(f"| {name} | {' | '.join(f'{each:.2f}' for each in taken)} | {taken[0] / taken[-1]:.1f}x |")
    write_figures(json_path, rows)
