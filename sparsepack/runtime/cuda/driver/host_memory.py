"""Memory of the host that kernels read and write over the bus, as tensors of the GPU."""

import gc
import mmap
from contextlib import suppress
from ctypes import addressof, c_char
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError


class _Pinned:
    """Pages of the host that a GPU reaches, as torch takes memory from elsewhere (`__cuda_array_interface__`)."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._registered = device, False
        try:
            self._pages = mmap.mmap(-1, size)
            with suppress(OSError):  # a system without them
                self._pages.madvise(mmap.MADV_HUGEPAGE)  # pinned several times as fast
        except OSError as error:
            raise UserError(_refused(size, str(error))) from error
        self.address = addressof(c_char.from_buffer(self._pages))
        if code := int(_runtime().cudaHostRegister(self.address, size, 0)):
            raise UserError(_refused(size, str(torch.cuda.CudaError(code))))
        self._registered = True
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if self._registered:
            torch.cuda.synchronize(self._device)  # a step that runs ahead may still read
            _runtime().cudaHostUnregister(self.address)


def _refused(size: int, why: str) -> str:
    return (
        f"{size / 1e9:.1f} GB of the host's memory for keys and values, pinned: not to be had ({why}); "
        "give a smaller context"
    )


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def host_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Contiguous tensors of a GPU that lie in the host's memory, all zero. They begin at multiples of 256 bytes.

    Kernels take the bus for each access, 50 GB/s in place of 3000; copies and torch's functions work as on any tensor
    of the device. Raises `UserError` where the host has no room for them.
    """
    each = dtype.itemsize * torch.Size(shape).numel()
    step = -(-each // 256) * 256
    if not count:
        return []
    gc.collect()  # what a decoder before had lies in cycles, and would be there twice
    with torch.cuda.device(device):
        pinned = _Pinned(count * step, device)
        whole = torch.as_tensor(pinned, device=device)
    if whole.data_ptr() != pinned.address:
        raise RuntimeError(f"torch copied memory of the host to {device} in place of taking it as it is")
    return [whole[n * step : n * step + each].view(dtype).view(shape) for n in range(count)]
