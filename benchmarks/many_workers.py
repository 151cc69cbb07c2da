"""Seconds of each verb that workers can share, by one worker and by several, as one Markdown table.

    python benchmarks/many_workers.py MODEL TEXT [--verb calibrate ...] [--workers 1 --workers 2] [--runs 3]
        [--device cpu|cuda] [--one-card] [--samples 96] [--context 512] [--work FOLDER] [--json FILE]
    python benchmarks/many_workers.py shape:8b:8 TEXT --work /dev/shm --device cuda --verb calibrate --verb prune ...

Each run is a whole command, Python's start included; beside it stands what is gained without the seconds that starting
Python, PyTorch, transformers and the device takes here by itself. On a CPU each worker has one thread. Runs of the
numbers take turns, and the fastest of each counts: other work on the machine only adds. CPU seconds are those of all
workers together, by the same run: how much more they are than one worker's is what sharing costs, whatever else the
machine does. A row's last columns are what the first worker did, as `worker_parts` samples it, and the seconds of those
parts that did not shrink. What the numbers write must be equal, byte for byte, or a verb's rows are not printed and the
exit status is 1. Verbs that need a calibration or a table take those of the first number of workers; what `--verb` does
not list is made for them once.

`shape:SIZE:LAYERS` is a random model, made in the folder `--work` unless it is there: so many blocks of 8b or 70b.
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
from figures import json_option, write_figures
from worker_parts import parts_in, sampled

MAKING = {
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
"""Each verb's command without its output. A word in braces that is another verb stands for what that one has made."""

OUTPUT = {"pack": (".gguf", "-o"), "eval": (".json", "--json")}  # else a folder or a table, by -o
START = "import torch, transformers; torch.zeros(1, device='{device}')"


@dataclass(frozen=True)
class Run:
    """One command: its seconds, the CPU seconds of all its processes, the load before, the hash of its output, what it
    said of what bounded it, and the seconds of the parts of each worker."""

    seconds: float
    cpu_seconds: float
    load: float
    content: str
    said: str
    parts: list[dict[str, float]]


def made_shape(name: str, work: Path, device: str) -> Path:
    """The folder of a random checkpoint `shape:SIZE:LAYERS`, made on the device unless it is there, in files as large
    as usual: several are hashed at a time."""
    import torch
    from cuda_synthetic import LLAMA_8B
    from huggingface_hub import save_torch_state_dict
    from synthetic import TINY, Size, random, save_config

    from sparsepack.models.stock.skeleton import parameter_shapes

    sizes = {"8b": LLAMA_8B, "70b": Size("Llama-3-70B", 8192, 80, 28672, 64, 8, 128256), "tiny": TINY}
    _, kind, layers = name.split(":")
    size = replace(sizes[kind], layers=int(layers))
    folder = work / f"{size.name}-{layers}"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(save_config(folder, size))
    generator = torch.Generator(device=device).manual_seed(0)
    # The whole model's count of blocks scales what a block adds, however few of them are made.
    weights = {name: random(name, shapes[name], sizes[kind].layers, generator).cpu() for name in shapes}
    save_torch_state_dict(weights, folder, max_shard_size="5GB", metadata={"format": "pt"})
    return folder


def content(path: Path) -> str:
    """One hash of a file, or of the names and files of a folder."""
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
    parts = output.with_name(f"{output.name}-parts")
    environment = sampled({**os.environ, **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})}, parts)
    load, before, began = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()] or [""]
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {lines[-1]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    bound = [line for line in lines if "bound by" in line]
    found = parts_in(parts)
    forget(parts)
    return Run(seconds, cpu, load, content(output), bound[-1] if bound else "", found)


def needed(verbs: Collection[str]) -> list[str]:
    """The verbs, and those whose output they or each other take, in the order of `MAKING`."""
    found = set(verbs)
    for verb in reversed(MAKING):  # each takes only what earlier ones make
        if any(f"{{{verb}}}" in MAKING[other] for other in found):
            found.add(verb)
    return [verb for verb in MAKING if verb in found]


def forget(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def show(verb: str, found: Mapping[int, list[Run]], start: float) -> list[dict[str, Any]]:
    """Print a verb's rows, one for each number of workers, and return their figures."""
    best = {count: min(each, key=lambda run: run.seconds) for count, each in found.items()}
    first = next(iter(best.values())).seconds
    parts = {count: run.parts[0] for count, run in best.items()}
    for count, run in best.items():
        gain = (first - start) / max(run.seconds - start, 1e-9)
        times = f"{run.seconds:.1f} | {first / run.seconds:.2f}x | {gain:.2f}x"
        bound = f"{run.said} | {parts_line(parts[count])} | {unshrunk(parts, count):.1f}"
        click.echo(f"| {verb} | {count} | {times} | {run.cpu_seconds:.1f} | {run.load:.1f} | {bound} |")
    return [{"verb": verb, "workers": count, "start": start, **vars(run)} for count, run in best.items()]


SHRUNK = 0.8
"""A part has shrunk that takes less than so much of what it took the first number of workers."""


def parts_line(parts: Mapping[str, float]) -> str:
    """The seconds of a worker's parts, the longest first."""
    longest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest if seconds >= 0.05)


def unshrunk(parts: Mapping[int, Mapping[str, float]], count: int) -> float:
    """The seconds of parts that have not shrunk with so many workers, by numbers of workers, the one to compare with
    first."""
    first = next(iter(parts.values()))
    return sum(seconds for name, seconds in parts[count].items() if seconds >= SHRUNK * first.get(name, 0.0))


@click.command()
@click.argument("model")
@click.argument("text")
@click.option("--verb", "verbs", type=click.Choice(list(MAKING)), multiple=True, default=("calibrate",))
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
    verbs: tuple[str, ...],
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
            model = str(made_shape(model, work or folder, device))
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", START.format(device=device)], check=True)
        start = time.perf_counter() - began
        click.echo(f"{model}, {device}; starting takes {start:.1f} s\n")
        columns = ("speed-up", "without starting", "CPU seconds", "load before", "bound", "parts", "did not shrink")
        click.echo(f"| verb | workers | seconds | {' | '.join(columns)} |")
        click.echo("|---|--:|--:|--:|--:|--:|--:|---|---|--:|")
        asked: dict[str, Any] = {"model": model, "text": text, **numbers}
        asked |= {verb: folder / f"{verb}{OUTPUT.get(verb, ('',))[0]}" for verb in MAKING}
        differ, figures = [], []
        for verb in needed(verbs):
            measured, line = verb in verbs, MAKING[verb]
            arguments, flag = [word.format(**asked) for word in line.split()], OUTPUT.get(verb, ("", "-o"))[1]
            found: dict[int, list[Run]] = {}
            for _ in range(runs if measured else 1):
                for count in counts if measured else counts[:1]:
                    output = asked[verb] if not found else asked[verb].with_stem(f"{verb}-again")
                    found.setdefault(count, []).append(run_once(arguments, output, flag, count, device, one_card))
                    if output != asked[verb]:
                        forget(output)
            if len({run.content for each in found.values() for run in each}) > 1:
                differ.append(verb)
            elif measured:
                figures += show(verb, found, start)
            if not any(f"{{{verb}}}" in line for line in MAKING.values()):
                forget(asked[verb])
        write_figures(json_path, {"model": model, "device": device, **numbers, "runs": figures, "differ": differ})
    if differ:
        raise click.ClickException(f"the outputs differ: {', '.join(differ)}")


if __name__ == "__main__":
    main()
