"""Random zigzag matrices, layouts to try them in, and the oracle of products with them."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.cuda.driver.kernel import multiprocessors
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, load_zigzag
from sparsepack.runtime.cuda.products.zigzag_products import blocks

CUDA_BLOCKS = BACKENDS["cuda"].blocks
CONFIGS = [
    CudaTileConfig(1, 8, 24, 1),
    CudaTileConfig(1, 8, 8, 8),
    CudaTileConfig(1, 8, 24, 32),
    CudaTileConfig(2, 8, 16, 5),
    CudaTileConfig(2, 4, 4, 16),
    CudaTileConfig(4, 8, 8, 3),
    CudaTileConfig(4, 16, 4, 2),
    CudaTileConfig(8, 8, 4, 2),
    CudaTileConfig(8, 8, 8, 9),
    CudaTileConfig(1, 8, 0, 32),
    CudaTileConfig(1, 6, 0, 7),
    CudaTileConfig(2, 8, 0, 5),
    CudaTileConfig(4, 16, 0, 1),
]
_SHORTER = [replace(config, stages=4) if config.tile_bands == 8 else config for config in CONFIGS]
ALL_BLOCKS = [*((config, "Q4_K") for config in CONFIGS), *zip(_SHORTER, cycle(CUDA_BLOCKS[1:]))]
"""The configurations with a type of blocks; the longer ones have room for fewer stages."""
LIMIT = 1e-5
"""Of the norm of a result. Tensor cores cut their sums off instead of rounding them, so that errors grow with what a
warp adds up: 1e-6 for 32 columns, 1.6e-5 for 4096 on an H100."""
PLANES_LIMIT = 1.5e-4
"""The same of planes: factors of one input are integers of 16 bits."""
PLANES_BATCH_LIMIT = 7e-4
"""The same of planes and several inputs, whose factors are float16."""


def random_matrix(rows: int, columns: int, seed: int = 0, block: str = "Q4_K") -> PackedMatrix:
    """Any nibbles and scales, of rows too; d and dmin spread over a decade. Other blocks than Q4_K: normal weights."""
    bits = torch.Generator().manual_seed(seed)
    if block != "Q4_K":
        blocks = zigzag.pack(0.1 * torch.randn(rows, columns, generator=bits), block)
        row_scale = 0.5 + torch.rand(rows, generator=bits)
        return PackedMatrix(blocks, MatrixFormat(block, "zigzag"), rows, columns, row_scale=row_scale)
    blocks = torch.randint(
        0, 256, (zigzag.bands(rows), columns, BLOCKS["Q4_K"].bytes), dtype=torch.uint8, generator=bits
    )
    ends = 10 ** -torch.rand(*blocks.shape[:2], 2, generator=bits) * 0.01
    blocks[..., :4] = ends.half().view(torch.uint8)
    return PackedMatrix(
        blocks, MatrixFormat("Q4_K", "zigzag"), rows, columns, row_scale=0.5 + torch.rand(rows, generator=bits)
    )


def weights(matrix: PackedMatrix) -> Tensor:
    return decode_matrix(matrix).double().cuda()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def assert_close(found: Tensor, expected: Tensor, limit: float = LIMIT) -> None:
    assert torch.isfinite(found).all()
    assert (found.double() - expected).norm() <= limit * expected.norm()


def loaded(stored: PackedMatrix, config: CudaTileConfig, gate: bool = False) -> CudaZigzag:
    matrix = load_zigzag(stored, "cuda", config, gate=gate)
    if blocks(matrix) > multiprocessors(matrix.blocks.device):
        pytest.skip("more blocks than this GPU runs at once")
    if config.splits > -(-stored.columns // 32):
        pytest.skip("blocks without columns")
    return matrix
