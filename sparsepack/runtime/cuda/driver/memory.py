"""Memory of the host that kernels reach over the bus, what a process takes of the GPU's, and memory through which
kernels hand values over before they end (`kernels/common/flag_in_data.cuh`)."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.placement.budget import DRIVER_BYTES, Plan, format_bytes
from sparsepack.runtime.cuda.driver.kernel import multiprocessors


class _Pinned:
    """Pages of the host that a GPU reaches, as torch takes memory from elsewhere (`__cuda_array_interface__`)."""

    def __init__(self, size: int, device: torch.device, purpose: str) -> None:
        self._device, self._registered = device, False
        try:
            self.pages = mmap.mmap(-1, size)
            with suppress(OSError, AttributeError):  # a system without them
                self.pages.madvise(mmap.MADV_HUGEPAGE)  # pinned several times as fast
        except OSError as error:
            raise UserError(_refused(size, purpose, str(error))) from error
        self.address = addressof(c_char.from_buffer(self.pages))
        if code := int(_runtime().cudaHostRegister(self.address, size, 0)):
            raise UserError(_refused(size, purpose, str(torch.cuda.CudaError(code))))
        self._registered = True
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if self._registered:
            with suppress(RuntimeError):  # after a kernel's fault no call of this GPU's succeeds
                torch.cuda.synchronize(self._device)  # a step that runs ahead may still read
            _runtime().cudaHostUnregister(self.address)


KEYS_AND_VALUES = "keys and values"
_REMEDIES = {KEYS_AND_VALUES: "give a smaller context"}


def _refused(size: int, purpose: str, why: str) -> str:
    remedy = _REMEDIES.get(purpose, "free memory, allow more of it to be locked (ulimit -l), or take a smaller model")
    return f"{format_bytes(size)} of the host's memory for {purpose}, pinned: not to be had ({why}); {remedy}"


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def host_tensors(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, purpose: str = KEYS_AND_VALUES
) -> list[Tensor]:
    """Contiguous tensors of a GPU that lie in the host's memory, all zero. They begin at multiples of 256 bytes.

    Kernels take the bus for each access, 50 GB/s in place of 3000; copies and torch's functions work as on any tensor
    of the device. Raises `UserError` where the host has no room for them, saying their purpose.
    """
    each = dtype.itemsize * torch.Size(shape).numel()
    step = -(-each // 256) * 256
    if not count:
        return []
    whole = _tensor(_pinned(count * step, device, purpose), device)
    return [whole[n * step : n * step + each].view(dtype).view(shape) for n in range(count)]


Place = Callable[[Tensor], Tensor]
"""Such a function says where what was loaded to a GPU shall lie, and brings it there."""


def on_card(loaded: Tensor) -> Tensor:
    """Leave a loaded tensor in the GPU's memory."""
    return loaded


@dataclass(frozen=True)
class DividedPlace:
    """A place for matrices of planes: the first ones of each column here, the others there. Whatever has no planes lies
    where the first ones do.

    levels      -- so many planes are the first ones, 1 to 4
    first, rest -- their places
    """

    levels: int
    first: Place
    rest: Place

    def __call__(self, loaded: Tensor) -> Tensor:
        return self.first(loaded)


def apart_on_card() -> Place:
    """A place in the GPU's memory that tensors have to themselves. Where they lie beside what loading took for a while,
    torch cannot give that back to the driver: of 3.6 GB within a budget it kept 0.9."""
    pool = torch.cuda.MemPool()

    def place(loaded: Tensor) -> Tensor:
        with torch.cuda.use_mem_pool(pool, loaded.device):
            return loaded.clone()

    return place


def in_host_memory(loaded: Tensor) -> Tensor:
    """Move a loaded tensor to the host's memory, where kernels read it over the bus.

    Raises `UserError` as `host_tensors`.
    """
    (there,) = host_tensors(1, tuple(loaded.shape), loaded.dtype, loaded.device, "weights")
    return there.copy_(loaded)


def shared_memory(size: int, device: torch.device, purpose: str) -> tuple[np.ndarray, Tensor]:
    """The same zeros of the host's memory for both sides: uint8 [size] of the host, and as a tensor of the GPU, which
    has to live as long as the other. Raises `UserError` as `host_tensors`."""
    pinned = _pinned(size, device, purpose)
    return np.frombuffer(pinned.pages, np.uint8), _tensor(pinned, device)


def _pinned(size: int, device: torch.device, purpose: str) -> _Pinned:
    with torch.cuda.device(device):
        return _Pinned(size, device, purpose)


def _tensor(pinned: _Pinned, device: torch.device) -> Tensor:
    with torch.cuda.device(device):
        whole = torch.as_tensor(pinned, device=device)
    if whole.data_ptr() != pinned.address:
        raise RuntimeError(f"torch copied memory of the host to {device} in place of taking it as it is")
    return whole


LIBRARY_BYTES = 1 << 26
"""cuBLAS takes at most so many bytes for itself of the memory that torch hands out."""


def check_capacity(plan: Plan, free: int, device: torch.device) -> None:
    """Raise `UserError` where a GPU has fewer bytes free than a plan takes there."""
    if plan.card_bytes > free:
        raise UserError(
            f"device {device}: {free / 1e9:.2f}GB of its memory are free, and {format_bytes(plan.card_bytes)} are to "
            "lie there; give a smaller --vram, or end the processes that have the rest"
        )


def check_use(plan: Plan, tensors: int, driver: int) -> None:
    """Raise `UserError` where more was taken than a plan's budget allows.

    tensors -- bytes that torch's tensors took; driver: by how many bytes the driver's free memory fell
    """
    budget = plan.budget
    if budget is not None and (tensors > budget + LIBRARY_BYTES or driver > budget + DRIVER_BYTES):
        raise UserError(
            f"--vram {format_bytes(budget)}: the model took {format_bytes(tensors)} of the GPU's memory, by the "
            f"driver's count {format_bytes(driver)}, of {format_bytes(plan.card_bytes)} planned and up to "
            f"{format_bytes(DRIVER_BYTES)} beside; give a larger --vram, and report this"
        )


@contextmanager
def within_budget(plan: Plan, device: torch.device) -> Iterator[None]:
    """Measure what is taken meanwhile and stays. Raises `UserError` as `check_capacity` before, and as `check_use`
    after. What torch keeps for later is given back, before and after."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
    check_capacity(plan, free, device)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated(device) - before
    check_use(plan, taken, free - torch.cuda.mem_get_info(device)[0])


SENTINEL = -1
"""A word that nobody has stored to since its reset has these bits, as an int32."""

WORKSPACE_WORDS = 1 << 14
"""Each multiprocessor has this many words: the sums of a block with the most rows (`zigzag.MOST_TILE_BANDS` bands of
256) and inputs (8)."""


def flag_in_data_buffers(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Words that hold SENTINEL, int32 [..], and in them float32 arrays of these sizes, each from a multiple of 16 bytes
    on."""
    size = [-(-size // 4) * 4 for size in sizes]
    words = torch.full((sum(size),), SENTINEL, dtype=torch.int32, device=device)
    parts = torch.split(words.view(torch.float32), size)
    return words, [part[:size] for part, size in zip(parts, sizes, strict=True)]


@cache
def workspace(device: torch.device) -> Tensor:
    """The words in which blocks of a kernel leave partial sums for each other (CUTLASS's split-K workspace). The words
    hold SENTINEL before and after the kernel. Kernels on one stream share the workspace."""
    return flag_in_data_buffers([multiprocessors(device) * WORKSPACE_WORDS], device)[0]
