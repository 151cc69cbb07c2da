"""Measures the bandwidth between a GPU and the processor: see `placement.machine.BandwidthProfile`.

    alone      the GPU out of slots | the GPU over the bus | the worker | large copies, to compare the bus with
    together   the GPU out of slots, or over the bus, while the worker computes out of the same memory
    on card    the GPU, matrices in its memory
    offloaded  matrices in the host's memory: the GPU over the bus | the worker | both at once
    handed     steps of which the worker computes a neuron a block, and steps of which nobody computes anything

All take turns, round after round. The GPU is timed by its own clock, between events, the worker from requests to
answers. What runs is what runs when a model decodes: the kernels of a token's graph, and the native worker.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.process import cores
from sparsepack.progress import format_count
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cpu.machine import last_caches
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.tile_config import BLOCK_BYTES, offloaded_tile_bands, offloaded_tile_config
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.hybrid.mailbox import Mailbox, ProductRequest, next_number, views
from sparsepack.runtime.hybrid.offloaded import GpuMailbox
from sparsepack.runtime.hybrid.slots import NeuronSlots
from sparsepack.runtime.tuning import ROTATION, random_blocks

LISTED = 2048
"""A call lists this many active neurons, so many that starting the call hardly counts."""
ONE_IN = 8
"""One of this many neurons is active, as in trained models with ReLU."""
MOST_LISTS = 256
"""No more lists than these take turns."""
TIMES_CACHES = 4
MOST_ROTATION = 2 << 30
"""What takes turns has at least this many times the bytes of the processor's caches, but no more than so many: a
server's cache of 300 MiB holds all that others do not, and a worker is faster out of it than out of memory."""


ROUNDS = 9
ATTEMPTS = 3
"""Rounds that do not agree are measured anew, so many times in all: other work may end meanwhile."""
NOISE = 0.2
"""The middle half of a figure's rounds may lie this far apart, as a part of the figure: a division by figures that are
wrong by more gains little."""
BANDS = 40
"""A matrix that every token reads has so many bands here, as those of large models."""
MAILBOX_BLOCKS = 32
"""A step hands over so many blocks."""
REPLAYS = 4
"""The GPU is timed for so many replays at once, so that the worker works beside it for milliseconds."""
_NEURONS = 64  # of a block that is handed over


@dataclass(frozen=True)
class MeasuredBandwidth:
    """What was measured: `together` is what the division goes by, all else is for people.

    copies -- neurons a second whose records large copies bring over the bus
    """

    together: BandwidthProfile
    alone: BandwidthProfile
    copies: float


def measure_card(kernels: Kernels, device: torch.device, threads: int, hidden: int) -> MeasuredBandwidth:
    """Medians over all rounds, of records of `hidden` channels. Takes the bytes of `count_for` records of the
    GPU's memory, and some times as many of the host's, half of it pinned.

    threads -- of the worker

    Raises `UserError` where other work on the machine hides a figure, naming it.
    """
    before = _load()
    try:
        return _measured(kernels, device, threads, hidden)
    except _Hidden as hidden_figure:
        raise UserError(
            f"tune: {hidden_figure}; other work on this machine hides how fast it is ({before}); end that, or leave it "
            f"cores by fewer --threads than {threads}, here and where the model runs, then run tune again; until then "
            "speeds are assumed"
        ) from hidden_figure


class _Hidden(Exception):
    """A figure of which the rounds do not agree."""


def _load() -> str:
    """How much wanted to run on this machine in the last minute."""
    running = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "an unknown number of"
    return f"before, {running} threads wanted to run, and tune has {format_count(cores(), 'core')}"


def _measured(kernels: Kernels, device: torch.device, threads: int, hidden: int) -> MeasuredBandwidth:
    """Raises `_Hidden`."""
    with torch.no_grad(), kernels.on_device(device):
        seconds = _interleaved_medians(_bandwidth(kernels, device, threads, hidden))
        on_card = _interleaved_medians(_on_card(kernels, device, hidden))
        offloaded = _interleaved_medians(_offloaded(kernels, device, threads, hidden))
        seconds |= _interleaved_medians(_mailbox_rounds(kernels, device, threads, hidden))
    speed = {name: LISTED / taken for name, taken in seconds.items()}
    handover = max(seconds["steps with requests"] - seconds["steps without"], 0.0) / MAILBOX_BLOCKS
    if handover == 0:
        raise _Hidden("steps with requests: they take no longer than steps without")

    def profile(how: str) -> BandwidthProfile:
        return BandwidthProfile(
            resident=speed["slots" + how],
            bus=speed["the bus" + how],
            worker=speed["the worker" + how],
            handover=handover,
            near=1 / on_card["matrices on the card"],
            far_bus=1 / offloaded["matrices over the bus" + how],
            far_worker=1 / offloaded["the worker's" + how],
        )

    return MeasuredBandwidth(profile(" beside"), profile(""), copies=speed["large copies"])


Measurement = Callable[[], Mapping[str, float]]
"""A turn measures something once: seconds, by the name of the figure."""


def _interleaved_medians(measurements: Sequence[Measurement], attempts: int = ATTEMPTS) -> dict[str, float]:
    """The median of each figure, of rounds in which each turn comes once. Raises `_Hidden` where no attempt has rounds
    that agree."""
    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for measure_round in measurements:
            for name, seconds in measure_round().items():
                taken.setdefault(name, []).append(seconds)
    try:
        return {name: _figure(name, each) for name, each in taken.items()}
    except _Hidden:
        if attempts == 1:
            raise
    return _interleaved_medians(measurements, attempts - 1)


def _figure(name: str, taken: Sequence[float]) -> float:
    """The median. Raises `_Hidden` where the rounds do not agree."""
    if len(taken) > 1:
        first, middle, third = statistics.quantiles(taken, n=4, method="inclusive")
        if not third - first <= NOISE * middle:
            raise _Hidden(f"{name}: {1e6 * min(taken):.0f} to {1e6 * max(taken):.0f} us in {ROUNDS} rounds")
    return statistics.median(taken)


def _bandwidth(kernels: Kernels, device: torch.device, threads: int, hidden: int) -> list[Measurement]:
    """Each figure is of `LISTED` neurons; each neuron is in one list, so that no cache serves it."""
    stored = records(count_for(hidden), hidden)
    indices = [each.to(device) for each in lists(stored.rows, seed=1)]
    slots = kernels.load_neurons(stored, device)
    (pinned,) = kernels.host_tensors(1, tuple(slots.records.shape), torch.uint8, device, "records")
    host = replace(slots, records=pinned.copy_(slots.records))
    copied = kernels.host_memory(slots.records)
    active_neurons = kernels.new_active_neurons(LISTED, hidden, 1, device)
    active_neurons.x.normal_()
    x, y = torch.zeros(1, hidden, device=device), torch.empty(1, hidden, device=device)
    stream = kernels.new_stream()

    active_neurons.gates.fill_(1.0)

    def graph(resident: int, **memory: Any) -> tuple[Any, Any]:
        """The graph, and the function that it came from, which keeps what the graph reads and writes."""
        counts = torch.tensor([resident, LISTED, 0], dtype=torch.int32, device=device)
        of_lists = [replace(active_neurons, index=each, counts=counts) for each in indices]

        def run() -> None:
            for each in of_lists:
                kernels.add_neurons(slots, each, x, y, **memory)

        return kernels.capture_graph(run, stream), run

    graphs = {"slots": graph(LISTED), "the bus": graph(0, host=host)}
    worker = WorkerBench([operations.load_neurons(stored)] * len(indices), stored.rows, hidden, threads)
    worker.ask(lists(stored.rows, seed=1))

    def replays(name: str) -> None:
        for _ in range(REPLAYS):
            kernels.replay(graphs[name][0])

    def copy() -> None:
        slots.records.copy_(copied, non_blocking=True)

    def alone() -> dict[str, float]:
        gpu = {name: seconds_on_gpu(kernels, partial(replays, name)) / REPLAYS / len(indices) for name in graphs}
        return {**gpu, "large copies": seconds_on_gpu(kernels, copy) / len(indices), "the worker": worker.step()}

    def together() -> dict[str, float]:
        gpu, steps = {}, list[float]()
        for name in graphs:
            taken = seconds_on_gpu(kernels, partial(replays, name), partial(_kept, worker.step, steps))
            gpu[f"{name} beside"] = taken / REPLAYS / len(indices)
        return {**gpu, "the worker beside": statistics.median(steps)}

    copied.copy_(slots.records)
    return [alone, together]


def _matrices(hidden: int) -> tuple[PackedMatrix, int, int]:
    """A matrix, its bytes, and how many times it must be there so that no cache has them all; of a small model's no
    more than lists take turns."""
    rows, size = BANDS * BAND_ROWS, BANDS * hidden * BLOCK_BYTES
    stored = PackedMatrix(random_blocks((rows, hidden)), MatrixFormat("Q4_K", "zigzag"), rows, hidden)
    return stored, size, min(beyond_caches(size), MOST_LISTS)


def _products(kernels: Kernels, matrices: Sequence[CudaZigzag], device: torch.device) -> tuple[Any, Any]:
    """The graph of each matrix times a vector, and the function that it came from, which keeps what the graph reads."""
    x = torch.ones(matrices[0].columns, device=device)
    y = torch.empty(matrices[0].rows, device=device)

    def run() -> None:
        for each in matrices:
            kernels.gemv(each, Input(x), Output(y))

    return kernels.capture_graph(run, kernels.new_stream()), run


def _on_card(kernels: Kernels, device: torch.device, hidden: int) -> list[Measurement]:
    """The figure is of a byte."""
    stored, size, count = _matrices(hidden)
    graph = _products(kernels, [kernels.load_zigzag(stored, device) for _ in range(count)], device)

    def replays() -> None:
        for _ in range(REPLAYS):
            kernels.replay(graph[0])

    return [lambda: {"matrices on the card": seconds_on_gpu(kernels, replays) / REPLAYS / count / size}]


def _offloaded(kernels: Kernels, device: torch.device, threads: int, hidden: int) -> list[Measurement]:
    """Each figure is of a byte."""
    stored, size, count = _matrices(hidden)
    config = offloaded_tile_config(BANDS, hidden, device, offloaded_tile_bands(BANDS))
    host = [kernels.load_zigzag(stored, device, config, place=kernels.in_host_memory) for _ in range(count)]
    graph = _products(kernels, [kernels.first_bands(each, BANDS) for each in host], device)
    request = ProductRequest(0, hidden, stored.rows)
    products = [(operations.load_zigzag(stored, threads=threads), request) for _ in range(count)]
    worker = WorkerBench([operations.load_neurons(records(1, hidden))], 1, hidden, threads, products)

    def replays() -> None:
        for _ in range(REPLAYS):
            kernels.replay(graph[0])

    def alone() -> dict[str, float]:
        taken = seconds_on_gpu(kernels, replays) / REPLAYS / count
        return {"matrices over the bus": taken / size, "the worker's": worker.product() / size}

    def together() -> dict[str, float]:
        steps = list[float]()
        taken = seconds_on_gpu(kernels, replays, partial(_kept, worker.product, steps)) / REPLAYS / count
        return {"matrices over the bus beside": taken / size, "the worker's beside": statistics.median(steps) / size}

    return [alone, together]


def _mailbox_rounds(kernels: Kernels, device: torch.device, threads: int, hidden: int) -> list[Measurement]:
    """Steps of `MAILBOX_BLOCKS` blocks."""
    nobody_else = BandwidthProfile(resident=1.0, bus=1e-9, worker=1e9)
    mailbox = GpuMailbox(Mailbox(MAILBOX_BLOCKS, _NEURONS, hidden, 1), device, kernels)
    slots = NeuronSlots((MAILBOX_BLOCKS, _NEURONS), hidden, 0, nobody_else, mailbox, device, kernels)
    stored = records(_NEURONS, hidden)
    host = [slots.load_records(stored, block) for block in range(MAILBOX_BLOCKS)]
    native = [operations.load_neurons(stored)] * MAILBOX_BLOCKS
    worker = operations.cold_worker(native, mailbox.memory, mailbox.layout, threads)
    active_neurons = kernels.new_active_neurons(_NEURONS, hidden, 1, device)
    x, norm, stream = torch.ones(1, hidden, device=device), torch.ones(hidden, device=device), kernels.new_stream()
    number = 0

    def step(run: Callable[[], Any]) -> Any:
        """Both graphs count steps on the GPU: the worker begins with each."""
        nonlocal number
        number = next_number(number)
        worker.begin(number)
        found = run()
        worker.end(number)
        kernels.synchronize(device)
        return found

    def graph(active: int) -> tuple[Any, Any]:
        """The graph, and the function that it came from, which keeps what the graph reads and writes."""
        gates = torch.full((1, _NEURONS), -1.0, device=device)
        gates[:, :active] = 1.0
        y = torch.empty(1, hidden, device=device)

        def run() -> None:
            for records, division in zip(host, map(slots.division, range(MAILBOX_BLOCKS)), strict=True):
                kernels.list_neurons(gates, 1, x, norm, 1e-5, active_neurons, division=division)
                kernels.add_neurons(slots.slots, active_neurons, x, y, host=records, division=division)

        return step(lambda: kernels.capture_graph(run, stream)), run

    graphs = {"steps with requests": graph(1), "steps without": graph(0)}

    def measure_round() -> dict[str, float]:
        timed = {
            name: partial(seconds_on_gpu, kernels, partial(kernels.replay, each)) for name, (each, _) in graphs.items()
        }
        return {name: statistics.median(step(run) for _ in range(REPLAYS)) for name, run in timed.items()}

    return [measure_round]


class WorkerBench:
    """The native worker, and requests of a step that are there before it begins."""

    def __init__(
        self,
        records: Sequence[Any],
        neurons: int,
        hidden: int,
        threads: int,
        products: Sequence[tuple[Any, ProductRequest]] = (),
    ) -> None:
        self._layout = Mailbox(len(records), neurons, hidden, 1, tuple(request for _, request in products))
        self._memory = np.zeros(self._layout.size, np.uint8)
        self._seen = views(self._layout, self._memory)
        self._worker = operations.cold_worker(
            records, self._memory, self._layout, threads, products=[each for each, _ in products]
        )
        self._number = 0

    def ask(self, lists: Sequence[Tensor]) -> None:
        self._seen.x[:] = np.random.default_rng(1).standard_normal(self._seen.x.shape)
        for block, each in enumerate(lists):
            self._seen.count[block] = len(each)
            self._seen.indices[block, : len(each)] = each.numpy()
            self._seen.gates[block, :, : len(each)] = 1

    def give(self, x: Tensor) -> None:
        """Let the products' input be this, float32 [columns]."""
        for place in self._layout.places:
            self._memory[place.x : place.x + x.nbytes] = x.numpy().view(np.uint8)

    def step(self) -> float:
        """Seconds for each `LISTED` neurons."""
        neurons, seconds = self._worker.neurons, self._worker.seconds
        self._answer()
        return float((self._worker.seconds - seconds) / (self._worker.neurons - neurons) * LISTED)

    def product(self) -> float:
        """Seconds for each of the products."""
        seconds = self._worker.product_seconds
        self._answer()
        return float((self._worker.product_seconds - seconds) / len(self._layout.products))

    def _answer(self) -> None:
        """The worker answers a step of requests that are all there."""
        self._number = next_number(self._number)
        words = self._memory.view(np.int32)
        words[[place.request // 4 for place in self._layout.places]] = self._number
        self._seen.request_numbers[:] = self._number
        self._worker.begin(self._number)
        self._worker.end(self._number)


def _kept(measured: Callable[[], float], taken: list[float]) -> None:
    taken.append(measured())


def seconds_on_gpu(
    kernels: Kernels, run: Callable[[], object], concurrent: Callable[[], object] | None = None
) -> float:
    """Seconds by the GPU's clock for what a function puts on the stream. What is done beside it is done again and again
    as long as the GPU works."""
    begin, end = (kernels.new_event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    if concurrent:
        concurrent()
        while not end.query():  # type: ignore[no-untyped-call]
            concurrent()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def count_for(hidden: int) -> int:
    """So many records that no cache has more than a quarter of them, a whole number of lists; of small ones no more
    than so many lists have: a model of those is served by a cache when it runs, too."""
    count = min(beyond_caches(record_bytes(hidden)), MOST_LISTS * LISTED)
    return count + -count % (ONE_IN * LISTED)


def beyond_caches(size: int) -> int:
    """So many things of a size that no cache has more than a quarter of them."""
    rotation = max(ROTATION, min(TIMES_CACHES * last_caches(), MOST_ROTATION))
    return -(-rotation // size)


def records(count: int, hidden: int) -> PackedMatrix:
    """Random records, as stored."""
    blocks = random_blocks((256 * count, 2 * hidden // 256))
    return PackedMatrix(blocks.flatten(1), MatrixFormat("Q4_K"), count, 2 * hidden)


def lists(count: int, seed: int) -> list[Tensor]:
    """Lists of active neurons, int32 [LISTED] each, each neuron in one of them: when a list comes again, no cache has
    its records any more."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.arange(0, count, ONE_IN * LISTED)
    within = torch.rand(len(starts), ONE_IN * LISTED, generator=generator).argsort(dim=1)
    found = (starts[:, None] + within).view(-1, LISTED).sort(dim=1).values.to(torch.int32)
    # Lists of the same neighbours share pages.
    return list(found[torch.randperm(len(found), generator=generator)])
