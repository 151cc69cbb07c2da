"""How fast the kernels of an MLP by neurons are: the list, and the active records, on the card or over the bus.

    python benchmarks/cuda_neurons.py [--shape 13b] [--shape 70b]

Random records and gates of a block of the shape, 13.5 % of its neurons active. Each kernel runs several times in a CUDA
graph, on other records each time, so that no cache serves it; the medians of replays. Beside records that lie in the
host's pinned memory stand large copies from there, and how many of their bytes a second the kernel has. Last what
copies of gates take: scores of all neurons, exact gates of those listed, and who of these is active.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import click
import torch
from cuda_timing import announced_bandwidth
from hybrid_synthetic import SIZES
from synthetic import Size

from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.formats.codecs.neurons import record_bytes
from sparsepack.runtime.cuda.driver.host_memory import host_tensors
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS
from sparsepack.runtime.cuda.products import gate_copies
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons, CudaNeurons
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.tuning import random_blocks
from sparsepack.tables import Table, markdown

DENSITY = 0.135
TEXTS = (1, 4, 8)
COPIES = 6
"""So many runs are in a graph."""
REPLAYS = 20
THERE = 24_576
"""Records in the host's memory, of which each run of a graph reads others."""
RECORDS = (100, 300, 1000, 4000)
RELU = 1

Run = Callable[[], object]


def microseconds(runs: Sequence[Run]) -> float:
    """Of one of the runs, the median over replays of a graph of all."""
    graph = KERNELS.captured(lambda: [run() for run in runs], torch.cuda.Stream())
    taken = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(taken)


def speed(us: float, nbytes: int) -> str:
    """Cells of a table."""
    return f"{us:.1f} us, {nbytes / us / 1e3:.1f} GB/s"


def on_the_card(size: Size, records: CudaNeurons) -> list[list[str]]:
    """A row for each number of texts."""
    device, each = records.records.device, record_bytes(size.hidden)
    blocks = random_blocks((size.intermediate, size.hidden))
    gate = KERNELS.load_zigzag(PackedMatrix(blocks, ZIGZAG, size.intermediate, size.hidden), device)
    copies = [records, *(replace(records, records=records.records.clone()) for _ in range(COPIES - 1))]
    threshold = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - DENSITY)).item()
    norm, junk = torch.ones(size.hidden, device=device), torch.empty(size.intermediate, device=device)
    rows = []
    for texts in TEXTS:
        room = KERNELS.new_active_neurons(size.intermediate, size.hidden, texts, device)
        x, gates = (torch.randn(texts, columns, device=device) for columns in (size.hidden, size.intermediate))
        gates, y = gates - threshold, torch.empty_like(x)
        listing = microseconds([partial(KERNELS.list_neurons, gates, RELU, x, norm, 1e-5, room)] * COPIES)
        count = int(room.counts[1])
        adding = microseconds([partial(KERNELS.add_neurons, each, room, x, y) for each in copies])
        gating = "-"
        if texts == 1:
            input = Input(x[0], norm=norm, eps=1e-5)
            gating = speed(microseconds([partial(KERNELS.gemv, gate, input, Output(junk))] * COPIES), blocks.nbytes)
        rows.append([size.name, str(texts), f"{count:,}", f"{listing:.1f} us", speed(adding, count * each), gating])
    return rows


def lists(size: Size, resident: int, count: int, device: torch.device) -> list[ActiveNeurons]:
    """Lists of neurons of the first memory and then of the second, those of the second other ones in each."""
    found = []
    for part in torch.randperm(THERE).split(count)[:COPIES]:
        room = KERNELS.new_active_neurons(size.intermediate, size.hidden, 1, device)
        near = torch.randperm(size.intermediate)[:resident].sort().values
        room.index[: resident + count] = torch.cat([near, part.sort().values]).to(device, torch.int32)
        room.gates.fill_(1.0)
        room.x.normal_()
        room.counts[0], room.counts[1] = resident, resident + count
        found.append(room)
    return found


def over_the_bus(size: Size, records: CudaNeurons) -> list[list[str]]:
    """A row for each number of records, the last one beside as many from the card as a 70B model in 24 GB has."""
    device, each = records.records.device, record_bytes(size.hidden)
    (there,) = host_tensors(1, (THERE, each), torch.uint8, device)
    for part in there.split(len(records.records)):
        part.copy_(records.records[: len(part)])
    host, room = replace(records, records=there), torch.empty_like(there[:4096])
    copies = there[:4096].nbytes / microseconds([partial(room.copy_, there[:4096])])
    x = torch.randn(1, size.hidden, device=device)
    y, rows = torch.empty_like(x), []
    beside = size.intermediate // 12
    for resident, count in [*((0, count) for count in RECORDS), (beside, 800)]:
        made = lists(size, resident, count, device)
        us = microseconds([partial(KERNELS.add_neurons, records, each, x, y, host=host) for each in made])
        share = f"{count * each / us / copies:.0%}"
        rows.append([size.name, f"{resident:,}", f"{count:,}", speed(us, count * each), share])
    rows.append([size.name, "-", "large copies", f"{copies / 1e3:.1f} GB/s", "-"])
    return rows


def by_copies(size: Size, device: torch.device) -> list[list[str]]:
    """Rows of the scores for each number of texts, and of the exact gates of 1.5 times as many as are active: from the
    card, and over the bus."""
    blocks = random_blocks((size.intermediate, size.hidden)).view(size.intermediate, -1)
    gate = PackedMatrix(blocks, "Q4_K", size.intermediate, size.hidden)
    frequency = torch.full((size.intermediate,), DENSITY)
    made = gate_copies.load_gate_copy(gate, frequency, 1.5, device)
    copies = [made, *(replace(made, codes=made.codes.clone()) for _ in range(COPIES - 1))]
    norm, rows = torch.ones(size.hidden, device=device), list[list[str]]()
    for texts in TEXTS:
        x, listed = torch.randn(texts, size.hidden, device=device), torch.empty(texts, size.intermediate, device=device)
        us = microseconds([partial(gate_copies.score_neurons, each, x, norm, 1e-5, listed) for each in copies])
        rows.append([size.name, f"scores, {texts} texts", f"{size.intermediate:,}", speed(us, made.codes.nbytes)])
    near = KERNELS.load_neurons(gate, device)
    (there,) = host_tensors(1, (THERE, blocks.shape[1]), torch.uint8, device)
    for part in there.split(len(near.records)):
        part.copy_(near.records[: len(part)])
    host, count = replace(near, records=there), round(1.5 * DENSITY * size.intermediate)
    for where, found in {
        "on the card": lists(size, count, 1, device),
        "over the bus": lists(size, 0, count, device),
    }.items():
        us = microseconds([partial(gate_copies.multiply_listed, near, each, RELU, host=host) for each in found])
        rows.append([size.name, f"exact gates {where}", f"{count:,}", speed(us, count * blocks.shape[1])])
    kept = [gate_copies.kept_of(each, gate_copies.new_kept(size.intermediate, 1, device)) for each in found]
    us = microseconds([partial(gate_copies.keep_active, *both) for both in zip(found, kept, strict=True)])
    rows.append([size.name, "who is kept", f"{count:,}", f"{us:.1f} us"])
    return rows


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SIZES)), default=("13b", "70b"))
def main(shapes: tuple[str, ...]) -> None:
    """Print the tables."""
    announced_bandwidth()
    device, near, far, copied = KERNELS.usable("cuda"), list[list[str]](), list[list[str]](), list[list[str]]()
    with torch.no_grad():
        for size in (SIZES[shape] for shape in shapes):
            blocks = random_blocks((size.intermediate, 2 * size.hidden)).view(size.intermediate, -1)
            stored = PackedMatrix(blocks, "Q4_K", size.intermediate, 2 * size.hidden)
            records = KERNELS.load_neurons(stored, device)
            near += on_the_card(size, records)
            far += over_the_bus(size, records)
            copied += by_copies(size, device)
    head = ["a block of", "texts", "active in any", "list", "up, down and sum", "gate"]
    click.echo(markdown(Table(head, near, "records on the card")))
    head = ["a block of", "records on the card", "over the bus", "up, down and sum", "of large copies"]
    click.echo(markdown(Table(head, far, "records in the host's memory")))
    head = ["a block of", "copies of its gate", "neurons", "time"]
    click.echo(markdown(Table(head, copied, "copies of gates in 2 bits")))


if __name__ == "__main__":
    main()
