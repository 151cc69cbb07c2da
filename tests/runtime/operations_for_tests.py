"""The products of every backend for tests, as its decoder computes them, and how near they come to float64 products of
the dequantised weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from backends import device_of, marks_of
from metal_stand_in import stand_in
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.runtime import decoder as seam
from sparsepack.runtime.backends import BACKENDS, find_backend
from sparsepack.runtime.chained.layer import Operations
from sparsepack.runtime.cpu.machine import FORCED
from sparsepack.runtime.cuda.decoder.model import ACTIVATIONS
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS
from sparsepack.runtime.cuda.products import neurons
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.cuda.products.neurons import CudaNeurons
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.reference import products as reference


@dataclass(frozen=True)
class Bounds:
    """elementwise -- of a sum's error, relative to its number of terms times the largest of them
    normwise -- of the error of a whole result, relative to it"""

    elementwise: float
    normwise: float


@dataclass(frozen=True)
class ChainedProducts:
    """By the operations that `OperationsDecoder` chains. Stored matrices are on the host, all else on its device."""

    operations: Operations
    device: str

    def load_zigzag(self, matrix: PackedMatrix) -> Any:
        return self.operations.load_zigzag(matrix, self.device)

    def load_rows(self, matrix: PackedMatrix) -> Any:
        return self.operations.load_rows(matrix, self.device)

    def gemv(self, matrix: Any, x: Tensor, threshold: Tensor | None) -> tuple[Tensor, int]:
        """W[:, active] x[active] and the number of active columns, those with |x| > threshold; None: every column."""
        if threshold is None:
            indices = torch.arange(len(x), dtype=torch.int32, device=x.device)
            count = torch.tensor(len(x), dtype=torch.int32, device=x.device)
        else:
            indices, count = self.operations.collect(x, threshold)
        return self.operations.zigzag_gemv(matrix, x, indices, count), int(count)

    def zigzag_matmul(self, matrix: Any, x: Tensor) -> Tensor:
        return self.operations.zigzag_matmul(matrix, x)

    def matmul(self, matrix: Any, x: Tensor) -> Tensor:
        return self.operations.matmul(matrix, x)


class CudaProducts:
    """The same by the kernels that the decoders on the GPU launch: of a step for one input, of prefill for several."""

    def __init__(self) -> None:
        self.device = KERNELS.usable("cuda")

    def load_zigzag(self, matrix: PackedMatrix) -> CudaZigzag:
        loaded = KERNELS.load_zigzag(matrix, self.device)
        KERNELS.synchronize(self.device)  # kernels read weights before they wait for what is ahead
        return loaded

    def load_rows(self, matrix: PackedMatrix) -> Any:
        return KERNELS.load_rows(matrix, self.device)

    def gemv(self, matrix: CudaZigzag, x: Tensor, threshold: Tensor | None) -> tuple[Tensor, int]:
        y, active = torch.empty(matrix.rows, device=x.device), torch.zeros((), dtype=torch.int64, device=x.device)
        KERNELS.gemv(
            matrix, Input(x, threshold=None if threshold is None else threshold.reshape(-1)), Output(y, active=active)
        )
        return y, int(active)

    def zigzag_matmul(self, matrix: CudaZigzag, x: Tensor) -> Tensor:
        product = KERNELS.multiply(matrix, KERNELS.to_scaled_fp16(x), KERNELS.new_scratch([matrix], x.device))
        y = torch.zeros(len(x), matrix.rows, device=x.device)
        KERNELS.add(y, product)
        return y

    def matmul(self, matrix: Any, x: Tensor) -> Tensor:
        return KERNELS.matmul(matrix, x)


class CudaNeuronOperations:
    """The operations on neurons by the kernels that the cuda decoder launches."""

    load_neurons = staticmethod(neurons.load_neurons)
    new_neurons = staticmethod(neurons.new_neurons)
    copy_neurons = staticmethod(neurons.copy_neurons)
    collect = staticmethod(reference.collect)

    def neuron_ffn(self, loaded: CudaNeurons, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        listed = neurons.new_active_neurons(len(loaded.records), loaded.hidden, 1, x.device)
        index = indices[: int(count)]
        listed.index[: len(index)] = index
        listed.gates[0, : len(index)] = gate[index.long()]
        listed.counts.fill_(len(index))
        listed.x.copy_(x[None])
        y = torch.zeros(1, loaded.hidden, device=x.device)
        KERNELS.add_neurons(loaded, listed, y, y)
        return y[0]

    def neuron_matmul(self, loaded: CudaNeurons, x: Tensor, gate: Tensor) -> Tensor:
        """By ReLU, which leaves these gates as they are."""
        scaled = KERNELS.to_scaled_fp16(x)
        scratch = torch.empty(2 * loaded.hidden * len(loaded.records), dtype=torch.float16, device=x.device)
        gates = Product(gate / scaled.factor[:, None], scaled.factor, 1.0, None)
        y = torch.zeros(len(x), loaded.hidden, device=x.device)
        KERNELS.add(y, KERNELS.multiply_neurons(loaded, gates, scaled, ACTIVATIONS["relu"], scratch))
        return y


@dataclass(frozen=True)
class Backend:
    """many -- bounds of `zigzag_matmul`"""

    name: str
    products: ChainedProducts | CudaProducts
    device: str
    bounds: Bounds
    many: Bounds

    def bounds_of(self, block: str) -> Bounds:
        """Of one input: on a GPU planes multiply it rounded to 16 bits."""
        return Bounds(1e-4, 1.5e-4) if self.name == "cuda" and BLOCKS[block].levels else self.bounds

    @property
    def operations(self) -> Operations:
        """Of the backends that `every_backend_of_operations` names."""
        assert isinstance(self.products, ChainedProducts)
        return self.products.operations

    @property
    def neurons(self) -> Any:
        """Operations of which those on neurons are there."""
        return CudaNeuronOperations() if isinstance(self.products, CudaProducts) else self.operations


OF_OPERATIONS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
    *(
        pytest.param(("cpu", *isa.values), id=f"cpu-{isa.values[0]}", marks=isa.marks)
        for isa in instruction_set_params()
    ),
    *(
        pytest.param((row.name, device_of(row)), id=row.name, marks=marks_of(row))
        for row in BACKENDS.values()
        if row.name not in ("reference", "cpu") and "operations" in vars(seam.load_backend_module(row))["__all__"]
    ),
    pytest.param(("metal", "emulated"), id="metal-emulated"),
]
CUDA = pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu)
every_backend = pytest.mark.parametrize("backend", [*OF_OPERATIONS, CUDA], indirect=True)
"""Tests that it marks get a `Backend` as `backend`, a fixture of conftest.py."""
every_backend_of_operations = pytest.mark.parametrize("backend", OF_OPERATIONS, indirect=True)
"""Those whose decoders chain the functions of `runtime/chained/layer.py`."""


def load_backend_module(name: str, variant: str) -> Iterator[Backend]:
    """A backend on a device, with an instruction set of the CPU, or emulated, while the iterator lives."""
    if variant == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    exact = Bounds(1e-6, 1e-5)
    if name == "cuda":
        # Weights and inputs are rounded to float16: 3e-4 of many terms, up to 2^-10 of a single one.
        yield Backend(name, CudaProducts(), variant, exact, Bounds(1e-3, 1e-3))
        return
    operations = seam.load_backend_module(find_backend(name)).operations
    if variant == "emulated":
        with stand_in(seed=1):  # each launch has another order of threads
            yield Backend(name, ChainedProducts(operations, "cpu"), "cpu", exact, exact)
        return
    if name != "cpu":
        yield Backend(name, ChainedProducts(operations, variant), variant, exact, exact)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORCED, variant)
        # Sums of float32 in plain C++, of products of 16-bit integers elsewhere.
        bounds = Bounds(1e-6 if variant == "scalar" else 1e-4, 1e-4)
        # Of prompts both factors are rounded to 14 or 15 bits.
        many = bounds if variant == "scalar" else Bounds(1e-3, 5e-4)
        yield Backend(name, ChainedProducts(operations, "cpu"), "cpu", bounds, many)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def packed(rows: int, columns: int, block: str = "Q4_K") -> PackedMatrix:
    """A matrix as artifacts store it, with scales of rows, and a tail where it has one; not to be changed."""
    blocks, tail = zigzag.pack_with_tail(normal(rows, columns, seed=rows), block)
    row_scale = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(rows))
    return PackedMatrix(blocks, MatrixFormat(block, "zigzag"), rows, columns, tail, row_scale)


@lru_cache(4)
def decoded(matrix: PackedMatrix) -> Tensor:
    """Its weights: float64 [rows, columns]."""
    return decode_matrix(matrix).double()


@lru_cache(4)
def largest_weights(matrix: PackedMatrix) -> Tensor:
    """Bounds of each row's weights, and of the terms that may cancel in them: float64 [rows]. Zigzag's multipliers
    share their precision among the sub-blocks of a superblock, whatever the scale of each."""
    if matrix.format != MatrixFormat("Q4_K", "zigzag"):
        return decoded(matrix).abs().amax(1)
    ends = []
    for nibbles in (0, 255):
        blocks = matrix.padded().blocks.clone()
        blocks[..., 4:16] = 255
        blocks[..., 16:] = nibbles
        ends.append(decode_matrix(replace(matrix.padded(), blocks=blocks)).double())
    return ((ends[1] - ends[0]).abs() + ends[0].abs()).amax(1)


def assert_close_to_product(bounds: Bounds, y: Tensor, matrix: PackedMatrix, x: Tensor, allowance: float = 1) -> None:
    """y [..., rows] against x [..., columns] W^T in float64; `allowance` times the normwise bound."""
    weight, x = decoded(matrix), x.double()
    expected = x @ weight.T
    largest = x.abs().amax(-1, keepdim=True) * largest_weights(matrix) * matrix.columns
    assert y.dtype == torch.float32
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    error = (y.double() - expected).abs()
    assert (error <= bounds.elementwise * largest).all()
    # What the norm would be if the terms had random signs: a few rows whose terms cancel say nothing.
    typical = (x.square() @ weight.T.square()).sum(-1).sqrt()
    assert (error.norm(dim=-1) <= allowance * bounds.normwise * expected.norm(dim=-1).maximum(typical)).all()
