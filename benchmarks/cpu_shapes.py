"""Decoding on the CPU in the shapes of released models, dense and with half of the weights skipped, beside llama.cpp's
Q4_K of the same shapes, in one run.

Greedy tokens, sampling included, after a prompt; all sides take turns, ratios are taken within a round. Weights are
random, thresholds real ones for them. Before anything is timed, the first layers are compared with the reference
backend: as many as have a block of each kind.
"""

from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.cpu_decode import PEER, decode_ours, decode_peer
from benchmarks.cpu_planes import rows_of
from benchmarks.shared import machine
from benchmarks.shared.checkpoints import DEFAULT_WORK
from benchmarks.shared.llama_bench import write_shape
from benchmarks.shared.llama_cpp import LlamaCpp, bytes_per_token
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import MODELS, configuration, random_ids
from benchmarks.shared.thresholds import find_thresholds, with_thresholds
from benchmarks.shared.timing import check_close, json_option, relative_error, write_figures
from sparsepack.bench import decode as engine_bench
from sparsepack.formats.packed import skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

SKIPPED = 0.5
PROMPT, NEW = 64, 64
CHECKED = 4
"""Layers: in Qwen3.5 the fourth has attention."""
LIMITS = {"dense": 0.05, "sparse": 0.15}
"""The largest relative errors of logits: activations are rounded to 8 bits, states keep errors, and of nearly equal
experts another may be chosen."""
SIDES = {"ours, dense": True, "ours, half skipped": False}


def shape(name: str, layers: int | None) -> Any:
    """Return the configuration of a model, or of its first layers."""
    config = configuration(name, max_position_embeddings=1024)
    return config if layers is None else configuration(name, max_position_embeddings=1024, **first(config, layers))


def first(config: Any, layers: int) -> dict[str, Any]:
    """Return the fields of a configuration that say how many layers there are, of the first ones."""
    kinds = getattr(config, "layer_types", None)
    return {"num_hidden_layers": layers} | ({} if kinds is None else {"layer_types": kinds[:layers]})


def check(name: str, config: Any, threads: int) -> dict[str, float]:
    """Return how far logits of the first layers are from the reference backend's."""
    few = shape(name, min(CHECKED, config.num_hidden_layers))
    packed = random_of(few, name, config.num_hidden_layers, "cpu")
    packed = with_thresholds(packed, find_thresholds(packed, [SKIPPED])[SKIPPED])
    ids = random_ids(packed.architecture.vocabulary, 20, seed=2)
    ours = Engine(packed, context=64, backend="cpu", threads=threads)
    oracle = Engine(packed, context=64, backend="reference")
    found = {}
    for mode, sparse_from in (("dense", len(ids)), ("sparse", 16)):
        error = relative_error(ours.teacher_forced(ids, sparse_from), oracle.teacher_forced(ids, sparse_from))
        found[mode] = check_close(f"{mode}, logits", error, LIMITS[mode])
    return found


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="qwen3.5-0.8b", show_default=True)
@click.option("--layers", type=int, help="Of the model, to try the benchmark.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@json_option
def main(name: str, layers: int | None, work: Path, threads: int, rounds: int, json_path: Path | None) -> None:
    """Print the table of one model."""
    torch.set_num_threads(threads)
    config = shape(name, layers)
    errors = check(name, config, threads)
    click.echo(
        ", ".join(f"{mode}: logits differ from the reference's by {error:.1e}" for mode, error in errors.items())
    )
    packed = random_of(config, name, configuration(name).num_hidden_layers, "cpu")
    packed = with_thresholds(packed, find_thresholds(packed, [SKIPPED])[SKIPPED])
    engine = Engine(packed, context=PROMPT + NEW, backend="cpu", threads=threads)
    work.mkdir(parents=True, exist_ok=True)
    path = write_shape(work / f"{name}.peer.gguf", config)
    peer = LlamaCpp(path, PROMPT + NEW)
    peer.threads(threads)
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    speeds: dict[str, list[float]] = {}
    read, skipped = {PEER: float(bytes_per_token(path))}, {PEER: ""}
    for _ in range(rounds):
        speeds.setdefault(PEER, []).append(decode_peer(peer, prompt, NEW))
        for side, dense in SIDES.items():
            speeds.setdefault(side, []).append(decode_ours(engine, dense, prompt, NEW))
            activity = engine.activity()
            read[side] = engine_bench.bytes_per_token(packed, activity)
            skipped[side] = f"{skipped_weights(packed, activity).overall:.1%}"
    peer.close()
    path.unlink()
    click.echo(machine.setting_line(machine.setting()))
    head = ["runs", "skipped", "MB/token", "t/s", "range", "x llama.cpp", "GB/s"]
    click.echo(markdown(Table(head, rows_of(speeds, skipped, read), f"{name}, {threads} threads, {rounds} rounds")))
    write_figures(json_path, {"model": name, "speeds": speeds, "read": read, "skipped": skipped, "errors": errors})
