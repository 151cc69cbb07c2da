"""Where the time of a token goes on the CPU: phases of a block, work and waiting, beside loops that read the same and
compute nothing.

A random Llama's shape in zigzag-q4_k, dense and half skipped, and in zigzag-q6_p at 3.4 and 2.8 bits read, at several
numbers of threads. Times are those of greedy tokens after a short prompt. Beside each product stands what a loop reads
in a second that follows the same lists of active columns through the same pieces of memory, shared out to the same
threads, with the best of some distances of fetching ahead. Thresholds are found on the first two layers and taken for
all: in a random model sites are alike.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared import machine
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import BILLION, QWEN_0_5B, SMOL, TINY, Size, llama_config, random_ids
from benchmarks.shared.thresholds import find_levels, find_thresholds, limits_reading, with_limits, with_thresholds
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.packed import PackedModel
from sparsepack.models.family import SITES
from sparsepack.runtime.cpu.machine import instruction_set, native
from sparsepack.runtime.cpu.operations import load_zigzag
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.tables import Table, markdown

SIZES = {size.name: size for size in (BILLION, QWEN_0_5B, SMOL, TINY)}
KINDS = ("q4_k dense", "q4_k half", "planes 3.4", "planes 2.8")
PROMPT, NEW, ROUNDS, CALIBRATED = 16, 24, 3, 2
AHEAD = (0, 2, 8, 32)
"""Pieces that a reading loop fetches ahead."""
READS = 3
"""Times that it reads each matrix, which is put out of the caches before."""


@dataclass(frozen=True)
class Phase:
    """What a phase takes of a token, in seconds. work, waiting: of each thread; bytes: that its matrices hold of what
    is read; ceiling: seconds of a loop that reads them, or None."""

    name: str
    work: Sequence[float]
    waiting: Sequence[float]
    bytes: float
    ceiling: float | None

    @property
    def seconds(self) -> float:
        """From barrier to barrier: the same for all threads."""
        return statistics.mean(self.work) + statistics.mean(self.waiting)


def models_of(size: Size, kinds: Sequence[str]) -> dict[str, PackedModel]:
    """Return the model of each kind."""
    found: dict[str, PackedModel] = {}
    config = llama_config(size)
    few = llama_config(size, num_hidden_layers=min(CALIBRATED, size.layers))
    places = [(layer, site) for layer in range(size.layers) for site in SITES]
    for block in ("Q4_K", "Q6_P"):
        names = [kind for kind in kinds if kind.startswith("q4_k") == (block == "Q4_K")]
        if not names:
            continue
        whole, sample = (random_of(each, size.name, size.layers, "cpu", block) for each in (config, few))
        of_all = {(layer, site): (min(layer, CALIBRATED - 1), site) for layer, site in places}
        if block == "Q4_K":
            thresholds = find_thresholds(sample, [0.5])[0.5] if "q4_k half" in names else {}
            half = {place: thresholds[of] for place, of in of_all.items()} if thresholds else {}
            found |= {kind: with_thresholds(whole, half if kind == "q4_k half" else {}) for kind in names}
            continue
        limits = find_levels(sample, [float(kind.split()[1]) for kind in names])
        for kind in names:
            of_kind = limits[float(kind.split()[1])]
            found[kind] = with_limits(whole, {place: of_kind[of] for place, of in of_all.items()})
    return found


def decode(engine: Engine, prompt: list[int], count: int) -> float:
    """Return the seconds of a token."""
    engine.reset()
    sampler = Sampler(Sampling(temperature=0.0))
    id = sampler.choose(engine.prefill(prompt))
    start = time.perf_counter()
    for _ in range(count):
        id = engine.decode_next(id, sampler)
    return (time.perf_counter() - start) / count


def seconds_of_reads(packed: PackedModel, site: str, share: float, threads: int) -> float:
    """Return the seconds in which a loop reads what a token's products at a site read, at the best distance."""
    loaded = [load_zigzag(layer.matrices[site], threads=threads) for layer in packed.layers]
    matrix = packed.layers[0].matrices[site]
    x = torch.randn(8, matrix.columns, generator=torch.Generator().manual_seed(0))
    inputs = x.numpy(), limits_of(x, share, matrix.format.block).numpy(), threads, READS * len(loaded)
    best = float("inf")
    for ahead in AHEAD:
        times = native().time_gemv(loaded, *inputs, instruction_set(), ahead)
        best = min(best, sum(statistics.median(times[n :: len(loaded)]) for n in range(len(loaded))) / 1e9)
    return best


def phases_of(engine: Engine, threads: int, prompt: list[int], ceilings: bool) -> list[Phase]:
    """Return the phases of an engine's token."""
    decoder: Any = engine._decoder.native
    decode(engine, prompt, NEW // 2)
    decoder.time_phases(True)
    decode(engine, prompt, NEW)
    times = {name: (work, waiting) for name, work, waiting in decoder.phase_times()}
    decoder.time_phases(False)
    activity, packed = engine.activity(), engine.packed
    layers = range(len(packed.layers))
    shares = {site: statistics.mean(activity.get((layer, site), 1.0) for layer in layers) for site in SITES}
    reads = {site: seconds_of_reads(packed, site, shares[site], threads) for site in SITES if ceilings}
    nbytes = {
        site: sum(activity.get((n, site), 1.0) * packed.layers[n].matrices[site].nbytes for n in layers)
        for site in SITES
    }
    nbytes["output"] = packed.output.blocks.nbytes
    found = []
    for name, of_threads in times.items():
        work, waiting = ([time / NEW / 1e9 for time in of] for of in of_threads)
        found.append(Phase(name, work, waiting, nbytes.get(name, 0.0), reads.get(name)))
    return found


def limits_of(x: torch.Tensor, share: float, block: str) -> torch.Tensor:
    """Return thresholds with which a share of the bytes is read for normal x, as the kernels take them."""
    if block == "Q6_P":
        levels = BLOCKS[block].level_bytes
        return torch.cat([torch.ones(x.shape[1]), limits_reading(x.abs(), share * levels[-1] / 32, levels)])
    return x.abs().flatten().quantile(1 - share)[None] if share < 1 else torch.full((1,), -1.0)


def huge_pages() -> str:
    """Return which share of this process's memory lies in huge pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    huge, all = (int(lines[name].split()[0]) for name in ("AnonHugePages", "Anonymous"))
    return f"{huge / all:.0%} of memory in huge pages"


def rows_of(phases: Sequence[Phase]) -> list[list[str]]:
    """Return the cells of a table."""
    rows = []
    for phase in phases:
        speed = f"{phase.bytes / phase.seconds / 1e9:.1f}" if phase.bytes else ""
        ceiling = f"{phase.bytes / phase.ceiling / 1e9:.1f}" if phase.ceiling else ""
        share = f"{phase.ceiling / phase.seconds:.0%}" if phase.ceiling else ""
        waits = f"{statistics.mean(phase.waiting) * 1e6:.0f}", f"{max(phase.waiting) * 1e6:.0f}"
        megabytes = f"{phase.bytes / 1e6:.0f}" if phase.bytes else ""
        rows.append([phase.name, f"{phase.seconds * 1e6:.0f}", *waits, megabytes, speed, ceiling, share])
    return rows


def summary(kind: str, threads: int, token: float, phases: Sequence[Phase]) -> list[str]:
    """Return a row of the table of all kinds: microseconds of products, what lies between them, output and sampling."""
    products = [phase for phase in phases if phase.name in SITES]
    seconds, named = sum(p.seconds for p in products), {p.name: p.seconds for p in phases}
    ceiling = sum(p.ceiling or 0.0 for p in products)
    waiting = sum(statistics.mean(p.waiting) for p in products)
    between = named["lists"] + named["attention"] + named["gate"]
    return [
        kind,
        str(threads),
        f"{1 / token:.1f}",
        f"{seconds * 1e6:.0f}",
        f"{waiting / seconds:.0%}",
        f"{sum(p.bytes for p in products) / seconds / 1e9:.1f}" + (f", {ceiling / seconds:.0%}" if ceiling else ""),
        f"{between * 1e6:.0f}",
        f"{(named['output'] + named['sampling']) * 1e6:.0f}",
    ]


@click.command()
@click.option("--size", "name", type=click.Choice(list(SIZES)), default=BILLION.name, show_default=True)
@click.option("--threads", "threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS, show_default=True)
@click.option("--no-ceilings", is_flag=True, help="Leave the loops that only read out.")
@json_option
def main(
    name: str, threads: tuple[int, ...], kinds: tuple[str, ...], no_ceilings: bool, json_path: Path | None
) -> None:
    """Print the tables."""
    size = SIZES[name]
    torch.set_num_threads(max(threads))
    click.echo(machine.setting_line(machine.setting()))
    models = models_of(size, kinds)
    prompt = random_ids(size.vocabulary, PROMPT, seed=3)
    lines: list[list[str]] = []
    figures: list[Mapping[str, Any]] = []
    for count in threads:
        torch.set_num_threads(count)
        bandwidth = machine.cpu_read_bandwidth(count)
        for kind in kinds:
            engine = Engine(models[kind], context=PROMPT + NEW, backend="cpu", threads=count)
            phases = phases_of(engine, count, prompt, not no_ceilings)
            token = statistics.median(decode(engine, prompt, NEW) for _ in range(ROUNDS))
            head = ["phase", "us", "waiting", "most", "MB", "GB/s", "reads alone", "share"]
            memory = f"memory read in order {bandwidth / 1e9:.1f} GB/s, {huge_pages()}"
            title = f"{size.name}, {kind}, {count} threads: {1 / token:.1f} t/s; {memory}"
            click.echo(markdown(Table(head, rows_of(phases), title)) + "\n")
            lines.append(summary(kind, count, token, phases))
            figures.append({"kind": kind, "threads": count, "token": token, "phases": [vars(p) for p in phases]})
            del engine
    head = ["runs", "threads", "t/s", "products, us", "waiting", "GB/s, of reads alone", "between, us", "output, us"]
    click.echo(markdown(Table(head, lines, f"{size.name}, {NEW} tokens after {PROMPT}")))
    write_figures(json_path, figures)
