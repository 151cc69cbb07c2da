"""The GPU that runs: whether the cuda backend can run on it, its shared memory, and streams that nobody else has.

A block that does not fit into shared memory has fewer stages of its pipeline; what a kernel needs is computed beside
its layout: `attention.Variant`, `rows.product`, `tile_config.shared_bytes`, `zigzag.batch`.

`torch.cuda.Stream` hands out the same 32 streams again and again, so two that were asked for may be one. What a thread
puts on such a stream while another one records a CUDA graph there would become part of the graph, and waiting for it
ends the recording. `own_stream` gives one of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver.kernel import architecture, check_architecture, checked, nvrtc_version


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
