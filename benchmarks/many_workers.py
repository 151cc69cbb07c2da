"""Seconds to calibrate by one worker and by several, one thread each, as one Markdown table.

    python benchmarks/many_workers.py MODEL TEXT [--samples 96] [--context 512] [--workers 1 --workers 2] [--runs 3]

Each run is a whole command, Python's start included. Runs of the numbers take turns, and the fastest of each counts:
other work on the machine only adds. CPU seconds are those of all workers together, by the same run: how much more they
are than one worker's is what sharing costs, whatever else the machine does. The calibrations must be equal, byte for
byte, or nothing is printed.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float
    load: float
    content: dict[str, bytes]


def run_once(model: str, text: str, options: list[str], workers: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "c"
        command = [sys.executable, "-m", "sparsepack", "calibrate", model, "--text", text, "-o", str(output), *options]
        command += ["--devices", ",".join(["cpu"] * workers)] if workers > 1 else []
        load, before, began = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Run(seconds, cpu, load, {path.name: path.read_bytes() for path in sorted(output.iterdir())})


@click.command()
@click.argument("model")
@click.argument("text")
@click.option("--samples", type=int, default=96)
@click.option("--context", type=int, default=512)
@click.option("--workers", "counts", type=int, multiple=True, default=(1, 2))
@click.option("--runs", type=int, default=3)
def main(model: str, text: str, samples: int, context: int, counts: tuple[int, ...], runs: int) -> None:
    """Print the table."""
    options = ["--samples", str(samples), "--context", str(context)]
    found: dict[int, list[Run]] = {count: [] for count in counts}
    for _ in range(runs):
        for count in counts:
            found[count].append(run_once(model, text, options, count))
    if any(run.content != found[counts[0]][0].content for of_count in found.values() for run in of_count):
        raise SystemExit("the calibrations differ")
    best = {count: min(of_count, key=lambda run: run.seconds) for count, of_count in found.items()}
    first = best[counts[0]]
    print("| workers | seconds | speed-up | CPU seconds | load before |\n|--:|--:|--:|--:|--:|")
    for count, run in best.items():
        times = f"{run.seconds:.1f} | {first.seconds / run.seconds:.2f}x"
        print(f"| {count} | {times} | {run.cpu_seconds:.1f} | {run.load:.1f} |")


if __name__ == "__main__":
    main()
