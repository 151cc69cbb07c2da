"""The operations of `runtime/reference.py` by CUDA kernels, on float32 tensors of a GPU.

Matrices keep their 4.5 bits a weight. `zigzag_matmul` rounds weights and inputs to float16, the inputs relative to the
largest of their row; everything else is computed in float32. Neurons are the reference's: no decoder here runs them.
"""

import torch
from torch import Tensor

from sparsepack.codecs.matrices import PackedMatrix
from sparsepack.runtime.backends import backend_named
from sparsepack.runtime.cuda import elementwise, rows, zigzag
from sparsepack.runtime.cuda.dense import multiply, new_scratch, to_scaled_fp16
from sparsepack.runtime.cuda.device import usable
from sparsepack.runtime.cuda.rows import RowsMatrix
from sparsepack.runtime.cuda.zigzag import Input, ZigzagMatrix
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.reference import load_neurons, neuron_ffn, neuron_matmul

__all__ = [
    "collect",
    "load_neurons",
    "load_rows",
    "load_zigzag",
    "matmul",
    "neuron_ffn",
    "neuron_matmul",
    "new_kv_cache",
    "zigzag_gemv",
    "zigzag_matmul",
]


def load_zigzag(matrix: PackedMatrix, device: torch.device | str = "cuda") -> ZigzagMatrix:
    """Copy a stored zigzag matrix to a GPU. Raises `UserError` where the cuda backend cannot run on it."""
    device = usable(device)
    with torch.cuda.device(device):
        loaded = zigzag.load_zigzag(matrix, device)
        torch.cuda.current_stream().synchronize()  # kernels read weights before they wait for what is ahead
    return loaded


def load_rows(matrix: PackedMatrix, device: torch.device | str = "cuda") -> RowsMatrix:
    """Copy a matrix stored by rows to a GPU. Raises `UserError` as `load_zigzag` does."""
    device = usable(device)
    with torch.cuda.device(device):
        return rows.load_rows(matrix, device)


def collect(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """List the active columns of an input vector; see `reference.collect`."""
    with torch.cuda.device(x.device):
        return elementwise.collect(x.float().contiguous(), threshold.float().reshape(-1).contiguous())


def zigzag_gemv(matrix: ZigzagMatrix, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = W[:, active] x[active]; see `reference.zigzag_gemv`. The same bits every run."""
    y = torch.empty(matrix.rows, device=x.device)
    with torch.cuda.device(x.device):
        zigzag.gemv(matrix, Input(x.float().contiguous(), indices=indices.int().contiguous(), count=count.int()), y)
    return y


def zigzag_matmul(matrix: ZigzagMatrix, x: Tensor) -> Tensor:
    """Y = X W^T with every column: float32 [S, columns] -> float32 [S, rows]."""
    with torch.cuda.device(x.device):
        return multiply(matrix, to_scaled_fp16(x.contiguous()), new_scratch([matrix], x.device)).rows()


def matmul(weight: RowsMatrix, x: Tensor) -> Tensor:
    """Y = X W^T for a matrix loaded by `load_rows`: float32 [S, columns] -> float32 [S, rows]."""
    with torch.cuda.device(x.device):
        return rows.matmul(weight, x)


def new_kv_cache(shape: AttentionShape, device: torch.device | str = "cuda", type: str | None = None) -> KvCache:
    """An empty cache; see `reference_operations.new_kv_cache`. Raises `UserError` for a type that it does not have."""
    from sparsepack.runtime.cuda.double.kv_cache import DoubleKvCache
    from sparsepack.runtime.cuda.kv_cache import DenseKvCache

    device, type = usable(device), backend_named("cuda").checked_cache_type(type)
    with torch.cuda.device(device):
        return (DenseKvCache if shape.policy is None else DoubleKvCache)(shape, type, device)
