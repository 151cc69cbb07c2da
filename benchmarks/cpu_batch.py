"""Decoding of several sequences together on the CPU, beside one, in one run: planes and zigzag-q4_k.

Counts of sequences take turns, ratios are taken within a round. Weights and tokens are random, so that the sequences
have no more columns in common than chance gives them. Bits are those read of a weight for all sequences, each column
at the level of its largest input.
"""

import statistics
import time
from pathlib import Path

import click
import torch

from benchmarks.shared import machine
from benchmarks.shared.random_models import random_model
from benchmarks.shared.shapes import BILLION, SMOL, TINY, Size
from benchmarks.shared.thresholds import find_levels, find_thresholds, with_limits, with_thresholds
from benchmarks.shared.timing import interleave, json_option, median_ratio, write_figures
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

BLOCKS = Size("two blocks of llama-1b", 2048, 2, 8192, 32, 8, 512)
SIZES = {"tiny": TINY, "smol": SMOL, "blocks": BLOCKS, "1b": BILLION}
BITS = {"Q6_P": 6.25, "Q4_K": 4.5}
PROMPT = 16


def models(size: str, layers: int | None) -> dict[str, PackedModel]:
    """Return the models by the name of their row."""
    q4_k = random_model(SIZES[size], layers, "cpu")
    planes = random_model(SIZES[size], layers, "cpu", "Q6_P")
    return {
        "zigzag-q4_k, dense": q4_k,
        "zigzag-q4_k, half skipped": with_thresholds(q4_k, find_thresholds(q4_k, [0.5])[0.5]),
        "zigzag-q6_p, all bits": planes,
        "zigzag-q6_p, 3.4 bits": with_limits(planes, find_levels(planes, [3.4])[3.4]),
    }


def tokens_per_second(engine: Engine, sequences: int, steps: int) -> float:
    """Return tokens a second of all sequences together; ids are random, and each sequence has its own."""
    engine.reset()
    vocabulary = engine.architecture.vocabulary
    generator = torch.Generator().manual_seed(sequences)
    ids = torch.randint(vocabulary, (sequences, PROMPT + steps), generator=generator).tolist()
    for sequence, row in enumerate(ids):
        engine.prefill(row[:PROMPT], sequence)
    start = time.perf_counter()
    for step in range(PROMPT, PROMPT + steps):
        engine.step_all([row[step] for row in ids])
    return sequences * steps / (time.perf_counter() - start)


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="blocks", show_default=True)
@click.option("--layers", type=int, help="As many alone, in place of all.")
@click.option("--sequences", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--threads", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--steps", default=16, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@json_option
def main(
    size: str,
    layers: int | None,
    sequences: tuple[int, ...],
    threads: tuple[int, ...],
    steps: int,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Print the table."""
    rows, figures = [], []
    click.echo(machine.setting_line(machine.setting()))
    packed_models = models(size, layers)
    for count in threads:
        torch.set_num_threads(count)
        for name, packed in packed_models.items():
            engines = {
                n: Engine(packed, context=PROMPT + steps, backend="cpu", threads=count, sequences=n) for n in sequences
            }
            runs = {n: lambda n=n, engine=engine: tokens_per_second(engine, n, steps) for n, engine in engines.items()}
            speeds = interleave(runs, rounds, warm_up=1)
            for n, taken in speeds.items():
                read = BITS[packed.block] * (1 - skipped_weights(packed, engines[n].activity()).overall)
                ratio = median_ratio(taken, speeds[sequences[0]])
                speed = statistics.median(taken)
                rows.append(
                    [
                        name,
                        str(count),
                        str(n),
                        f"{speed:.1f}",
                        f"{min(taken):.1f} to {max(taken):.1f}",
                        f"{ratio:.2f}",
                        f"{read:.2f}",
                    ]
                )
                figures.append({"runs": name, "threads": count, "sequences": n, "bits": read, "speeds": taken})
    head = ["runs", "threads", "sequences", "t/s, all", "range", "x one", "bits read"]
    click.echo(markdown(Table(head, rows, f"{SIZES[size].name}, {rounds} rounds of {steps} steps")))
    write_figures(json_path, figures)
