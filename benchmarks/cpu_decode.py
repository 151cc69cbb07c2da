"""Our CPU engine against llama.cpp on a billion-parameter Llama in Q4_K: decoding, prefill, loading, memory.

Decoding: greedy, sampling included, after a prompt, both sides in turns in one process; ratios are taken within a round
and their median printed. Outputs of both are compared first with the stock model's with their own dequantised weights.
Dense logits must agree. Sparse ones cannot to the last bits: an input so close to its threshold that rounding decides
is worth more than all rounding, and in a random model it moves others across theirs. How far that carries is measured
on the stock model itself, with every site's input changed by 0.01 %: ours may be half as much again off, and as active.

Each load is timed in a process of its own, so that the peak of memory is this model's, beside reading the file.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared import machine
from benchmarks.shared.checkpoints import DEFAULT_WORK, Synthetic, synthetic
from benchmarks.shared.ik_llama_cpp import IkLlamaCpp
from benchmarks.shared.llama_cpp import LlamaCpp, bytes_per_token, check_logits, expect_runs
from benchmarks.shared.shapes import BILLION, TINY, random_ids
from benchmarks.shared.timing import check_close, json_option, median_ratio, of_bound, relative_error, write_figures
from sparsepack.bench import decode as engine_bench
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import skipped_weights
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.tables import Table, markdown

CONTEXT = 1024
PEER = "llama.cpp Q4_K"
NAMES = {"dense": "ours, dense", "0.5": "ours, 50 % active", "0.75": "ours, 25 % active"}
CHECKED, CHECKED_PROMPT = 32, 16
DENSE_LIMIT = 2e-3
NOISE, NOISE_FACTOR = 1e-4, 1.5
SMALLEST_LIMIT = 0.05
"""In a small model the noise may move no input across its threshold, and our rounding one."""
ACTIVITY_LIMIT = 0.02
"""Of a site's share of active columns, over the positions that are compared."""
STEADY = 1.3
"""The fastest round over the slowest; beyond it something else ran on the machine."""
STEPS = 8
"""Steps behind a load."""


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
PROMPTS = Plan(rounds=0, prefill_rounds=7, loads=0)


@dataclass(frozen=True)
class Expected:
    """logits after the prompt and after each later token: float32 [17, vocabulary]; active share by (layer, site)."""

    logits: torch.Tensor
    activity: Mapping[tuple[int, str], float]
    limit: float


class Checks:
    """What the stock models say to one short text, and whether others say the same. RuntimeError where they do not."""

    def __init__(self, model: Synthetic, vocabulary: int) -> None:
        self.ids = random_ids(vocabulary, CHECKED, seed=2)
        plain = open_subject(str(model.plain))
        self._peer, _ = self._stock(plain, {})
        del plain
        gc.collect()
        zigzag = open_subject(str(model.zigzag))
        self._ours = {"dense": Expected(*self._stock(zigzag, {}), DENSE_LIMIT)}
        for sparsity, table in model.thresholds.items():
            logits, activity = self._stock(zigzag, table)
            disturbed, _ = self._stock(zigzag, table, NOISE)
            limit = max(SMALLEST_LIMIT, NOISE_FACTOR * median_error(disturbed, logits))
            self._ours[str(sparsity)] = Expected(logits, activity, limit)

    @torch.inference_mode()
    def _stock(
        self, subject: Subject, thresholds: Mapping[tuple[int, str], float], noise: float = 0.0
    ) -> tuple[torch.Tensor, dict[tuple[int, str], float]]:
        """Logits and activity of the stock model with the tokens after the prompt sparse."""
        activity: dict[tuple[int, str], float] = {}
        generator = torch.Generator().manual_seed(0)

        def sparsify(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            if (layer, site) not in thresholds:
                return None
            if noise:
                x = x * (1 + noise * torch.randn(x.shape, generator=generator))
            active = x.abs() > thresholds[layer, site]
            activity[layer, site] = active[:, CHECKED_PROMPT:].float().mean().item()
            prompt = torch.arange(x.shape[1])[:, None] < CHECKED_PROMPT
            return torch.where(active | prompt, x, 0)

        with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, sparsify):
            logits: torch.Tensor = subject.model(torch.tensor([self.ids]), use_cache=False).logits[
                0, CHECKED_PROMPT - 1 :
            ]
        return logits.clone(), activity

    def peer(self, peer: LlamaCpp | IkLlamaCpp) -> float:
        """llama.cpp's relative error."""
        return check_logits(peer, self.ids[:CHECKED_PROMPT], self.ids[CHECKED_PROMPT:], self._peer)

    def engine(self, engine: Engine, name: str) -> float:
        """Our relative error, `name` being "dense" or the sparsity; of a sparse engine the median over positions."""
        expected = self._ours[name]
        engine.dense = name == "dense"
        engine.reset()
        found = torch.stack([(engine.step(p[0]) if n else engine.prefill(p)) for n, p in enumerate(self._pieces())])
        error = (relative_error if name == "dense" else median_error)(found, expected.logits)
        check_close(f"{name}, logits", error, expected.limit)
        for site, share in engine.activity().items():
            expected_share = expected.activity.get(site, 1.0)
            check_close(f"{name}, active columns of {site}", abs(share - expected_share), ACTIVITY_LIMIT)
        self._expect_same_choices(engine, name, found)
        return error

    def _expect_same_choices(self, engine: Engine, name: str, logits: torch.Tensor) -> None:
        """What is timed is `decode_next`."""
        sampler = Sampler(Sampling(temperature=0.0))
        engine.reset()
        engine.prefill(self.ids[:CHECKED_PROMPT])
        chosen = [engine.decode_next(id, sampler) for id in self.ids[CHECKED_PROMPT:]]
        if chosen != logits[1:].argmax(-1).tolist():
            raise RuntimeError(f"{name}: does not choose the likeliest token; not timed")

    def _pieces(self) -> list[list[int]]:
        return [self.ids[:CHECKED_PROMPT], *([id] for id in self.ids[CHECKED_PROMPT:])]


def median_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def open_engine(model: Synthetic, sparsity: float, threads: int) -> Engine:
    """Return our engine with so many threads."""
    torch.set_num_threads(threads)
    return Engine(model.packed(sparsity), context=CONTEXT, backend="cpu", threads=threads)


def decode_ours(engine: Engine, dense: bool, prompt: list[int], count: int) -> float:
    """Return our tokens a second."""
    engine.reset()
    engine.dense = dense
    sampler = Sampler(Sampling(temperature=0.0))
    id = sampler.choose(engine.prefill(prompt))
    start = time.perf_counter()
    for _ in range(count):
        id = engine.decode_next(id, sampler)
    return count / (time.perf_counter() - start)


def decode_peer(peer: LlamaCpp, prompt: list[int], count: int) -> float:
    """Return llama.cpp's tokens a second."""
    peer.reset()
    peer.decode(prompt)
    id = peer.choose()
    start = time.perf_counter()
    for _ in range(count):
        peer.decode([id])
        id = peer.choose()
    return count / (time.perf_counter() - start)


def prefill_speeds(reset: Callable[[], None], run: Callable[[list[int]], Any], ids: list[int]) -> tuple[float, float]:
    """Return the tokens of a prompt a second, and a second of all threads: beside other programs these vary less."""
    reset()
    start, used = time.perf_counter(), time.process_time()
    run(ids)
    return len(ids) / (time.perf_counter() - start), len(ids) / (time.process_time() - used)


@dataclass
class Measured:
    """Tokens a second of every round by name, at one number of threads."""

    decode: dict[str, list[float]] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)
    prefill_of_processor: dict[str, list[float]] = field(default_factory=dict)
    activity: dict[str, engine_bench.Activity] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)


def measure(
    model: Synthetic, checks: Checks, peer: LlamaCpp, others: Mapping[str, IkLlamaCpp], threads: int, plan: Plan
) -> Measured:
    """Check, then time, everything at one number of threads; `others` read the prompt alone."""
    engines = {str(s): open_engine(model, s, threads) for s in model.thresholds}
    engines["dense"] = engines[str(min(model.thresholds))]
    peer.threads(threads)
    for other in others.values():
        other.threads(threads)
    result = Measured(errors={PEER: checks.peer(peer)})
    result.errors |= {name: checks.engine(engines[name], name) for name in NAMES}
    result.errors |= {name: checks.peer(other) for name, other in others.items()}
    ids = random_ids(engines["dense"].architecture.vocabulary, max(plan.prompt, plan.prefill), seed=3)
    prompt, long = ids[: plan.prompt], ids[: plan.prefill]
    dense = engines["dense"]
    runs: dict[str, tuple[Callable[[], None], Callable[[list[int]], Any]]] = {PEER: (peer.reset, peer.decode)}
    runs |= {name: (other.reset, other.decode) for name, other in others.items()}
    runs["dense"] = (dense.reset, dense.prefill)
    for _ in range(plan.prefill_rounds):
        for name, (reset, run) in runs.items():
            speed, of_processor = prefill_speeds(reset, run, long)
            result.prefill.setdefault(name, []).append(speed)
            result.prefill_of_processor.setdefault(name, []).append(of_processor)
    for _ in range(plan.rounds):
        result.decode.setdefault(PEER, []).append(decode_peer(peer, prompt, plan.generated))
        for name in NAMES:
            speed = decode_ours(engines[name], name == "dense", prompt, plan.generated)
            result.decode.setdefault(name, []).append(speed)
            result.activity[name] = engines[name].activity()
        result.bandwidth.append(machine.cpu_read_bandwidth(threads))
    return result


def decode_rows(model: Synthetic, results: Mapping[int, Measured]) -> list[list[str]]:
    """Return a row for each number of threads and engine."""
    packed, rows = model.packed(), []
    for threads, result in results.items():
        bandwidth = statistics.median(result.bandwidth)
        for name, speeds in result.decode.items():
            speed, activity = statistics.median(speeds), result.activity.get(name, {})
            needed = engine_bench.bytes_per_token(packed, activity) if name != PEER else bytes_per_token(model.plain)
            skipped = skipped_weights(packed, activity).overall if name != PEER else 0.0
            disturbed = " (disturbed)" if max(speeds) > STEADY * min(speeds) else ""
            rows.append(
                [
                    str(threads),
                    NAMES.get(name, name),
                    f"{speed:.1f}",
                    f"{min(speeds):.1f} to {max(speeds):.1f}{disturbed}",
                    f"{median_ratio(speeds, result.decode[PEER]):.2f}",
                    f"{skipped:.1%}",
                    f"{needed / 1e6:.0f}",
                    f"{of_bound(needed, 1 / speed, bandwidth)} of {bandwidth / 1e9:.1f}",
                    f"{result.errors[name]:.1e}",
                ]
            )
    return rows


def read_seconds(path: Path) -> float:
    """Return the seconds of reading a file as cat does: into one small buffer, over and over."""
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def drop_from_page_cache(path: Path) -> None:
    """Put a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_bytes(which: str) -> int:
    """Return the resident memory of this process, mapped files included: "VmRSS" now, "VmHWM" the most ever.

    Not `getrusage`, whose peak counts the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


def load_once(path: Path, engine: str, threads: int, cold: bool) -> dict[str, float]:
    """Return what one load takes in this process; `cold`: from the disk, not from the page cache."""
    torch.set_num_threads(threads)
    if engine == PEER:
        expect_runs(path)
    else:
        from sparsepack.runtime.cpu.machine import native

        native()  # linking the kernels is no part of loading a model
    if cold:
        drop_from_page_cache(path)
        reading = read_seconds(path)
        drop_from_page_cache(path)
    else:
        reading = min(read_seconds(path) for _ in range(4))
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    if engine == PEER:
        peer = LlamaCpp(path, CONTEXT)
        loading = time.perf_counter() - start
        peer.threads(threads)
        for ids in [[1, 2, 3], *[[4]] * STEPS]:
            peer.decode(ids)
    else:
        ours = Engine(read_packed(path, verify=True), context=CONTEXT, backend="cpu", threads=threads)
        loading = time.perf_counter() - start
        ours.prefill([1, 2, 3])
        for _ in range(STEPS):
            ours.step(4)
    return {"read": reading, "load": loading, "peak": memory_bytes("VmHWM"), "before": before}


def load_rows(model: Synthetic, threads: int, times: int) -> list[list[str]]:
    """Return a row for each engine and place: loads in processes of their own, in turns; medians, and the peaks."""
    packed = model.packed().architecture
    cache = 2 * packed.layers * packed.kv_heads * packed.head_dim * CONTEXT * 2  # keys and values in f16
    files = {PEER: model.plain, "ours": model.zigzag}
    cases = [(name, cold) for cold in (True, False) for name in files]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(times):
        for name, cold in cases:
            command = [sys.executable, "-m", "benchmarks", "cpu_decode", "--load", str(files[name].absolute()), name]
            command += ["--threads", str(threads), *["--cold"] * cold]
            root = Path(__file__).parents[1]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root)
            found[name, cold].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for (name, cold), loads in found.items():
        load, read = (statistics.median(each[key] for each in loads) for key in ("load", "read"))
        peak, before = (max(each[key] for each in loads) for key in ("peak", "before"))
        size = files[name].stat().st_size + cache
        where = "the disk" if cold else "the page cache"
        memory = [f"{peak / 2**20:.0f}", f"{before / 2**20:.0f}", f"{(peak - before) / size:.2f}"]
        rows.append([f"{name}, from {where}", f"{load:.2f}", f"{read:.2f}", f"{load / read:.1f}", *memory])
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option("--prompts", is_flag=True, help="Prefill alone.")
@click.option("--tiny", is_flag=True, help="A tiny model, to try the benchmark; its figures mean nothing.")
@click.option("--threads", "threads", multiple=True, type=int, default=(2, 1), show_default=True)
@click.option("--load", "loaded", type=(click.Path(path_type=Path), str), hidden=True)
@click.option("--cold", is_flag=True, hidden=True)
@json_option
def main(
    work: Path,
    quick: bool,
    prompts: bool,
    tiny: bool,
    threads: tuple[int, ...],
    loaded: tuple[Path, str] | None,
    cold: bool,
    json_path: Path | None,
) -> None:
    """Print the tables."""
    if loaded:
        click.echo(json.dumps(load_once(*loaded, threads[0], cold)))
        return
    setting, plan = machine.setting(), QUICK if quick else PROMPTS if prompts else Plan()
    model = synthetic(work, TINY if tiny else BILLION)
    expect_runs(model.plain)  # processes that load it would crash
    loads = [] if prompts else load_rows(model, max(threads), plan.loads)
    checks = Checks(model, model.packed().architecture.vocabulary)
    peer = LlamaCpp(model.plain, CONTEXT, plan.prefill)
    others = {"ik_llama.cpp Q4_K": IkLlamaCpp(model.plain, CONTEXT, plan.prefill)} if find_spec("ik_llama_cpp") else {}
    results = {count: measure(model, checks, peer, others, count, plan) for count in threads}
    click.echo(machine.setting_line(setting))
    title = f"Decoding {plan.generated} tokens after {plan.prompt}, medians of {plan.rounds} rounds"
    head = [
        "threads",
        "engine",
        "tokens/s",
        "range",
        "x llama.cpp",
        "skipped",
        "MB/token",
        "of bandwidth, GB/s",
        "error",
    ]
    if not prompts:
        click.echo(markdown(Table(head, decode_rows(model, results), title)))
    prefill = [
        [str(count), NAMES.get(name, name)]
        + [
            figure
            for of in (result.prefill, result.prefill_of_processor)
            for figure in (f"{statistics.median(of[name]):.1f}", f"{median_ratio(of[name], of[PEER]):.2f}")
        ]
        for count, result in results.items()
        for name in result.prefill
    ]
    title = f"Prefill of {plan.prefill} tokens, medians of {plan.prefill_rounds} rounds"
    columns = ["threads", "engine", "tokens/s", "x llama.cpp", "tokens/processor s", "x llama.cpp"]
    click.echo(markdown(Table(columns, prefill, title)))
    head = ["engine", "load, s", "read file, s", "load / read", "peak, MiB", "before, MiB", "added / (file + KV)"]
    if not prompts:
        click.echo(markdown(Table(head, loads, f"Loading and memory with a context of {CONTEXT}")))
    figures = {count: {"decode": of.decode, "prefill": of.prefill} for count, of in results.items()}
    write_figures(json_path, {"setting": setting, "plan": vars(plan), "tokens_per_second": figures, "loads": loads})
