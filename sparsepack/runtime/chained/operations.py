"""The seam between a decoder and the kernels of a backend: products, and the cache that attends."""

from typing import Any, Protocol

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.runtime.kv_cache import AttentionShape, KvCache


class Operations(Protocol):
    """What a backend offers, each function as its namesake in `runtime/reference`.

    A loaded matrix is the backend's own: it may repack the bytes, and only its own operations read it.
    """

    def load_zigzag(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a zigzag matrix for `zigzag_gemv` and `zigzag_matmul`."""

    def load_rows(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a matrix stored by rows, the output matrix or a change of basis, for `matmul`."""

    def collect(self, x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """The active columns of x, in ascending order, and their count."""

    def zigzag_gemv(self, matrix: Any, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """W[:, active] x[active]."""

    def zigzag_matmul(self, matrix: Any, x: Tensor) -> Tensor:
        """X W^T with every column."""

    def matmul(self, weight: Any, x: Tensor) -> Tensor:
        """X W^T of a matrix stored by rows."""

    def load_neurons(self, records: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare neuron records for `neuron_ffn` and `neuron_matmul`."""

    def neuron_ffn(self, neurons: Any, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """The sum over active neurons of gate_n (up_n . x) down_n."""

    def neuron_matmul(self, neurons: Any, x: Tensor, gate: Tensor) -> Tensor:
        """The sum of `neuron_ffn` for several positions, with every neuron."""

    def new_cache(self, shape: AttentionShape, type: str | None = None, device: torch.device | str = "cpu") -> KvCache:
        """An empty cache that attends to every position that a layer's window shows."""
