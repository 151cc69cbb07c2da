"""`sparsepack serve` under load: tokens a second, the time to the first token, how soon /health answers; beside
llama.cpp with continuous batching on the plain Q4_K file of the same model.

Every client asks for some texts, one after the other, each of a prompt of its own. Every eighth text is given up after
a quarter of its tokens. The peer has no HTTP: what HTTP costs, on the same cores, is in our figures alone.
"""

import asyncio
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import click
import httpx
import torch

from benchmarks.shared.evaluation import BOOKS_MODEL, CALIBRATION_TEXT
from benchmarks.shared.llama_cpp import LlamaCpp, LlamaCppBatch, SequenceRequest
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.packing import PackRequest, pack
from sparsepack.tables import Table, markdown

TextOf = Callable[[Sequence[int], int], AsyncIterator[int]]
"""The function makes a text of at most so many tokens after a prompt: yields how many tokens came, each time that some
did."""


@dataclass
class Load:
    """What was seen under one load.

    first  -- seconds to the first token, of each text
    health -- seconds that /health took, each time that it was asked
    """

    program: str
    clients: int
    tokens: int = 0
    given_up: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)

    def row(self) -> list[str]:
        """A row of the table."""
        p95 = statistics.quantiles(self.first, n=20)[-1] if len(self.first) > 1 else self.first[0]
        health = f"{1e3 * max(self.health):.0f}" if self.health else ""
        return [
            self.program,
            str(self.clients),
            f"{self.tokens / self.seconds:.0f}",
            f"{1e3 * statistics.median(self.first):.0f}",
            f"{1e3 * p95:.0f}",
            health,
        ]


@dataclass(frozen=True)
class Work:
    """What each client asks for: how many texts, of how many tokens after how many."""

    texts: int
    prompt: int
    tokens: int
    ids: Sequence[int]

    def prompt_of(self, number: int) -> list[int]:
        """A prompt of its own for each text: a place of the book."""
        first = random.Random(number).randrange(len(self.ids) - self.prompt)
        return list(self.ids[first : first + self.prompt])


async def under_load(load: Load, work: Work, text_of: TextOf) -> None:
    """Let the clients ask, and note what they see."""

    async def client(number: int) -> None:
        for n in range(work.texts):
            text = number * work.texts + n
            began, count = time.perf_counter(), 0
            async for came in text_of(work.prompt_of(text), work.tokens):
                if not count:
                    load.first.append(time.perf_counter() - began)
                count += came
                if text % 8 == 7 and count >= work.tokens // 4:
                    load.given_up += 1
                    break
            load.tokens += count

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(load.clients)))
    load.seconds = time.perf_counter() - began


async def load_of_ours(url: str, load: Load, work: Work) -> None:
    """The load on a server of ours."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def text_of(ids: Sequence[int], tokens: int) -> AsyncIterator[int]:
            body = {"model": "served", "prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"{response.status_code}: {await response.aread()!r}")
                async for line in response.aiter_lines():
                    if '"finish_reason":null' in line:
                        yield 1

        with asking_for_health(url) as load.health:
            await under_load(load, work, text_of)


def ask_for_health(url: str, connection: Connection) -> None:
    """Ask until something is sent, and send the seconds that each answer took; in a process of its own, since those of
    the clients wait for each other."""
    seconds: list[float] = []
    with httpx.Client(base_url=url, timeout=600) as http:
        http.get("/health")
        connection.send(None)
        while not connection.poll(0.05):
            began = time.perf_counter()
            http.get("/health").raise_for_status()
            seconds.append(time.perf_counter() - began)
    connection.send(seconds)


@contextmanager
def asking_for_health(url: str) -> Iterator[list[float]]:
    """The seconds that /health took, each time that it was asked; they are in the list at the end."""
    spawn, seconds = multiprocessing.get_context("spawn"), list[float]()
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=ask_for_health, args=(url, theirs), daemon=True)
    process.start()
    ours.recv()
    yield seconds
    ours.send(None)
    seconds += ours.recv()
    process.join()


async def load_of_peer(peer: LlamaCppBatch, load: Load, work: Work) -> None:
    """The load on llama.cpp."""
    loop = asyncio.get_running_loop()

    async def text_of(ids: Sequence[int], tokens: int) -> AsyncIterator[int]:
        came: asyncio.Queue[int | None] = asyncio.Queue()
        request = SequenceRequest(ids, tokens, lambda id: loop.call_soon_threadsafe(came.put_nowait, id) and None)
        peer.submit(request)
        try:
            while await came.get() is not None:
                yield 1
        finally:
            request.cancelled.set()

    await under_load(load, work, text_of)


@contextmanager
def served(path: Path, context: int, sequences: int, threads: int) -> Iterator[str]:
    """A server in a process of its own; its address."""
    options = ["--port", "0", "--model-name", "served", "--context", str(context), "--sequences", str(sequences)]
    command = [sys.executable, "-m", "sparsepack", "serve", str(path), *options, "--threads", str(threads)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"at (http://\S+)/v1", line):
                break
            click.echo(line.rstrip(), err=True)
        else:
            raise RuntimeError("the server ended")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe would be full one day
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(60)


LEAST_AGREEMENT = 0.9
"""llama.cpp has the likeliest token of transformers in at least this share of the places; it rounds activations."""


@torch.inference_mode()
def agreement(plain: Path, ids: Sequence[int]) -> float:
    """The share of places in which llama.cpp has the likeliest token of transformers, with the weights of the same
    file. Raises `RuntimeError` where it is below `LEAST_AGREEMENT`: what computes something else is not timed."""
    expected = open_subject(str(plain)).model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    peer, found = LlamaCpp(plain, len(ids)), []
    for id in ids:
        peer.decode([id])
        found.append(peer.choose())
    peer.close()
    share = sum(a == b for a, b in zip(found, expected, strict=True)) / len(ids)
    if share < LEAST_AGREEMENT:
        raise RuntimeError(f"llama.cpp: the likeliest token of transformers in {share:.0%} of the places; not timed")
    return share


@click.command()
@click.option("--model", default=BOOKS_MODEL, show_default=True)
@click.option("--text", default=CALIBRATION_TEXT, show_default=True)
@click.option("--sparsity", default=0.5, show_default=True, help="0: nothing is skipped.")
@click.option("--clients", default="1,8,32,100", show_default=True)
@click.option("--sequences", default=8, show_default=True)
@click.option("--texts", default=2, show_default=True, help="Texts that each client asks for.")
@click.option("--prompt", default=64, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=32, show_default=True, help="Tokens of a text.")
@click.option("--threads", default=os.cpu_count(), show_default=True)
@json_option
def main(
    model: str,
    text: str,
    sparsity: float,
    clients: str,
    sequences: int,
    texts: int,
    prompt: int,
    tokens: int,
    threads: int,
    json_path: Path | None,
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("dense", "sparse") if sparsity else ("dense",)
        files = {name: Path(folder) / f"{name}.gguf" for name in ("plain", *names)}
        checkpoint, calibration = open_checkpoint(model), Path(folder) / "calibration"
        pack(PackRequest(model, files["plain"], format="q4_k"))
        pack(PackRequest(model, files["dense"], format="zigzag-q4_k"))
        if sparsity:
            calibrate(checkpoint, read_text(text), calibration, CalibrateOptions(samples=8, context=256))
            skipping = AllocationOptions(sparsity=sparsity)
            pack(PackRequest(model, files["sparse"], calibration=calibration, allocation=skipping))
        ids = rolling_windows(checkpoint.tokenizer, read_text(text), 2048, 5)[0].flatten().tolist()
        work = Work(texts, prompt, tokens, ids)
        share = agreement(files["plain"], ids[:128])
        print(f"llama.cpp has the likeliest token of transformers in {share:.1%} of 128 places")
        print(f"load {os.getloadavg()[0]:.1f} before")
        loads = []
        for count in map(int, clients.split(",")):
            for name in names:
                with served(files[name], prompt + tokens, sequences, threads) as url:
                    loads.append(Load(f"sparsepack, {name}", count))
                    asyncio.run(load_of_ours(url, loads[-1], work))
            peer = LlamaCppBatch(files["plain"], prompt + tokens, sequences, threads)
            loads.append(Load("llama.cpp", count))
            asyncio.run(load_of_peer(peer, loads[-1], work))
            peer.close()
        heads = ["", "clients", "t/s", "first token, median ms", "95 % ms", "/health, longest ms"]
        print(markdown(Table(heads, [load.row() for load in loads])))
        print(f"load {os.getloadavg()[0]:.1f} after; {sum(load.given_up for load in loads)} texts given up")
        write_figures(json_path, [asdict(load) for load in loads])
