"""Decoding on the CPU with planes, beside llama.cpp's Q4_K and zigzag-q4_k on the same shapes, in one run.

Greedy tokens, sampling included, after a prompt; all sides take turns, ratios are taken within a round. Weights are
random, and levels follow the inputs' sizes, about a bit for each doubling. Before anything is timed, two layers are
compared with the reference backend. Several sequences together are timed beside one.
"""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.cpu_decode import PEER, decode_ours, decode_peer
from benchmarks.shared import machine
from benchmarks.shared.checkpoints import DEFAULT_WORK, synthetic
from benchmarks.shared.llama_cpp import LlamaCpp, bytes_per_token
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import BILLION, TINY, Size, llama_config, random_ids
from benchmarks.shared.thresholds import find_levels, with_limits
from benchmarks.shared.timing import check_close, json_option, median_ratio, relative_error, write_figures
from sparsepack.bench import decode as engine_bench
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

BITS = (4.5, 3.4, 2.8)
"""Read of a weight."""
OF_ALL = 6.25
PROMPT, NEW = 16, 32
SEVERAL = 4


def random_planes(size: Size, layers: int | None = None) -> PackedModel:
    """Return a model of a size in zigzag-q6_p, or the first layers of one."""
    config = llama_config(size, num_hidden_layers=layers or size.layers)
    return random_of(config, size.name, size.layers, "cpu", "Q6_P")


def check(size: Size, threads: int) -> float:
    """Return how far logits of two layers are from the reference backend's, at 3.4 bits."""
    packed = random_planes(size, 2)
    packed = with_limits(packed, find_levels(packed, [3.4])[3.4])
    ids = random_ids(size.vocabulary, 20, seed=2)
    found = Engine(packed, context=64, backend="cpu", threads=threads).teacher_forced(ids, 16)
    expected = Engine(packed, context=64, backend="reference").teacher_forced(ids, 16)
    return check_close("logits", relative_error(found, expected), 0.1)


def decode_several(engine: Engine, prompt: list[int], count: int) -> float:
    """Return tokens a second of all sequences together."""
    engine.reset()
    for sequence in range(SEVERAL):
        engine.prefill([*prompt[:-1], sequence + 1], sequence)
    ids: list[int | None] = [*range(SEVERAL)]
    start = time.perf_counter()
    for _ in range(count):
        ids = [int(row.argmax()) for row in engine.step_all(ids)]
    return SEVERAL * count / (time.perf_counter() - start)


def rows_of(speeds: Mapping[str, list[float]], said: Mapping[str, str], read: Mapping[str, float]) -> list[list[str]]:
    """Return the cells of the table, by side. said: its second column"""
    return [
        [
            side,
            said.get(side, ""),
            f"{read[side] / 1e6:.0f}",
            f"{statistics.median(each):.1f}",
            f"{min(each):.1f} to {max(each):.1f}",
            f"{median_ratio(each, speeds[PEER]):.2f}",
            f"{read[side] * statistics.median(each) / 1e9:.1f}",
        ]
        for side, each in speeds.items()
    ]


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--tiny", is_flag=True, help="A tiny model, to try the benchmark; its figures mean nothing.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@json_option
def main(work: Path, tiny: bool, threads: int, rounds: int, json_path: Path | None) -> None:
    """Print the tables."""
    size = TINY if tiny else BILLION
    torch.set_num_threads(threads)
    files = synthetic(work, size)
    click.echo(f"two layers: logits differ from the reference backend's by {check(size, threads):.1e}")
    planes = random_planes(size)
    limits = find_levels(planes, BITS)
    models = {"zigzag-q4_k, dense": files.packed(), f"zigzag-q6_p, dense ({OF_ALL} bits)": planes}
    models |= {f"zigzag-q6_p, {bits} bits": with_limits(planes, limits[bits]) for bits in BITS}
    new_engine = partial(Engine, context=PROMPT + NEW, backend="cpu", threads=threads)
    engines = {side: new_engine(packed) for side, packed in models.items()}
    together = {side: new_engine(models[side], sequences=SEVERAL) for side in (*list(models)[:1], *list(models)[3:4])}
    peer = LlamaCpp(files.plain, PROMPT + NEW)
    peer.threads(threads)
    prompt = random_ids(size.vocabulary, PROMPT, seed=3)
    speeds: dict[str, list[float]] = {}
    several: dict[str, list[float]] = {}
    for _ in range(rounds):
        speeds.setdefault(PEER, []).append(decode_peer(peer, prompt, NEW))
        for side, engine in engines.items():
            speeds.setdefault(side, []).append(decode_ours(engine, False, prompt, NEW))
        for side, engine in together.items():
            several.setdefault(side, []).append(decode_several(engine, prompt, NEW // SEVERAL))
    read = {PEER: float(bytes_per_token(files.plain))}
    read |= {side: engine_bench.bytes_per_token(models[side], engine.activity()) for side, engine in engines.items()}
    bits = {
        side: OF_ALL * (1 - skipped_weights(models[side], engine.activity()).overall)
        for side, engine in engines.items()
        if models[side].block == "Q6_P"
    }
    click.echo(machine.setting_line(machine.setting()))
    head = ["runs", "bits read", "MB/token", "t/s", "range", "x llama.cpp", "GB/s"]
    said = {side: f"{of:.2f}" for side, of in bits.items()}
    click.echo(markdown(Table(head, rows_of(speeds, said, read), f"{size.name}, {threads} threads, {rounds} rounds")))
    base = next(iter(several))
    lines = [[s, f"{statistics.median(v):.1f}", f"{median_ratio(v, several[base]):.2f}"] for s, v in several.items()]
    click.echo(markdown(Table(["runs", "t/s", "x"], lines, f"{SEVERAL} sequences together")))
    write_figures(json_path, {"speeds": speeds, "several": several, "bits": bits, "read": read})
