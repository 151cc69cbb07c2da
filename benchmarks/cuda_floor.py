"""How fast a product with half of its columns could be on a GPU that knew them and had nothing to multiply.

    python benchmarks/cuda_floor.py

As in `cuda_gemv.py` products are a chain, each needs what the one before made, and a chain is replayed as a CUDA graph
over more than 600 MB of weights. But here (`cuda_floor.cu`) a block only waits for its input, reads its active columns,
which it knew before, and adds up with the blocks that have other columns of the same rows. Of the layouts tried for a
shape the fastest counts. Products that share columns between blocks as ours do have all of this to do, and more; other
ways to read or to add up may be faster than the ones here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click
import torch
from cuda_chain import Buffers
from cuda_gemv import ANCHORS, BYTES, FEWEST, SUMMED
from cuda_timing import announced_bandwidth
from torch import Tensor
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.runtime.cuda.driver.compiler import FOLDER, cuda_core
from sparsepack.runtime.cuda.driver.flag_in_data import flag_in_data_buffers
from sparsepack.runtime.cuda.driver.kernel import Kernel, architecture, launch, multiprocessors
from sparsepack.tables import Table, markdown

SUPERBLOCK = 144
TILE_BANDS = (1, 2, 4, 8)
BLOCKS = ((256, 8), (512, 4), (512, 8), (1024, 4))
"""Threads of a block, and reads that each of them has on their way."""
ROUNDS = 5
TARGETS = (0.75, 1.8)
"""The share of the bandwidth, and the speed over llama.cpp's, that are wanted."""


@dataclass(frozen=True)
class Layout:
    """tile_bands -- bands of 256 rows that lie together
    splits     -- blocks that share a tile's columns
    threads    -- of a block
    at_once    -- reads of 16 bytes that a thread has on their way
    """

    tile_bands: int
    splits: int
    threads: int
    at_once: int

    def __str__(self) -> str:
        return f"{self.tile_bands}, {self.splits} x {self.threads} x {self.at_once}"


def layouts(rows: int, columns: int, processors: int) -> Iterator[Layout]:
    """Those that suit a shape: about a block for each multiprocessor."""
    for tile_bands, (threads, at_once) in product(TILE_BANDS, BLOCKS):
        tiles, rest = divmod(rows, 256 * tile_bands)
        if rest or tiles > processors:
            continue
        yield Layout(tile_bands, min(processors // tiles, columns // 32), threads, at_once)


class Chain:
    """Products of a shape that feed each other, over parts of one buffer.

    blocks -- uint8 [matrices, rows / 256 * columns * 144]
    """

    def __init__(self, rows: int, columns: int, layout: Layout, blocks: Tensor, read: bool) -> None:
        self._rows, self._columns, self._layout, self._blocks = rows, columns, layout, blocks
        self._kernel = _kernel(layout, read)
        device = blocks.device
        split = [
            torch.arange(columns, device=device).view(-1, 32)[s :: layout.splits].flatten()
            for s in range(layout.splits)
        ]
        chosen = [part[torch.randperm(len(part), device=device)[: len(part) // 2]].sort().values for part in split]
        self._most = len(chosen[0])
        self.active = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1).int()
        self._buffers = Buffers(rows, columns, device, lambda part: part.fill_(1))
        self._workspace = flag_in_data_buffers([rows * layout.splits], device)[0]

    def run(self, number: int) -> None:
        """Put a product on the current stream, after those before it."""
        if number == 0:
            self._buffers.begin()
        launch(
            self._kernel,
            (self._layout.splits, self._rows // 256 // self._layout.tile_bands),
            self._layout.threads,
            *(self._blocks[number % len(self._blocks)], self.active, self._most, self._columns),
            *(self._buffers.taken(number), self.made(number), self._workspace),
            *(self._buffers.reset(number), self._rows),
            shared=4 * self._most,
        )

    def made(self, number: int) -> Tensor:
        """What a product made, float32 [rows], until the second after it runs."""
        return self._buffers.made(number)


def _kernel(layout: Layout, read: bool) -> Kernel:
    from cuda.bindings import driver

    arch = architecture(0)
    macros = {
        "TILE_BANDS": layout.tile_bands,
        "SPLITS": layout.splits,
        "BLOCK": layout.threads,
        "AT_ONCE": layout.at_once,
        "READ": int(read),
    }
    options = cuda_core().ProgramOptions(
        std="c++17",
        arch=f"sm_{arch}",
        define_macro=[(name, str(value)) for name, value in macros.items()],
        include_path=str(FOLDER),
    )
    source = Path(__file__).with_suffix(".cu").read_text()
    code = bytes(cuda_core().Program(source, "c++", options).compile("cubin").code)
    error, module = driver.cuModuleLoadData(code)
    error, function = (error, None) if int(error) else driver.cuModuleGetFunction(module, b"cuda_floor")
    if int(error):
        raise RuntimeError(f"CUDA: {error.name} in cuda_floor")
    return Kernel(function, arch, "cuda_floor")


def check() -> None:
    """RuntimeError unless blocks read their active columns, all of them and no others, and add up."""
    rows, columns, layout = 1024, 288, Layout(2, 4, 256, 8)
    blocks = torch.zeros(1, rows // 512, columns, 2 * SUPERBLOCK, dtype=torch.uint8, device="cuda")
    chain = Chain(rows, columns, layout, blocks.flatten(1), read=True)
    active = torch.zeros(columns, dtype=torch.bool, device="cuda")
    active[chain.active[chain.active >= 0].long()] = True

    def made(tile: int, column: int, byte: int) -> list[list[float]]:
        blocks.zero_()
        blocks[0, tile, column, byte] = 1
        chain.run(0)
        return [part.unique().tolist() for part in chain.made(0).clone().split(512)]

    for column in range(columns):
        for byte in (0, 2 * SUPERBLOCK - 1):
            expected = [[layout.splits + int(active[column])], [layout.splits]]
            if made(0, column, byte) != expected or made(1, column, byte) != expected[::-1]:
                raise RuntimeError(f"column {column}, byte {byte}: not what its blocks should have read; not timed")


def measure(rows: int, columns: int) -> tuple[dict[bool, float], Layout, int]:
    """Seconds of the fastest product with and without reading, the former's layout, and the bytes that it reads."""
    nbytes = rows // 256 * columns * SUPERBLOCK
    copies = max(4, -(-BYTES // nbytes))
    blocks = torch.randint(0, 256, (copies, nbytes), dtype=torch.uint8, device="cuda")
    length = copies * -(-FEWEST // copies)
    best: dict[bool, tuple[float, Layout, int]] = {}
    for layout in layouts(rows, columns, multiprocessors(blocks.device)):
        chains = {read: Chain(rows, columns, layout, blocks, read) for read in (False, True)}
        seconds = interleaved({str(read): graph_seconds(chain.run, length) for read, chain in chains.items()}, ROUNDS)
        for read, chain in chains.items():
            found = (seconds[str(read)], layout, rows // 256 * int((chain.active >= 0).sum()) * SUPERBLOCK)
            best[read] = min(best.get(read, found), found, key=lambda one: one[0])
    return {read: one[0] for read, one in best.items()}, *best[True][1:]


@click.command()
def main() -> None:
    """Print the table."""
    check()
    bandwidth = announced_bandwidth()
    lines = []
    for (rows, columns), anchor in ANCHORS.items():
        seconds, layout, nbytes = measure(rows, columns)
        name = f"{rows} x {columns}" + (f" ({SUMMED[rows, columns]})" if (rows, columns) in SUMMED else "")
        wanted = nbytes / bandwidth / TARGETS[0] * 1e6, anchor / TARGETS[1]
        lines.append(
            [
                name,
                f"{seconds[False] * 1e6:.2f}",
                f"{seconds[True] * 1e6:.2f}",
                f"{nbytes / seconds[True] / bandwidth:.0%}",
                f"{anchor / seconds[True] / 1e6:.2f}",
                *(f"{us:.2f}" for us in wanted),
                str(layout),
            ]
        )
    head = ["shape", "us, nothing read", "us", "of bandwidth", "x", "us for 75 %", "us for 1.8 x", "layout"]
    click.echo(markdown(Table(head, lines)))
    click.echo("x: llama.cpp's dense time over this one; layout: tile_bands, splits x threads x reads at once")


if __name__ == "__main__":
    main()
