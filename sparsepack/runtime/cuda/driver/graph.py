"""CUDA graphs: what a function puts on the stream, kept, and replayed without Python; and numbers on the GPU that
kernels change, written by the host only where they are not there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.device import own_stream

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels


_lock = Lock()
_last: dict[int, torch.cuda.Stream] = {}
"""A GPU's last turn was on this stream."""


def captured(run: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Run a function once, so that its kernels are compiled and loaded, and once more while its launches are recorded.

    stream -- of the recording, on the current device; not the current stream, nor one that others use (`own_stream`)
    pool   -- memory that graphs share of which one runs at a time (`torch.cuda.graph_pool_handle`)

    What the first run leaves in memory is for the caller to undo; the second computes nothing.
    """
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream), _turn():
        run()
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: engines of other threads may go on meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Put what was recorded on the current stream."""
    with _turn():
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
        with torch.cuda.stream(self._stream):
            # Of this thread alone: others read the next block and bring finished ones to the host.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        self._last = graph
        return partial(replay, graph), result


@contextmanager
def _turn() -> Iterator[None]:
    """While the context lasts, the current stream's work waits for what other streams of the GPU did in earlier turns.

    The blocks of a product wait for each other. If products of two engines ran at one time, each might keep the other's
    last blocks from a multiprocessor, for ever.
    """
    here = torch.cuda.current_stream()
    with _lock:
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
