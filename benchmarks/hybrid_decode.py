"""Decoding a model with ReLU on a GPU too small for it: hot neurons there, others on the processor and over the bus.

Random weights; who is active is replayed from a trace of a trained model at a density of 0.132. Without --vram: a
quarter, a half and three quarters of the bytes. Keys and values in float16. A token is timed as a user waits for it:
chosen on the GPU, read by the host. The prompt is one token: the activity of a longer one would be that of random
weights.

With TIMES in --gate-copy gates are stored by rows, and where they have no room copies of them list neurons. Random
weights make half of the listed ones active, where copies would list TIMES as many as are active. So that for each
active one as many bytes are read, a gate being half of a record, the trace lists TIMES / 2 + 1 as many as it has: for 2
the same, for 1.5 a sixth more gates and an eighth fewer records, and of bytes a sixth too many are printed.

First two blocks of the same widths are compared with the reference backend, without replay. The policies of --policy
take turns on one engine. The peer is the best split of llama.cpp within the same budget by its own report
(--llama-bench), timed before ours is loaded and after it is gone.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared.budgets import (
    BOOKS_TRACE,
    CHECKED,
    LIMIT,
    PROMPT,
    WIKITEXT_TRACE,
    Activity,
    BudgetRequest,
    bandwidth_tensor,
    budget_options,
    decode_seconds,
    free_memory,
    measure_budgets,
    tiled,
    with_more,
)
from benchmarks.shared.random_models import random_neurons
from benchmarks.shared.shapes import Size, random_ids
from benchmarks.shared.timing import check_close, device_line, interleave, relative_error
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Parts, format_bytes
from sparsepack.placement.options import MOST_LISTED
from sparsepack.placement.traffic import per_token
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.plan import make_plan, parts_of
from sparsepack.runtime.options import EngineOptions

TEXTS = {"books": BOOKS_TRACE, "wikitext": WIKITEXT_TRACE}
"""Traces; frequencies are of books in both."""


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
    cases = {f"{100 * share:.0f} % with slots": replace(settings, cached=share) for share in (0.0, 0.3)}
    if gate_copy is not None:
        budget = _of_copies(parts_of(packed, 64, "f16", gate_copies=True))
        cases = {"copies of gates": replace(settings, vram=f"{budget / 1e6:.6f}MB", gate_copy=MOST_LISTED)}
    for name, options in cases.items():
        engine = Engine(packed, options)
        logits = torch.stack([engine.prefill(ids[:8]), *(engine.step(id) for id in ids[8:])]).double()
        error = relative_error(logits, expected[7:])
        found[name] = check_close("logits", error, LIMIT)
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
    plan = make_plan(packed, settings.context or 0, "f16", replace(settings, vram=vram, gate_copy=gate_copy))
    if plan.copied:
        assert gate_copy is not None
        activity = with_more(activity, gate_copy / 2 + 1)
    options = replace(settings, vram=vram, gate_copy=gate_copy, activity=activity.bits)
    start = time.perf_counter()
    engine = Engine(packed, options)
    decoder = engine._decoder
    loading = time.perf_counter() - start
    if not isinstance(decoder, CudaDecoder) or (cpu_gpu := decoder.cpu_gpu) is None:
        raise click.ClickException(f"{format_bytes(budget)} hold the whole model: no neuron is without a slot there")
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    found: dict[str, Any] = {}

    def timed(policy: str) -> float:
        cpu_gpu.follow(policy)
        engine.reset()
        seconds = decode_seconds(engine, prompt, len(activity.bits))
        found[policy] = {"description": engine.description, "loading": loading}
        if engine.traffic_stats is not None:
            found[policy] |= per_token(engine.traffic_stats, seconds)
            found[policy]["slots"] = engine.traffic_stats.plan.share
        return seconds

    for name, seconds in interleave({name: partial(timed, name) for name in policies}, rounds, warm_up=1).items():
        found[name]["seconds"] = seconds
    return found


def listed_times(value: str) -> list[float | None]:
    """What `--gate-copy` names."""
    try:
        found = [None if each == "none" else float(each) for each in value.split(",")]
    except ValueError:
        found = [0.0]
    if any(times is not None and times < 1 for times in found):
        raise click.BadParameter(f"{value}: expected none, or numbers of at least 1, with commas")
    return found


@click.command()
@budget_options(tokens=128)
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
def main(
    request: BudgetRequest, text: str, policy: str, copies: Sequence[float | None], json_path: Path | None
) -> None:
    """Print a table for each budget."""
    size, rounds, threads = request.size, request.rounds, request.threads
    activity = tiled(size.layers, size.intermediate, tokens=request.tokens, path=TEXTS[text])
    by_rows = dict.fromkeys(times is not None for times in copies)
    packed = {rows: random_neurons(size, activity.frequency, device="cuda", rows=rows) for rows in by_rows}
    context = PROMPT + request.tokens
    settings = EngineOptions(device="cuda", context=context, cache_type="f16", threads=threads)
    parts = parts_of(packed[copies[0] is not None], context, "f16")
    click.echo(
        f"{device_line()}, {threads} threads; {size.name}, {format_bytes(parts.weights)} of weights, density "
        f"{activity.density:.3f} ({text}), context {context}"
    )
    differences = dict[str, float]()
    for stored in by_rows:
        differences |= check(size, next(times for times in copies if (times is not None) == stored))
    click.echo(f"logits differ from the reference backend's by: {differences}")
    free_memory()
    if request.tune:
        click.echo(bandwidth_tensor(size, threads))

    def run(budget: int) -> dict[str, Any]:
        found = dict[str, Any]()
        for times in copies:
            timed = ours(packed[times is not None], activity, budget, settings, policy.split(","), rounds, times)
            found |= {name if times is None else f"{name}, copies {times:g}": of for name, of in timed.items()}
            free_memory()
        return found

    report = {"device": device_line(), "threads": threads, "size": asdict(size), "check": differences}
    peer = request.peer(parts, mlp=3 * parts.gates[0])
    title = "{} in {}".format
    measure_budgets(
        request, request.budgets(parts), peer, run, partial(title, size.name), lambda found: [], report, json_path
    )
