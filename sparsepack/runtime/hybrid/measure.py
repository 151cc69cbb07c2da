"""How fast the links are between two workers of one processor, measured: see `placement.links.Links`.

    alone      the device out of slots | the device out of the host's records | the worker out of the host's records
    together   the device out of slots, or of the host's records; at the same time the worker out of the host's records
    handed     a piece of work without neurons, to the worker and back

All take turns, round after round, so that what disturbs the machine disturbs them all. Both read the same memory, at
the same time when a model runs: the speeds together are the ones that count.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.codecs.neurons import record_bytes
from sparsepack.placement.links import Links
from sparsepack.runtime.chained.decoder import torch_threads
from sparsepack.runtime.chained.operations import NeuronFfn, Operations
from sparsepack.runtime.cpu.machine import last_caches
from sparsepack.runtime.hybrid.handover import Worker
from sparsepack.runtime.tuning import ROTATION, random_blocks

LISTED = 2048
"""A call lists this many active neurons, so many that starting the call hardly counts."""
ONE_IN = 8
"""One of this many neurons is active, as in trained models with ReLU."""
MOST_LISTS = 256
"""No more lists than these take turns."""
CALLS = 24
ROUNDS = 7
TIMES_CACHES = 4
MOST_ROTATION = 2 << 30
"""What takes turns has at least this many times the bytes of the processor's caches, but no more than so many: a
server's cache of 300 MiB holds all that others do not, and a worker is faster out of it than out of memory."""

Calls = Iterator[Callable[[], Any]]


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured: `together` is what the division goes by, all else is for people.

    copies -- neurons a second whose records large copies bring over the bus; None: there is no bus
    """

    together: Links
    alone: Links
    copies: float | None = None


def divided(threads: int) -> tuple[int, int]:
    """How many threads the device has and how many the worker: a half each, and at least one."""
    worker = max(1, threads // 2)
    return max(1, threads - worker), worker


def measure_links(
    operations: Operations, beside: Callable[[int], NeuronFfn], threads: int, hidden: int
) -> MeasuredLinks:
    """Medians over all rounds, of records of `hidden` channels. Takes twice the bytes of `count_for` records.

    operations -- of a backend on the CPU; beside: given a number of threads, its `neuron_ffn` on threads of its own
    threads    -- of both together
    """
    first, second = divided(threads)
    count = count_for(hidden)
    with closing(Worker()) as worker, torch_threads(first):
        handed = cycle([lambda: worker.take(worker.post(_nothing))])
        host = operations.load_neurons(records(count, hidden))
        slots = operations.new_neurons(count, hidden)
        everyone = torch.arange(count, dtype=torch.int32)
        operations.copy_neurons(slots, everyone, host, everyone)
        resident = _calls(operations.neuron_ffn, slots, count, hidden, seed=1)
        bus = _calls(operations.neuron_ffn, host, count, hidden, seed=2)
        offloaded = _calls(beside(second), host, count, hidden, seed=3)
        taken: dict[str, list[int]] = {}
        for _ in range(ROUNDS):
            for name, calls in (("resident", resident), ("bus", bus)):
                taken.setdefault(f"{name} alone", []).extend(_times(calls))
                own, others = _times_together(calls, worker, offloaded)
                taken.setdefault(name, []).extend(own)
                taken.setdefault("worker", []).extend(others)
            taken.setdefault("worker alone", []).extend(worker.take(worker.post(lambda: _times(offloaded))))
            taken.setdefault("handover", []).extend(_times(handed))
    seconds = {name: statistics.median(times) / 1e9 for name, times in taken.items()}
    together, alone = (_links(seconds, how, record_bytes(hidden)) for how in ("", " alone"))
    return MeasuredLinks(together, alone)


def _links(seconds: Mapping[str, float], how: str, record: int) -> Links:
    resident, bus, worker = (LISTED / seconds[f"{name}{how}"] for name in ("resident", "bus", "worker"))
    return Links(resident, bus, worker, seconds["handover"], resident * record, bus * record, worker * record)


def _nothing() -> None:
    """Do nothing: handing this over to the worker shows how long handing over takes."""


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
    return PackedMatrix(blocks.flatten(1), "Q4_K", count, 2 * hidden)


def lists(count: int, seed: int) -> list[Tensor]:
    """Lists of active neurons, int32 [LISTED] each, each neuron in one of them: when a list comes again, no cache has
    its records any more."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.arange(0, count, ONE_IN * LISTED)
    within = torch.rand(len(starts), ONE_IN * LISTED, generator=generator).argsort(dim=1)
    found = (starts[:, None] + within).view(-1, LISTED).sort(dim=1).values.to(torch.int32)
    # Lists of the same neighbours share pages.
    return list(found[torch.randperm(len(found), generator=generator)])


def _calls(ffn: NeuronFfn, neurons: Any, count: int, hidden: int, seed: int) -> Calls:
    x, gate = torch.randn(hidden, generator=torch.Generator().manual_seed(seed)), torch.ones(count)
    return cycle([_call(ffn, neurons, x, gate, each) for each in lists(count, seed)])


def _call(ffn: NeuronFfn, neurons: Any, x: Tensor, gate: Tensor, indices: Tensor) -> Callable[[], Tensor]:
    count = torch.tensor(len(indices), dtype=torch.int32)
    return lambda: ffn(neurons, x, gate, indices, count)


def _times(calls: Calls) -> list[int]:
    """Nanoseconds of each of the next calls."""
    return [_time(call) for call in islice(calls, CALLS)]


def _time(call: Callable[[], Any]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def _times_together(calls: Calls, worker: Worker, offloaded: Calls) -> tuple[list[int], list[int]]:
    """Nanoseconds of each of the device's next calls, and of the worker's, which go on as long as the device's do."""
    ended = threading.Event()

    def work() -> list[int]:
        taken = [_time(next(offloaded))]
        while not ended.is_set():
            taken.append(_time(next(offloaded)))
        return taken

    number = worker.post(work)
    try:
        own = _times(calls)
    finally:
        ended.set()
    return own, worker.take(number)
