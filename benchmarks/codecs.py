"""Error and speed of the Q4_K and Q6_K codecs, next to ggml's."""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.shared.evaluation import SHARED
from benchmarks.shared.timing import interleave
from sparsepack.formats.blocks import q4_k, q6_k
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.orders import zigzag

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import codec_cases
import ggml

CODECS = {"q4_k": q4_k, "q6_k": q6_k}


def check_decoders(device: torch.device) -> None:
    """Exit unless every decoder reads random blocks as gguf-py does, bit for bit."""
    if importlib.util.find_spec("gguf") is None:
        click.echo("gguf-py is absent: decoders compared with our own on the CPU only", err=True)
    for name, codec in CODECS.items():
        blocks = torch.randint(0, 256, (512, 8 * BLOCKS[name.upper()].bytes), dtype=torch.uint8)
        expected = ggml.dequantize(name, blocks) if importlib.util.find_spec("gguf") else codec.decode(blocks)
        found = codec.decode(blocks.to(device)).cpu()
        finite = expected.isfinite()
        if not torch.equal(found.isfinite(), finite) or not torch.equal(found[finite], expected[finite]):
            raise click.ClickException(f"{name}: the decoder differs from gguf-py; no times are taken")


def matrices() -> Iterator[tuple[str, str, Callable[[], Iterator[Tensor]]]]:
    """(name, order, the matrices counted together)."""
    for name, weights in codec_cases.synthetic().items():
        yield name, "rows", lambda weights=weights: iter([weights])
    shared = SHARED / "models"
    for model in ("books-26m-silu", "books-26m-relu", "stories-260k"):
        if not (shared / model).is_dir():
            click.echo(f"{shared / model} is absent: left out", err=True)
            continue
        for order, arrange in (("rows", codec_cases.padded), ("zigzag", codec_cases.zigzag_order)):
            yield (
                f"{model}, every matrix, worst",
                order,
                lambda path=shared / model, arrange=arrange: (arrange(w) for _, w in codec_cases.model_matrices(path)),
            )


def error_table(device: torch.device) -> None:
    click.echo("| matrix | order | format | sparsepack, rel. error | ggml | ratio |\n|---|---|---|---|---|---|")
    for label, order, group in matrices():
        for name, codec in CODECS.items():
            worst: tuple[float, float | None, float] | None = None
            for weights in group():
                ours = codec_cases.relative_error(codec.decode(codec.encode(weights.to(device))).cpu(), weights)
                theirs = None
                if ggml.library() is not None:
                    theirs = codec_cases.relative_error(ggml.dequantize(name, ggml.quantize(name, weights)), weights)
                ratio = ours / theirs if theirs else ours
                if worst is None or ratio > worst[2]:
                    worst = ours, theirs, ratio
            assert worst is not None
            peer = "- | -" if worst[1] is None else f"{worst[1]:.6f} | {worst[2]:.4f}"
            click.echo(f"| {label} | {order} | {name} | {worst[0]:.6f} | {peer} |")


def speed_table(device: torch.device, size: int, repeats: int, dtype: torch.dtype) -> None:
    weights = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    on_device = weights.to(device, dtype)
    runs: dict[str, Callable[[], Tensor]] = {
        "q4_k.encode": lambda: q4_k.encode(on_device),
        "q6_k.encode": lambda: q6_k.encode(on_device),
        "zigzag.pack": lambda: zigzag.pack(on_device),
    }
    results: dict[str, Tensor] = {}
    runs["q4_k.decode"] = lambda: q4_k.decode(results["q4_k.encode"])
    runs["q6_k.decode"] = lambda: q6_k.decode(results["q6_k.encode"])
    if device.type == "cpu" and ggml.library() is not None:
        for name in CODECS:
            runs[f"ggml {name}, 1 thread"] = lambda name=name: ggml.quantize(name, weights)

    def seconds_of(name: str) -> float:
        start = time.perf_counter()
        results[name] = runs[name]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    # The first round compiles and warms up.
    seconds = interleave({name: partial(seconds_of, name) for name in runs}, repeats + 1)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    click.echo(f"\n{size} x {size} {str(dtype).removeprefix('torch.')}, {where}, median of {repeats}, interleaved\n")
    click.echo("| operation | first call, s | ms | M weights/s | GB/s of unpacked weights |\n|---|---|---|---|---|")
    for name, times in seconds.items():
        first, *later = times
        middle = statistics.median(later)
        width = 4 if "ggml" in name or "decode" in name else dtype.itemsize
        rate = weights.numel() / middle
        click.echo(f"| {name} | {first:.2f} | {middle * 1e3:.1f} | {rate / 1e6:.1f} | {rate * width / 1e9:.2f} |")


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=2, show_default=True, help="CPU threads")
@click.option("--size", type=int, help="rows and columns for the speed table; 4096, on CUDA 16384")
@click.option("--repeats", default=7, show_default=True)
@click.option("--errors/--no-errors", default=True)
def main(device: str, threads: int, size: int | None, repeats: int, errors: bool) -> None:
    """Print the tables."""
    torch.set_num_threads(threads)
    where = torch.device(device)
    on_cuda = where.type == "cuda"
    check_decoders(where)
    if errors:
        error_table(where)
    speed_table(where, size or (16384 if on_cuda else 4096), repeats, torch.bfloat16 if on_cuda else torch.float32)
