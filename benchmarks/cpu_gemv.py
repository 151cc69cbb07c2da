"""One zigzag matrix-vector product against llama.cpp's on the same weights in Q4_K, from memory, not from the caches.

    python benchmarks/cpu_gemv.py [--quick] [--tiny]

Each side has copies of the matrix of 512 MiB in all and goes through them. Ours includes collecting the active columns.
The input's columns are active at random. Both sides are first compared with float64 on their own dequantised weights.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import cpu_setting
import torch
from figures import json_option, write_figures
from ggml_gemv import GgmlGemv
from nearness import expect_near, relative_error
from turns import in_turns

from sparsepack.formats.codecs import q4_k, zigzag
from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.tables import Table, markdown

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (28672, 4096))
ACTIVE = (1.0, 0.5, 0.25)
COPIES_BYTES = 512 << 20
LIMITS = {"llama.cpp": 0.02, "ours": 1e-3}
PEER = "llama.cpp Q4_K"


@dataclass(frozen=True)
class Case:
    """A shape loaded on both sides, with inputs and the thresholds for each share of active columns."""

    rows: int
    columns: int
    nbytes: int
    peer: GgmlGemv
    matrices: list[Any]
    inputs: torch.Tensor  # float32 [copies, columns]
    thresholds: dict[float, torch.Tensor]
    errors: dict[str, float]


def open_case(rows: int, columns: int, copies_bytes: int) -> Case:
    """Random weights, quantised for both sides, copied and checked. RuntimeError where a product is wrong."""
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) / columns**0.5
    by_rows, stored = q4_k.encode(weights), PackedMatrix(zigzag.pack(weights), ZIGZAG, rows, columns)
    del weights
    copies = max(2, -(-copies_bytes // by_rows.nbytes))
    peer = GgmlGemv(by_rows, rows, columns, copies)
    matrices = [operations.load_zigzag(stored) for _ in range(copies)]
    inputs = torch.randn(copies, columns, generator=torch.Generator().manual_seed(1))
    thresholds = {share: _threshold(inputs, share) for share in ACTIVE}
    errors = {PEER: _peer_error(peer, by_rows, inputs[0])}
    errors |= {_name(share): _our_error(matrices[-1], stored, inputs[0], t) for share, t in thresholds.items()}
    for name, error in errors.items():
        expect_near(f"{rows} x {columns}, {name}", error, LIMITS["llama.cpp" if name == PEER else "ours"])
    return Case(rows, columns, by_rows.nbytes, peer, matrices, inputs, thresholds, errors)


def _threshold(inputs: torch.Tensor, share: float) -> torch.Tensor:
    if share == 1:
        return torch.tensor([-1.0])
    size = inputs.abs().flatten()
    return size.kthvalue(round((1 - share) * size.numel())).values.reshape(1)


def _name(share: float) -> str:
    return f"ours, {share:.0%} active"


def _peer_error(peer: GgmlGemv, blocks: torch.Tensor, x: torch.Tensor) -> float:
    peer.threads(torch.get_num_threads())
    return _error(peer.product(x, peer.copies - 1), q4_k.decode(blocks), x)


def _our_error(matrix: Any, stored: PackedMatrix, x: torch.Tensor, threshold: torch.Tensor) -> float:
    found = operations.zigzag_gemv(matrix, x, *operations.collect(x, threshold))
    return _error(found, zigzag.unpack(stored.blocks, stored.rows), torch.where(x.abs() > threshold, x, 0))


def _error(found: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> float:
    expected = torch.cat([piece.double() @ x.double() for piece in weights.split(4096)])
    return relative_error(found.double(), expected)


def measure(case: Case, threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a product by name: of each round the median over the copies; the sides in turns."""
    case.peer.threads(threads)
    case.peer.set_input(case.inputs[0])
    runs: dict[str, Callable[[], list[float]]] = {PEER: case.peer.seconds}
    for share, threshold in case.thresholds.items():
        runs[_name(share)] = lambda threshold=threshold: _our_seconds(case, threshold, threads)
    return {name: list(map(statistics.median, each)) for name, each in in_turns(runs, rounds).items()}


def _our_seconds(case: Case, threshold: torch.Tensor, threads: int) -> list[float]:
    count = len(case.matrices)
    times = native().time_gemv(case.matrices, case.inputs, threshold, threads, count, instruction_set())
    return [nanoseconds / 1e9 for nanoseconds in times]


def rows_of(case: Case, threads: int, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per side and share."""
    shares = {PEER: 1.0} | {
        _name(share): float((case.inputs.abs() > threshold).float().mean())
        for share, threshold in case.thresholds.items()
    }
    rows = []
    for name, samples in seconds.items():
        middle, needed = statistics.median(samples), case.nbytes * shares[name]
        rows.append(
            {
                "rows": case.rows,
                "columns": case.columns,
                "threads": threads,
                "product": name,
                "microseconds": middle * 1e6,
                "ratio": cpu_setting.median_ratio(seconds[PEER], samples),
                "best_ratio": min(seconds[PEER]) / min(samples),
                "needed_bytes_per_second": needed / middle,
                "relative_error": case.errors[name],
                "samples": samples,
            }
        )
    return rows


def show(result: dict[str, Any]) -> str:
    """The table."""
    cells = [
        [
            f"{row['rows']} x {row['columns']}",
            row["threads"],
            row["product"],
            f"{row['microseconds']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['best_ratio']:.2f}",
            f"{row['needed_bytes_per_second'] / 1e9:.1f}",
            f"{row['needed_bytes_per_second'] / row['read_bandwidth']:.0%} of {row['read_bandwidth'] / 1e9:.1f}",
            f"{row['relative_error']:.1e}",
        ]
        for row in result["products"]
    ]
    head = [
        "rows x columns",
        "threads",
        "product",
        "us",
        "x llama.cpp",
        "best / best",
        "GB/s needed",
        "of the bandwidth, GB/s",
        "error",
    ]
    lines = [cpu_setting.setting_line(result["setting"]), f"llama.cpp's weights in {result['buffer']}", ""]
    return "\n".join([*lines, markdown(Table(head, cells))])


@click.command()
@click.option("--quick", is_flag=True, help="Two shapes, few rounds.")
@click.option("--tiny", is_flag=True, help="A small matrix in the caches, to try the script; its figures mean nothing.")
@click.option("--threads", "threads", multiple=True, type=int, default=(2, 1), show_default=True)
@json_option
def main(quick: bool, tiny: bool, threads: tuple[int, ...], json_path: Path | None) -> None:
    """Print the table."""
    result: dict[str, Any] = {"setting": cpu_setting.setting(), "products": []}
    bandwidth: dict[int, list[float]] = {count: [] for count in threads}
    for rows, columns in ((512, 512),) if tiny else SHAPES[: 2 if quick else None]:
        case = open_case(rows, columns, 1 << 20 if tiny else COPIES_BYTES)
        result["buffer"] = case.peer.buffer_name
        for count in threads:
            seconds = measure(case, count, 3 if quick or tiny else 11)
            bandwidth[count].append(cpu_setting.read_bandwidth(count))
            result["products"] += rows_of(case, count, seconds)
        case.peer.close()
    for row in result["products"]:
        row["read_bandwidth"] = statistics.median(bandwidth[row["threads"]])
    write_figures(json_path, result)
    print(show(result))


if __name__ == "__main__":
    main()
