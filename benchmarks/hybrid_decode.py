"""Decoding with a card too small for the model: hot neurons there, the others on the processor and over the bus.

    python benchmarks/hybrid_decode.py --shape 13b [--vram LIST] [--llama-bench PATH] [--json FILE]
    python benchmarks/hybrid_decode.py --shape 70b --vram 24GB,32GB

Random weights of the shape (`hybrid_synthetic.py`); who is active is replayed from a trace of a trained model at a
density of 0.135 (`replayed.py`), since no trained ReLU model of these sizes is here. Without --vram: a quarter, a half
and three quarters of the bytes. Keys and values in float16. A token is timed as a user waits for it: chosen on the GPU,
read by the host.

First a model of the same kind that fits everywhere is compared with the reference backend, without replay: a wrong
engine is not timed. `static` and `slow` take turns, a token's bytes, waits and share of the model of time are those
of the last round. The peer is the best split of llama.cpp within the same budget by its own report
(`llama_cpp_offload.py`), timed before ours are loaded and after they are gone: both may not fit side by side. Where
no --llama-bench is given the peer is not run, and the script says so.
"""

import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_timing import device_line
from figures import json_option, write_figures
from hybrid_synthetic import SIZES, TINY, random_neurons, write_for_llama_cpp
from llama_cpp_offload import Peer, Split, runner
from nearness import expect_near, relative_error
from replayed import Activity, tiled
from synthetic import random_ids
from turns import in_turns

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import bytes_in, in_words
from sparsepack.placement.ways import per_token, per_token_in_words
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.sampling import Sampler, Sampling
from sparsepack.tables import Table, markdown

PROMPT, NEW = 128, 256
CHECKED = 24
LIMIT = 0.02
"""The largest relative error of the logits; keys and values are float16."""
SHARES = (0.25, 0.5, 0.75)
POLICIES = ("static", "slow")


def check() -> dict[str, float]:
    """How far logits of a small model with slots are from the reference backend's, for several placements."""
    activity = tiled(TINY.layers, TINY.intermediate)
    packed, ids = random_neurons(TINY, activity.frequency), random_ids(TINY.vocabulary, CHECKED, seed=2)
    expected = Engine(packed, context=64, backend="reference", dense=True).teacher_forced(ids, len(ids)).double()
    found = {}
    for cached in (0.0, 0.3, 1.0):
        engine = Engine(packed, device="cuda", cached=cached, context=64, cache_type="f16")
        logits = torch.stack([engine.prefill(ids[:8]), *(engine.step(id) for id in ids[8:])]).double().cpu()
        error = relative_error(logits, expected[7:])
        found[f"{100 * cached:.0f} % with slots"] = expect_near("logits", error, LIMIT)
    return found


def decode_seconds(engine: Engine, prompt: Sequence[int], new: int) -> float:
    """The seconds that a token takes after a prompt, each the likeliest after the last."""
    engine.reset()
    sampler = Sampler(Sampling())
    id = sampler.choose(engine.prefill(prompt))
    engine.synchronise()
    start = time.perf_counter()
    for _ in range(new):
        id = engine.decode_next(id, sampler)
    engine.synchronise()
    return (time.perf_counter() - start) / new


def ours(packed: PackedModel, activity: Activity, budget: int, settings: EngineOptions, rounds: int) -> dict[str, Any]:
    """By policy: seconds of a token in each round, and what a token took."""
    told = replace(settings, vram=f"{budget / 1e6:.6f}MB", activity=activity.bits)
    engines = {policy: Engine(packed, replace(told, policy=policy)) for policy in POLICIES}
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    new = (settings.context or 0) - PROMPT
    runs = {name: partial(decode_seconds, engine, prompt, new) for name, engine in engines.items()}
    found = {}
    for name, seconds in in_turns(runs, rounds, warm_up=1).items():
        engine = engines[name]
        found[name] = {"seconds": seconds, "description": engine.description}
        if engine.hit_counts is not None and engine.ways is not None:
            found[name] |= per_token(engine.ways, engine.hit_counts, statistics.median(seconds))
            found[name]["slots"] = engine.ways.plan.share
    return found


def peer_rounds(peer: Peer, splits: Sequence[Split], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each split, by its name."""
    return {split.name: peer.tokens_per_second(split, rounds) for split in splits}


def row_of(name: str, speeds: Sequence[float], beside: float | None, of: Mapping[str, Any]) -> list[str]:
    """A row of the table. beside -- the peer's speed; of: what `per_token` says of ours"""
    median = statistics.median(speeds)
    cells = [
        name,
        f"{median:.1f}",
        f"{min(speeds):.1f} to {max(speeds):.1f}",
        f"{median / beside:.2f}" if beside else "-",
    ]
    if "bytes" not in of:
        return [*cells, *"-----"]
    read = " / ".join(f"{of['bytes'][way] / 1e6:.1f}" for way in ("card", "bus", "worker", "moved"))
    share = "-" if of["model"] is None else f"{of['model']['share']:.0%} ({of['model']['slowest']})"
    hits = f"{of['hits'] / max(of['needed'], 1e-9):.1%}"
    return [*cells, f"{of['slots']:.1%}", hits, read, f"{of['waited_us']:.0f}", share]


HEAD = ["", "t/s", "range", "x peer", "slots", "hits", "MB card / bus / worker / moved", "us waited", "of the model"]


@click.command()
@click.option("--shape", type=click.Choice(list(SIZES)), required=True)
@click.option("--vram", help="Budgets, with commas between them (default: a quarter, a half, three quarters).")
@click.option("--layers", type=int, help="Of the model, to try the script.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=min(16, os.cpu_count() or 1), show_default=True, help="Of the processor, for both.")
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="llama.cpp's, built with CUDA.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("/tmp/sparsepack-bench"), show_default=True)
@json_option
def main(
    shape: str,
    vram: str | None,
    layers: int | None,
    rounds: int,
    threads: int,
    llama_bench: Path | None,
    work: Path,
    json_path: Path | None,
) -> None:
    """Print a table for each budget."""
    if not torch.cuda.is_available():
        raise click.ClickException("an NVIDIA GPU is needed, and torch sees none here")
    size = replace(SIZES[shape], layers=layers or SIZES[shape].layers)
    activity = tiled(size.layers, size.intermediate)
    packed = random_neurons(size, activity.frequency, device="cuda")
    torch.cuda.empty_cache()
    settings = EngineOptions(device="cuda", context=PROMPT + NEW, cache_type="f16", threads=threads)
    parts = parts_of(packed, PROMPT + NEW, "f16")
    budgets = [bytes_in(each) for each in vram.split(",")] if vram else [int(s * parts.weights) for s in SHARES]
    click.echo(
        f"{device_line()}, {threads} threads; {size.name}, {in_words(parts.weights)} of weights, density "
        f"{activity.density:.3f}, context {PROMPT + NEW}"
    )
    differences = check()
    click.echo(f"logits differ from the reference backend's by: {differences}")
    peer = None
    if llama_bench is None:
        click.echo("no --llama-bench: the peer was not run")
    else:
        work.mkdir(parents=True, exist_ok=True)
        path = work / f"{size.name}-{size.layers}.q4_k.gguf"
        peer = Peer(
            runner(llama_bench),
            path if path.is_file() else write_for_llama_cpp(size, path),
            *(size.layers, PROMPT, NEW, threads),
            layer=parts.attention[0] + 3 * parts.gates[0],
            mlp=3 * parts.gates[0],
        )
    report: dict[str, Any] = {"device": device_line(), "threads": threads, "size": asdict(size), "check": differences}
    for budget in budgets:
        splits = [] if peer is None else peer.within(budget)
        before = {} if peer is None else peer_rounds(peer, splits, rounds)
        found = ours(packed, activity, budget, settings, rounds)
        gc.collect()
        torch.cuda.empty_cache()
        after = {} if peer is None else peer_rounds(peer, splits, rounds)
        theirs = {name: before[name] + after[name] for name in before}
        best = max((statistics.median(speeds) for speeds in theirs.values()), default=None)
        rows = [row_of(f"llama.cpp, {name}", speeds, best, {}) for name, speeds in theirs.items()]
        for name, of in found.items():
            rows.append(row_of(f"ours, {name}", [1 / seconds for seconds in of["seconds"]], best, of))
        told = [f"{name}: {per_token_in_words(of)}" for name, of in found.items() if "bytes" in of]
        click.echo(markdown(Table(HEAD, rows, f"{size.name} in {in_words(budget)}", told)))
        report[in_words(budget)] = {"ours": found, "llama.cpp": theirs, "splits": [asdict(split) for split in splits]}
    write_figures(json_path, report)


if __name__ == "__main__":
    main()
