"""Our CPU engine on a mixture that is random in its packed form, and a llama-bench on a GGUF of its shape: for machines
where llama-cpp-python is not installed, and where a minute has to do.

    python benchmarks/cpu_experts_random.py [--threads 2] [--rounds 5] [--llama-bench PATH] [--tiny] [--json FILE]

The shape is cpu_experts.py's, and so is what is decoded: the likeliest token, 64 times after a prompt of 64. Two blocks
are compared with the reference backend first. The program and ours take turns; ratios are taken within a round.
"""

import json
import os
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
from cpu_engine import CONTEXT, decode_ours, open_engine
from cuda_synthetic import random_of
from figures import json_option, write_figures
from llama_cpp_file import write_shape
from llama_cpp_offload import runner
from mixtures import THREE_BILLION, TINY, Mixture, configuration
from nearness import expect_near, relative_error
from synthetic import random_ids
from thresholds import find_thresholds, with_thresholds

from sparsepack.bench import decode as traffic
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.tables import Table, markdown

PROMPT, GENERATED, CHECKED, SPARSITY = 64, 64, 24, 0.5
PEER, DENSE, SPARSE = "llama.cpp Q4_K", "ours, dense", "ours, half skipped"
LARGEST_ERROR = 0.05
"""Of dense logits, relative: a rounding may choose another expert for a token."""


def random_mixture(size: Mixture, layers: int) -> PackedModel:
    """A mixture of so many of its layers."""
    config = configuration(size, num_hidden_layers=layers, max_position_embeddings=CONTEXT)
    return random_of(config, size.name, size.layers, "cpu")


def check(size: Mixture, threads: int) -> float:
    """How far dense logits of two blocks are from the reference backend's. RuntimeError where it is too far."""
    packed, ids = random_mixture(size, 2), random_ids(size.vocabulary, CHECKED, seed=2)
    ours, oracle = (open_engine(packed, name, threads).teacher_forced(ids, CHECKED) for name in ("cpu", "reference"))
    return expect_near("dense logits", relative_error(ours, oracle), LARGEST_ERROR)


def peer_speed(program: Path, model: Path, threads: int) -> float:
    """llama.cpp's tokens a second after a prompt, without a GPU."""
    sizes = ["-p", "0", "-n", str(GENERATED), "-d", str(PROMPT), "-r", "1"]
    written, _ = runner(program)(["-m", str(model), "-o", "json", "-ngl", "0", "-t", str(threads), "-fa", "1", *sizes])
    (row,) = json.loads(written)
    return float(row["avg_ts"])


@click.command()
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="llama.cpp's.")
@click.option("--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For its file.")
@click.option("--tiny", is_flag=True, help="A tiny model, to try the script; its figures mean nothing.")
@json_option
def main(threads: int, rounds: int, llama_bench: Path | None, work: Path, tiny: bool, json_path: Path | None) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    size = TINY if tiny else THREE_BILLION
    difference = check(size, threads)
    model = (
        None
        if llama_bench is None
        else write_shape(work / f"{size.name}-peer.gguf", configuration(size, max_position_embeddings=CONTEXT))
    )
    packed = random_mixture(size, size.layers)
    packed = with_thresholds(packed, find_thresholds(packed, [SPARSITY])[SPARSITY])
    engine, prompt = open_engine(packed, "cpu", threads), random_ids(size.vocabulary, PROMPT, seed=3)
    speeds: dict[str, list[float]] = {PEER: [], DENSE: [], SPARSE: []}
    bytes_of: dict[str, float] = {}
    bandwidth = []
    for _ in range(rounds):
        if llama_bench is not None and model is not None:
            speeds[PEER].append(peer_speed(llama_bench, model, threads))
        for name in (DENSE, SPARSE):
            speeds[name].append(decode_ours(engine, name == DENSE, prompt, GENERATED))
            bytes_of[name] = traffic.bytes_per_token(packed, engine.activity())
        bandwidth.append(native().read_bandwidth(1 << 30, threads, 3))
    if model is not None:
        model.unlink()
    rows = [row(name, found, speeds[PEER], bytes_of.get(name, bytes_of[DENSE])) for name, found in speeds.items()]
    where = f"{cpu_info()}, {len(os.sched_getaffinity(0))} of its cores, {instruction_set()}"
    title = f"{datetime.now(UTC):%Y-%m-%d}, {where}, {threads} threads; read bandwidth {max(bandwidth) / 1e9:.1f} GB/s"
    head = ["engine", "t/s", "x", "MB a token", "GB/s"]
    click.echo(markdown(Table(head, [each["shown"] for each in rows if each["samples"]], title)))
    found = {"where": where, "threads": threads, "difference": difference, "bandwidth": bandwidth, "decode": rows}
    write_figures(json_path, found)


def row(name: str, speeds: list[float], peers: list[float], bytes_: float) -> dict[str, Any]:
    """A row of the table; the peer is taken to read what ours reads dense."""
    speed = statistics.median(speeds) if speeds else 0.0
    ratio = statistics.median(ours / peer for ours, peer in zip(speeds, peers, strict=True)) if peers else None
    spread = f"{speed:.1f} ({min(speeds, default=0):.1f} to {max(speeds, default=0):.1f})"
    shown = [
        name,
        spread,
        "-" if ratio is None else f"{ratio:.2f}",
        f"{bytes_ / 1e6:.0f}",
        f"{speed * bytes_ / 1e9:.1f}",
    ]
    return {"engine": name, "samples": speeds, "ratio": ratio, "bytes_per_token": bytes_, "shown": shown}


if __name__ == "__main__":
    main()
