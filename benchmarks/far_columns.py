"""Columns of matrices in the host's memory: how fast a GPU reads the active ones, and the processor beside it.

    python benchmarks/far_columns.py [--rows 8192] [--columns 28672] [--json FILE]

For each width of a tile, in bands of 256 rows, and each share of active columns: bytes of active columns a second, of
the GPU over the bus, of the processor, and of both at once. The more bands a tile has, the longer is what lies together
of a column, 144 bytes for each band. "In pieces": by the product for matrices in the GPU's memory, which does not mind
where lines of the host's memory begin. Products are checked against those with the matrix in the GPU's memory.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_timing import device_line
from figures import json_option, write_figures

from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS as kernels
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, far_tile_config
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.hybrid.handover import AskedProduct
from sparsepack.runtime.hybrid.measure import beyond_caches, records
from sparsepack.runtime.hybrid.measure_card import AskedWorker, seconds_on_gpu
from sparsepack.runtime.tuning import random_blocks
from sparsepack.tables import Table, markdown

TILES = (1, 2, 4, 8)
SHARES = (1.0, 0.5, 0.25, 0.1)
MOST = 16
"""No more matrices than these take turns."""


def speeds(
    here: CudaZigzag, there: Sequence[CudaZigzag], worker: AskedWorker, share: float, rounds: int
) -> dict[str, float]:
    """Bytes of active columns a second, in GB/s, by who reads.

    here -- the matrix in the GPU's memory; there: the same in the host's, some times
    """
    columns, device = here.columns, here.blocks.device
    generator = torch.Generator().manual_seed(1)
    active = torch.rand(columns, generator=generator) < share
    x = (torch.rand(columns, generator=generator) + 0.5) * active
    input = Input(x.to(device), threshold=None if share == 1 else torch.tensor([0.25], device=device))
    y, expected = (torch.zeros(here.rows, device=device) for _ in range(2))

    def run() -> None:
        for each in there:
            kernels.gemv(each, input, Output(y))

    kernels.gemv(here, input, Output(expected))
    replay = partial(kernels.replay, kernels.captured(run, kernels.new_stream()))
    replay()
    kernels.synchronize(device)
    if not torch.equal(y, expected):
        raise click.ClickException(f"{here.config}: the product differs from that in the GPU's memory")
    worker.give(x)
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        steps: list[float] = []
        turns = {
            "GPU": seconds_on_gpu(kernels, replay) / len(there),
            "processor": worker.product(),
            "GPU, both": seconds_on_gpu(kernels, replay, lambda to=steps: to.append(worker.product())) / len(there),
        }
        for name, seconds in {**turns, "processor, both": statistics.median(steps)}.items():
            taken.setdefault(name, []).append(seconds)
    used = int(active.sum()) / columns * here.blocks.nbytes
    return {name: used / statistics.median(each) / 1e9 for name, each in taken.items()}


@click.command()
@click.option("--rows", default=8192, show_default=True)
@click.option("--columns", default=28_672, show_default=True)
@click.option("--threads", default=14, show_default=True, help="Of the processor.")
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(rows: int, columns: int, threads: int, rounds: int, json_path: Path | None) -> None:
    """Print a table, and write the figures."""
    if not torch.cuda.is_available():
        raise click.ClickException("an NVIDIA GPU is needed, and torch sees none here")
    device = torch.device("cuda")
    stored = PackedMatrix(random_blocks((rows, columns)), ZIGZAG, rows, columns)
    bands, count = len(stored.blocks), min(beyond_caches(stored.blocks.nbytes), MOST)
    asked = AskedProduct(0, columns, rows, skips=True)
    native = [(operations.load_zigzag(stored, threads=threads), asked) for _ in range(count)]
    worker = AskedWorker([operations.load_neurons(records(1, 256))], 1, 256, threads, native)
    found: dict[tuple[int, str, float], dict[str, float]] = {}
    with torch.no_grad(), kernels.on_device(device):
        for tile_bands in TILES:
            far = far_tile_config(bands, columns, device, tile_bands)
            near = CudaTileConfig(**asdict(far))
            here = kernels.load_zigzag(stored, device, near)
            there = [replace(here, blocks=kernels.in_host_memory(here.blocks)) for _ in range(count)]
            for lines, config in (("in pieces", near), ("whole", far)):
                laid = [replace(each, config=config) for each in there]
                for share in SHARES:
                    found[tile_bands, lines, share] = speeds(here, laid, worker, share, rounds)
    head = ["bands of a tile", "lines", "active", *next(iter(found.values()))]
    cells = [
        [str(tile), lines, f"{share:g}", *map("{:.1f}".format, of.values())]
        for (tile, lines, share), of in found.items()
    ]
    title = f"{rows} x {columns}, {bands} bands, {device_line()}, {threads} threads: GB/s of active columns"
    click.echo(markdown(Table(head, cells, title)))
    report: dict[str, Any] = {
        f"{tile} bands, lines {lines}, {share:g} active": of for (tile, lines, share), of in found.items()
    }
    write_figures(json_path, {"device": device_line(), "rows": rows, "columns": columns, "GB/s": report})


if __name__ == "__main__":
    main()
