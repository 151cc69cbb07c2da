"""Products with slid weights on Hopper's 2:4 tensor cores, by one kernel of ours (`kernels/slide_matmul.cu`)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import checked, kernel, launch, multiprocessors

K_TILE = 64
"""Stored values of a row that are multiplied together."""
BLOCK_ROWS = 64
OUT_TOKENS = 32
CLUSTER = 2
"""Blocks that share their inputs."""
DIAG = 0
_PIECE = 4
"""Bytes of positions: of 16 stored values, what a thread gives to a product."""
_OUTPUTS = {torch.bfloat16: 0, torch.float16: 1}
_BAND_BYTES = 24 << 20
"""Of lifted inputs that are multiplied with all rows before the next are: they stay in the L2 cache."""


@dataclass(frozen=True)
class Tile:
    """What a block multiplies at a time.

    groups -- warpgroups that multiply, 64 rows each
    tokens -- 64, 128 or 256
    stages -- of the pipeline
    """

    groups: int = 2
    tokens: int = 256
    stages: int = 4

    @property
    def rows(self) -> int:
        return BLOCK_ROWS * self.groups

    @property
    def shared_bytes(self) -> int:
        """What a block needs, alignment included."""
        stage = self.rows * 64 + self.tokens * 128 + self.groups * 1024
        return 1024 + self.groups * 2 * OUT_TOKENS * 128 + self.stages * stage


def k_tiles(stored: int) -> int:
    """Steps along a row of so many stored values."""
    return -(-stored // K_TILE)


def arranged_positions(positions: Tensor, stored: int) -> Tensor:
    """Positions as a slid folder has them, uint8 [rows, stored / 4 rounded up], in the order of the kernel's threads:
    uint8 [rows / 64 rounded up, k tiles, 128 threads, 8 bytes].

    Thread t of a warpgroup has row 16 (t / 32) + t % 32 / 4, for odd t the row 8 further down, and of each half of a
    k_tile (32 values) the first 16 values, for odd t / 2 the others.
    """
    rows, given = positions.shape
    tiles, blocks = k_tiles(stored), -(-rows // BLOCK_ROWS)
    # Where nothing is stored there still are positions, 0 and 1: equal ones are undefined.
    padded = positions.new_full((blocks * BLOCK_ROWS, tiles * K_TILE // 4), 0b01000100)
    padded[:rows, :given] = positions
    if stored % 4:
        padded[:rows, given - 1] |= 0b01000000
    pieces = padded.view(torch.int32).view(blocks, 4, 2, 8, tiles, 2, 2)  # block, warp, lower, row, tile, half, piece
    return pieces.permute(0, 4, 1, 3, 6, 2, 5).contiguous().view(torch.uint8).view(blocks, tiles, 128, 8)


@dataclass(frozen=True, eq=False)
class HopperMatrix:
    """Slid weights as the kernel takes them.

    values    -- int8 or float8_e4m3fn [rows, stored]; `stored` is a multiple of 16
    positions -- from `arranged_positions`
    scale     -- float32 [rows]
    bias      -- bfloat16 or float16 [rows], the type of the outputs, or None
    """

    values: Tensor
    positions: Tensor
    scale: Tensor
    bias: Tensor | None


def slide_matmul(matrix: HopperMatrix, q: Tensor, scale: Tensor, out: torch.dtype, tile: Tile) -> Tensor:
    """Y = (Q W^T) * scales + bias, on the current stream.

    q     -- of the type of the weights, [tokens, lifted], a multiple of 16 wide: `inputs.quantise_slide`
    scale -- float32 [tokens]
    out   -- bfloat16 or float16

    Returns [tokens, rows]. Rows must be a multiple of 8.
    """
    (rows, stored), tokens = matrix.values.shape, len(q)
    y = torch.empty(tokens, rows, dtype=out, device=q.device)
    steps, fp8 = k_tiles(stored), int(q.dtype == torch.float8_e4m3fn)
    defines = (
        f"FP8={fp8}",
        f"TOKENS={tile.tokens}",
        f"GROUPS={tile.groups}",
        f"STAGES={tile.stages}",
        f"HALF={_OUTPUTS[out]}",
        f"DIAG={DIAG}",
    )
    token_tiles, row_tiles = -(-tokens // tile.tokens), -(-rows // (CLUSTER * tile.rows))
    clusters = min(multiprocessors(q.device) // CLUSTER, token_tiles * row_tiles)
    band = max(1, _BAND_BYTES // (tile.tokens * q.shape[1]))
    launch(
        kernel("slide_matmul", "slide_matmul", defines, q.device.index or 0),
        (clusters * CLUSTER,),
        128 * tile.groups + 32,
        _map(matrix.values, 64, tile.rows),
        _map(q, 128, tile.tokens // CLUSTER),
        _map(y, 64, OUT_TOKENS),
        *(matrix.positions, matrix.scale, scale, matrix.bias),
        *(rows, tokens, steps, band),
        shared=tile.shared_bytes,
    )
    return y


def _map(matrix: Tensor, columns: int, rows: int) -> Any:
    """What the copy engine has to know of a matrix, of which it copies so many columns and rows at a time."""
    height, width = matrix.shape
    return _tensor_map(matrix.data_ptr(), matrix.element_size(), width, height, columns, rows)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, element: int, width: int, height: int, columns: int, rows: int) -> Any:
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    swizzles = driver.CUtensorMapSwizzle
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    line = columns * element
    return checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element == 1 else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [wide(width), wide(height)],
            [wide(width * element)],
            [narrow(columns), narrow(rows)],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if line == 128 else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
