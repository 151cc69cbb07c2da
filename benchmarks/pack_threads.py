"""Seconds to pack a random Llama on 1, 2, 4 ... cores of a CPU, as one Markdown table.

    python benchmarks/pack_threads.py [--format zigzag-q4_k] [--cores 1 --cores 16] [--size llama-1b] [--work FOLDER]

Each count of cores is a process of its own that may use no others. The checkpoint is read once before, so that it lies
in the page cache; Python's and the libraries' start is not counted: a checkpoint is opened before. The artifacts of all
counts must be equal, byte for byte, or nothing is printed.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click

_PACK = """
import json, os, sys, time
cores = sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]
os.sched_setaffinity(0, cores)
import torch
torch.set_num_threads(len(cores))
from pathlib import Path
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack
open_checkpoint(sys.argv[2]).architecture
began = time.perf_counter()
pack(PackRequest(sys.argv[2], Path(sys.argv[3]), format=sys.argv[4], overwrite=True))
print(json.dumps(time.perf_counter() - began))
"""
_MAKE = """
import sys
from pathlib import Path
import synthetic
sizes = {size.name: size for size in (synthetic.BILLION, synthetic.LLAMA_3_2_1B, synthetic.TINY)}
folder = Path(sys.argv[2])
folder.mkdir(parents=True)
synthetic.make_checkpoint(folder, sizes[sys.argv[1]])
"""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@click.command()
@click.option("--format", "format", default="zigzag-q4_k", show_default=True)
@click.option("--cores", type=int, multiple=True, help="Counts of cores; default 1, 2, 4 ... and all.")
@click.option("--size", default="llama-1b", show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("/dev/shm/sparsepack-pack"), show_default=True)
def main(format: str, cores: tuple[int, ...], size: str, work: Path) -> None:
    """Print the table."""
    there = len(os.sched_getaffinity(0))
    counts = cores or tuple(sorted({there, *(1 << n for n in range(there.bit_length()) if 1 << n <= there)}))
    model = work / size
    if not model.is_dir():
        subprocess.run([sys.executable, "-c", _MAKE, size, str(model)], cwd=Path(__file__).parent, check=True)
    for path in model.glob("*.safetensors"):
        _sha256(path)
    seconds: dict[int, float] = {}
    hashes = set()
    for count in counts:
        out = work / "packed.gguf"
        command = [sys.executable, "-c", _PACK, str(count), str(model), str(out), format]
        made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        seconds[count] = json.loads(made.stdout.decode().splitlines()[-1])
        hashes.add(_sha256(out))
        out.unlink()
    if len(hashes) > 1:
        raise click.ClickException("the artifacts differ from each other")
    print(f"{size}, {format}, {there} cores there")
    print("\n| cores | seconds | times as fast as on the first |\n|--:|--:|--:|")
    for count in counts:
        print(f"| {count} | {seconds[count]:.1f} | {seconds[counts[0]] / seconds[count]:.2f} |")


if __name__ == "__main__":
    main()
