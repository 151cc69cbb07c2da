"""Streams that nobody else has.

`torch.cuda.Stream` hands out the same 32 streams again and again, so two that were asked for may be one. What a thread
puts on such a stream while another one records a CUDA graph there would become part of the graph, and waiting for it
ends the recording.
"""

from dataclasses import dataclass
from threading import Lock

import torch

from sparsepack.runtime.cuda.driver.kernel import checked

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
