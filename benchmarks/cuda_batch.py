"""Decoding of several sequences together on the GPU: llama.cpp, ours dense, ours sparse.

Each sequence has 128 random tokens of its own and then 128 given ones, whose logits stay on the GPU. A column is
skipped where it is inactive in all of them, within a mixture's experts where it is inactive in the one sequence. Dense
and sparse take turns on one engine. Before anything is timed, two sequences in a model of the same widths with two
layers are compared with the reference backend. --llama-batched-bench times a random GGUF of the same shape.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.cuda_decode import NAMES, NEW, PROMPT, SHOWN, config_of, limits_of, random_model
from benchmarks.shared.llama_bench import peer_batches
from benchmarks.shared.shapes import random_ids
from benchmarks.shared.thresholds import find_thresholds, with_thresholds
from benchmarks.shared.timing import check_close, device_line, interleave, json_option, relative_error, write_figures
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

SEQUENCES = (2, 4, 8)
CHECKED, PREFILLED = 24, 16
"""Tokens of a text that is compared, and how many of them are its prompt."""


def peer(program: Path | None, name: str, layers: int | None, work: Path) -> dict[int, float]:
    """Return llama.cpp's tokens a second by the number of sequences; none without the program."""
    if program is None:
        click.echo("no --llama-batched-bench: the peer was not run")
        return {}
    return peer_batches(program, config_of(name, layers), work, PROMPT, NEW, SEQUENCES)


def check(name: str) -> float:
    """How far logits of two sequences are from the reference backend's. RuntimeError where they are another model's."""
    packed = random_model(name, 2)
    sequences = [random_ids(packed.architecture.vocabulary, CHECKED, seed=seed) for seed in (2, 3)]
    together = Engine(packed, device="cuda", context=64, sequences=len(sequences), dense=True)
    oracle = Engine(packed, device="cuda", context=64, backend="reference")
    for number, text in enumerate(sequences):
        together.prefill(text[:PREFILLED], number)
    steps = [together.step_all(ids) for ids in zip(*(text[PREFILLED:] for text in sequences), strict=True)]
    found = torch.stack(steps, dim=1).double()
    expected = torch.stack([oracle.teacher_forced(text, len(text))[PREFILLED:] for text in sequences]).double()
    return check_close("logits of two sequences", relative_error(found, expected), limits_of(packed)["dense"])


def step_seconds(engine: Engine, sequences: Sequence[Sequence[int]]) -> float:
    """The seconds of a step, which appends a token to each text."""
    engine.reset()
    for number, text in enumerate(sequences):
        engine.prefill(text[:PROMPT], number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for ids in zip(*(text[PROMPT:] for text in sequences), strict=True):
        engine.step_all(ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / NEW


def measure(packed: PackedModel, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure dense and sparse decoding in turns."""
    engine = Engine(packed, device="cuda", context=PROMPT + NEW, sequences=count)
    sequences = [random_ids(packed.architecture.vocabulary, PROMPT + NEW, seed=3 + number) for number in range(count)]

    def timed(dense: bool) -> tuple[float, float]:
        engine.dense = dense
        return step_seconds(engine, sequences), skipped_weights(packed, engine.activity()).overall

    samples = interleave({"dense": partial(timed, True), "sparse": partial(timed, False)}, rounds, warm_up=1)
    return {
        mode: {"seconds": statistics.median(seconds for seconds, _ in taken), "sparsity": taken[-1][1]}
        for mode, taken in samples.items()
    }


@click.command()
@click.option("--model", "name", type=click.Choice(NAMES), default="8b", show_default=True)
@click.option("--layers", type=int, help="Of the model, to try the script.")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--llama-batched-bench", "program", type=click.Path(path_type=Path, exists=True), help="llama.cpp's, with CUDA."
)
@click.option(
    "--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For llama.cpp's file."
)
@json_option
def main(name: str, layers: int | None, rounds: int, program: Path | None, work: Path, json_path: Path | None) -> None:
    """Print the table."""
    click.echo(f"{device_line()}; {name}, logits differ from the reference backend's by {check(name):.1e}")
    theirs = peer(program, name, layers, work)
    packed = random_model(name, layers)
    packed = with_thresholds(packed, find_thresholds(packed, [SHOWN])[SHOWN])
    results = {sequences: measure(packed, sequences, rounds) for sequences in SEQUENCES}
    lines = [
        [
            str(sequences),
            mode,
            f"{result['sparsity']:.1%}",
            f"{result['seconds'] * 1e6:.0f}",
            f"{sequences / result['seconds']:.0f}",
            f"{sequences / result['seconds'] / theirs[sequences]:.2f}" if theirs else "-",
        ]
        for sequences, modes in results.items()
        for mode, result in modes.items()
    ]
    click.echo(markdown(Table(["sequences", "runtime", "skipped", "us a step", "t/s", "x"], lines)))
    click.echo(f"llama.cpp, t/s: {', '.join(f'{speed:.0f} of {n} sequences' for n, speed in theirs.items()) or '-'}")
    write_figures(json_path, {"device": device_line(), "sequences": results, "peer": theirs})
