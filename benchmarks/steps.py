"""Seconds and peak memory of every step of the command line, each in a process of its own.

The model is random, of a real one's shape, and made once in --work. The peak is resident memory, mapped files included.
Nothing large is imported here: a process's peak begins with that of the one that started it.
"""

import json
import os
import platform
import pydoc_data.topics
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

DEFAULT_WORK = Path("/tmp/sparsepack-bench")
ROOT = Path(__file__).parents[1]
MAKE = """
import sys
from pathlib import Path
from benchmarks.shared import checkpoints, shapes
sizes = {size.name: size for size in (shapes.BILLION, shapes.LLAMA_3_2_1B, shapes.LLAMA_8B, shapes.TINY)}
folder = Path(sys.argv[2])
folder.mkdir(parents=True)
checkpoints.make_shards(folder, sizes[sys.argv[1]], sys.argv[3])
"""


@dataclass(frozen=True)
class Step:
    """What a step took; `code` is its exit code."""

    name: str
    seconds: float
    peak_bytes: int
    code: int


def commands(
    model: Path, out: Path, text: Path, context: int, windows: int, planes: bool, device: str
) -> dict[str, list[str]]:
    """Every step by its name, in the order in which one needs the output of another.

    planes -- zigzag-q6_p, of which 3.4 bits are read, in place of zigzag-q4_k, of which half is skipped
    """
    artifact, calibration, table = out / "m.gguf", out / "calibration", out / "thresholds.json"
    span = ["--context", str(context)]
    scored = ["--perplexity", str(text), *span, "--windows", str(windows)]
    on, kind = ["--device", device], ["--format", "zigzag-q6_p"] if planes else []
    share = ["--sparsity", "0.456", *kind] if planes else ["--sparsity", "0.5", "--windows", "2"]
    taken = ["--calibration", str(calibration), *share]
    text_of = ["--text", str(text), *span, "--samples", "8"]
    return {
        "calibrate": ["calibrate", str(model), *text_of, *on, "-o", str(calibration)],
        "thresholds": ["thresholds", str(model), *taken, *on, "-o", str(table)],
        "pack": ["pack", str(model), "--thresholds", str(table), *kind, *on, "-o", str(artifact)],
        "inspect": ["inspect", str(artifact)],
        "verify": ["verify", str(artifact)],
        "verify --against": ["verify", str(artifact), "--against", str(model)],
        "eval of the model": ["eval", str(model), *scored, *on],
        "eval of the artifact": ["eval", str(artifact), *scored, *on],
        "eval --against": ["eval", str(artifact), "--against", str(model), *scored, *on],
        "eval --backend cpu": ["eval", str(artifact), "--backend", "cpu", *scored],
        "bench": ["bench", str(artifact), "-p", "64", "-n", "16", "-r", "1"],
        "generate": ["generate", str(artifact), "--prompt", "It was a cold evening", "-n", "16"],
    }


def measured(name: str, command: list[str]) -> Step:
    """Run a command to its end; what it prints is shown where it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        start = time.perf_counter()
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        click.echo(printed.decode(errors="replace")[-2000:], err=True)
    unit = 1 if sys.platform == "darwin" else 1024
    return Step(name, time.perf_counter() - start, usage.ru_maxrss * unit, process.returncode)


def table(steps: list[Step]) -> str:
    """As Markdown."""
    rows = ["| step | seconds | peak, MiB |", "|---|--:|--:|"]
    for step in steps:
        failed = f" (failed: exit {step.code})" if step.code else ""
        rows.append(f"| {step.name}{failed} | {step.seconds:.1f} | {step.peak_bytes / 2**20:,.0f} |")
    return "\n".join(rows)


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option(
    "--size", type=click.Choice(("Llama-3-8B", "llama-3.2-1b", "llama-1b", "llama-tiny")), default="llama-3.2-1b"
)
@click.option("--context", default=512, show_default=True, help="Tokens per window.")
@click.option("--windows", default=2, show_default=True, help="Windows that eval scores.")
@click.option("--planes", is_flag=True, help="zigzag-q6_p, 3.4 bits read, in place of zigzag-q4_k, half skipped.")
@click.option("--device", default="cpu", show_default=True, help="Of what runs blocks or packs.")
@click.option("--only", "names", multiple=True, help="Only these steps; repeats.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
def main(
    work: Path,
    size: str,
    context: int,
    windows: int,
    planes: bool,
    device: str,
    names: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Run every step and print the table."""
    model, out = work / size / "checkpoint", work / size / "steps"
    if not (model / "model.safetensors.index.json").is_file():
        click.echo(f"making {model}", err=True)
        shutil.rmtree(model, ignore_errors=True)
        subprocess.run([sys.executable, "-c", MAKE, size, str(model.absolute()), device], check=True, cwd=ROOT)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    text = out / "text.txt"
    text.write_text("\n".join(pydoc_data.topics.topics.values())[:200_000], encoding="utf-8")
    steps = []
    for name, arguments in commands(model, out, text, context, windows, planes, device).items():
        if names and name not in names:
            continue
        steps.append(measured(name, [sys.executable, "-m", "sparsepack", *arguments]))
        click.echo(table(steps[-1:]).splitlines()[-1], err=True)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    click.echo(f"{size}, {weights / 2**20:,.0f} MiB as stored; {where}, {device}; {now} UTC\n\n{table(steps)}")
    if json_path:
        values = {"size": size, "bytes": weights, "steps": [asdict(step) for step in steps]}
        json_path.write_text(json.dumps(values, indent=2))
