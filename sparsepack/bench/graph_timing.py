"""Time launches on a GPU: many of them in one CUDA graph, so that no host is measured."""

from collections.abc import Callable
from typing import Any

import torch


def graph_seconds(run: Callable[[int], object], count: int) -> Callable[[], float]:
    """A function that replays run(0), run(1), ... run(count - 1), and returns the seconds of one of them."""
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph,
        stream=torch.cuda.Stream(),  # type: ignore[no-untyped-call]
    ):
        for i in range(count):
            run(i)
    graph.replay()

    def replay() -> float:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    return replay
