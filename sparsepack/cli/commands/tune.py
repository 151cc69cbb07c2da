"""`sparsepack tune`, and what came of it as text for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import command, emit, from_options, group, json_output
from sparsepack.cli.shared import ARTIFACT, RUNS, device_option
from sparsepack.progress import format_count
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown


@command(short_help="Find the fastest layout of the kernels on this machine.")
@click.argument("paths", type=ARTIFACT, nargs=-1)
@device_option
@group(RUNS, from_options(EngineOptions, "--threads"))
@json_output
def tune(paths: tuple[Path, ...], device: str, threads: int | None, json_path: str | None) -> None:
    """Measure once which layout suits this machine, for the matrices of the artifacts PATHS, all of one format.

    Without PATHS: for those of Llamas of 1 and 8 billion parameters, as zigzag-q4_k. What was found is kept below
    ~/.cache, and the runtime of the device uses it from then on (on the CPU at the same number of threads); output
    changes by rounding only. On the CPU an engine does so at its first load, in two seconds; this takes longer and
    finds more. Of artifacts by neurons it also measures the speeds by which neurons are divided where
    only some have slots (--cached, --vram), on a GPU: of its memory, of the bus, and of the processor, of which
    --threads then says the threads; of other artifacts likewise, for matrices that have no room there. Nothing else
    should run meanwhile; where other work hides the figures beside a GPU in three attempts, they are refused and not
    kept.
    """
    from sparsepack.tuning import tune as measure

    emit(measure(paths, device, threads), json_path, tuning_table)


_TILE_CONFIG = ("span", "tile", "tile_bands", "warps", "stages", "splits", "simdgroups")
"""`tune` chooses the values of these fields, on CPUs and on GPUs."""


def tuning_table(result: Mapping[str, Any]) -> str:
    """What `tune` measured."""
    shapes = result["shapes"]
    parameters = [name for name in _TILE_CONFIG if shapes and name in shapes[0]]
    rows = [
        [
            f"{row['rows']} x {row['columns']}",
            *(row[name] for name in parameters),
            f"{row['microseconds']:.1f}",
            f"{row['slowest_microseconds']:.1f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
        ]
        for row in shapes
    ]
    header = ["rows x columns", *parameters, "us", "slowest us", "GB/s"]
    machine = result.get("gpu_info") or (
        f"{result['cpu_info']}, {result['instruction_set']}, {format_count(result['threads'], 'thread')}"
    )
    read = "3.4 bits of a weight read" if result.get("block") == "Q6_P" else "half of the columns active"
    parts: list[str | Table] = [
        f"{machine}, {read}",
        Table(header, rows),
        f"kept in {result['path']}",
    ]
    if links := result.get("links"):
        parts += [_links_table(links), *(f"kept in {row['path']}" for row in links)]
    if hidden := result.get("links_hidden"):
        parts.append(f"without --vram nothing is lost: {hidden}")
    return markdown(*parts)


_LINKS = {"resident": "out of slots", "bus": "out of host memory", "worker": "by the worker beside"}

_MATRICES = {
    "near": "matrices on the card",
    "far_bus": "matrices over the bus",
    "far_worker": "matrices by the worker",
}


def _links_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """Neurons per second, a row for each width of records."""
    rows = [
        [
            row["hidden"],
            *(f"{row['together'][name] / 1e6:.2f} ({row['alone'][name] / 1e6:.2f})" for name in _LINKS),
            f"{row['together']['handover'] * 1e6:.0f}",
            *(f"{row['together'][name] / 1e9:.1f} ({row['alone'][name] / 1e9:.1f})" for name in _MATRICES),
            f"{100 * row['alone']['bus'] / row['copies']:.0f} %",
        ]
        for row in links
    ]
    header = ["channels", *(f"{name}, M/s" for name in _LINKS.values()), "handing over, us"]
    header += [*(f"{name}, GB/s" for name in _MATRICES.values()), "the bus, of large copies"]
    return Table(header, rows, "neurons per second, both workers at once (one alone)")
