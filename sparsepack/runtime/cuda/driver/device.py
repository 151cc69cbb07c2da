"""The GPU that runs: whether the cuda backend can run on it, its shared memory, streams of its own, and CUDA graphs
with the numbers on the GPU that they read.

A block that does not fit into shared memory has fewer stages of its pipeline; what a kernel needs is computed beside
its layout: `attention.Variant`, `rows.product`, `tile_config.shared_bytes`, `zigzag.batch`.

`torch.cuda.Stream` hands out the same 32 streams again and again, so two that were asked for may be one. What a thread
puts on such a stream while another one records a CUDA graph there would become part of the graph, and waiting for it
ends the recording. `own_stream` gives one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver.kernel import architecture, check_architecture, checked, nvrtc_version

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels


def usable(device: torch.device | str) -> torch.device:
    """The device with its number. Raises `UserError` where the backend cannot run on it, saying what is missing."""
    device = torch.device(device)
    if device.type != "cuda":
        raise UserError(
            f"device {device}: the cuda backend runs on NVIDIA GPUs; use device cuda or the reference backend"
        )
    if not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no CUDA device on this machine; use cpu")
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise UserError(f"device {device}: this machine has {count} CUDA devices; expected at most cuda:{count - 1}")
    check_architecture(architecture(index))
    _check_driver(nvrtc_version())
    return torch.device("cuda", index)


def _check_driver(nvrtc: str) -> None:
    """Raise `UserError` where the driver is of an older major version of CUDA than the machine code."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    if version // 1000 < int(nvrtc.partition(".")[0]):
        raise UserError(
            f"the GPU's driver knows CUDA {version // 1000}.{version % 1000 // 10}, and NVRTC is {nvrtc}: update the "
            "driver (CUDA 13 needs 580 or later), or install cuda-bindings and NVRTC of the driver's version"
        )


@cache
def shared_limit(device: torch.device) -> int:
    """The bytes of shared memory that a block may have, those included that its kernel declares itself."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(checked(driver.cuDeviceGetAttribute(attribute, device.index or 0), "shared memory of a block"))


def deepest_pipeline(stages: Sequence[int], needed: Callable[[int], int], device: torch.device) -> int:
    """The first of these numbers of stages with which a block's bytes fit; the last one where none does.

    needed -- bytes that a block needs with a number of stages, those that its kernel declares included
    """
    limit = shared_limit(device)
    return next((n for n in stages if needed(n) <= limit), stages[-1])


_lock = Lock()
_idle: dict[tuple[int, int], list[int]] = {}
"""The streams of a device, by its number, and a priority, that nobody has any more. They are not destroyed: torch's
allocator may still wait for what ran there."""


@dataclass(frozen=True)
class _Lent:
    """A stream that somebody has, as long as this object lives. torch's own objects cannot be watched: their memory
    goes without a word to weak references."""

    handle: int
    idle: list[int]

    def __del__(self) -> None:
        self.idle.append(self.handle)  # without the lock, which the same thread may hold as it collects garbage


def own_stream(device: torch.device | None = None, priority: int = 0) -> torch.cuda.Stream:
    """A stream of a device (None: the current one), which is the caller's as long as the object lives.

    priority -- as torch's: -1 comes before 0 where kernels compete for multiprocessors
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        number = torch.cuda.current_device()
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        with _lock:
            idle = _idle.setdefault((number, priority), [])
            handle = idle.pop() if idle else None
        if handle is None:
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            handle = int(checked(driver.cuStreamCreateWithPriority(flags, priority)))
        stream = torch.cuda.ExternalStream(handle, device=number)  # type: ignore[no-untyped-call]
    stream._lent = _Lent(handle, idle)  # type: ignore[attr-defined]
    return stream


_graph_lock = Lock()
_last: dict[int, torch.cuda.Stream] = {}
"""A GPU's last turn was on this stream."""


def capture_graph(run: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Run a function once, so that its kernels are compiled and loaded, and once more while its launches are recorded.

    stream -- of the recording, on the current device; not the current stream, nor one that others use (`own_stream`)
    pool   -- memory that graphs share of which one runs at a time (`torch.cuda.graph_pool_handle`)

    What the first run leaves in memory is for the caller to undo; the second computes nothing.
    """
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream), _exclusive():
        run()
    before.wait_stream(stream)
    with _graph_lock:  # who waited for this stream while it records would become part of the graph
        if _last.get(before.device_index) == stream:
            _last[before.device_index] = before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), _recording(graph, pool):
        run()
    return graph


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What the context puts on the current stream becomes part of a graph. `torch.cuda.graph` would wait for the whole
    GPU, which fails while another thread records."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # of this thread: engines of others go on
    try:
        yield
    finally:
        graph.capture_end()


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Put what was recorded on the current stream."""
    with _exclusive():
        graph.replay()


class Recorder:
    """Records one function after the other, while the GPU goes on: nothing is waited for, and nothing is computed.

    All share their memory, so the last one alone may be replayed. What a function launches must have run before, so
    that its kernels are loaded; it must not wait for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # memory that no graph has is gone

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What puts the function's work on the current stream, and the tensor in which it leaves its result."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _recording(graph, self._pool):
            result = run()
        self._last = graph
        return partial(replay, graph), result


@contextmanager
def _exclusive() -> Iterator[None]:
    """While the context lasts, the current stream's work waits for what other streams of the GPU did in earlier turns.

    The blocks of a product wait for each other. If products of two engines ran at one time, each might keep the other's
    last blocks from a multiprocessor, for ever.
    """
    here = torch.cuda.current_stream()
    with _graph_lock:
        last = _last.get(here.device_index, here)
        if last != here:
            here.wait_stream(last)
        _last[here.device_index] = here
        yield


class Mirror:
    """Numbers on the GPU, and what the host knows of them.

    there -- int32 [n]
    known -- what lies there when all that is on the stream has run; None: the host does not know. Who lets kernels
             change the numbers says so here
    """

    def __init__(self, there: Tensor, kernels: Kernels) -> None:
        self.there = there
        self.known: list[int] | None = None
        self._kernels = kernels

    def write(self, values: Sequence[int]) -> None:
        """Put values on the current stream, unless they are there. The host waits for nothing."""
        if self.known == values:
            return
        if len(values) == 1:
            self.there.fill_(values[0])
        else:
            self.there.copy_(self._kernels.host_values(values), non_blocking=True)
        self.known = list(values)
