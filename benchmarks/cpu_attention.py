"""Attention of a decoding step on the CPU, to all tokens and to the sixteenth that Double Sparsity reads.

    python benchmarks/cpu_attention.py [--quick] [--json FILE]

A step is one position of one layer: rotate queries and key, append, attend; the sparse one also labels its key, scores
the labels, selects. Layers take turns, over more than 256 MB of keys and values, so that no cache of the processor
serves them; dense and sparse ones too. Keys are random, so that what is selected lies scattered: the worst case. The
fastest step counts: what disturbs one only slows it. That flatters the shorter ones on a busy machine, so the ratio of
the medians is printed as well. Both are compared with the oracle's before anything is timed.
"""

import statistics
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import click
import cpu_setting
import torch
from figures import json_option, write_figures
from nearness import expect_near, relative_error

from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cpu.dispatch import operations as native_operations
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.backend import operations as reference_operations
from sparsepack.tables import Table, markdown

HEADS = ((32, 8), (8, 4))
"""The heads of queries, and those of keys and values."""
HEAD_DIM = 128
CHANNELS = HEAD_DIM // 4
POLICY = TokenPolicy(Fraction(1, 16), min_context=0)
POSITIONS = (2048, 8192, 32768)
SHORT = (96, 128, 192, 256, 512)
"""Where the break-even is looked for."""
BYTES = 256 << 20
LIMIT = 1e-4
"""The largest relative error of a result."""
CHUNK = 512


@dataclass(frozen=True)
class Case:
    """Two caches of several layers with the same text, at the position before the last."""

    heads: int
    kv_heads: int
    positions: int

    @cached_property
    def layers(self) -> int:
        return max(1, -(-BYTES // self.dense_bytes))

    @property
    def dense_bytes(self) -> int:
        """What a step needs of one layer."""
        return self.kv_heads * self.positions * HEAD_DIM * 4

    @property
    def sparse_bytes(self) -> int:
        budget = POLICY.budget(self.positions)
        scored = self.positions - POLICY.sinks - POLICY.recent if budget < self.positions else 0
        return self.kv_heads * (scored * (CHANNELS // 2 + 2) + budget * HEAD_DIM * 4)

    @property
    def rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    def shape(self, layers: int) -> AttentionShape:
        """Nothing is really rotated: then the oracle makes labels of the very same numbers."""
        random = torch.Generator().manual_seed(0)
        heavy = [torch.randperm(HEAD_DIM, generator=random)[:CHANNELS].sort().values for _ in range(self.kv_heads)]
        cos = torch.ones(self.positions, HEAD_DIM // 2)
        of_layers = (LayerAttention(channels=torch.stack(heavy)),) * layers
        return AttentionShape(
            self.heads, self.kv_heads, HEAD_DIM, 1e-5, cos, torch.zeros_like(cos), of_layers, policy=POLICY
        )


def random_rows(case: Case, count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, case.rows, generator=torch.Generator().manual_seed(seed))


def check(case: Case) -> None:
    """Compare one layer with the oracle's. RuntimeError where an error is too large."""
    ours = operations.new_cache(case.shape(1))
    theirs = reference_operations.new_cache(case.shape(1), type="f16")
    for caches in (ours, theirs):
        _fill(case, caches, 1)
    rows = random_rows(case, 1, 10**6)
    for sparse in (False, True):
        found, expected = (cache.attend(0, cache.append(0, rows), sparse=sparse) for cache in (ours, theirs))
        expect_near(f"{case}, sparse {sparse}", relative_error(found, expected), LIMIT)


def _fill(case: Case, cache: Any, layers: int) -> None:
    left = case.positions - 1
    while left:
        count = min(left, CHUNK)
        rows = random_rows(case, count, left)  # alike in all layers
        for layer in range(layers):
            cache.append(layer, rows)
        cache.advance(count)
        left -= count


def filled(case: Case) -> Any:
    """The cache of all layers, one position short of the case's."""
    cache = operations.new_cache(case.shape(case.layers))
    _fill(case, cache, case.layers)
    return cache


def measure(case: Case, cache: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, of each round one a layer; the two in turns."""
    rows, y = random_rows(case, 1, 10**6), torch.empty(1, case.heads * HEAD_DIM)
    native, run = cache.native[0], native_operations()
    seconds: dict[str, list[float]] = {"dense": [], "sparse": []}
    for _ in range(rounds):
        for name, samples in seconds.items():
            for layer in range(case.layers):
                qkv = rows.clone()
                start = time.perf_counter()
                run.append(native, layer, qkv)
                run.attend(native, layer, qkv, y, name == "sparse")
                samples.append(time.perf_counter() - start)
    return seconds


def row_of(case: Case, cache: Any, rounds: int, bandwidth: float) -> dict[str, Any]:
    """What the threads that torch has now take."""
    seconds = measure(case, cache, rounds)
    best = {name: min(samples) for name, samples in seconds.items()}
    needed = {"dense": case.dense_bytes, "sparse": case.sparse_bytes}
    return {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "positions": case.positions,
        "threads": torch.get_num_threads(),
        "microseconds": {name: 1e6 * value for name, value in best.items()},
        "needed_bytes": needed,
        "share_of_bandwidth": {name: needed[name] / best[name] / bandwidth for name in best},
        "bandwidth": bandwidth,
        "ratio": best["dense"] / best["sparse"],
        "median_ratio": statistics.median(seconds["dense"]) / statistics.median(seconds["sparse"]),
        "samples": seconds,
    }


def break_even(rows: list[dict[str, Any]]) -> int | None:
    """From which of the contexts on the sparse step is faster; None: not even at the longest."""
    slower = [row["positions"] for row in rows if row["ratio"] <= 1]
    faster = [row["positions"] for row in rows if not slower or row["positions"] > max(slower)]
    return min(faster, default=None)


def show(rows: list[dict[str, Any]]) -> str:
    """The table."""
    return markdown(
        Table(
            [
                "heads / KV heads",
                "tokens",
                "threads",
                "dense, us",
                "sparse, us",
                "x",
                "x of the medians",
                "MB: dense",
                "sparse",
                "x",
                "of GB/s: dense",
                "sparse",
            ],
            [
                [
                    f"{row['heads']} / {row['kv_heads']}",
                    row["positions"],
                    row["threads"],
                    f"{row['microseconds']['dense']:.0f}",
                    f"{row['microseconds']['sparse']:.0f}",
                    f"{row['ratio']:.1f}",
                    f"{row['median_ratio']:.1f}",
                    f"{row['needed_bytes']['dense'] / 1e6:.2f}",
                    f"{row['needed_bytes']['sparse'] / 1e6:.2f}",
                    f"{row['needed_bytes']['dense'] / row['needed_bytes']['sparse']:.1f}",
                    f"{row['share_of_bandwidth']['dense']:.0%} of {row['bandwidth'] / 1e9:.1f}",
                    f"{row['share_of_bandwidth']['sparse']:.0%}",
                ]
                for row in rows
            ],
        )
    )


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Fewer rounds, two threads alone.")
@json_option
def main(quick: bool, json_path: Path | None) -> None:
    where = cpu_setting.setting()
    click.echo(cpu_setting.setting_line(where))
    results = []
    for heads, kv_heads in HEADS:
        for positions in (*SHORT, *POSITIONS):
            case = Case(heads, kv_heads, positions)
            check(case)
            cache = filled(case)
            for threads in (2,) if quick else (1, 2):
                torch.set_num_threads(threads)
                bandwidth = cpu_setting.read_bandwidth(threads)
                results.append(row_of(case, cache, 5 if quick else 15, bandwidth))
    click.echo(show([row for row in results if row["positions"] in POSITIONS]) + "\n")
    for (heads, kv_heads), threads in product(HEADS, (2,) if quick else (1, 2)):
        rows = [row for row in results if (row["heads"], row["kv_heads"], row["threads"]) == (heads, kv_heads, threads)]
        ratios = ", ".join(f"{row['positions']}: {row['ratio']:.2f}" for row in rows if row["positions"] in SHORT)
        click.echo(f"{heads} / {kv_heads}, {threads} threads: faster from {break_even(rows)} tokens on; x at {ratios}")
    write_figures(json_path, {"setting": where, "steps": results})


if __name__ == "__main__":
    main()
