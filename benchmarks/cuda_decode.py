"""Decoding and prefill of Llamas of 1, 7 and 8 billion parameters on the GPU: llama.cpp, ours dense, ours sparse.

    python benchmarks/cuda_decode.py [--quick] [--layers N] [--model 8b] [--json FILE]

128 tokens after a prompt of 128, batch 1, each the likeliest after the last, chosen on the GPU and read by the host:
everything that a user waits for. Dense and sparse decoding take turns on one engine. llama.cpp's figures are anchors:
measured in November 2026 on an H100 with random Q4_K weights of the same shapes (benchmarks/notes/anchors.md).
Before anything is timed, a model of the same widths with two layers is compared with the reference backend.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_synthetic import CONTEXT, LLAMA_1B, LLAMA_7B, LLAMA_8B, random_model
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from nearness import expect_near, relative_error
from synthetic import random_ids
from thresholds import Thresholds, find_thresholds, with_thresholds
from turns import in_turns, interleaved

from sparsepack.bench import traffic
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.sampling import Sampler, Sampling
from sparsepack.runtime.skipped import skipped_weights
from sparsepack.tables import Table, markdown

SIZES = {"8b": LLAMA_8B, "7b": LLAMA_7B, "1b": LLAMA_1B}
DECODE_ANCHORS = {"8b": 283.0, "7b": 303.0}
PREFILL_ANCHORS = {"8b": {512: 9600, 2048: 10050, 8192: 9690}}
SPARSITIES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.65, 0.8)
SHOWN = 0.5
PROMPT, NEW = 128, 128
LIMITS = {"dense": 0.01, "sparse": 0.1}
"""The largest relative error of the logits. Keys and values are bfloat16, which may move inputs across thresholds."""


def check(packed: PackedModel, limits: Mapping[str, float] = LIMITS) -> dict[str, float]:
    """How far logits of a model of two layers are from the reference backend's. RuntimeError where they are another
    model's."""
    packed = with_thresholds(packed, find_thresholds(packed, [SHOWN])[SHOWN])
    ids = random_ids(packed.architecture.vocabulary, 24, seed=2)
    found = {}
    ours, oracle = (Engine(packed, device="cuda", context=64, backend=name) for name in ("cuda", "reference"))
    for mode, sparse_from in (("dense", len(ids)), ("sparse", 16)):
        a, b = (engine.teacher_forced(ids, sparse_from).double() for engine in (ours, oracle))
        found[f"{mode}, at once"] = expect_near(f"{mode}, logits", relative_error(a, b), limits[mode])
    ours.reset()
    first = [ours.prefill(ids[:16]), *(ours.step(id) for id in ids[16:])]
    stepped = relative_error(torch.stack(first).double(), b[15:])
    found["sparse, steps"] = expect_near("sparse, logits", stepped, limits["sparse"])
    return found


def decode_seconds(engine: Engine, ids: list[int], dense: bool) -> float:
    """The seconds that a token takes after a prompt, each the likeliest after the last."""
    engine.dense = dense
    engine.reset()
    sampler = Sampler(Sampling())
    id = sampler.choose(engine.prefill(ids[:PROMPT]))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NEW):
        id = engine.decode_next(id, sampler)
    return (time.perf_counter() - start) / NEW


def teacher_forced_seconds(engine: Engine, ids: list[int], dense: bool) -> float:
    """The seconds that a token takes after a prompt, where all are given and logits stay on the GPU."""
    engine.dense = dense
    engine.reset()
    engine.prefill(ids[:PROMPT])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for id in ids[PROMPT : PROMPT + NEW]:
        engine.step(id)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / NEW


def prefill_seconds(engine: Engine, ids: list[int]) -> float:
    """The seconds that a whole prompt takes."""
    engine.reset()
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.prefill(ids)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(packed: PackedModel, thresholds: Thresholds, rounds: int) -> dict[str, Any]:
    """Dense and sparse decoding in turns."""
    sparse = with_thresholds(packed, thresholds)
    engine = Engine(sparse, device="cuda", context=CONTEXT)
    ids = random_ids(packed.architecture.vocabulary, PROMPT + NEW, seed=3)

    def timed(kind: str, dense: bool) -> tuple[float, traffic.Activity]:
        taken = (decode_seconds if kind == "chosen" else teacher_forced_seconds)(engine, ids, dense)
        return taken, engine.activity()

    runs = {
        name_of(kind, dense): partial(timed, kind, dense) for kind in ("chosen", "given") for dense in (True, False)
    }
    results = {}
    for name, samples in in_turns(runs, rounds, warm_up=1).items():
        seconds, activity = [taken for taken, _ in samples], samples[-1][1]
        results[name] = {
            "seconds": statistics.median(seconds),
            "range": [min(seconds), max(seconds)],
            "bytes": traffic.bytes_per_token(sparse, activity),
            "sparsity": skipped_weights(sparse, activity).overall,
        }
    return results


def name_of(kind: str, dense: bool) -> str:
    return f"{'dense' if dense else 'sparse'}, {kind}"


def measure_prefill(packed: PackedModel, rounds: int) -> dict[int, float]:
    """Seconds by length of the prompt."""
    engine = Engine(packed, device="cuda", context=CONTEXT)
    ids = random_ids(packed.architecture.vocabulary, CONTEXT, seed=4)
    runs = {length: partial(prefill_seconds, engine, ids[:length]) for length in (128, 512, 2048, 8192)}
    return interleaved(runs, rounds, warm_up=1)


def decode_rows(name: str, kind: str, result: dict[str, Any], bandwidth: float) -> list[list[str]]:
    """Three rows: llama.cpp, where it has an anchor, dense, sparse."""
    anchor, dense = DECODE_ANCHORS.get(name), result[name_of(kind, True)]
    size = SIZES[name].name
    rows = []
    if anchor:
        share = f"{dense['bytes'] * anchor / bandwidth:.0%}"
        rows = [[size, "llama.cpp (anchor)", "-", f"{anchor:.0f}", "-", "1.00", f"{dense['bytes'] / 1e9:.2f}", share]]
    for mode in (True, False):
        row = result[name_of(kind, mode)]
        speed = 1 / row["seconds"]
        low, high = (1 / s for s in reversed(row["range"]))
        rows.append(
            [
                size,
                f"ours, {name_of(kind, mode)}",
                f"{row['sparsity']:.1%}",
                f"{speed:.0f}",
                f"{low:.0f} to {high:.0f}",
                f"{speed / anchor:.2f}" if anchor else "-",
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['bytes'] * speed / bandwidth:.0%}",
            ]
        )
    return rows


def decode_options(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of scripts that measure decoding of models with these names: names (all unless told otherwise),
    layers, quick, rounds, and the file for figures."""

    def every(context: click.Context, option: click.Parameter, chosen: tuple[str, ...]) -> tuple[str, ...]:
        return chosen or tuple(names)

    def two_if_quick(context: click.Context, option: click.Parameter, rounds: int) -> int:
        return 2 if context.params["quick"] else rounds

    options = (
        click.option("--quick", is_flag=True, is_eager=True, help="Two rounds, and no other sparsities than one half."),
        click.option("--layers", type=int, help="Of the models, to try the script."),
        click.option(
            "--model", "names", multiple=True, type=click.Choice(list(names)), callback=every, help="Only these."
        ),
        click.option("--rounds", default=5, show_default=True, callback=two_if_quick),
        json_option,
    )

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return with_options


@click.command()
@decode_options(SIZES)
def main(quick: bool, layers: int | None, names: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """Print the tables."""
    bandwidth = announced_bandwidth()
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    for name in names:
        size = SIZES[name]
        differences = check(random_model(size, layers=2))
        click.echo(f"{size.name}, difference of logits from the reference backend, two layers: {differences}")
        packed = random_model(replace(size, layers=layers or size.layers))
        tried = (SHOWN,) if quick or name != "8b" else SPARSITIES
        thresholds = find_thresholds(packed, tried)
        results = {sparsity: measure(packed, thresholds[sparsity], rounds) for sparsity in tried}
        head = ["model", "runtime", "skipped", "t/s", "range", "x", "GB/token", "of bandwidth"]
        lines = [line for kind in ("chosen", "given") for line in decode_rows(name, kind, results[SHOWN], bandwidth)]
        click.echo(markdown(Table(head, lines)))
        if len(tried) > 1:
            click.echo(
                markdown(Table(["target", *head[2:]], [_break_even(s, results[s], name, bandwidth) for s in tried]))
            )
        prefill = measure_prefill(packed, rounds)
        anchors = PREFILL_ANCHORS.get(name, {})
        click.echo(
            markdown(
                Table(
                    ["model", "prompt", "t/s", "llama.cpp"],
                    [[size.name, n, f"{n / s:.0f}", anchors.get(n, "-")] for n, s in prefill.items()],
                )
            )
        )
        report[name] = {"check": differences, "decode": results, "prefill": prefill}
        del packed
    write_figures(json_path, report)


def _break_even(target: float, result: dict[str, Any], name: str, bandwidth: float) -> list[str]:
    return [f"{target:.0%}", *decode_rows(name, "given", result, bandwidth)[-1][2:]]


if __name__ == "__main__":
    main()
