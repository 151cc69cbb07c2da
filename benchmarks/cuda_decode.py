"""Decoding and prefill on the GPU, of Llamas and many other families: llama.cpp, ours dense, ours sparse.

128 tokens after a prompt of 128, batch 1, each the likeliest after the last, chosen on the GPU and read by the host:
everything that a user waits for. Weights are random, thresholds real ones for them. Dense and sparse decoding take
turns on one engine. Before anything is timed, two layers of each shape are compared with the reference backend.

--llama-bench times a GGUF of the same shape in the same run. Without it the Llamas stand beside anchors: llama.cpp with
random Q4_K weights of the same shapes, measured in November 2026 on an H100.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared.llama_bench import PeerSpeeds, peer_speeds
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import (
    CONTEXT,
    LLAMA_1B,
    LLAMA_7B,
    LLAMA_8B,
    MODELS,
    configuration,
    first_layers,
    llama_config,
    random_ids,
)
from benchmarks.shared.thresholds import Thresholds, find_thresholds, with_thresholds
from benchmarks.shared.timing import (
    announced_bandwidth,
    check_close,
    device_line,
    interleave,
    interleaved,
    json_option,
    of_bound,
    relative_error,
    write_figures,
)
from sparsepack.bench.decode import Activity, bytes_per_token, parameters
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.tables import Table, markdown

LLAMAS = {"8b": LLAMA_8B, "7b": LLAMA_7B, "1b": LLAMA_1B}
NAMES = (*LLAMAS, *MODELS)
DECODE_ANCHORS = {"8b": 283.0, "7b": 303.0}
PREFILL_ANCHORS = {"8b": {512: 9600.0, 2048: 10050.0, 8192: 9690.0}}
SHOWN = 0.5
SPARSITIES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.65, 0.8)
"""Of the 8B Llama."""
PROMPT, NEW = 128, 128
PROMPTS = (32, 128, 512, 2048, 8192)
LIMITS = {"dense": 0.01, "sparse": 0.1}
"""The largest relative error of the logits. Keys and values are bfloat16, which may move inputs across thresholds."""
EXPERT_LIMITS = {"dense": 0.05, "sparse": 0.15}
"""The same of mixtures: rounding may choose another expert for a token."""
HEAD = ["runtime", "skipped", "t/s", "range", "x", "GB/token", "of bandwidth"]
KINDS = ("chosen", "given")
"""The likeliest token is chosen on the GPU and read by the host, or all are given and logits stay on the GPU."""


def config_of(name: str, layers: int | None = None) -> Any:
    """Return the configuration of a name in `NAMES`, with another number of layers if given."""
    changes: dict[str, Any] = {"max_position_embeddings": CONTEXT}
    if layers is not None:
        changes |= first_layers(name, layers) if name in MODELS else {"num_hidden_layers": layers}
    return llama_config(LLAMAS[name], **changes) if name in LLAMAS else configuration(name, **changes)


def random_model(name: str, layers: int | None = None) -> PackedModel:
    """Return a model of it, on the GPU."""
    return random_of(config_of(name, layers), name, config_of(name).num_hidden_layers)


def limits_of(packed: PackedModel) -> Mapping[str, float]:
    """Return the largest errors of a model's logits."""
    return LIMITS if packed.architecture.experts is None else EXPERT_LIMITS


def check(packed: PackedModel) -> dict[str, float]:
    """Return how far logits of a model of two layers are from the reference backend's."""
    limits = limits_of(packed)
    packed = with_thresholds(packed, find_thresholds(packed, [SHOWN])[SHOWN])
    ids = random_ids(packed.architecture.vocabulary, 24, seed=2)
    found = {}
    ours, oracle = (Engine(packed, device="cuda", context=64, backend=name) for name in ("cuda", "reference"))
    for mode, sparse_from in (("dense", len(ids)), ("sparse", 16)):
        a, b = (engine.teacher_forced(ids, sparse_from).double() for engine in (ours, oracle))
        found[f"{mode}, at once"] = check_close(f"{mode}, logits", relative_error(a, b), limits[mode])
    ours.reset()
    first = [ours.prefill(ids[:16]), *(ours.step(id) for id in ids[16:])]
    stepped = relative_error(torch.stack(first).double(), b[15:])
    found["sparse, steps"] = check_close("sparse, logits", stepped, limits["sparse"])
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

    def timed(kind: str, dense: bool) -> tuple[float, Activity]:
        taken = (decode_seconds if kind == "chosen" else teacher_forced_seconds)(engine, ids, dense)
        return taken, engine.activity()

    runs = {
        name_of(kind, dense): partial(timed, kind, dense) for kind in ("chosen", "given") for dense in (True, False)
    }
    results = {}
    for name, samples in interleave(runs, rounds, warm_up=1).items():
        seconds, activity = [taken for taken, _ in samples], samples[-1][1]
        results[name] = {
            "seconds": statistics.median(seconds),
            "range": [min(seconds), max(seconds)],
            "bytes": bytes_per_token(sparse, activity, pads_tails=True),
            "sparsity": skipped_weights(sparse, activity).overall,
        }
    return results


def name_of(kind: str, dense: bool) -> str:
    return f"{'dense' if dense else 'sparse'}, {kind}"


def measure_prefill(packed: PackedModel, rounds: int) -> dict[int, float]:
    """Seconds by length of the prompt."""
    engine = Engine(packed, device="cuda", context=CONTEXT)
    ids = random_ids(packed.architecture.vocabulary, CONTEXT, seed=4)
    runs = {length: partial(prefill_seconds, engine, ids[:length]) for length in PROMPTS}
    return interleaved(runs, rounds, warm_up=2)  # the second one of a size is recorded


def decode_rows(
    result: Mapping[str, Any], bandwidth: float, peers: Sequence[float] = (), kinds: Sequence[str] = KINDS
) -> list[list[str]]:
    """The cells of a row, as `HEAD` has them, for llama.cpp, and for ours dense and sparse of each kind.

    peers -- llama.cpp's tokens a second in each round; none where it did not run
    """
    peer = statistics.median(peers) if peers else 0.0

    def row(name: str, skipped: str, speed: float, low: float, high: float, read: float) -> list[str]:
        ratio, share = f"{speed / peer:.2f}" if peer else "-", of_bound(read, 1 / speed, bandwidth)
        return [name, skipped, f"{speed:.0f}", f"{low:.0f} to {high:.0f}", ratio, f"{read / 1e9:.2f}", share]

    shown = []
    if peers:
        shown.append(row("llama.cpp", "-", peer, min(peers), max(peers), result[name_of(KINDS[0], True)]["bytes"]))
    for name in (name_of(kind, dense) for kind in kinds for dense in (True, False)):
        of, (low, high) = result[name], (1 / s for s in reversed(result[name]["range"]))
        shown.append(row(f"ours, {name}", f"{of['sparsity']:.1%}", 1 / of["seconds"], low, high, of["bytes"]))
    return shown


def peer_of(program: Path | None, name: str, layers: int | None, work: Path, rounds: int) -> PeerSpeeds:
    """Return llama.cpp's speeds with the same shape: measured, else anchors, else none."""
    if program is not None:
        return peer_speeds(program, config_of(name, layers), work, PROMPT, NEW, PROMPTS, rounds)
    click.echo(f"no --llama-bench: llama.cpp's figures are {'anchors' if name in DECODE_ANCHORS else 'missing'}")
    decode = (DECODE_ANCHORS[name],) if name in DECODE_ANCHORS else ()
    return PeerSpeeds(decode, PREFILL_ANCHORS.get(name, {}))


def prompt_table(seconds: Mapping[int, float], peer: Mapping[int, float]) -> Table:
    """Return tokens a second of prompts, by their lengths: ours, and llama.cpp's where they are known."""
    rows = [[str(n), f"{n / s:.0f}", f"{peer[n]:.0f}" if n in peer else "-"] for n, s in seconds.items()]
    return Table(["prompt", "t/s", "llama.cpp"], rows)


@click.command()
@click.option("--model", "names", multiple=True, type=click.Choice(NAMES), default=tuple(LLAMAS), show_default=True)
@click.option("--layers", type=int, help="Of the models, to try the benchmark.")
@click.option("--quick", is_flag=True, help="Two rounds, and no other sparsities than one half.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--only-prompts", is_flag=True, help="Time no decoding.")
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="llama.cpp's, built with CUDA.")
@click.option(
    "--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For llama.cpp's files."
)
@json_option
def main(
    names: tuple[str, ...],
    layers: int | None,
    quick: bool,
    rounds: int,
    only_prompts: bool,
    llama_bench: Path | None,
    work: Path,
    json_path: Path | None,
) -> None:
    """Print the tables."""
    bandwidth, rounds = announced_bandwidth(), 2 if quick else rounds
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    for name in names:
        differences = check(random_model(name, 2))
        click.echo(f"{name}, difference of logits from the reference backend, two layers: {differences}")
        peer = peer_of(llama_bench, name, layers, work, rounds)
        packed = random_model(name, layers)
        tried = () if only_prompts else SPARSITIES if name == "8b" and not quick else (SHOWN,)
        thresholds = find_thresholds(packed, tried) if tried else {}
        results = {sparsity: measure(packed, thresholds[sparsity], rounds) for sparsity in tried}
        title = f"{name}, {parameters(packed) / 1e9:.1f} billion parameters; {PROMPT} + {NEW}"
        if tried:
            click.echo(markdown(Table(HEAD, decode_rows(results[SHOWN], bandwidth, peer.decode), title)))
        if len(tried) > 1:
            rows = [decode_rows(results[each], bandwidth, peer.decode, KINDS[1:])[-1] for each in tried]
            lines = [[f"{each:.0%}", *row[1:]] for each, row in zip(tried, rows, strict=True)]
            click.echo(markdown(Table(["target", *HEAD[1:]], lines)))
        prefill = measure_prefill(packed, rounds)
        click.echo(markdown(prompt_table(prefill, peer.prompts)))
        report[name] = {"check": differences, "decode": results, "peer": vars(peer), "prefill": prefill}
        write_figures(json_path, report)
        del packed
