"""How long SparseGPT takes to prune a matrix on a GPU: by the Triton kernel, and column by column in plain torch.

    python benchmarks/sparsegpt_speed.py [--shape 4096x14336 --shape 8192x28672] [--keep 6] [--of 8] [--rounds 3]
        [--json FILE]

A shape is ROWS x COLUMNS of a random float32 matrix, whose inputs depend on each other. Both sides take turns; each is
timed by CUDA events, from the products of the inputs, whose inverse is known, to the pruned matrix. Before that, both
results are compared by the error of the outputs, and the exit status is 1 where they differ by more than 0.1 %.
"""

import statistics
from typing import Any

import click
import torch
from cuda_timing import device_line
from figures import json_option, write_figures

from sparsepack.models.records.pattern import Pattern
from sparsepack.pruning import methods as sparsegpt
from sparsepack.reconstruction.inputs import Inputs
from sparsepack.tables import Table, markdown

KERNEL, PLAIN = "kernel", "plain torch"


def known(columns: int, generator: torch.Generator) -> Inputs:
    """What is known of inputs [2 x columns, columns] that depend on each other, from a random mixture."""
    x = torch.randn(2 * columns, columns, device="cuda", generator=generator)
    mixed = x + x.roll(1, 1) + 3 * x[:, :1]
    products = mixed.t() @ mixed / len(mixed)
    return Inputs(products.diagonal().clone(), products)


def pruned(side: str, weight: torch.Tensor, inputs: Inputs, pattern: Pattern) -> torch.Tensor:
    """A matrix pruned by one of the two sides."""
    before = sparsegpt.by_triton
    if side == PLAIN:
        sparsegpt.by_triton = lambda *asked: None
    try:
        return sparsegpt.prune(weight, inputs, pattern)
    finally:
        sparsegpt.by_triton = before


def milliseconds(side: str, weight: torch.Tensor, inputs: Inputs, pattern: Pattern) -> float:
    """One run, between two CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    pruned(side, weight, inputs, pattern)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@click.command()
@click.option("--shape", "shapes", multiple=True, default=("4096x4096", "14336x4096", "4096x14336", "8192x28672"))
@click.option("--keep", default=6, show_default=True)
@click.option("--of", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@json_option
def main(shapes: tuple[str, ...], keep: int, of: int, rounds: int, json_path: Any) -> None:
    """Print the table."""
    pattern, generator, rows_made = Pattern(keep, of), torch.Generator("cuda").manual_seed(0), []
    torch.set_grad_enabled(False)
    for shape in shapes:
        rows, columns = map(int, shape.split("x"))
        weight = torch.randn(rows, columns, device="cuda", generator=generator)
        inputs = known(columns, generator)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        _ = inputs.inverse_factor
        end.record()
        errors = {
            side: inputs.relative_error(weight, pruned(side, weight, inputs, pattern)) for side in (KERNEL, PLAIN)
        }
        if abs(errors[KERNEL] / errors[PLAIN] - 1) > 1e-3:
            raise click.ClickException(f"{shape}: the errors of the outputs differ: {errors}")
        found: dict[str, list[float]] = {KERNEL: [], PLAIN: []}
        for _round in range(rounds):
            for side, times in found.items():
                times.append(milliseconds(side, weight, inputs, pattern))
        rows_made.append(
            {
                "rows": rows,
                "columns": columns,
                "inverse, ms": float(begin.elapsed_time(end)),
                **{f"{side}, ms": statistics.median(times) for side, times in found.items()},
                "error": errors[KERNEL],
            }
        )
    table = [
        [
            f"{row['rows']} x {row['columns']}",
            f"{row['kernel, ms']:.1f}",
            f"{row['plain torch, ms']:.0f}",
            f"{row['plain torch, ms'] / row['kernel, ms']:.0f}x",
            f"{row['inverse, ms']:.0f}",
            f"{row['error']:.4f}",
        ]
        for row in rows_made
    ]
    click.echo(f"{device_line()}, keep {keep} of {of}\n")
    heads = ("rows x columns", "kernel, ms", "plain torch, ms", "speed-up", "inverse of the products, ms", "error")
    click.echo(markdown(Table(heads, table)))
    write_figures(json_path, {"device": device_line(), "keep": keep, "of": of, "rows": rows_made})


if __name__ == "__main__":
    main()
