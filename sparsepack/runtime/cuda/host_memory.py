"""Memory of the host that kernels read and write over the bus, as tensors of the GPU."""

import mmap
from ctypes import addressof, c_char
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError


class _Pinned:
    """Pages of the host that a GPU reaches, as torch takes memory from elsewhere (`__cuda_array_interface__`)."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size)
        self._pages.madvise(mmap.MADV_HUGEPAGE)  # pinned several times as fast
        self._address = addressof(c_char.from_buffer(self._pages))
        error = _runtime().cudaHostRegister(self._address, size, 0)
        if int(error):
            raise UserError(
                f"{size / 1e9:.1f} GB of pinned memory for keys and values: the host gives no more ({error.name}); "
                "give a smaller context, or raise the limit of locked memory (ulimit -l)"
            )
        self._registered = True
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if getattr(self, "_registered", False):
            _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def host_tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Contiguous tensors of a GPU that lie in the host's memory, all zero. They begin at multiples of 256 bytes.

    Kernels take the bus for each access, 50 GB/s in place of 3000; copies and torch's functions work as on any tensor
    of the device. Raises `UserError` where the host has no room for them.
    """
    each = dtype.itemsize * torch.Size(shape).numel()
    step = -(-each // 256) * 256
    if not count or not each:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
    with torch.cuda.device(device):
        whole = torch.as_tensor(_Pinned(count * step), device=device)
    return [whole[n * step : n * step + each].view(dtype).view(shape) for n in range(count)]
