"""What benchmarks of decoding on a card too small for the model share: what they are asked, the peer, and the table."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
import torch
from figures import json_option
from hybrid_synthetic import SIZES, write_for_llama_cpp
from llama_cpp_offload import LAYERS, MLPS, Peer, Split, runner
from synthetic import Size

from sparsepack.errors import UserError
from sparsepack.formats.codecs.neurons import record_bytes
from sparsepack.placement.budget import Parts, bytes_in
from sparsepack.runtime.cuda.links import measure, measured_links
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

PROMPT = 1
CHECKED = 12
LIMIT = 0.02
"""The largest relative error of the logits; keys and values are float16."""
SHARES = (0.25, 0.5, 0.75)
HEAD = ["", "t/s", "range", "x peer", "slots", "hits", "MB card / bus / worker / moved", "us waited", "of the model"]


@dataclass(frozen=True)
class Asked:
    """What such a benchmark is asked.

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
        return [bytes_in(each) for each in self.vram.split(",")]

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
            path if path.is_file() else write_for_llama_cpp(size, path),
            *(size.layers, PROMPT, self.peer_tokens or self.tokens, self.threads),
            layer=parts.attention[0] + mlp,
            mlp=mlp,
            kinds=self.splits,
        )


def asked_options(tokens: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the options of `Asked`, which the function gets as its first argument, and --json.

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
        def collected(**told: Any) -> None:
            if not torch.cuda.is_available():
                raise click.ClickException("an NVIDIA GPU is needed, and torch sees none here")
            main(Asked(**{field.name: told.pop(field.name) for field in fields(Asked)}), **told)

        for option in reversed(options):
            collected = option(collected)
        return collected

    return decorator


def beside(
    peer: Peer | None, budget: int, rounds: int, run: Callable[[], Mapping[str, Any]]
) -> tuple[Mapping[str, Any], dict[Split, list[float]]]:
    """What `run` found, and the peer's tokens a second, before ours is loaded and after it is gone, by its split."""
    before = {} if peer is None else peer.within(budget, rounds)
    found = run()
    freed()
    after = {} if peer is None else {split: peer.tokens_per_second(split, rounds) for split in before}
    return found, {split: before[split] + after[split] for split in before}


def best_of(speeds: Mapping[str, Sequence[float]]) -> float | None:
    """The fastest median; None of nothing."""
    return max((statistics.median(each) for each in speeds.values()), default=None)


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


def links_of(size: Size, threads: int) -> str:
    """How fast the links of a size's records are, measured unless they were; where noise hides them, that they were
    not, and the engine divides by those of a named machine."""
    device = torch.device("cuda")
    known = measured_links(threads, size.hidden, device)
    if known is None:
        try:
            measure([size.hidden], device, threads)
        except UserError as error:
            return f"links not measured: {error}"
        known = measured_links(threads, size.hidden, device)
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


def freed() -> None:
    """Give back what engines had that are gone."""
    gc.collect()
    torch.cuda.empty_cache()
