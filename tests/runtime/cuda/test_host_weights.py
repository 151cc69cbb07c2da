"""Matrices that lie in the host's memory: kernels read them over the bus, with the bits of those on the card."""

from dataclasses import asdict

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import zigzag as codec
from sparsepack.runtime.cuda.driver.memory import in_host_memory, on_card
from sparsepack.runtime.cuda.products import offloaded, rows, zigzag, zigzag_products
from sparsepack.runtime.cuda.products.gemm_fp16 import multiply, new_scratch, to_scaled_fp16
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, offloaded_tile_config
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(params=["bulk copies", "copies of lanes"])
def _copies(request: pytest.FixtureRequest) -> None:
    """Also the path of older GPUs."""
    if request.param == "copies of lanes":
        request.getfixturevalue("no_copy_engine")


def both(shape: tuple[int, int]) -> list[CudaZigzag]:
    packed = PackedMatrix(codec.pack(normal(*shape)), MatrixFormat("Q4_K", "zigzag"), *shape)
    found = [zigzag.load_zigzag(packed, CUDA, place=place) for place in (on_card, in_host_memory)]
    torch.cuda.synchronize()
    return found


@pytest.mark.usefixtures("_copies", "workspace_is_reset")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("shape", [(300, 256), (1536, 700), (13824, 5120), (4096, 4096)])
def test_products_of_one_input(shape: tuple[int, int], dense: bool) -> None:
    x = normal(shape[1], seed=1).to(CUDA)
    threshold = None if dense else torch.full((1,), 0.7, device=CUDA)
    found: list[Tensor] = []
    for matrix in both(shape):
        y = torch.empty(shape[0], device=CUDA)
        zigzag_products.gemv(matrix, Input(x, threshold=threshold), Output(y))
        found.append(y.cpu())
    assert torch.equal(*found)


@pytest.mark.usefixtures("_copies", "workspace_is_reset")
@pytest.mark.parametrize("dense", [False, True])
def test_products_of_several_inputs(dense: bool) -> None:
    x = normal(3, 1280, seed=1).to(CUDA)
    threshold = None if dense else torch.full((1,), 0.7, device=CUDA)
    found: list[Tensor] = []
    for matrix in both((1536, 1280)):
        y = torch.empty(3, 1536, device=CUDA)
        zigzag_products.batch(matrix, Input(x, threshold=threshold), Output(y))
        found.append(y.cpu())
    assert torch.equal(*found)


@pytest.mark.usefixtures("_copies", "workspace_is_reset")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("columns", [2048, 701])
@pytest.mark.parametrize("tile_bands", [1, 2, 4, 8])
def test_products_of_first_bands(tile_bands: int, columns: int, dense: bool) -> None:
    bands, near = 32, 3 * tile_bands
    packed = PackedMatrix(
        codec.pack(normal(256 * bands, columns)), MatrixFormat("Q4_K", "zigzag"), 256 * bands, columns
    )
    config = offloaded_tile_config(bands, columns, CUDA, tile_bands)
    there = offloaded.first_bands(zigzag.load_zigzag(packed, CUDA, config, place=in_host_memory), near)
    first = PackedMatrix(packed.blocks[:near].contiguous(), MatrixFormat("Q4_K", "zigzag"), 256 * near, columns)
    here = zigzag.load_zigzag(first, CUDA, CudaTileConfig(**asdict(there.config)))
    x = normal(3, columns, seed=1).to(CUDA)
    threshold = None if dense else torch.full((1,), 0.7, device=CUDA)
    for texts, product in ((1, zigzag_products.gemv), (3, zigzag_products.batch)):
        found: list[Tensor] = []
        for matrix in (here, there):
            y = torch.empty(texts, matrix.rows, device=CUDA)
            shapes = (x[0], y[0]) if texts == 1 else (x, y)
            product(matrix, Input(shapes[0], threshold=threshold), Output(shapes[1]))
            found.append(y.cpu())
        assert torch.equal(*found)


def test_products_of_prefill() -> None:
    x = to_scaled_fp16(normal(80, 1280, seed=1).to(CUDA))  # fewer are multiplied otherwise on the card
    sums = [multiply(m, x, new_scratch([m], CUDA)).sums.cpu() for m in both((1536, 1280))]
    assert torch.equal(*sums)


@pytest.mark.parametrize("type", ["F16", "BF16", "Q4_K", "Q6_K", "Q8_0"])
def test_matrices_by_rows(type: str) -> None:
    packed = PackedMatrix(BLOCKS[type].encode(normal(1000, 512)), MatrixFormat(type), 1000, 512)
    x, ids = normal(1, 512, seed=1).to(CUDA), torch.tensor([3, 999, 0], dtype=torch.int32, device=CUDA)
    found: list[Tensor] = []
    for place in (on_card, in_host_memory):
        matrix = rows.load_rows(packed, CUDA, place=place)
        y, embedded = torch.empty(1, 1000, device=CUDA), torch.empty(3, 512, device=CUDA)
        rows.product(matrix, x, y)
        rows.embed(matrix, ids, embedded)
        found.append(torch.cat([part.flatten().cpu() for part in (y, embedded, rows.matmul(matrix, x.expand(40, -1)))]))
    assert torch.equal(*found)
