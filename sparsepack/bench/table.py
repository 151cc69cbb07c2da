"""The result of a benchmark as a Markdown table in the manner of llama-bench."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepack.models.skipped import shown

_LEFT = 4  # of the columns, how many hold words
HEADER = (
    "model",
    "backend",
    "test",
    "sites",
    "size",
    "params",
    "threads",
    "t/s",
    "median (range)",
    "read/token",
    "skipped",
    "of bandwidth",
)


def bench_table(result: Mapping[str, Any]) -> str:
    """A table of `bench_decode`'s result, and under it what the figures mean."""
    lines = [_line(HEADER), _line(["---"] * _LEFT + ["---:"] * (len(HEADER) - _LEFT))]
    lines += [_line(_cells(row)) for row in result["tests"]]
    gigabytes = result["read_bandwidth"]["bytes_per_second"] / 1e9
    lines += [
        "",
        result["runtime"],
        f"t/s: mean ± standard deviation of {len(result['tests'][0]['samples_ns'])} runs; tokens: {result['tokens']}",
        "read/token: stored bytes that a token needs; skipped: share of the block weights that it does not",
        f"bandwidth: {gigabytes:.1f} GB/s ({result['read_bandwidth']['how']}); its share: read/token * t/s",
        *result["notes"],
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Mapping[str, Any]) -> list[str]:
    needed, sparsity, share = row["bytes_per_token"], row["realised_sparsity"], row["bandwidth_share"]
    return [
        row["model_type"],
        row["backends"],
        row["test"],
        row["mode"],
        f"{row['model_size'] / 2**20:.2f} MiB",
        f"{row['model_n_params'] / 1e6:.2f} M",
        str(row["n_threads"]),
        f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        f"{row['median_ts']:.2f} ({row['min_ts']:.2f} to {row['max_ts']:.2f})",
        "-" if needed is None else f"{needed / 2**20:.2f} MiB",
        "-" if sparsity is None else shown(sparsity, row["realised_sparsity_of_sparse_sites"]),
        "-" if share is None else f"{100 * share:.1f} %",
    ]
