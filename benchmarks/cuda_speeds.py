"""How fast models decode on the GPU, and read prompts: what `cuda_decode.py` and `cuda_families.py` measure alike.

128 tokens after a prompt of 128, batch 1, each the likeliest after the last, chosen on the GPU and read by the host:
everything that a user waits for. Dense and sparse decoding take turns on one engine.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from asked import asked_as
from cuda_synthetic import CONTEXT
from figures import json_option
from llama_cpp_file import PeerSpeeds, peer_speeds
from nearness import expect_near, relative_error
from synthetic import random_ids
from thresholds import Thresholds, find_thresholds, with_thresholds
from turns import in_turns, interleaved

from sparsepack.bench import decode as traffic
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.skipped import skipped_weights
from sparsepack.tables import Table

SHOWN = 0.5
PROMPT, NEW = 128, 128
PROMPTS = (128, 512, 2048, 8192)
LIMITS = {"dense": 0.01, "sparse": 0.1}
"""The largest relative error of the logits. Keys and values are bfloat16, which may move inputs across thresholds."""
HEAD = ["runtime", "skipped", "t/s", "range", "x", "GB/token", "of bandwidth"]
KINDS = ("chosen", "given")
"""The likeliest token is chosen on the GPU and read by the host, or all are given and logits stay on the GPU."""


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
            "bytes": traffic.bytes_per_token(sparse, activity, pads_tails=True),
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
    return interleaved(runs, rounds, warm_up=1)


def decode_rows(
    result: Mapping[str, Any], bandwidth: float, peers: Sequence[float] = (), kinds: Sequence[str] = KINDS
) -> list[list[str]]:
    """The cells of a row, as `HEAD` has them, for llama.cpp, and for ours dense and sparse of each kind.

    peers -- llama.cpp's tokens a second in each round; none where it did not run
    """
    peer = statistics.median(peers) if peers else 0.0

    def row(name: str, skipped: str, speed: float, low: float, high: float, read: float) -> list[str]:
        ratio, share = f"{speed / peer:.2f}" if peer else "-", f"{read * speed / bandwidth:.0%}"
        return [name, skipped, f"{speed:.0f}", f"{low:.0f} to {high:.0f}", ratio, f"{read / 1e9:.2f}", share]

    shown = []
    if peers:
        shown.append(row("llama.cpp", "-", peer, min(peers), max(peers), result[name_of(KINDS[0], True)]["bytes"]))
    for name in (name_of(kind, dense) for kind in kinds for dense in (True, False)):
        of, (low, high) = result[name], (1 / s for s in reversed(result[name]["range"]))
        shown.append(row(f"ours, {name}", f"{of['sparsity']:.1%}", 1 / of["seconds"], low, high, of["bytes"]))
    return shown


def peer_of(program: Path | None, config: Any, work: Path, rounds: int) -> PeerSpeeds:
    """llama.cpp's speeds with the shape of a configuration; none without the program."""
    if program is None:
        click.echo("no --llama-bench: the peer was not run")
        return PeerSpeeds()
    return peer_speeds(program, config, work, PROMPT, NEW, PROMPTS, rounds)


def prompt_table(seconds: Mapping[int, float], peer: Mapping[int, float]) -> Table:
    """Tokens a second of prompts, by their lengths: ours, and llama.cpp's where they are known."""
    rows = [[str(n), f"{n / s:.0f}", f"{peer[n]:.0f}" if n in peer else "-"] for n, s in seconds.items()]
    return Table(["prompt", "t/s", "llama.cpp"], rows)


@dataclass(frozen=True)
class Asked:
    """What a script that measures decoding is asked for.

    names -- of the models; layers -- of each, None: all that it has
    quick -- no other sparsities than one half
    work  -- the folder for files of llama.cpp's, which llama_bench times; that None: nobody does
    """

    quick: bool
    names: tuple[str, ...]
    layers: int | None
    rounds: int
    json_path: Path | None
    llama_bench: Path | None
    work: Path


def decode_options(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of scripts that measure decoding of models with these names, all unless told otherwise."""

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
        click.option(
            "--llama-bench",
            type=click.Path(path_type=Path, exists=True),
            help="llama.cpp's, built with CUDA: the peer.",
        ),
        click.option(
            "--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For llama.cpp's files."
        ),
    )

    return asked_as(Asked, options)
