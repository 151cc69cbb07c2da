"""Decoding of several texts together on the GPU, dense and sparse: a Llama of 8 billion parameters, or another shape.

    python benchmarks/cuda_batch.py [--model olmoe-1b-7b] [--rounds N] [--llama-batched-bench PATH] [--json FILE]

Each text has 128 random tokens of its own and then 128 given ones, whose logits stay on the GPU; a column is skipped
where it is inactive in all of them, within a mixture's experts where it is inactive in the one text. Dense and sparse
take turns on one engine. Before anything is timed, two texts in a model of the same widths with two layers are compared
with the reference backend, dense; what several texts skip is what tests compare (`tests/runtime/cuda/test_batch.py`).
--llama-batched-bench, a program of llama.cpp, times a GGUF of the same shape, random as well, in the same run.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch
from cuda_families import OF_EXPERTS, config_of
from cuda_families import random_model as random_shape
from cuda_speeds import LIMITS, NEW, PROMPT, SHOWN
from cuda_synthetic import CONTEXT, LLAMA_8B, random_model
from cuda_timing import device_line
from figures import json_option, write_figures
from llama_cpp_file import peer_batches
from nearness import expect_near, relative_error
from shapes import MODELS
from synthetic import llama_config, random_ids
from thresholds import find_thresholds, with_thresholds
from turns import in_turns

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.skipped import skipped_weights
from sparsepack.tables import Table, markdown

TEXTS = (2, 4, 8)
CHECKED, PREFILLED = 24, 16
"""Tokens of a text that is compared, and how many of them are its prompt."""


def made(name: str, layers: int | None) -> PackedModel:
    """The model of a name, with fewer layers if asked."""
    return random_model(LLAMA_8B, layers) if name == LLAMA_8B.name else random_shape(name, layers)


def peer(program: Path | None, name: str, layers: int | None, work: Path) -> dict[int, float]:
    """llama.cpp's tokens a second by the number of texts; none without the program."""
    if program is None:
        click.echo("no --llama-batched-bench: the peer was not run")
        return {}
    of_llama = {"num_hidden_layers": layers or LLAMA_8B.layers, "max_position_embeddings": CONTEXT}
    config = llama_config(LLAMA_8B, **of_llama) if name == LLAMA_8B.name else config_of(name, layers)
    return peer_batches(program, config, work, PROMPT, NEW, TEXTS)


def check(name: str) -> float:
    """How far logits of two texts are from the reference backend's. RuntimeError where they are another model's."""
    packed = made(name, 2)
    texts = [random_ids(packed.architecture.vocabulary, CHECKED, seed=seed) for seed in (2, 3)]
    together = Engine(packed, device="cuda", context=64, sequences=len(texts), dense=True)
    oracle = Engine(packed, device="cuda", context=64, backend="reference")
    for number, text in enumerate(texts):
        together.prefill(text[:PREFILLED], number)
    steps = [together.step_all(ids) for ids in zip(*(text[PREFILLED:] for text in texts), strict=True)]
    found = torch.stack(steps, dim=1).double()
    expected = torch.stack([oracle.teacher_forced(text, len(text))[PREFILLED:] for text in texts]).double()
    limit = (LIMITS if packed.architecture.experts is None else OF_EXPERTS)["dense"]
    return expect_near("logits of two texts", relative_error(found, expected), limit)


def step_seconds(engine: Engine, texts: Sequence[Sequence[int]]) -> float:
    """The seconds of a step, which appends a token to each text."""
    engine.reset()
    for number, text in enumerate(texts):
        engine.prefill(text[:PROMPT], number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for ids in zip(*(text[PROMPT:] for text in texts), strict=True):
        engine.step_all(ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / NEW


def measure(packed: PackedModel, sequences: int, rounds: int) -> dict[str, dict[str, float]]:
    """Dense and sparse decoding in turns."""
    engine = Engine(packed, device="cuda", context=PROMPT + NEW, sequences=sequences)
    texts = [random_ids(packed.architecture.vocabulary, PROMPT + NEW, seed=3 + number) for number in range(sequences)]

    def timed(dense: bool) -> tuple[float, float]:
        engine.dense = dense
        return step_seconds(engine, texts), skipped_weights(packed, engine.activity()).overall

    samples = in_turns({"dense": partial(timed, True), "sparse": partial(timed, False)}, rounds, warm_up=1)
    return {
        mode: {"seconds": statistics.median(seconds for seconds, _ in taken), "sparsity": taken[-1][1]}
        for mode, taken in samples.items()
    }


@click.command()
@click.option("--model", "name", type=click.Choice([LLAMA_8B.name, *MODELS]), default=LLAMA_8B.name, show_default=True)
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
    packed = made(name, layers)
    packed = with_thresholds(packed, find_thresholds(packed, [SHOWN])[SHOWN])
    results = {sequences: measure(packed, sequences, rounds) for sequences in TEXTS}
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
    click.echo(markdown(Table(["texts", "runtime", "skipped", "us a step", "t/s", "x"], lines)))
    click.echo(f"llama.cpp, t/s: {', '.join(f'{speed:.0f} of {n} texts' for n, speed in theirs.items()) or '-'}")
    write_figures(json_path, {"device": device_line(), "texts": results, "peer": theirs})


if __name__ == "__main__":
    main()
