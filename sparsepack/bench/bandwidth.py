"""What the memory of a device delivers: bytes a second, as its makers state them or as measured."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.reference.backend import synchronise

_CHIPS: dict[str, float | dict[int, float]] = {
    "Apple M1": 68,
    "Apple M1 Pro": 200,
    "Apple M1 Max": 400,
    "Apple M1 Ultra": 800,
    "Apple M2": 100,
    "Apple M2 Pro": 200,
    "Apple M2 Max": 400,
    "Apple M2 Ultra": 800,
    "Apple M3": 100,
    "Apple M3 Pro": 150,
    "Apple M3 Max": {30: 300, 40: 400},
    "Apple M3 Ultra": 819,
    "Apple M4": 120,
    "Apple M4 Pro": 273,
    "Apple M4 Max": {32: 410, 40: 546},
    "Apple M5": 153,
}
"""Gigabytes a second by name, and where chips of one name differ by the cores of their GPU. Source: "memory bandwidth"
in the technical specifications of Macs, support.apple.com/en-us/docs/mac."""


def stated_bandwidth(chip: str, cores: int | None) -> float | None:
    """Bytes a second that Apple states for a chip, by its name and the cores of its GPU (None: not known); None where
    the table does not have it."""
    found = _CHIPS.get(chip)
    if isinstance(found, dict):
        found = found.get(cores or 0)
    return None if found is None else found * 1e9


def gpu_cores() -> int | None:
    """The cores of this machine's Apple GPU; None where torch does not tell."""
    ask = getattr(torch.backends.mps, "get_core_count", None)  # torch 2.9 and later
    return None if ask is None else int(ask())


ARRAY_BYTES = 1 << 29


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, and how that is known."""

    bytes_per_second: float
    how: str


def bandwidth_of(device: torch.device) -> Bandwidth:
    """What a device's memory delivers: as its makers state where a table has the device, else as `read_bandwidth`
    measures it."""
    stated = _STATED.get(device.type, lambda: "")()
    if isinstance(stated, Bandwidth):
        return stated
    same_threads = " at the same number of threads" if device.type == "cpu" else ""
    how = f"torch max over {ARRAY_BYTES >> 20} MiB of float32{same_threads}, fastest of 5{stated}"
    return Bandwidth(read_bandwidth(device), how)


def _apple() -> Bandwidth | str:
    """What is stated for this machine's chip, or why nothing is."""
    chip, cores = cpu_info(), gpu_cores()
    stated = stated_bandwidth(chip, cores)
    if stated is None:
        of_cores = "" if cores is None else f" with {cores} GPU cores"
        return f"; what Apple states for {chip}{of_cores} is not known here"
    return Bandwidth(stated, f"as Apple states for {chip}")


_STATED: Mapping[str, Callable[[], Bandwidth | str]] = {"mps": _apple}
"""By torch's type of a device, what is stated for the one of this machine, or a text that says why nothing is."""


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
