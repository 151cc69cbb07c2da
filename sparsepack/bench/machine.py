"""What the memory of the machine delivers that a benchmark runs on."""

import time

import torch

from sparsepack.runtime.reference.backend import synchronise

ARRAY_BYTES = 1 << 29


def read_bandwidth(device: torch.device | str = "cpu", nbytes: int = ARRAY_BYTES, repetitions: int = 5) -> float:
    """Bytes a second that the memory of a device delivers, at torch's present number of threads.

    Times the largest element of a float32 array much larger than the caches, `repetitions` times, and takes the
    fastest: what disturbs a run only slows it.
    """
    array = torch.ones(nbytes // 4, device=device)
    array.max()
    return array.nbytes / min(_timed_read(array) for _ in range(repetitions))


def _timed_read(array: torch.Tensor) -> float:
    synchronise(array.device)
    start = time.perf_counter()
    array.max()
    synchronise(array.device)
    return time.perf_counter() - start
