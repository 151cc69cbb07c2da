"""Seconds of each command that workers can share, by one worker and by several; their outputs must have the same bytes.

Each run is a whole command, Python's start included; beside it stands what is gained without the seconds that starting
Python, PyTorch, transformers and the device takes here by itself. On a CPU each worker has one thread. Runs of the
numbers of workers take turns. MODEL is a folder, or shape:8b:8, a random model in bfloat16 with so many blocks.
"""

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.timing import interleave, json_option, write_figures

COMMANDS = {
    "calibrate": "calibrate {model} --text {text} --samples {samples} --context {context}",
    "thresholds": "thresholds {model} --calibration {calibrate} --sparsity 0.5 --windows {windows}",
    "teal": "thresholds {model} --calibration {calibrate} --sparsity 0.5 --allocation teal --windows {windows}",
    "global": "thresholds {model} --calibration {calibrate} --sparsity 0.5 --allocation global --steps {steps} "
    "--batch 4 --length {context}",
    "prune": "prune {model} --keep 6 --of 8 --calibration {calibrate} --windows {samples}",
    "rotate": "rotate {model} --calibration {calibrate}",
    "pack": "pack {model} --thresholds {thresholds}",
    "eval": "eval {model} --thresholds {thresholds} --perplexity {text} --windows {windows} --context {context}",
}
"""Commands without their outputs. A word in braces that is another command stands for what that one has made."""
OUTPUT = {"pack": (".gguf", "-o"), "eval": (".json", "--json")}  # else a folder or a table, by -o
START = "import torch, transformers; torch.zeros(1, device='{device}')"


@dataclass(frozen=True)
class Run:
    """One command: its seconds, the CPU seconds of all its processes, the load before, the hash of its output, and what
    it said of what bounded it."""

    seconds: float
    cpu_seconds: float
    load: float
    content: str
    bound: str


def random_shape(name: str, work: Path, device: str) -> Path:
    """Return the folder of a random checkpoint `shape:SIZE:LAYERS`, made on the device unless it is there."""
    from benchmarks.shared.checkpoints import make_shards
    from benchmarks.shared.shapes import LLAMA_8B, LLAMA_70B, TINY

    _, kind, layers = name.split(":")
    size = replace({"8b": LLAMA_8B, "70b": LLAMA_70B, "tiny": TINY}[kind], layers=int(layers))
    folder = work / f"{size.name}-{layers}"
    if not (folder / "model.safetensors.index.json").is_file():
        make_shards(folder, size, device)
    return folder


def content(path: Path) -> str:
    """Return one hash of a file, or of the names and files of a folder."""
    found = hashlib.sha256()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                found.update(f"{each.relative_to(path)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


def run_once(arguments: list[str], output: Path, flag: str, workers: int, device: str, one_card: bool) -> Run:
    """Run a command by so many workers. Raises `click.ClickException` with its last line where it fails."""
    names = ["cpu" if device == "cpu" else str(0 if one_card else number) for number in range(workers)]
    alone = ["--device", "cpu" if device == "cpu" else "cuda:0"]
    command = [sys.executable, "-m", "sparsepack", *arguments, flag, str(output)]
    command += ["--devices", ",".join(names)] if workers > 1 else alone
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})}
    load, before, began = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()] or [""]
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {lines[-1]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    bound = [line for line in lines if "bound by" in line]
    return Run(seconds, cpu, load, content(output), bound[-1] if bound else "")


def needed(commands: Collection[str]) -> list[str]:
    """Return the commands, and those whose output they or each other take, in the order of `COMMANDS`."""
    found = set(commands)
    for command in reversed(COMMANDS):  # each takes only what earlier ones make
        if any(f"{{{command}}}" in COMMANDS[other] for other in found):
            found.add(command)
    return [command for command in COMMANDS if command in found]


def delete(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def show(command: str, found: Mapping[int, list[Run]], start: float) -> list[dict[str, Any]]:
    """Print a command's rows, one for each number of workers, and return their figures."""
    best = {count: min(each, key=lambda run: run.seconds) for count, each in found.items()}
    first = next(iter(best.values())).seconds
    for count, run in best.items():
        gain = (first - start) / max(run.seconds - start, 1e-9)
        times = f"{run.seconds:.1f} | {first / run.seconds:.2f}x | {gain:.2f}x"
        click.echo(f"| {command} | {count} | {times} | {run.cpu_seconds:.1f} | {run.load:.1f} | {run.bound} |")
    return [{"command": command, "workers": count, "start": start, **vars(run)} for count, run in best.items()]


@click.command()
@click.argument("model")
@click.argument("text")
@click.option("--command", "commands", type=click.Choice(list(COMMANDS)), multiple=True, default=("calibrate",))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--one-card", is_flag=True, help="All workers share the first GPU.")
@click.option("--samples", default=96, show_default=True, help="Windows of calibrate and prune.")
@click.option("--windows", default=16, show_default=True, help="Windows of thresholds and eval.")
@click.option("--context", default=512, show_default=True)
@click.option("--steps", default=4, show_default=True, help="Steps of global.")
@click.option("--workers", "counts", type=int, multiple=True, default=(1, 2))
@click.option("--runs", default=3, show_default=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Where models and outputs are written.")
@json_option
def main(
    model: str,
    text: str,
    commands: tuple[str, ...],
    device: str,
    one_card: bool,
    counts: tuple[int, ...],
    runs: int,
    work: Path | None,
    json_path: Path | None,
    **numbers: int,
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=work) as made:
        folder = Path(made)
        if model.startswith("shape:"):
            model = str(random_shape(model, work or folder, device))
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", START.format(device=device)], check=True)
        start = time.perf_counter() - began
        click.echo(f"{model}, {device}; starting takes {start:.1f} s\n")
        columns = ("speed-up", "without starting", "CPU seconds", "load before", "bound")
        click.echo(f"| command | workers | seconds | {' | '.join(columns)} |\n|---|--:|--:|--:|--:|--:|--:|---|")
        values: dict[str, Any] = {"model": model, "text": text, **numbers}
        values |= {name: folder / f"{name}{OUTPUT.get(name, ('',))[0]}" for name in COMMANDS}
        differ, figures = [], []
        for name in needed(commands):
            measured, flag = name in commands, OUTPUT.get(name, ("", "-o"))[1]
            arguments = [word.format(**values) for word in COMMANDS[name].split()]

            def run(count: int, name: str = name, flag: str = flag, arguments: list[str] = arguments) -> Run:
                output = values[name] if not values[name].exists() else values[name].with_stem(f"{name}-again")
                found = run_once(arguments, output, flag, count, device, one_card)
                if output != values[name]:
                    delete(output)
                return found

            sides = {count: lambda count=count, run=run: run(count) for count in (counts if measured else counts[:1])}
            found = interleave(sides, runs if measured else 1)
            if len({run.content for each in found.values() for run in each}) > 1:
                differ.append(name)
            elif measured:
                figures += show(name, found, start)
        write_figures(json_path, {"model": model, "device": device, **numbers, "runs": figures, "differ": differ})
    if differ:
        raise click.ClickException(f"the outputs differ: {', '.join(differ)}")
