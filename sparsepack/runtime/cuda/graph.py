"""CUDA graphs: what a function puts on the stream, kept, and replayed without Python."""

from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Run a function once, so that its kernels are compiled and loaded, and once more while its launches are recorded.

    stream -- of the recording, on the current device; not the current stream
    pool   -- memory that graphs share of which one runs at a time (`torch.cuda.graph_pool_handle`)

    What the first run leaves in memory is for the caller to undo; the second computes nothing.
    """
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        run()
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: engines of other threads may go on meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph
