"""The seam between the engine and the backends: the operations that each backend brings, and where it brings them."""

from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsepack.codecs.matrices import PackedMatrix
from sparsepack.errors import UserError

BACKENDS = MappingProxyType(
    {
        "reference": "sparsepack.runtime.reference",
        "cpu": "sparsepack.runtime.cpu.operations",
        "cuda": "sparsepack.runtime.cuda.operations",
    }
)
"""Backend name -> the module whose functions are its operations."""


class Operations(Protocol):
    """What a backend offers, each function as its namesake in `runtime/reference.py`.

    A loaded matrix is the backend's own: it may repack the bytes, and only its own operations read it.
    """

    def load_zigzag(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a zigzag matrix for `zigzag_gemv` and `zigzag_matmul`."""

    def load_rows(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a matrix stored by rows for `matmul`."""

    def collect(self, x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """The active columns of x, in ascending order, and their count."""

    def zigzag_gemv(self, matrix: Any, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """W[:, active] x[active]."""

    def zigzag_matmul(self, matrix: Any, x: Tensor) -> Tensor:
        """X W^T with every column."""

    def matmul(self, weight: Any, x: Tensor) -> Tensor:
        """X W^T of a matrix stored by rows."""


def open_backend(name: str) -> Operations:
    """The operations of a backend by name; raises `UserError` naming the known ones."""
    if name not in BACKENDS:
        raise UserError(f"backend {name!r}: unknown; expected one of {', '.join(BACKENDS)}")
    return cast(Operations, import_module(BACKENDS[name]))
