"""Seconds that packing takes on 1, 2, 4 ... cores, by format, with and without error feedback: how it scales.

Each number of cores is a process of its own that may use no others. Without error feedback whole models are packed, to
`--work`, from a checkpoint whose hash is taken meanwhile. With error feedback it is the pass of `pack --calibration`
(`calibrate/refitting.py`) with nothing skipped, on random tokens, of a model of fewer blocks.

`--profile` prints as well, of each, the functions whose own seconds on the main thread are most on the most cores,
beside those on the fewest: what takes as long on both does not scale.
"""

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
LISTED = 25
"""So many functions of a profile are printed."""


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


def seconds_here(
    work: Path, formats: Sequence[str], windows: int, profile: bool
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the seconds of each format, and with error feedback, on the cores that this process may use; with a
    profile also those of each function of theirs."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pack(
        PackRequest(str(work / "small"), work / "small.gguf", score=False, overwrite=True)
    )  # imports what packing needs
    found: dict[str, float] = {}
    functions: dict[str, dict[str, float]] = {}

    def timed(name: str, run: Callable[[], float]) -> None:
        profiler = cProfile.Profile()
        found[name] = profiler.runcall(run) if profile else run()
        if profile:
            functions[name] = own_seconds(profiler)

    for format in formats:
        timed(format, partial(pack_seconds, work, format))
        if windows and FORMATS[format].fits:
            timed(f"{format}, error feedback", partial(feedback_seconds, work / "small", format, windows))
    return found, functions


def pack_seconds(work: Path, format: str) -> float:
    """Return the seconds in which the model is packed."""
    start = time.perf_counter()
    pack(PackRequest(str(work / "model"), work / f"{format}.gguf", format, score=False, overwrite=True))
    return time.perf_counter() - start


def own_seconds(profiler: cProfile.Profile) -> dict[str, float]:
    """Return a profile's functions, each with the seconds that it spent itself."""
    found: dict[str, float] = {}
    for (file, line, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        label = name if file == "~" else f"{Path(file).name}:{line}({name})"
        found[label] = found.get(label, 0.0) + own
    return found


def profile_table(fewest: Mapping[str, float], most: Mapping[str, float], counts: tuple[int, int]) -> str:
    """Return the functions that take longest on the most cores, with their seconds on the fewest and on the most."""
    lines = [f"| own seconds | {counts[0]} | {counts[1]} | |", "|---|--:|--:|--:|"]
    for name in sorted(most, key=lambda name: -most[name])[:LISTED]:
        before = fewest.get(name, 0.0)
        lines.append(f"| {name} | {before:.2f} | {most[name]:.2f} | {before / max(most[name], 1e-9):.1f}x |")
    return "\n".join(lines)


@click.command()
@click.option("--cores", "counts", default="1,2,4,8,16", show_default=True)
@click.option("--formats", default="zigzag-q4_k,zigzag-q6_k,zigzag-q6_p", show_default=True)
@click.option("--layers", type=int, help="Of the model that is packed (default: all 16 of its shape, of 1.1 billion).")
@click.option("--feedback-layers", default=2, show_default=True)
@click.option("--windows", default=8, show_default=True, help="Of 512 tokens, for error feedback; 0: leave it out.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--tiny", is_flag=True, help="A model of a few hundred thousand parameters, to try the benchmark.")
@click.option("--profile", is_flag=True, help="Print where the seconds go, on the fewest cores and on the most.")
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
    profile: bool,
    here: Path | None,
    json_path: Path | None,
) -> None:
    """Print the table."""
    names = formats.split(",")
    if here is not None:
        click.echo(json.dumps(seconds_here(here, names, windows, profile)))
        return
    size = TINY if tiny else BILLION
    rows: dict[int, dict[str, float]] = {}
    functions: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        make_shards(Path(folder) / "model", replace(size, layers=layers or size.layers))
        make_shards(Path(folder) / "small", replace(size, layers=feedback_layers, vocabulary=4096))
        allowed = sorted(os.sched_getaffinity(0))
        for count in map(int, counts.split(",")):
            if count > len(allowed):
                continue
            command = ["taskset", "-c", ",".join(map(str, allowed[:count])), sys.executable, "-m", "benchmarks"]
            command += ["pack_threads", "--here", folder, "--formats", formats, "--windows", str(windows)]
            command += ["--profile"] if profile else []
            said = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
            rows[count], functions[count] = json.loads(said.splitlines()[-1])
            click.echo(f"{count} cores: {rows[count]}", err=True)
    fewest, most = min(rows), max(rows)
    click.echo(f"| seconds | {' | '.join(map(str, rows))} | {fewest} / {most} |\n|---|{'--:|' * (len(rows) + 1)}")
    for name in rows[fewest]:
        taken = " | ".join(f"{row[name]:.2f}" for row in rows.values())
        click.echo(f"| {name} | {taken} | {rows[fewest][name] / rows[most][name]:.1f}x |")
    for name in functions[fewest]:
        of_fewest, of_most = functions[fewest][name], functions[most][name]
        click.echo(f"\n{name}\n{profile_table(of_fewest, of_most, (fewest, most))}")
    write_figures(json_path, rows)
