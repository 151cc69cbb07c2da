"""Quantising and lifting the inputs of slid weights in one kernel, beside the same kernel without lifting, and a copy.

    python benchmarks/slide_inputs.py [--rounds 9]

For the widths of Qwen2.5-7B. The copy moves as many bytes: half of them read, half written.
"""

import click
import torch
from cuda_timing import device_line
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.formats.codecs.slide import Slide
from sparsepack.models.records.pattern import Pattern
from sparsepack.runtime.cuda.slide.inputs import quantise_slide
from sparsepack.runtime.reference import products as reference
from sparsepack.tables import Table, markdown

TOKENS, WIDTHS = (512, 2048, 8192, 16384), (3584, 18944)
PLAIN, SLID = Slide(Pattern(2, 4)), Slide(Pattern(6, 8))
DTYPES = (torch.int8, torch.float8_e4m3fn)


def check(x: torch.Tensor, how: Slide, dtype: torch.dtype) -> None:
    """Raises RuntimeError where the bits are not the reference's."""
    q, scale = quantise_slide(x, how, dtype)
    wanted, wanted_scale = reference.quantise_slide(x, how, dtype)
    same = torch.equal(q[:, : wanted.shape[1]].view(torch.uint8), wanted.view(torch.uint8))
    if wanted_scale is None or not same or not torch.equal(scale, wanted_scale):
        raise RuntimeError(f"{how}, {dtype}: not the reference's values; not timed")


@click.command()
@click.option("--rounds", default=9, show_default=True)
def main(rounds: int) -> None:
    """Print the table."""
    click.echo(device_line())
    rows = []
    for width in WIDTHS:
        for tokens in TOKENS:
            copies = max(1, (1 << 27) // (2 * tokens * width))
            x = [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(copies)]
            for dtype in DTYPES:
                check(x[0], SLID, dtype)
                moved = tokens * (2 * width + SLID.lifted(width))
                source = torch.empty(moved // 2 * copies, dtype=torch.uint8, device="cuda").view(copies, -1)
                target = torch.empty_like(source)

                def sliding(i: int, x: list[torch.Tensor] = x, dtype: torch.dtype = dtype) -> object:
                    return quantise_slide(x[i % len(x)], SLID, dtype)

                def plain(i: int, x: list[torch.Tensor] = x, dtype: torch.dtype = dtype) -> object:
                    return quantise_slide(x[i % len(x)], PLAIN, dtype)

                def copying(i: int, source: torch.Tensor = source, target: torch.Tensor = target) -> object:
                    return target[i % len(target)].copy_(source[i % len(source)])

                count = max(8, copies)
                ways = {"slid": sliding, "plain": plain, "copy": copying}
                found = interleaved({name: graph_seconds(way, count) for name, way in ways.items()}, rounds)
                rows.append(
                    [
                        str(dtype).removeprefix("torch."),
                        width,
                        tokens,
                        *(f"{found[name] * 1e6:.1f}" for name in ways),
                        f"{found['slid'] / found['plain']:.2f}",
                        f"{moved / found['slid'] / 1e9:.0f}",
                        f"{found['copy'] / found['slid']:.0%}",
                    ]
                )
    head = [
        "type",
        "inputs",
        "tokens",
        "slid 6/8, us",
        "plain, us",
        "copy, us",
        "slid / plain",
        "GB/s",
        "of the copy's",
    ]
    click.echo(markdown(Table(head, rows)))


if __name__ == "__main__":
    main()
