"""Seconds and peak memory of calibrating and packing a mixture of 30 billion parameters, from a few of its blocks.

    python benchmarks/large_mixture.py [--blocks 2,3] [--samples 8] [--context 512] [--tiny]

Blocks of a model are alike: random ones of Qwen3-30B-A3B's shape are made and taken through the command line, each step
in a process of its own, so that memory is as with any number of blocks: one at work, one that waits. What one more
block takes, and what the command takes beside its blocks, make up the time of all 48. The vocabulary is a small one:
what the embedding and the output matrix take is not counted. A peak is of all processes of a step together, looked up
ten times a second: memory that they share counts once, and mapped files count. Linux alone tells that.
"""

import os
import pydoc_data.topics
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from figures import json_option, write_figures
from steps import DEFAULT_WORK, Step

_MAKE = """
import sys
from dataclasses import replace
from pathlib import Path
import cpu_experts
import mixtures
folder = Path(sys.argv[2])
folder.mkdir(parents=True)
cpu_experts.make_checkpoint(folder, replace(getattr(mixtures, sys.argv[1]), layers=int(sys.argv[3])))
"""
"""In a process of its own, so that nothing large is imported here."""

LAYERS = 48
EVERY = 0.1
BYTES_OF_CALCULATION = 4
"""On a CPU calibration computes in float32, whatever the weights are stored in."""


def measured(name: str, command: list[str]) -> Step:
    """Run a command to its end, and look at what it and the processes that it starts take."""
    peak, start = 0, time.perf_counter()
    with tempfile.TemporaryFile() as printed, subprocess.Popen(command, stdout=printed, stderr=printed) as process:
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(EVERY)
        seconds = time.perf_counter() - start
        if process.returncode:
            printed.seek(0)
            click.echo(printed.read().decode(errors="replace")[-2000:], err=True)
    return Step(name, seconds, peak, process.returncode)


def memory_of(pid: int) -> int:
    """The bytes that a process and those below it have in memory; of what several share, each has its part."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        below = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in _children(task)]
    except OSError:  # it has ended
        return 0
    own = next((int(row.split()[1]) for row in rows if row.startswith("Pss:")), 0)
    return 1024 * own + sum(memory_of(each) for each in below)


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


@dataclass(frozen=True)
class Found:
    """What a step took with two numbers of blocks."""

    name: str
    fewer: Step
    more: Step

    def of_all(self, fewer: int, more: int, layers: int) -> float | None:
        """The seconds of so many blocks; None where more blocks took no longer, because something else ran beside."""
        each = (self.more.seconds - self.fewer.seconds) / (more - fewer)
        return self.fewer.seconds + (layers - fewer) * each if each > 0 else None


def make(work: Path, shape: str, blocks: int) -> Path:
    """The checkpoint of so many blocks, made unless it is there."""
    folder = work / f"{shape.lower()}-{blocks}"
    if not (folder / "model.safetensors.index.json").is_file():
        click.echo(f"making {folder}", err=True)
        shutil.rmtree(folder, ignore_errors=True)
        here = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([sys.executable, "-c", _MAKE, shape, str(folder), str(blocks)], check=True, env=here)
    return folder


def steps(model: Path, text: Path, samples: int, context: int) -> list[Step]:
    """Calibrate the model, find its thresholds and pack it with these."""
    out = model.parent / f"{model.name}-steps"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    cal, table, sized = str(out / "cal"), str(out / "t.json"), ["--context", str(context), "--samples", str(samples)]
    commands = {
        "calibrate": ["calibrate", str(model), "--text", str(text), *sized, "-o", cal],
        "thresholds": [
            "thresholds",
            str(model),
            "--calibration",
            cal,
            "--sparsity",
            "0.5",
            "--windows",
            "2",
            "-o",
            table,
        ],
        "pack": ["pack", str(model), "--thresholds", table, "-o", str(out / "m.gguf")],
    }
    found = []
    for name, arguments in commands.items():
        found.append(measured(name, [sys.executable, "-m", "sparsepack.cli", *arguments]))
        click.echo(f"{model.name}: {name} {found[-1].seconds:.1f} s, {found[-1].peak_bytes / 1e9:.2f} GB", err=True)
        if found[-1].code:
            raise click.ClickException(f"{name} ended with {found[-1].code}")
    shutil.rmtree(out)
    return found


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--blocks", default="2,3", show_default=True, help="Two numbers of blocks that are measured.")
@click.option("--samples", default=8, show_default=True, help="Windows of the calibration.")
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--tiny", is_flag=True, help="A tiny model, to try the script; its figures mean nothing.")
@json_option
def main(work: Path, blocks: str, samples: int, context: int, tiny: bool, json_path: Path | None) -> None:
    """Print the table."""
    shape, counts = "TINY" if tiny else "THIRTY_BILLION", sorted(int(part) for part in blocks.split(","))
    if len(counts) != 2 or counts[0] == counts[1] or counts[0] < 1:
        raise click.UsageError(f"--blocks {blocks}: expected two numbers of blocks, such as 2,3")
    work.mkdir(parents=True, exist_ok=True)
    text = work / "text.txt"
    text.write_text("\n".join(pydoc_data.topics.topics.values())[:400_000], encoding="utf-8")
    models = [make(work, shape, count) for count in counts]
    bytes_of = [sum(file.stat().st_size for file in model.glob("*.safetensors")) for model in models]
    block = (bytes_of[1] - bytes_of[0]) // (counts[1] - counts[0])
    pairs = zip(*(steps(model, text, samples, context) for model in models), strict=True)
    found = [Found(fewer.name, fewer, more) for fewer, more in pairs]
    rows = [row(each, counts, block) for each in found]
    click.echo(
        f"{shape.lower()}: a block is {block / 1e9:.2f} GB as stored and {block / 1e9 * 2:.2f} GB in float32; "
        f"{samples} windows of {context} tokens; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    head = f"| step | s, {counts[0]} blocks | s, {counts[1]} blocks | {LAYERS} blocks, minutes | peak, GB | in blocks |"
    click.echo("\n".join([head, "|---|--:|--:|--:|--:|--:|", *(each["shown"] for each in rows)]))
    write_figures(json_path, {"shape": shape, "block_bytes": block, "counts": counts, "steps": rows})


def row(found: Found, counts: list[int], block: int) -> dict[str, Any]:
    """A row of the table. Blocks are counted in the size that the step has them in: of float32 where it computes."""
    whole = found.of_all(counts[0], counts[1], LAYERS)
    of_step = block if found.name == "pack" else block * BYTES_OF_CALCULATION // 2
    peak = found.more.peak_bytes
    minutes = "?" if whole is None else f"{whole / 60:.0f}"
    shown = f"| {found.name} | {found.fewer.seconds:.1f} | {found.more.seconds:.1f} | {minutes} "
    shown += f"| {peak / 1e9:.2f} | {peak / of_step:.2f} |"
    return {
        "step": found.name,
        "seconds": [found.fewer.seconds, found.more.seconds],
        "peak_bytes": peak,
        "shown": shown,
    }


if __name__ == "__main__":
    main()
