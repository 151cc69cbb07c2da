"""Decoding with a card too small for the model: hot neurons there, the others on the processor and over the bus.

    python benchmarks/hybrid_decode.py --shape 13b [--vram LIST] [--llama-bench PATH] [--json FILE]
    python benchmarks/hybrid_decode.py --shape 70b --vram 24GB,32GB [--split layers]
    python benchmarks/hybrid_decode.py --shape 13b --gate-copy none,1.5,2
    python benchmarks/hybrid_decode.py --shape 13b --whole

Random weights of the shape (`hybrid_synthetic.py`); who is active is replayed from a trace of a trained model at a
density of 0.132 (`replayed.py`), since no trained ReLU model of these sizes is here. Without --vram: a quarter, a half
and three quarters of the bytes. Keys and values in float16. A token is timed as a user waits for it: chosen on the GPU,
read by the host. The prompt is one token: the activity of a longer one would be that of random weights.

With TIMES in --gate-copy gates are stored by rows, and where they have no room copies of them list neurons. Random
weights make half of the listed ones active, where copies would list TIMES as many as are active. So that for each
active one as many bytes are read, a gate being half of a record, the trace lists TIMES / 2 + 1 as many as it has: for 2
the same, for 1.5 a sixth more gates and an eighth fewer records, and of bytes a sixth too many are printed. Hits are of
listed ones. All that --gate-copy names is timed between the same two runs of the peer; a budget that holds all gates
needs no copies.

First two blocks of the same widths are compared with the reference backend, without replay: a wrong engine is not
timed. The policies of --policy take turns on one engine; a token's bytes, waits and share of the model of time are
those of the last round. The peer is the best split of llama.cpp within the same budget by its own report
(`llama_cpp_offload.py`), timed before ours is loaded and after it is gone: both may not fit side by side. Where no
--llama-bench is given the peer is not run, and the script says so; of the 13B shape it then shows, labelled so, what
another run measured on an H200 with 16 threads (benchmarks/notes/anchors.md).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_timing import device_line
from figures import write_figures
from hybrid_synthetic import random_neurons
from nearness import expect_near, relative_error
from replayed import CARRIED, OTHER, Activity, tiled, with_more
from synthetic import Size, random_ids
from turns import in_turns
from within_budgets import (
    CHECKED,
    HEAD,
    LIMIT,
    PROMPT,
    Asked,
    asked_options,
    beside,
    best_of,
    decode_seconds,
    freed,
    links_of,
    row_of,
)

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Parts, in_words
from sparsepack.placement.options import MOST_LISTED
from sparsepack.placement.ways import per_token, per_token_in_words
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.cuda_decoder import CudaHybridDecoder
from sparsepack.runtime.hybrid.plan import parts_of, planned
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

TEXTS = {"books": CARRIED, "wikitext": OTHER}
"""Traces; frequencies are of books in both."""
ANCHORS = {"13b": {0: 9.9, 10: 11.9, 20: 13.0, 30: 29.2, 36: 55.5, 40: 184.0}}
"""Tokens a second of llama.cpp by layers on the GPU (-ngl), in another run: H200, 16 threads, tg24."""


def check(size: Size, gate_copy: float | None = None) -> dict[str, float]:
    """How far logits of two blocks are from the reference backend's, by what has slots or copies: of gates copies that
    list all, which lose nothing."""
    size = replace(size, layers=2)
    activity = tiled(size.layers, size.intermediate, tokens=1)
    packed = random_neurons(size, activity.frequency, "cuda", rows=gate_copy is not None)
    ids = random_ids(size.vocabulary, CHECKED, seed=2)
    oracle = Engine(packed, device="cuda", context=64, backend="reference", dense=True)
    expected = oracle.teacher_forced(ids, len(ids)).double()
    del oracle
    found = {}
    settings = EngineOptions(device="cuda", context=64, cache_type="f16")
    told = {f"{100 * share:.0f} % with slots": replace(settings, cached=share) for share in (0.0, 0.3)}
    if gate_copy is not None:
        budget = _of_copies(parts_of(packed, 64, "f16", gate_copies=True))
        told = {"copies of gates": replace(settings, vram=f"{budget / 1e6:.6f}MB", gate_copy=MOST_LISTED)}
    for name, options in told.items():
        engine = Engine(packed, options)
        logits = torch.stack([engine.prefill(ids[:8]), *(engine.step(id) for id in ids[8:])]).double()
        error = relative_error(logits, expected[7:])
        found[name] = expect_near("logits", error, LIMIT)
    return found


def _of_copies(parts: Parts) -> int:
    """A budget that holds copies of gates and a few slots, and not all gates."""
    always = parts.least + parts.output + sum(parts.attention)
    return always + 13 * sum(parts.copies) // 10 + (always >> 5)


def ours(
    packed: PackedModel,
    activity: Activity,
    budget: int,
    settings: EngineOptions,
    policies: Sequence[str],
    rounds: int,
    gate_copy: float | None = None,
) -> dict[str, Any]:
    """By policy: seconds of a token in each round, and what a token took."""
    vram = f"{budget / 1e6:.6f}MB"
    plan = planned(packed, settings.context or 0, "f16", replace(settings, vram=vram, gate_copy=gate_copy))
    if plan.copied:
        assert gate_copy is not None
        activity = with_more(activity, gate_copy / 2 + 1)
    told = replace(settings, vram=vram, gate_copy=gate_copy, activity=activity.bits)
    start = time.perf_counter()
    engine = Engine(packed, told)
    decoder = engine._decoder
    loading = time.perf_counter() - start
    if not isinstance(decoder, CudaHybridDecoder):
        raise click.ClickException(f"{in_words(budget)} hold the whole model: no neuron is without a slot there")
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    found: dict[str, Any] = {}

    def timed(policy: str) -> float:
        decoder.follow(policy)
        seconds = decode_seconds(engine, prompt, len(activity.bits))
        found[policy] = {"description": engine.description, "loading": loading}
        if engine.ways is not None:
            found[policy] |= per_token(engine.ways, seconds)
            found[policy]["slots"] = engine.ways.plan.share
        return seconds

    for name, seconds in in_turns({name: partial(timed, name) for name in policies}, rounds, warm_up=1).items():
        found[name]["seconds"] = seconds
    return found


def whole(packed: PackedModel, settings: EngineOptions, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second where all is on the card: of the cuda engine, the same within a budget, and with a slot for each
    neuron. Who is active is what random gates say, about half: the cuda engine replays nothing."""
    ample = f"{2 * parts_of(packed, PROMPT + tokens, 'f16').weights / 1e6 + 4000:.0f}MB"
    told = {
        "the cuda engine": settings,
        "within a budget": replace(settings, vram=ample),
        "a slot for each neuron": replace(settings, cached=1.0),
    }
    engines = {name: Engine(packed, options) for name, options in told.items()}
    engines["the cuda engine, dense"] = Engine(packed, settings, dense=True)
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    timed = {name: partial(decode_seconds, engine, prompt, tokens) for name, engine in engines.items()}
    return {name: [1 / each for each in taken] for name, taken in in_turns(timed, rounds, warm_up=1).items()}


def listed_times(told: str) -> list[float | None]:
    """What `--gate-copy` names."""
    try:
        found = [None if each == "none" else float(each) for each in told.split(",")]
    except ValueError:
        found = [0.0]
    if any(times is not None and times < 1 for times in found):
        raise click.BadParameter(f"{told}: expected none, or numbers of at least 1, with commas")
    return found


def anchor_of(shape: str, parts: Parts, budget: int) -> dict[str, list[float]]:
    """What another run measured of llama.cpp, of as many layers as fit."""
    layer = parts.attention[0] + 3 * parts.gates[0]
    fitting = [count for count in ANCHORS.get(shape, {}) if count * layer + parts.cache <= budget]
    if not fitting:
        return {}
    return {f"-ngl {max(fitting)} (another run, H200)": [ANCHORS[shape][max(fitting)]]}


@click.command()
@asked_options(tokens=128)
@click.option("--text", type=click.Choice(list(TEXTS)), default="books", show_default=True, help="That is replayed.")
@click.option("--policy", default="static,slow", show_default=True, help="With commas.")
@click.option(
    "--gate-copy",
    "copies",
    default="none",
    show_default=True,
    callback=lambda *of: listed_times(of[-1]),
    help="Copies of gates list so many times as many as are active; with commas.",
)
@click.option("--whole", "is_whole", is_flag=True, help="With all on the card, instead of within budgets.")
def main(
    asked: Asked, text: str, policy: str, copies: Sequence[float | None], is_whole: bool, json_path: Path | None
) -> None:
    """Print a table for each budget, and write the figures so far."""
    size, tokens, rounds, threads = asked.size, asked.tokens, asked.rounds, asked.threads
    activity = tiled(size.layers, size.intermediate, tokens=tokens, path=TEXTS[text])
    by_rows = dict.fromkeys(times is not None for times in copies)
    packed = {rows: random_neurons(size, activity.frequency, device="cuda", rows=rows) for rows in by_rows}
    first = packed[copies[0] is not None]
    context = PROMPT + tokens
    settings = EngineOptions(device="cuda", context=context, cache_type="f16", threads=threads)
    parts = parts_of(first, context, "f16")
    budgets = asked.budgets(parts)
    click.echo(
        f"{device_line()}, {threads} threads; {size.name}, {in_words(parts.weights)} of weights, density "
        f"{activity.density:.3f} ({text}), context {context}"
    )
    differences = dict[str, float]()
    for stored in by_rows:
        differences |= check(size, next(times for times in copies if (times is not None) == stored))
    click.echo(f"logits differ from the reference backend's by: {differences}")
    freed()
    report: dict[str, Any] = {"device": device_line(), "threads": threads, "size": asdict(size), "check": differences}
    if is_whole:
        near = whole(first, settings, tokens, rounds)
        of_engine = statistics.median(near["the cuda engine"])
        rows = [row_of(name, speeds, of_engine, {})[:4] for name, speeds in near.items()]
        click.echo(markdown(Table(["all on the card", "t/s", "range", "x the cuda engine"], rows, size.name)))
        write_figures(json_path, report | {"whole": near})
        return
    if asked.tune:
        click.echo(links_of(size, threads))
    peer = asked.peer(parts, mlp=3 * parts.gates[0])
    for budget in budgets:

        def run(budget: int = budget) -> dict[str, Any]:
            found = dict[str, Any]()
            for times in copies:
                model = packed[times is not None]
                timed = ours(model, activity, budget, settings, policy.split(","), rounds, times)
                found |= {name if times is None else f"{name}, copies {times:g}": of for name, of in timed.items()}
                freed()
            return found

        found, of_splits = beside(peer, budget, rounds, run)
        measured = {split.name: speeds for split, speeds in of_splits.items()}
        theirs = measured or anchor_of(asked.shape, parts, budget)
        best = best_of(theirs)
        rows = [row_of(f"llama.cpp, {name}", speeds, best, {}) for name, speeds in theirs.items()]
        for name, of in found.items():
            rows.append(row_of(f"ours, {name}", [1 / seconds for seconds in of["seconds"]], best, of))
        loading = max(of["loading"] for of in found.values())
        click.echo(f"loaded in {loading:.0f} s")
        told = [f"{name}: {per_token_in_words(of)}" for name, of in found.items() if "bytes" in of]
        ran = {of["description"] for of in found.values()}
        click.echo(markdown(Table(HEAD, rows, f"{size.name} in {in_words(budget)}", [*told, *sorted(ran)])))
        report[in_words(budget)] = {
            "ours": found,
            "llama.cpp": theirs,
            "splits": [asdict(split) for split in of_splits],
        }
        write_figures(json_path, report)


if __name__ == "__main__":
    main()
