"""The four linears of Qwen2.5-7B on a GPU: dense BF16, INT8 and FP8 beside slid weights of four patterns, in turns.

    python benchmarks/slide_gemm.py [--tokens 64 --tokens 512 ...] [--rounds 7] [--json FILE]

Everything that a layer costs is counted: inputs are quantised (and lifted), outputs scaled. Dense INT8 is NVIDIA's
library's, and on Hopper also our own kernel's ("one kernel"), the one that multiplies slid weights, without what makes
them slid: what a good dense kernel takes. See `sparsepack bench`, which does the same with the shapes of a slid folder.
"""

from pathlib import Path

import click
from figures import json_option, write_figures

from sparsepack.bench.linears import TOKENS, Linear, bench_linears
from sparsepack.bench.table import linears_table

QWEN_7B = (
    Linear("Wqkv", 4608, 3584),
    Linear("Wo", 3584, 3584),
    Linear("W13", 37888, 3584),
    Linear("W2", 3584, 18944),
)


@click.command()
@click.option("--tokens", multiple=True, type=int, default=TOKENS, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@json_option
def main(tokens: tuple[int, ...], rounds: int, json_path: Path | None) -> None:
    """Print the tables."""
    result = bench_linears(QWEN_7B, tokens, rounds=rounds)
    click.echo(linears_table(result))
    write_figures(json_path, result)


if __name__ == "__main__":
    main()
