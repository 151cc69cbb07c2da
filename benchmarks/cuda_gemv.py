"""A zigzag matrix-vector product on the GPU, its collection of active columns included, beside llama.cpp's dense one.

    python benchmarks/cuda_gemv.py [--quick]

Products run as in a decoder: each takes its input from what the one before made, and cannot begin without it. Finding
the active columns is part of the kernel. A chain of products is replayed as a CUDA graph, over more than 600 MB of
weights, so that no cache serves them; dense and sparse take turns. The last product of every chain is compared with
float64 before anything is timed.

llama.cpp's times are anchors: its own kernel for one vector and Q4_K, measured in November 2026 on an H100, one launch
after the other in a CUDA graph, too (benchmarks/notes/anchors.md); where ours is one matrix (q, k, v; gate, up)
its products are added up.
"""

from pathlib import Path
from typing import Any

import click
import torch
from cuda_chain import Chain
from cuda_synthetic import random_zigzag
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from nearness import expect_near, relative_error
from torch import Tensor
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.formats.codecs import zigzag
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, load_zigzag
from sparsepack.tables import Table, markdown

ANCHORS = {  # rows, columns -> microseconds of llama.cpp's dense product
    (1024, 4096): 4.28,
    (4096, 4096): 7.95,
    (6144, 4096): 16.5,
    (14336, 4096): 20.9,
    (4096, 14336): 18.2,
    (8192, 8192): 20.4,
    (28672, 4096): 41.8,
    (28672, 8192): 62.6,
    (8192, 28672): 57.5,
}
SMALL = ((2048, 2048), (3072, 2048), (1536, 1536))
"""Shapes of models of one or two billion parameters, for which there are no anchors."""
SUMMED = {(6144, 4096): "q, k, v", (28672, 4096): "gate, up"}
SKIPPED = {"dense": 0.0, "50 %": 0.5}
BYTES = 600 << 20
FEWEST = 40
"""Products of a chain: its beginning, one copy of some words, is part of the time."""
LIMIT = 1e-5
ROUNDS = 9


def measure(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    """Seconds and errors of a shape. RuntimeError where a product is wrong."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    stored = random_zigzag(rows, columns, 1.0, generator)
    copies = max(4, -(-BYTES // stored.blocks.nbytes))
    matrices = [load_zigzag(random_zigzag(rows, columns, 1.0, generator)) for _ in range(copies - 1)]
    matrices.append(load_zigzag(stored))
    length = copies * -(-FEWEST // copies)
    chains = {name: Chain(matrices, length, generator) for name in SKIPPED}
    errors = {}
    for name, share in SKIPPED.items():
        chain = chains[name]
        if share:
            chain.skip(share)
        for number in range(length):
            chain.run(number)
        error = _error(chain.made(length - 1), stored, chain.taken(length - 1))
        errors[name] = expect_near(f"{rows} x {columns}, {name}", error, LIMIT)
    seconds = interleaved({name: graph_seconds(chain.run, length) for name, chain in chains.items()}, rounds)
    return {
        "rows": rows,
        "columns": columns,
        "nbytes": stored.blocks.nbytes,
        "active": {name: chain.active for name, chain in chains.items()},
        "seconds": seconds,
        "errors": errors,
        "config": _config(matrices[0]),
    }


def _error(found: Tensor, stored: Any, x: Tensor) -> float:
    pieces = zigzag.unpack(stored.blocks, stored.rows).split(4096)
    expected = torch.cat([piece.double() @ x.double() for piece in pieces])
    return relative_error(found.double(), expected)


def _config(matrix: CudaZigzag) -> str:
    c = matrix.config
    return f"{c.tile_bands} x {c.warps}, {c.stages}, {c.splits}"


def rows_of(result: dict[str, Any], bandwidth: float) -> list[list[str]]:
    """A line per share of active columns."""
    shape = (result["rows"], result["columns"])
    name = f"{shape[0]} x {shape[1]}" + (f" ({SUMMED[shape]})" if shape in SUMMED else "")
    anchor = ANCHORS.get(shape)
    lines = []
    for share, seconds in result["seconds"].items():
        needed = result["nbytes"] * result["active"][share]
        lines.append(
            [
                name,
                share,
                f"{seconds * 1e6:.1f}",
                f"{anchor:.1f}" if anchor else "-",
                f"{anchor / seconds / 1e6:.2f}" if anchor else "-",
                f"{needed / 2**20:.1f}",
                f"{needed / seconds / 1e9:.0f}",
                f"{needed / seconds / bandwidth:.0%}",
                f"{result['errors'][share]:.0e}",
                result["config"],
            ]
        )
    return lines


@click.command()
@click.option("--quick", is_flag=True, help="One round.")
@json_option
def main(quick: bool, json_path: Path | None) -> None:
    """Print the table."""
    bandwidth = announced_bandwidth()
    results = [measure(*shape, 1 if quick else ROUNDS) for shape in (*ANCHORS, *SMALL)]
    head = ["shape", "active", "us", "llama.cpp", "x", "MiB", "GB/s", "of bandwidth", "error", "config"]
    click.echo(markdown(Table(head, [line for result in results for line in rows_of(result, bandwidth)])))
    click.echo("us: collection included; x: llama.cpp's dense time over ours; config: bands x warps, stages, splits")
    write_figures(json_path, {"device": device_line(), "bandwidth": bandwidth, "shapes": results})


if __name__ == "__main__":
    main()
