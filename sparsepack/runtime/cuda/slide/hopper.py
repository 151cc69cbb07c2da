"""Products with sparse24 weights on Hopper's 2:4 tensor cores, by one kernel of ours
(`kernels/slide/slide_matmul.cu`)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.runtime.cuda.driver.kernel import checked, kernel, launch, multiprocessors

ARCHITECTURE = 90
"""Only GPUs of this compute capability, times ten, have these instructions."""
OUTPUTS = {torch.bfloat16: 0, torch.float16: 1}
"""Products come in these types, under the numbers that the kernel gives them."""
ROWS = 8
"""A matrix has a multiple of this many rows."""
STORED = 16
"""A row has a multiple of this many stored values."""
ALIGNMENT = 16
"""A matrix begins at a multiple of this many bytes."""
EXPANDED = 32
"""A token has a multiple of this many inputs (`inputs.ALIGNMENT`)."""

K_TILE = 128
"""This many inputs of a token are multiplied together, with half as many stored values of a row."""
K_STORED = K_TILE // 2
BLOCK_ROWS = 64
CLUSTER = 2
"""This many blocks share their inputs."""
_OUT_TOKENS = 32
_OUT_BYTES = _OUT_TOKENS * 128
_BAND_BYTES = 24 << 20
"""This many bytes of expanded inputs are multiplied with all rows before the next are: these inputs stay in the L2
cache."""
_SHARED_BYTES = 227 << 10
"""A block has this many bytes of shared memory."""
_STATIC_BYTES = 4096
"""The kernel declares up to this many bytes of shared memory, those for aligning the rest included."""


@dataclass(frozen=True)
class Tile:
    """The tile that a block multiplies at a time: `groups` warpgroups of 64 rows, by 64, 128, 192 or 256 tokens."""

    groups: int
    tokens: int

    @property
    def rows(self) -> int:
        return BLOCK_ROWS * self.groups

    @property
    def load_warps(self) -> int:
        """The warps behind the groups, of which one thread fetches. A whole warpgroup gives its registers to the
        others; where there is one other, that one has enough."""
        return 4 if self.groups > 1 else 1

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32 * self.load_warps

    @property
    def stage_bytes(self) -> int:
        """The bytes of shared memory for a k_tile of weights, inputs and positions."""
        return self.rows * K_STORED + self.tokens * K_TILE + self._position_bytes

    @property
    def _position_bytes(self) -> int:
        return self.groups * 1024

    @property
    def stages(self) -> int:
        """The stages of the pipeline: as many as leave room for all outputs of a tile, but enough to hide what fetching
        takes, if two buffers of outputs remain."""
        available, outputs = _SHARED_BYTES - _STATIC_BYTES, self.rows * self.tokens * 2
        enough = min(5, (available - 2 * self.groups * _OUT_BYTES) // self.stage_bytes)
        return max(enough, min(12, (available - outputs) // self.stage_bytes))

    @property
    def out_buffers(self) -> int:
        """The buffers of outputs of each warpgroup: the next tile does not wait until they are stored."""
        left = _SHARED_BYTES - _STATIC_BYTES - self.stages * self.stage_bytes
        return min(self.tokens // _OUT_TOKENS, left // (self.groups * _OUT_BYTES))

    @property
    def shared_bytes(self) -> int:
        """The bytes of dynamic shared memory of a block."""
        return 1024 + self.groups * self.out_buffers * _OUT_BYTES + self.stages * self.stage_bytes

    @property
    def microseconds(self) -> float:
        """The time of a k_tile on an H100: what goes in and out of its shared memory at 128 bytes a cycle, and a
        little."""
        read = self.groups * self.tokens * K_TILE + self.rows * K_STORED + self._position_bytes
        return 0.1 + 0.00045 * (read + self.stage_bytes) / 128


TILES = (Tile(2, 256), Tile(3, 192), Tile(2, 192), Tile(3, 128), Tile(2, 128), Tile(1, 128), Tile(3, 64), Tile(1, 64))


@lru_cache(maxsize=4096)
def best_tile(rows: int, tokens: int, blocks: int) -> Tile:
    """The tile with which so many blocks at a time are done first: with four shapes and 64 to 8192 tokens on an H200,
    at most 5 % slower than the best."""

    def cost(tile: Tile) -> float:
        pairs = -(-rows // (CLUSTER * tile.rows)) * -(-tokens // tile.tokens)
        return -(-pairs // (blocks // CLUSTER)) * tile.microseconds

    return min(TILES, key=cost)


@dataclass(frozen=True, eq=False)
class HopperMatrix:
    """sparse24 weights as the kernel takes them.

    values    -- int8 or float8_e4m3fn [rows, stored], `ROWS` and `STORED` of them or a multiple
    positions -- from `arranged_positions`
    scale     -- float32 [rows]
    bias      -- of the type of the outputs [rows], or None
    """

    values: Tensor
    positions: Tensor
    scale: Tensor
    bias: Tensor | None


def arranged_positions(positions: Tensor, stored: int) -> Tensor:
    """Positions as a slid folder has them, uint8 [rows, stored / 4 rounded up], in the order of the kernel's threads:
    uint8 [rows / 64 rounded up, k_tiles, 128 threads, 8 bytes].

    Thread t of a warpgroup has row 16 (t / 32) + t % 32 / 4, for odd t the row 8 further down, and of each half of a
    k_tile (32 values) the first 16 values, for odd t / 2 the others.

    Raises `PackingError` for positions that do not ascend within a window: what the kernel does with them is undefined.
    """
    rows, given = positions.shape
    tiles, blocks = -(-stored // K_STORED), -(-rows // BLOCK_ROWS)
    # Where nothing is stored there still are positions, 0 and 1: what equal ones do is undefined.
    padded = positions.new_full((blocks * BLOCK_ROWS, tiles * K_STORED // 4), 0b01000100)
    padded[:rows, :given] = positions
    if stored % 4:
        padded[:rows, given - 1] |= 0b01000000
    ascending = ((padded & 3) < (padded >> 2 & 3)) & ((padded >> 4 & 3) < padded >> 6)
    if not ascending.all():
        row = int((~ascending).any(1).nonzero()[0])
        raise PackingError(f"the positions of row {row} do not ascend; they were changed: pack the model again")
    pieces = padded.view(torch.int32).view(blocks, 4, 2, 8, tiles, 2, 2)  # block, warp, lower, row, tile, half, piece
    return pieces.permute(0, 4, 1, 3, 6, 2, 5).contiguous().view(torch.uint8).view(blocks, tiles, 128, 8)


def slide_matmul(matrix: HopperMatrix, q: Tensor, scale: Tensor, out: torch.dtype, tile: Tile | None = None) -> Tensor:
    """Y = (Q W^T) * scales + bias, on the current stream.

    q     -- of the type of the weights, [tokens, expanded], a multiple of 16 wide: `inputs.quantise_slide`
    scale -- float32 [tokens]
    out   -- one of `OUTPUTS`
    tile  -- None: `best_tile`

    Returns [tokens, rows]. Raises `ValueError` for inputs of another width.
    """
    (rows, stored), tokens = matrix.values.shape, len(q)
    if not 0 <= q.shape[1] - 2 * stored + 2 * STORED < 2 * STORED + EXPANDED:
        raise ValueError(f"inputs expanded to {q.shape[1]} for weights with {stored} stored values a row")
    y = torch.empty(tokens, rows, dtype=out, device=q.device)
    if not tokens:
        return y
    blocks = multiprocessors(q.device)
    tile = tile or best_tile(rows, tokens, blocks)
    defines = (
        f"FP8={int(q.dtype == torch.float8_e4m3fn)}",
        f"TOKENS={tile.tokens}",
        f"GROUPS={tile.groups}",
        f"LOAD_WARPS={tile.load_warps}",
        f"STAGES={tile.stages}",
        f"OUT_BUFFERS={tile.out_buffers}",
        f"CLUSTER={CLUSTER}",
        f"HALF={OUTPUTS[out]}",
    )
    tiles = -(-tokens // tile.tokens) * -(-rows // (CLUSTER * tile.rows))
    launch(
        kernel("slide_matmul", "slide_matmul", defines, q.device.index or 0),
        (min(blocks // CLUSTER, tiles) * CLUSTER,),
        tile.threads,
        _map(matrix.values, K_STORED, tile.rows),
        _map(q, K_TILE, tile.tokens // CLUSTER),
        _map(y, BLOCK_ROWS, _OUT_TOKENS),
        *(matrix.positions, matrix.scale, scale, matrix.bias),
        *(rows, tokens, -(-stored // K_STORED), max(1, _BAND_BYTES // (tile.tokens * q.shape[1]))),
        shared=tile.shared_bytes,
    )
    return y


def _map(matrix: Tensor, columns: int, rows: int) -> Any:
    """The tensor map of a matrix of which the copy engine takes so many columns and rows at a time."""
    height, width = matrix.shape
    return _tensor_map(matrix.data_ptr(), matrix.element_size(), width, height, columns, rows)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, element: int, width: int, height: int, columns: int, rows: int) -> Any:
    from cuda.bindings import driver

    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element == 1 else types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            address,
            [wide(width), wide(height)],
            [wide(width * element)],
            [narrow(columns), narrow(rows)],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if columns * element == 128 else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
