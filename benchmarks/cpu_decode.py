"""Our engine against llama.cpp on a billion-parameter Llama in Q4_K: decoding, prefill, loading, memory.

    python benchmarks/cpu_decode.py [--work FOLDER] [--quick] [--tiny] [--backend cpu]

Decoding: greedy, sampling included, after a prompt, both sides in turns in one process; ratios are taken within a round
and their median printed. Outputs are compared with the stock model's first, and nothing is timed where they differ.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import cpu_setting
from cpu_decode_check import Checks
from cpu_decode_table import show
from cpu_engine import CONTEXT, decode_ours, open_engine
from figures import json_option, write_figures
from llama_cpp_peer import LlamaCpp, bytes_per_token, expect_runs
from synthetic import BILLION, DEFAULT_WORK, TINY, Synthetic, random_ids, synthetic

from sparsepack.bench import decode as traffic
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.skipped import skipped_weights

PEER = "llama.cpp Q4_K"
NAMES = {"dense": "ours, dense", "0.5": "ours, 50 % active", "0.75": "ours, 25 % active"}


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    prompt: int = 64
    generated: int = 64
    rounds: int = 9
    prefill: int = 512
    prefill_rounds: int = 3
    loads: int = 3


QUICK = Plan(rounds=3, prefill_rounds=1, loads=1)


@dataclass
class Measured:
    """Tokens a second of every round by name, at one number of threads."""

    decode: dict[str, list[float]] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)
    activity: dict[str, traffic.Activity] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)


def decode_peer(peer: LlamaCpp, prompt: list[int], count: int) -> float:
    """Tokens a second of llama.cpp."""
    peer.reset()
    peer.decode(prompt)
    id = peer.choose()
    start = time.perf_counter()
    for _ in range(count):
        peer.decode([id])
        id = peer.choose()
    return count / (time.perf_counter() - start)


def measure(model: Synthetic, checks: Checks, peer: LlamaCpp, backend: str, threads: int, plan: Plan) -> Measured:
    """Check, then time, everything at one number of threads."""
    engines = {str(s): open_engine(model.packed(s), backend, threads) for s in model.thresholds}
    engines["dense"] = engines[str(min(model.thresholds))]
    peer.threads(threads)
    result = Measured(errors={PEER: checks.peer(peer)})
    result.errors |= {name: checks.engine(engines[name], name) for name in NAMES}
    ids = random_ids(engines["dense"].architecture.vocabulary, max(plan.prompt, plan.prefill), seed=3)
    for number in range(plan.rounds):
        _decode_round(result, engines, peer, ids[: plan.prompt], plan.generated)
        result.bandwidth.append(cpu_setting.read_bandwidth(threads))
        if number < plan.prefill_rounds:
            _prefill_round(result, engines["dense"], peer, ids[: plan.prefill])
    return result


def _decode_round(result: Measured, engines: dict[str, Engine], peer: LlamaCpp, prompt: list[int], count: int) -> None:
    result.decode.setdefault(PEER, []).append(decode_peer(peer, prompt, count))
    for name in NAMES:
        speed = decode_ours(engines[name], name == "dense", prompt, count)
        result.decode.setdefault(name, []).append(speed)
        result.activity[name] = engines[name].activity()


def _prefill_round(result: Measured, engine: Engine, peer: LlamaCpp, ids: list[int]) -> None:
    def timed(name: str, reset: Callable[[], None], run: Callable[[list[int]], Any]) -> None:
        reset()
        start = time.perf_counter()
        run(ids)
        result.prefill.setdefault(name, []).append(len(ids) / (time.perf_counter() - start))

    timed(PEER, peer.reset, peer.decode)
    timed("dense", engine.reset, engine.prefill)


def decode_rows(model: Synthetic, results: dict[int, Measured]) -> list[dict[str, Any]]:
    """A row per number of threads and engine."""
    packed = model.packed()
    rows = []
    for threads, result in results.items():
        bandwidth = statistics.median(result.bandwidth)
        for name, speeds in result.decode.items():
            ours, speed = name != PEER, statistics.median(speeds)
            activity = result.activity.get(name, {})
            needed = traffic.bytes_per_token(packed, activity) if ours else bytes_per_token(model.plain)
            rows.append(
                {
                    "threads": threads,
                    "engine": NAMES.get(name, name),
                    "tokens_per_second": speed,
                    "range": [min(speeds), max(speeds)],
                    "ratio": cpu_setting.median_ratio(speeds, result.decode[PEER]),
                    "best_ratio": max(speeds) / max(result.decode[PEER]),
                    "skipped": skipped_weights(packed, activity).overall if ours else 0.0,
                    "bytes_per_token": needed,
                    "bandwidth_share": needed * speed / bandwidth,
                    "read_bandwidth": bandwidth,
                    "relative_error": result.errors[name],
                    "samples": speeds,
                }
            )
    return rows


def prefill_rows(results: dict[int, Measured]) -> list[dict[str, Any]]:
    """A row per number of threads and engine."""
    return [
        {
            "threads": threads,
            "engine": NAMES.get(name, name),
            "tokens_per_second": statistics.median(speeds),
            "ratio": cpu_setting.median_ratio(speeds, result.prefill[PEER]),
            "samples": speeds,
        }
        for threads, result in results.items()
        for name, speeds in result.prefill.items()
    ]


def load_rows(model: Synthetic, backend: str, threads: int, times: int) -> list[dict[str, Any]]:
    """Loads in processes of their own, in turns; the median of the times, the largest of the memory."""
    packed = model.packed().architecture
    cache = 2 * packed.layers * packed.kv_heads * packed.head_dim * CONTEXT * 2  # keys and values in f16
    cases = {
        f"{PEER}, from the disk": [str(model.plain), "--backend", "llama.cpp", "--cold"],
        "ours, from the disk": [str(model.zigzag), "--backend", backend, "--verify", "--cold"],
        f"{PEER}, from the page cache": [str(model.plain), "--backend", "llama.cpp"],
        "ours, from the page cache": [str(model.zigzag), "--backend", backend, "--verify"],
    }
    script = [sys.executable, str(Path(__file__).with_name("cpu_load.py")), "--threads", str(threads)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(times):
        for name, arguments in cases.items():
            done = subprocess.run([*script, *arguments], check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for name, loads in found.items():
        peak, before = (max(load[key] for load in loads) for key in ("peak_bytes", "before_bytes"))
        size = loads[0]["file_bytes"] + cache
        rows.append(
            {
                "engine": name,
                "load_seconds": statistics.median(load["load_seconds"] for load in loads),
                "read_seconds": statistics.median(load["read_seconds"] for load in loads),
                "load_over_read": statistics.median(load["load_seconds"] / load["read_seconds"] for load in loads),
                "peak_bytes": peak,
                "before_bytes": before,
                "file_and_cache_bytes": size,
                "peak_over_file_and_cache": peak / size,
                "added_over_file_and_cache": (peak - before) / size,
            }
        )
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option("--tiny", is_flag=True, help="A tiny model, to try the script; its figures mean nothing.")
@click.option("--backend", default="cpu", show_default=True)
@click.option("--threads", "threads", multiple=True, type=int, default=(2, 1), show_default=True)
@json_option
def main(work: Path, quick: bool, tiny: bool, backend: str, threads: tuple[int, ...], json_path: Path | None) -> None:
    """Print the tables."""
    found, plan = cpu_setting.setting(), QUICK if quick else Plan()
    model = synthetic(work, TINY if tiny else BILLION)
    expect_runs(model.plain)  # processes that load it would crash
    loads = load_rows(model, backend, max(threads), plan.loads)
    checks = Checks(model, model.packed().architecture.vocabulary)
    peer = LlamaCpp(model.plain, CONTEXT, plan.prefill)
    results = {count: measure(model, checks, peer, backend, count, plan) for count in threads}
    result = {
        "setting": found,
        "plan": vars(plan),
        "context": CONTEXT,
        "backend": backend,
        "decode": decode_rows(model, results),
        "prefill": prefill_rows(results),
        "load": loads,
        "read_bandwidth": {count: it.bandwidth for count, it in results.items()},
    }
    write_figures(json_path, result)
    print(show(result))


if __name__ == "__main__":
    main()
