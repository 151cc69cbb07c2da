"""Decoding on cores that others use: an engine alone, two at once, more threads than cores, next to a busy process; and
llama.cpp likewise.

Each engine is a process of its own, bound to the same cores, and decodes greedily for some seconds while the others do.
Situations take turns. Weights are random, of a small model's shape, nothing skipped. Tokens of a second of processor
time say how much waiting costs, whatever else runs on the machine.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from benchmarks.shared import machine
from benchmarks.shared.checkpoints import DEFAULT_WORK
from benchmarks.shared.shapes import QWEN_0_5B, SMALL, llama_config, random_ids
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.tables import Table, markdown

OURS, PEER, BUSY = "ours", "llama.cpp Q4_K", "busy"
SIDES = (OURS, PEER)
SIZES = {size.name: size for size in (SMALL, QWEN_0_5B)}
CONTEXT, PROMPT = 512, 16


@dataclass(frozen=True)
class Contender:
    """One process: which engine it has, and its threads."""

    side: str
    threads: int
    number: int = 0


def situations(side: str, cores: int) -> dict[str, tuple[Contender, ...]]:
    """Return who runs at once, by the name of the situation."""
    one, two, crowd = Contender(side, cores), Contender(side, cores, 1), Contender(side, 2 * cores)
    return {
        "alone": (one,),
        "two engines at once": (one, two),
        "twice as many threads as cores": (crowd,),
        "next to a busy process": (one, Contender(BUSY, 1)),
    }


def decoder_of(contender: Contender, size: str, path: Path, cores: Sequence[int]) -> Any:
    """Return a function that decodes the token after a token, and begins anew with a prompt, on these cores."""
    if contender.side == BUSY:
        os.sched_setaffinity(0, cores)
        return lambda prompt, id: id
    if contender.side == PEER:
        from benchmarks.shared.llama_cpp import LlamaCpp

        os.sched_setaffinity(0, cores)
        peer = LlamaCpp(path, CONTEXT)
        peer.threads(contender.threads)

        def of_peer(prompt: Sequence[int], id: int) -> int:
            if prompt:
                peer.reset()
            peer.decode(prompt or [id])
            return peer.choose()

        return of_peer
    import torch

    from benchmarks.shared.random_models import random_model
    from sparsepack.runtime.engine import Engine
    from sparsepack.runtime.generation.sampling import Sampler, Sampling

    torch.set_num_threads(1)
    packed = random_model(SIZES[size], device="cpu")
    os.sched_setaffinity(0, cores)
    engine = Engine(packed, context=CONTEXT, backend="cpu", threads=contender.threads)
    sampler = Sampler(Sampling(temperature=0.0))

    def of_ours(prompt: Sequence[int], id: int) -> int:
        if prompt:
            engine.reset()
            return sampler.choose(engine.prefill(prompt))
        return engine.decode_next(id, sampler)

    return of_ours


def contend(contender: Contender, size: str, path: Path, cores: Sequence[int], connection: Connection) -> None:
    """Decode whenever a message with the times of begin and end comes, and send the tokens of a second, and of a second
    of processor time."""
    decode, prompt = decoder_of(contender, size, path, cores), random_ids(SIZES[size].vocabulary, PROMPT, seed=3)
    connection.send(None)
    while (span := connection.recv()) is not None:
        begin, end = span
        id, tokens, length = decode(prompt, 0), 0, PROMPT
        while time.monotonic() < begin:
            time.sleep(1e-3)
        used = time.process_time()
        while time.monotonic() < end:
            fresh = length + 1 >= CONTEXT
            id, tokens, length = decode(prompt if fresh else (), id), tokens + 1, PROMPT if fresh else length + 1
        connection.send((tokens / (time.monotonic() - begin), tokens / (time.process_time() - used)))


def measure(
    connections: Mapping[Contender, Connection], who: Sequence[Contender], seconds: float
) -> list[tuple[float, float]]:
    """Return the tokens of a second, and of a second of processor time, of all that run at once and decode."""
    begin = time.monotonic() + 0.2
    for each in who:
        connections[each].send((begin, begin + seconds))
    found = {each: connections[each].recv() for each in who}
    return [speeds for each, speeds in found.items() if each.side != BUSY]


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default=SMALL.name, show_default=True)
@click.option("--cores", "count", default=2, show_default=True, help="All are bound to so many.")
@click.option("--seconds", default=3.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--side", "sides", type=click.Choice(SIDES), multiple=True, default=SIDES, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@json_option
def main(
    size: str, count: int, seconds: float, rounds: int, sides: Sequence[str], work: Path, json_path: Path | None
) -> None:
    """Print the table."""
    from benchmarks.shared.llama_bench import write_shape

    cores = sorted(os.sched_getaffinity(0))[:count]
    path = work / f"{size}.peer.gguf"
    work.mkdir(parents=True, exist_ok=True)
    if PEER in sides and not path.is_file():
        write_shape(path, llama_config(SIZES[size]))
    runs = {(side, name): who for side in sides for name, who in situations(side, count).items()}
    context, connections = multiprocessing.get_context("spawn"), dict[Contender, Connection]()
    for contender in dict.fromkeys(each for who in runs.values() for each in who):
        connections[contender], theirs = context.Pipe()
        context.Process(target=contend, args=(contender, size, path, cores, theirs), daemon=True).start()
    for connection in connections.values():
        connection.recv()
    click.echo(machine.setting_line(machine.setting()))
    speeds: dict[tuple[str, str], list[list[tuple[float, float]]]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run, who in runs.items():
            speeds[run].append(measure(connections, who, seconds))
    for connection in connections.values():
        connection.send(None)
    rows = []
    for (side, name), found in speeds.items():
        sums = [sum(speed for speed, _ in each) for each in found]
        alone = statistics.median(each[0][0] for each in speeds[side, "alone"])
        each = " + ".join(f"{statistics.median(speed for speed, _ in one):.1f}" for one in zip(*found, strict=True))
        of_cpu = statistics.median(of_cpu for each in found for _, of_cpu in each)
        ratio = f"{statistics.median(sums) / alone:.2f}" if alone else "-"
        rows.append([side, name, each, f"{min(sums):.1f} to {max(sums):.1f}", ratio, f"{of_cpu:.1f}"])
    head = ["runs", "situation", "t/s", "range of the sum", "x alone", "tokens/CPU s"]
    click.echo(markdown(Table(head, rows, f"{size}, {count} cores, {rounds} rounds of {seconds} s")))
    figures = [{"side": side, "situation": name, "speeds": found} for (side, name), found in speeds.items()]
    write_figures(json_path, {"size": size, "cores": count, "runs": figures, **machine.setting()})


if __name__ == "__main__":
    main()
