"""Decoding on a GPU too small for the model: options, who is active, the peer within the same budget, and the table.

Who is active in random models is replayed from `results/`: a short trace of books-26m-relu, made by `sparsepack
calibrate --context 1024 --samples 40` and `trace --sessions 6 --tokens 480 --prompt 64`, the session whose density is
nearest to 0.135. Block b of L takes its activity from block 8 b / L there, and each of its neurons from one neuron: a
random order of all of that block's neurons, then another one, until all have theirs. So every block keeps its share of
active neurons, and every neuron how often it is active and how long it stays so.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.shared.llama_bench import LAYERS, MLPS, Peer, runner, write_shape
from benchmarks.shared.shapes import SIZES, Size, llama_config
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.errors import UserError
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.placement.budget import Parts, format_bytes, parse_bytes
from sparsepack.placement.traffic import describe_per_token
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.hybrid.bandwidth import load_profile, measure
from sparsepack.tables import Table, markdown

RESULTS = Path(__file__).parents[1] / "results"
BOOKS_TRACE = RESULTS / "books-26m-relu.activity.npz"
WIKITEXT_TRACE = RESULTS / "books-26m-relu.wikitext2.npz"
"""The same model and frequencies, of books, on a session of WikiText-2."""


@dataclass(frozen=True, eq=False)
class Activity:
    """Who is active for each token of a session.

    frequency -- float64 [blocks, neurons]: how often each neuron is active elsewhere, falling in each block
    bits      -- uint8 [tokens, blocks, neurons / 8, rounded up], the lowest bit first
    """

    frequency: np.ndarray
    bits: Tensor

    @property
    def density(self) -> float:
        """The share of the neurons that a token needs."""
        return float(np.bitwise_count(self.bits.numpy()).sum() / len(self.bits) / self.frequency.size)


def tiled(blocks: int, neurons: int, seed: int = 0, tokens: int | None = None, path: Path = BOOKS_TRACE) -> Activity:
    """Return a trace, or its first tokens, for so many blocks of neurons, those of a block by falling frequency."""
    stored = np.load(path)
    known, packed = stored["frequency"].astype(np.float64), stored["bits"][:tokens]
    generator = np.random.default_rng(seed)
    layers, count = known.shape
    frequency = np.empty((blocks, neurons))
    bits = np.empty((len(packed), blocks, -(-neurons // 8)), np.uint8)
    for block in range(blocks):
        layer = block * layers // blocks
        orders = [generator.permutation(count) for _ in range(-(-neurons // count))]
        taken = np.concatenate(orders)[:neurons]
        taken = taken[np.argsort(-known[layer][taken], kind="stable")]
        active = np.unpackbits(packed[:, layer], axis=1, count=count, bitorder="little")
        frequency[block] = known[layer][taken]
        bits[:, block] = np.packbits(active[:, taken], axis=1, bitorder="little")
    return Activity(frequency, torch.from_numpy(bits))


def with_more(activity: Activity, times: float, seed: int = 0) -> Activity:
    """So many times as many neurons in each block and token, those included that were active: as copies of gates would
    list them, those that were active for some other tokens first."""
    bits, neurons = activity.bits.numpy(), activity.frequency.shape[1]
    tokens, generator = len(bits), np.random.default_rng(seed)
    more = np.empty_like(bits)
    for token in range(tokens):
        taken = [(token + tokens * n // 5) % tokens for n in range(5)]
        active, *others = np.unpackbits(bits[taken], axis=2, count=neurons, bitorder="little").astype(bool)
        order = generator.random(active.shape) + np.any(others, axis=0) + 2 * active
        wanted = np.minimum(np.rint(times * active.sum(1)).astype(int), neurons)
        rank = np.argsort(np.argsort(-order, axis=1), axis=1)
        more[token] = np.packbits(rank < wanted[:, None], axis=1, bitorder="little")
    return Activity(activity.frequency, torch.from_numpy(more))


PROMPT = 1
CHECKED = 12
LIMIT = 0.02
"""The largest relative error of the logits; keys and values are float16."""
SHARES = (0.25, 0.5, 0.75)
HEAD = ["", "t/s", "range", "x peer", "slots", "hits", "MB card / bus / worker / moved", "us waited", "of the model"]


@dataclass(frozen=True)
class BudgetRequest:
    """The options of such a benchmark.

    shape, layers -- the model's size, with other layers to try a script; vram: budgets, with commas
    tokens        -- that are timed in a round; threads: of the processor, for both
    tune          -- whether links are measured first
    llama_bench   -- the peer's, with so many peer_tokens a round and these splits; work: for its file
    """

    shape: str
    vram: str | None
    layers: int | None
    tokens: int
    rounds: int
    threads: int
    tune: bool
    llama_bench: Path | None
    peer_tokens: int | None
    splits: Sequence[str]
    work: Path

    @property
    def size(self) -> Size:
        return replace(SIZES[self.shape], layers=self.layers or SIZES[self.shape].layers)

    def budgets(self, parts: Parts) -> list[int]:
        """In bytes; without --vram shares of the model's."""
        if self.vram is None:
            return [int(share * parts.weights) for share in SHARES]
        return [parse_bytes(each) for each in self.vram.split(",")]

    def peer(self, parts: Parts, mlp: int) -> Peer | None:
        """llama.cpp with the shape's file; None where nobody gave it, which is said. mlp -- bytes of a block's MLP"""
        if self.llama_bench is None:
            click.echo("no --llama-bench: the peer was not run")
            return None
        self.work.mkdir(parents=True, exist_ok=True)
        size = self.size
        path = self.work / f"{size.name}-{size.layers}.q4_k.gguf"
        return Peer(
            runner(self.llama_bench),
            path if path.is_file() else write_shape(path, llama_config(size)),
            *(size.layers, PROMPT, self.peer_tokens or self.tokens, self.threads),
            layer=parts.attention[0] + mlp,
            mlp=mlp,
            kinds=self.splits,
        )


def budget_options(tokens: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the options of `BudgetRequest`, which the function gets as its first argument, and --json.

    tokens -- that are timed where nobody says how many
    """
    splits, kinds = (LAYERS, MLPS), click.Choice([LAYERS, MLPS])
    there, path = click.Path(path_type=Path, exists=True), click.Path(path_type=Path)
    options = [
        click.option("--shape", type=click.Choice(list(SIZES)), required=True),
        click.option("--vram", help="Budgets, with commas between them (default: a quarter, a half, three quarters)."),
        click.option("--layers", type=int, help="Of the model, to try the script."),
        click.option("--tokens", default=tokens, show_default=True, help="That are timed in a round."),
        click.option("--rounds", default=3, show_default=True),
        click.option(
            "--threads", default=min(16, os.cpu_count() or 1), show_default=True, help="Of the processor, for both."
        ),
        click.option("--tune/--no-tune", default=True, help="Measure the links first, where nobody has here."),
        click.option("--llama-bench", type=there, help="That of llama.cpp with CUDA."),
        click.option("--peer-tokens", type=int, help="That llama.cpp is timed for, in a context of so many."),
        click.option("--split", "splits", multiple=True, type=kinds, default=splits, help="Of llama.cpp."),
        click.option("--work", type=path, default=Path("/tmp/sparsepack-bench"), show_default=True),
        json_option,
    ]

    def decorator(main: Callable[..., None]) -> Callable[..., None]:
        @wraps(main)
        def collected(**options_given: Any) -> None:
            if not torch.cuda.is_available():
                raise click.ClickException("an NVIDIA GPU is needed, and torch sees none here")
            main(
                BudgetRequest(**{field.name: options_given.pop(field.name) for field in fields(BudgetRequest)}),
                **options_given,
            )

        for option in reversed(options):
            collected = option(collected)
        return collected

    return decorator


def measure_budgets(
    request: BudgetRequest,
    budgets: Sequence[int],
    peer: Peer | None,
    run: Callable[[int], Mapping[str, Any]],
    title: Callable[[str], str],
    notes: Callable[[Mapping[str, Any]], list[str]],
    report: dict[str, Any],
    json_path: Path | None,
) -> None:
    """Print a table for each budget and write the figures so far. The peer is timed before ours is loaded and after it
    is gone: both may not fit side by side.

    run   -- measures ours within a budget, by name; notes -- what stands below the table besides
    """
    for budget in budgets:
        before = {} if peer is None else peer.within(budget, request.rounds)
        found = run(budget)
        free_memory()
        splits = {s: before[s] + peer.tokens_per_second(s, request.rounds) for s in before} if peer else {}
        theirs = {split.name: speeds for split, speeds in splits.items()}
        best = max((statistics.median(each) for each in theirs.values()), default=None)
        rows = [row_of(f"llama.cpp, {name}", speeds, best, {}) for name, speeds in theirs.items()]
        rows += [row_of(f"ours, {name}", [1 / each for each in of["seconds"]], best, of) for name, of in found.items()]
        below = [*notes(found), f"loaded in {max(of['loading'] for of in found.values()):.0f} s"]
        below += [f"{name}: {describe_per_token(of)}" for name, of in found.items() if "bytes" in of]
        below += sorted({of["description"] for of in found.values()})
        click.echo(markdown(Table(HEAD, rows, title(format_bytes(budget)), below)))
        report[format_bytes(budget)] = {
            "ours": found,
            "llama.cpp": theirs,
            "splits": [asdict(split) for split in splits],
        }
        write_figures(json_path, report)


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


def bandwidth_tensor(size: Size, threads: int) -> str:
    """How fast the links of a size's records are, measured unless they were; where noise hides them, that they were
    not, and the engine divides by those of a named machine."""
    device = torch.device("cuda")
    known = load_profile(threads, size.hidden, device)
    if known is None:
        try:
            measure([size.hidden], device, threads)
        except UserError as error:
            return f"links not measured: {error}"
        known = load_profile(threads, size.hidden, device)
    assert known is not None
    record = record_bytes(size.hidden)
    speeds = {"slots": known.resident, "bus": known.bus, "processor": known.worker}
    said = ", ".join(f"{name} {speed * record / 1e9:.1f} GB/s" for name, speed in speeds.items())
    return f"links, both sides at work: {said}, handing over {known.handover * 1e6:.1f} us"


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


def free_memory() -> None:
    """Give back what engines had that are gone."""
    gc.collect()
    torch.cuda.empty_cache()
