"""What the memory of this machine delivers: the bound of every decoder that reads its weights once a token."""

import time

import torch

DEFAULT_BYTES = 1 << 29


def read_bandwidth(device: torch.device | str = "cpu", nbytes: int = DEFAULT_BYTES, repetitions: int = 5) -> float:
    """Bytes a second that torch reads at its present number of threads.

    Sums an int32 array much larger than the caches, as often as `repetitions`, and takes the fastest run: what
    disturbs a run only slows it.
    """
    array = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    array.sum()
    fastest = min(_timed_sum(array) for _ in range(repetitions))
    return array.nbytes / fastest


def _timed_sum(array: torch.Tensor) -> float:
    synchronise(array.device)
    start = time.perf_counter()
    array.sum()
    synchronise(array.device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
