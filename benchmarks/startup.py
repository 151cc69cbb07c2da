"""What starting takes: seconds and memory of `sparsepack generate`, and of importing torch, which is most of both.

Each is a process of its own, all in turns. Seconds of processor are the median of rounds, memory is the most that a
process had resident.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import click

from benchmarks.shared.timing import interleave, json_option, write_figures
from sparsepack.packing import PackRequest, pack
from sparsepack.tables import Table, markdown

PEAK = r"""
import atexit, re, runpy, sys
status = lambda: open("/proc/self/status").read()
atexit.register(lambda: print(re.search(r"VmHWM:\s+(\d+)", status())[1], file=sys.stderr))
"""
"""A process that begins so says at its end how many KiB it had resident: what wait4 says is this one's, if more."""

RUN = "runpy.run_module('sparsepack', run_name='__main__')"


def run_process(code: str, *arguments: str) -> tuple[float, float, int]:
    """Run Python code with these arguments; return its seconds, those of the processor, and the most bytes it had
    resident. Raises `RuntimeError` where it fails."""
    began = time.perf_counter()
    command = [sys.executable, "-c", PEAK + code, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{code} {' '.join(arguments)}: {said}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, int(said.split()[-1]) * 1024


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="A packed file (default: the tiny model).")
@click.option("--tokens", default=8, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(model: Path | None, tokens: int, rounds: int, json_path: Path | None) -> None:
    """Print the table. Linux alone: other systems count memory otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        file = model or pack(PackRequest("shipped:tiny", Path(folder) / "tiny.gguf", score=False)).path
        arguments = ["generate", str(file), "--prompt", "The", "--tokens", str(tokens)]
        runs = {
            "import torch": partial(run_process, "import torch"),
            f"sparsepack generate, {tokens} tokens": partial(run_process, RUN, *arguments),
        }
        found = interleave(runs, rounds, warm_up=1)
    figures, rows = {}, []
    for name, taken in found.items():
        seconds, processor, memory = (statistics.median(each) for each in zip(*taken, strict=True))
        figures[name] = {"seconds": seconds, "processor_seconds": processor, "bytes": memory}
        rows.append([name, f"{seconds:.1f}", f"{processor:.1f}", f"{memory / 1e6:.0f}"])
    click.echo(markdown(Table(["process", "seconds", "of processor", "MB"], rows)))
    write_figures(json_path, figures)
