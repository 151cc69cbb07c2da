"""Decoding on the GPU with planes: one sequence beside zigzag-q4_k that skips columns until it reads as many bytes,
several beside zigzag-q4_k that reads everything.

128 tokens after a prompt of 128, all given, whose logits stay on the GPU; or of one sequence each the likeliest after
the last, read by the host. All sides take turns. Weights are random, and levels follow the inputs' sizes, about a bit
for each doubling. Before anything is timed, two layers are compared with the reference backend.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.cuda_batch import step_seconds
from benchmarks.cuda_decode import LLAMAS, NEW, PROMPT, config_of, decode_seconds, teacher_forced_seconds
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import random_ids
from benchmarks.shared.thresholds import find_levels, find_thresholds, with_limits, with_thresholds
from benchmarks.shared.timing import (
    announced_bandwidth,
    check_close,
    device_line,
    interleave,
    json_option,
    median_ratio,
    relative_error,
    write_figures,
)
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

BITS = (3.4, 2.8)
"""Read of a weight."""
OF_ALL = {"Q6_P": 6.25, "Q4_K": 4.5}
SEQUENCES = (4, 8)
FEW_LAYERS, MORE_LAYERS = 2, 6


def random_model(name: str, layers: int | None, block: str) -> PackedModel:
    """Return a model on the GPU."""
    return random_of(config_of(name, layers), name, config_of(name).num_hidden_layers, block=block)


def check(name: str) -> float:
    """Return how far logits of two layers are from the reference backend's, at the first of `BITS`."""
    packed = random_model(name, 2, "Q6_P")
    packed = with_limits(packed, find_levels(packed, BITS[:1])[BITS[0]])
    ids = random_ids(packed.architecture.vocabulary, 24, seed=2)
    found, expected = (
        Engine(packed, device="cuda", context=64, backend=backend).teacher_forced(ids, 16).double()
        for backend in ("cuda", "reference")
    )
    return check_close("logits", relative_error(found, expected), 0.1)


def bits_read(packed: PackedModel, engine: Engine) -> float:
    """Return the bits of a weight of the decoder blocks that decoded tokens read."""
    return OF_ALL[packed.block] * (1 - skipped_weights(packed, engine.activity()).overall)


def measure_one(models: Mapping[str, PackedModel], name: str, rounds: int) -> dict[str, Any]:
    """Return seconds a token of one sequence, in each round, and the bits that it reads."""
    engines = {side: Engine(packed, device="cuda", context=PROMPT + NEW) for side, packed in models.items()}
    ids = random_ids(config_of(name).vocab_size, PROMPT + NEW, seed=3)
    runs = {
        f"{side}, {kind}": partial(seconds, engine, ids, False)
        for side, engine in engines.items()
        for kind, seconds in (("given", teacher_forced_seconds), ("chosen", decode_seconds))
    }
    taken = interleave(runs, rounds, warm_up=1)
    bits = {side: bits_read(models[side], engine) for side, engine in engines.items()}
    return {run: {"seconds": taken[run], "bits": bits[run.partition(",")[0]]} for run in runs}


def measure_several(models: Mapping[str, PackedModel], count: int, name: str, rounds: int) -> dict[str, Any]:
    """Return seconds a step of several sequences, likewise."""
    engines = {
        side: Engine(packed, device="cuda", context=PROMPT + NEW, sequences=count) for side, packed in models.items()
    }
    texts = [random_ids(config_of(name).vocab_size, PROMPT + NEW, seed=3 + number) for number in range(count)]
    taken = interleave({side: partial(step_seconds, engine, texts) for side, engine in engines.items()}, rounds, 1)
    return {side: {"seconds": taken[side], "bits": bits_read(models[side], engine)} for side, engine in engines.items()}


def rows_of(results: Mapping[str, Any], base: str, sequences: int = 1) -> list[list[str]]:
    """Return the cells of a table: of each side its speed, and over that of `base`."""
    return [
        [
            str(sequences),
            side,
            f"{of['bits']:.2f}",
            f"{sequences / statistics.median(of['seconds']):.0f}",
            f"{median_ratio(results[base]['seconds'], of['seconds']):.2f}",
        ]
        for side, of in results.items()
    ]


def measure(name: str, layers: int | None, rounds: int) -> dict[str, dict[str, Any]]:
    """Return what was measured of each comparison, the side that others are divided by first."""
    planes, q4_k = (random_model(name, layers, block) for block in ("Q6_P", "Q4_K"))
    limits = find_levels(planes, BITS)
    skips = {bits: 1 - bits / OF_ALL["Q4_K"] for bits in BITS}
    thresholds = find_thresholds(q4_k, skips.values())
    report = {}
    for bits in BITS:
        sides = {
            f"zigzag-q4_k at {bits}": with_thresholds(q4_k, thresholds[skips[bits]]),
            f"zigzag-q6_p at {bits}": with_limits(planes, limits[bits]),
        }
        results = measure_one(sides, name, rounds)
        for kind in ("given", "chosen"):
            report[f"1, {bits}, {kind}"] = {run: of for run, of in results.items() if run.endswith(kind)}
    for count in SEQUENCES:
        sides = {"zigzag-q4_k, dense": q4_k, f"zigzag-q6_p at {BITS[0]}": with_limits(planes, limits[BITS[0]])}
        report[f"{count}, {BITS[0]}"] = measure_several(sides, count, name, rounds)
        torch.cuda.empty_cache()
    return report


def layer_rows(fewer: Mapping[str, Any], more: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a table of what a layer takes, from models of `FEW_LAYERS` and `MORE_LAYERS`: of each side
    microseconds, and those of the first side over them."""
    lines = []
    for place, results in more.items():
        taken = {
            side: statistics.median(of["seconds"]) - statistics.median(fewer[place][side]["seconds"])
            for side, of in results.items()
        }
        base = next(iter(taken.values()))
        for side, seconds in taken.items():
            each = seconds / (MORE_LAYERS - FEW_LAYERS) * 1e6
            bits = f"{results[side]['bits']:.2f}"
            lines.append([place.partition(",")[0], side, bits, f"{each:.1f}", f"{base / seconds:.2f}"])
    return lines


@click.command()
@click.option("--model", "name", type=click.Choice(tuple(LLAMAS)), default="8b", show_default=True)
@click.option("--layers", type=int, help="Of the model, to try the benchmark.")
@click.option(
    "--per-layer", is_flag=True, help=f"Time a layer, by models of {FEW_LAYERS} and {MORE_LAYERS}: a fifth of the time."
)
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(name: str, layers: int | None, per_layer: bool, rounds: int, json_path: Path | None) -> None:
    """Print the tables."""
    announced_bandwidth()
    click.echo(f"{name}, two layers: logits differ from the reference backend's by {check(name):.1e}")
    report: dict[str, Any] = {"device": device_line()}
    if per_layer:
        fewer, more = (measure(name, count, rounds) for count in (FEW_LAYERS, MORE_LAYERS))
        report |= {"fewer": fewer, "more": more}
        head, lines = ["sequences", "runs", "bits read", "us a layer", "x"], layer_rows(fewer, more)
    else:
        results = measure(name, layers, rounds)
        report |= results
        head, lines = ["sequences", "runs", "bits read", "t/s", "x"], []
        for place, of in results.items():
            lines += rows_of(of, next(iter(of)), int(place.partition(",")[0]))
    click.echo(markdown(Table(head, lines, f"{name}; {PROMPT} + {NEW}")))
    write_figures(json_path, report)
