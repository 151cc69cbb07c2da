"""The operations of every backend for tests, and how near they come to float64 products of the dequantised weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.codecs import zigzag
from sparsepack.codecs.matrices import ZIGZAG, PackedMatrix, decode_matrix
from sparsepack.runtime.backends import backend_named
from sparsepack.runtime.cpu.dispatch import FORCED
from sparsepack.runtime.operations import Operations


@dataclass(frozen=True)
class Bounds:
    """elementwise -- of a sum's error, relative to its number of terms times the largest of them
    normwise -- of the error of a whole result, relative to it"""

    elementwise: float
    normwise: float


@dataclass(frozen=True)
class Backend:
    """many -- bounds of `zigzag_matmul`"""

    operations: Operations
    device: str
    bounds: Bounds
    many: Bounds


every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(("reference", "cpu"), id="reference"),
        pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
        pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
        *(
            pytest.param(("cpu", *isa.values), id=f"cpu-{isa.values[0]}", marks=isa.marks)
            for isa in instruction_set_params()
        ),
    ],
    indirect=True,
)
"""Tests that it marks get a `Backend` as `backend`, a fixture of conftest.py."""


def opened(name: str, variant: str) -> Iterator[Backend]:
    """A backend on a device, or with an instruction set of the CPU, while the iterator lives."""
    if variant == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    exact = Bounds(1e-6, 1e-5)
    if name == "reference":
        yield Backend(backend_named(name).open().operations, variant, exact, exact)
        return
    if name == "cuda":
        # Weights and inputs are rounded to float16: 3e-4 of many terms, up to 2^-10 of a single one.
        yield Backend(backend_named(name).open().operations, variant, exact, Bounds(1e-3, 1e-3))
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORCED, variant)
        # Sums of float32 in plain C++, of products of 16-bit integers elsewhere.
        bounds = Bounds(1e-6 if variant == "scalar" else 1e-4, 1e-4)
        yield Backend(backend_named(name).open().operations, "cpu", bounds, bounds)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(rows: int, columns: int) -> PackedMatrix:
    return PackedMatrix(zigzag.pack(normal(rows, columns, seed=rows)), ZIGZAG, rows, columns)


def largest_weights(matrix: PackedMatrix) -> Tensor:
    """Bounds of each row's weights, and of the terms that may cancel in them: float64 [rows]. Zigzag's multipliers
    share their precision among the sub-blocks of a superblock, whatever the scale of each."""
    if matrix.type != ZIGZAG:
        return decode_matrix(matrix).double().abs().amax(1)
    ends = []
    for nibbles in (0, 255):
        blocks = matrix.blocks.clone()
        blocks[..., 4:16] = 255
        blocks[..., 16:] = nibbles
        ends.append(zigzag.unpack(blocks, matrix.rows).double())
    return ((ends[1] - ends[0]).abs() + ends[0].abs()).amax(1)


def assert_close_to_product(bounds: Bounds, y: Tensor, matrix: PackedMatrix, x: Tensor, allowance: float = 1) -> None:
    """y [..., rows] against x [..., columns] W^T in float64; `allowance` times the normwise bound."""
    weight, x = decode_matrix(matrix).double(), x.double()
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
