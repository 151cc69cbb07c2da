"""Time launches on a GPU: many of them in one CUDA graph, so that no host is measured."""

import statistics
from collections.abc import Callable

import torch


def graph_seconds(run: Callable[[int], object], count: int) -> Callable[[], float]:
    """A function that replays run(0), run(1), ... run(count - 1), and returns the seconds of one of them."""
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for i in range(count):
            run(i)
    graph.replay()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    return replay


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each, all of them in turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(taken) for name, taken in samples.items()}


def read_bandwidth() -> float:
    """Bytes a second that the memory delivers: the largest of 2 GiB of float32, the fastest of ten times."""
    array = torch.ones(1 << 29, device="cuda")
    run = graph_seconds(lambda _: array.max(), 1)
    return array.nbytes / min(run() for _ in range(10))


def device_line() -> str:
    """The GPU, its driver's CUDA and torch, for the head of a report."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
