"""How near `calibrate` comes to what a GPU's products alone would take, as one Markdown table.

    python benchmarks/calibrate_bound.py TEXT [--shape 8b:32 --shape 70b:5] [--samples 128] [--context 2048] [--pack]
        [--work /dev/shm/sparsepack-bound] [--json FILE]

A shape is a random model in bfloat16 with so many blocks (`many_workers.py`). The bound is 2 x weights of its blocks x
tokens, at the rate at which the products of a block run here by themselves: medians of CUDA events, 4,096 and 16,384
tokens, the better counts. Beside it stand the seconds of the blocks, and of the whole function, which also hashes the
model's files, cuts the text and writes the calibration. The last columns are computed from them for all blocks of the
model: what one block took times their number.
"""

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_synthetic import LLAMA_8B
from figures import json_option, write_figures
from many_workers import made_shape

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.calibration.samples import at_once
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.stock import forecast as bound
from sparsepack.packing import PackRequest, pack

BLOCKS = {"8b": LLAMA_8B.layers, "70b": 80}
"""Of the whole models."""


def milliseconds(run: Any, times: int = 15) -> float:
    """The median of a run on the GPU."""
    run()
    found = []
    for _ in range(times):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last))
    return sorted(found)[times // 2]


def product_rate(checkpoint: Checkpoint) -> float:
    """Operations a second of the products of a block by themselves."""
    rates = []
    for tokens in (4096, 16384):
        shapes = [checkpoint.stacked_shape(site, 0) for site in SITES]
        weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        inputs = [torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16) for _, columns in shapes]

        taken = milliseconds(partial(_multiply, inputs, weights))
        rates.append(sum(2 * rows * columns * tokens for rows, columns in shapes) / taken * 1e3)
    return max(rates)


def _multiply(inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for x, matrix in zip(inputs, weights, strict=True):
        x @ matrix.t()


def measured(model: Path, text: str, samples: int, context: int, made: Path) -> tuple[float, float, str]:
    """Seconds of `calibrate` and of its blocks, and what it says of them, after a run of a few windows."""
    said: list[str] = []
    bound.EVERY = 0.0
    line = bound.bound_line

    def kept(seconds: float, *arguments: Any) -> str:
        said[:] = [str(seconds), line(seconds, *arguments)]
        return said[1]

    bound.bound_line = kept
    try:
        batch = at_once(None, samples, context, "cuda")
        for windows in (2 * batch, samples):
            began = time.perf_counter()
            options = CalibrateOptions(samples=windows, context=context, batch=batch, device="cuda")
            calibrate(model, text, made, options, overwrite=True)
            seconds = time.perf_counter() - began
    finally:
        bound.bound_line = line
    return seconds, float(said[0]), said[1]


@click.command()
@click.argument("text")
@click.option("--shape", "shapes", multiple=True, default=("8b:32", "70b:5"), show_default=True)
@click.option("--samples", default=128, show_default=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--pack", "packs", is_flag=True, help="Also pack to zigzag-q4_k on the GPU.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("/dev/shm/sparsepack-bound"), show_default=True)
@json_option
def main(
    text: str, shapes: tuple[str, ...], samples: int, context: int, packs: bool, work: Path, json_path: Path | None
) -> None:
    """Print the table."""
    work.mkdir(parents=True, exist_ok=True)
    click.echo(f"{torch.cuda.get_device_name()}, {samples} windows of {context} tokens")
    click.echo("\n| model | blocks | calibrate | its blocks | products alone | share | pack | all blocks | pack them |")
    click.echo("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows, lines = [], []
    for shape in shapes:
        model = made_shape(f"shape:{shape}", work, "cuda")
        checkpoint = open_checkpoint(model)
        rate = product_rate(checkpoint)
        whole, blocks, said = measured(model, text, samples, context, work / "calibration")
        least = 2 * bound.weights_of_block(checkpoint) * checkpoint.layers * samples * context / rate
        packing = 0.0
        for _ in range(2 if packs else 0):
            began = time.perf_counter()
            pack(PackRequest(str(model), work / "packed.gguf", device="cuda", overwrite=True))
            packing = time.perf_counter() - began
            (work / "packed.gguf").unlink()
        all_blocks = BLOCKS[shape.split(":")[0]] / checkpoint.layers
        click.echo(
            f"| {shape.split(':')[0]} | {checkpoint.layers} | {whole:.1f} s | {blocks:.1f} s | {least:.1f} s, "
            f"{rate / 1e12:.0f} TFLOP/s | {least / blocks:.0%} | {f'{packing:.1f} s' if packs else '-'} | "
            f"{blocks * all_blocks:.0f} s | {f'{packing * all_blocks:.0f} s' if packs else '-'} |"
        )
        lines.append(f"{shape}: {said}")
        rows.append(
            {"shape": shape, "calibrate": whole, "blocks": blocks, "bound": least, "rate": rate, "pack": packing}
        )
        shutil.rmtree(work / "calibration")
    click.echo("\n" + "\n".join(lines))
    write_figures(json_path, {"device": torch.cuda.get_device_name(), "samples": samples, "rows": rows})


if __name__ == "__main__":
    main()
