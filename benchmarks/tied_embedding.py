"""What the type of a tied embedding does to a small model's size and speed: the shape of Qwen2.5-0.5B, random weights.

The embedding is 28 % of its weights and is read for every token, as the output matrix. Files that differ in its type
alone take turns; each is checked, dense and sparse, before it is timed (`sparsepack bench`).
"""

import statistics
from pathlib import Path

import click
import torch

from benchmarks.shared.checkpoints import DEFAULT_WORK, INDEX, make_shards
from benchmarks.shared.shapes import QWEN_0_5B, TINY
from benchmarks.shared.thresholds import find_thresholds, with_thresholds
from sparsepack.bench.decode import bench_decode
from sparsepack.bench.options import BenchSettings
from sparsepack.formats.open import read_packed
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

KINDS = ("f16", "q8_0", "auto")
SHOWN = 0.5


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tiny", is_flag=True, help="To try the script.")
def main(device: str, work: Path, rounds: int, tiny: bool) -> None:
    """Print the table."""
    size = TINY if tiny else QWEN_0_5B
    folder = work / f"{size.name}-tied"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint"
    if not (checkpoint / INDEX).is_file():
        make_shards(checkpoint, size)
    files = {kind: folder / f"{kind}.gguf" for kind in KINDS}
    for kind, path in files.items():
        if not path.is_file():
            pack(PackRequest(str(checkpoint), path, embedding_type=kind, device=device))
    thresholds = find_thresholds(read_packed(files["f16"]), [SHOWN])[SHOWN]
    packed = {kind: with_thresholds(read_packed(path, verify=False), thresholds) for kind, path in files.items()}
    settings = BenchSettings(prompt=0, repetitions=2, engine=EngineOptions(device))
    speeds: dict[tuple[str, str], list[float]] = {}
    skipped: dict[str, float] = {}
    for _ in range(rounds):
        for kind, model in packed.items():
            for row in bench_decode(model, settings)["tests"]:
                speeds.setdefault((kind, row["mode"]), []).append(row["avg_ts"])
                skipped[row["mode"]] = row["realised_sparsity"]
    rows = []
    for kind, path in files.items():
        dense, sparse = (statistics.median(speeds[kind, mode]) for mode in ("dense", "sparse"))
        stored = f"{packed[kind].embedding.format} ({kind})"
        rows.append(
            [stored, f"{path.stat().st_size / 1e6:.0f}", f"{dense:.1f}", f"{sparse:.1f}", f"{sparse / dense:.2f}"]
        )
    where = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
    click.echo(
        f"{size.name}, {where}, {skipped['sparse']:.1%} of the block weights skipped; medians of {rounds} rounds"
    )
    click.echo(markdown(Table(["embedding", "MB", "dense, t/s", "sparse, t/s", "x"], rows)))
