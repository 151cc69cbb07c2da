"""How a product with a zigzag matrix is laid over the GPU: the parameters that `kernels/products/zigzag_gemv.cu` leaves
open, and the shared memory that follows from them.

`sparsepack tune --device cuda` measures them once per kind of GPU (`tuning.py`); what it found is kept below ~/.cache.
Where nothing was measured, `default_tile_config` chooses.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime import tuning
from sparsepack.runtime.cuda.driver.device import deepest_pipeline, shared_limit
from sparsepack.runtime.cuda.driver.kernel import multiprocessors
from sparsepack.runtime.tuning import Shape

SCHEMA = 2
PADDED_ROWS = BAND_ROWS + 20  # of its sums in shared memory (`kernels/products/split_k_reduce.cuh`)
BLOCK_BYTES = 144
PLANES_BYTES = 200
"""A superblock with planes (`kernels/blocks/q6_p.cuh`) takes so many bytes on the GPU, and no other does."""
LINE_BYTES = 128  # over the bus
K_TILE = 16  # columns that are multiplied together
COLUMNS_AT_ONCE = 32  # columns that go to a block together (`kernels/products/column_split.cuh`)
STATIC_BYTES = 2048
"""Products declare at most this many bytes of a block's shared memory themselves."""
PRODUCERS = 4
"""A block has this many producer warps, which fetch columns, where there is a ring."""
MOST_WARPS = 32
"""A block has at most this many warps, producers included."""
MOST_STAGES = 32
"""No configuration that is tried has more stages than this."""
STAGES = {8: 8, 4: 8, 2: 16, 1: 24}
"""A ring has this many stages by default, for each number of bands of a tile."""
DENSE_STAGES = {False: {4: 8, 2: 12}, True: {4: 12, 2: 32}}
"""As `STAGES`, of Q4_K of which every column is active, so that the ring fills before the input is there: of a gate
more, since what comes before it, attention and its output, reads little; of others fewer (an H200)."""
MOST_SPLITS = {8: 16, 4: 32, 2: 32, 1: 32}
"""A product has at most this many splits, by the bands of a tile: the sums of the splits have to be added up."""
PLANES_STAGES = {8: 4, 4: 12, 2: 24, 1: 24}
"""As `STAGES`, of planes: of most columns a half of a stage's room is filled."""
PLANES_SPLITS = 32
"""As `MOST_SPLITS`, of planes, most of which lie in tiles of 4 bands: levels of these end where what memory reads
together does."""
FEW_PLANES_COLUMNS = 256
"""Planes whose blocks would have fewer columns than this are in tiles of 2 bands, of which fewer sums are added up (an
H200: a block of 128 columns 6.8 us in place of 7.1, with eight inputs 9.8 in place of 11.4)."""
LEAST_COLUMNS_OF_FOUR = 448
"""For a block with this many columns, tiles of 4 bands of Q4_K are faster than tiles of 2 where columns are skipped,
and as fast where none are: an H200's memory brings pieces of 288 bytes faster than the copy engine asks for them (two
matrices of 8B, 28672 x 4096 and 4096 x 14336, a quarter skipped: 6 us less a layer)."""
MANY_COLUMNS = 1024
"""The same of other types, at 50 % (an H100), but for gates."""
OFFLOADED_TILES = 4
"""A matrix in the host's memory has at least so many tiles, of which GPU and processor take some each."""
FEW_COLUMNS = 224
"""A block of one band with no more columns than this is faster without a ring (an H100)."""


@dataclass(frozen=True)
class CudaTileConfig:
    """The sizes of a product's kernel: tile shape, stages and split-K slices, as CUTLASS calls them.

    tile_bands -- bands of 256 rows that lie together in a tile, column by column: 1, 2, 4 or 8
    warps      -- of a block that multiply; a multiple of `tile_bands`
    stages     -- of the pipeline, 16 columns each, that a block has on their way at once, fetched by producer warps; 0:
                  warps that multiply read their columns themselves, which suits blocks that read few (where all are
                  active, and for several inputs, there is a ring all the same)
    splits     -- blocks that share the columns of a tile (split-K)
    block_bytes -- of a superblock on the GPU (`zigzag.block_bytes`)
    """

    tile_bands: int = 1
    warps: int = 8
    stages: int = 16
    splits: int = 8
    block_bytes: int = BLOCK_BYTES
    offloaded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        slices, rest = divmod(self.warps, self.tile_bands)
        if rest or self.stages % slices or self.stages % PRODUCERS:
            raise ValueError(
                f"{self}: warps must be a multiple of tile_bands, stages of warps / tile_bands and of {PRODUCERS}"
            )
        if self.warps + PRODUCERS > MOST_WARPS or self.stages > MOST_STAGES:
            raise ValueError(f"{self}: at most {MOST_WARPS - PRODUCERS} warps and {MOST_STAGES} stages")

    @property
    def planes(self) -> bool:
        """Whether superblocks have planes."""
        return self.block_bytes == PLANES_BYTES

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * (self.warps + (PRODUCERS if self.stages else 0))

    def chunks(self, columns: int) -> int:
        """The chunks of a matrix's columns that a block takes at most."""
        return -(-columns // (COLUMNS_AT_ONCE * self.splits))

    @property
    def ring_bytes(self) -> int:
        """The bytes of shared memory for the columns on their way (`kernels/products/zigzag.cuh`)."""
        column = self.tile_bands * self.block_bytes // 16 // 2 * 32 + 16  # an odd number of 16 bytes
        if self.planes:
            bytes = max(self.tile_bands * self.block_bytes, PLANES_BYTES + 8)
            column = (bytes + 31) // 64 * 64 + 32  # an odd number of 32 bytes
            if self.tile_bands == 1:  # whose first planes and others may take 32 more where they lie apart
                column += 32
        if self.offloaded:
            column = max(column, LINE_BYTES * (self.tile_bands + 1))
        return self.stages * K_TILE * column


@dataclass(frozen=True)
class OffloadedTileConfig(CudaTileConfig):
    """That of a matrix in the host's memory, of which whole lines are asked for (`kernels/products/zigzag.cuh`)."""

    offloaded: ClassVar[bool] = True


Config = TypeVar("Config", bound=CudaTileConfig)


def shared_bytes(columns: int, config: CudaTileConfig) -> int:
    """The bytes of dynamic shared memory of a block of `zigzag_gemv`: ring, sums of the warps, list of columns."""
    return config.ring_bytes + 4 * config.warps * PADDED_ROWS + 8 * COLUMNS_AT_ONCE * config.chunks(columns)


def fitted(config: Config, needed: Callable[[CudaTileConfig], int], device: torch.device) -> Config:
    """The configuration, with fewer stages where a block would need more dynamic shared memory than there is."""
    step = math.lcm(PRODUCERS, config.warps // config.tile_bands)
    choices = range(config.stages, 0, -step)
    stages = deepest_pipeline(choices, lambda n: STATIC_BYTES + needed(replace(config, stages=n)), device)
    return replace(config, stages=stages)


def with_ring(config: CudaTileConfig) -> CudaTileConfig:
    """The same layout of a matrix, for kernels that need a ring."""
    stages = PLANES_STAGES if config.planes else STAGES
    return config if config.stages else replace(config, warps=8, stages=stages[config.tile_bands])


def dense_ring(config: CudaTileConfig, columns: int, gate: bool, device: torch.device) -> CudaTileConfig:
    """The same layout of a matrix, for products of which every column is active."""
    stages = DENSE_STAGES[gate].get(config.tile_bands)
    if config.block_bytes != BLOCK_BYTES or config.warps != 8 or config.offloaded or stages is None:
        return config
    return fitted(replace(config, stages=stages), lambda config: shared_bytes(columns, config), device)


def default_tile_config(
    bands: int, columns: int, device: torch.device, gate: bool = False, block_bytes: int = BLOCK_BYTES
) -> CudaTileConfig:
    """The configuration if nothing was measured: tiles of 2 bands, or of 4, whose pieces are longer, where that leaves
    a block for almost every multiprocessor and each of them many columns; as many stages as fit. Gates of other types
    than Q4_K, whose pieces are longer, have tiles of 2. Small matrices are in tiles of 1, without a ring. Planes are in
    tiles of 4 wherever there are so many bands and blocks have enough columns."""

    def needed(config: CudaTileConfig) -> int:
        return shared_bytes(columns, config)

    def of(tile_bands: int) -> CudaTileConfig:
        splits = filling_splits(bands, columns, device, tile_bands)
        return fitted(CudaTileConfig(tile_bands, 8, STAGES[tile_bands], splits, block_bytes), needed, device)

    if block_bytes == PLANES_BYTES:
        tile_bands = planes_tile_bands(bands)
        found = planes_tile_config(bands, columns, device, tile_bands)
        few = tile_bands == 4 and columns // found.splits < FEW_PLANES_COLUMNS
        return planes_tile_config(bands, columns, device, 2) if few else found
    one = CudaTileConfig(1, 8, 0, filling_splits(bands, columns, device, 1), block_bytes)
    if not gate and COLUMNS_AT_ONCE * one.chunks(columns) <= FEW_COLUMNS:
        return one
    four = of(4)
    enough = -(-bands // 4) * _most_splits(columns, 4) >= 0.95 * multiprocessors(device)
    fits = STATIC_BYTES + needed(four) <= shared_limit(device)
    short = block_bytes == BLOCK_BYTES
    least = LEAST_COLUMNS_OF_FOUR if short else MANY_COLUMNS
    if (short or not gate) and enough and columns // four.splits >= least and fits:
        return four
    return of(2 if gate or bands >= 4 else 1)


def planes_tile_bands(bands: int) -> int:
    """The most bands of a tile of planes, and as many as there are where a part of the matrix lies elsewhere."""
    return next(size for size in (4, 2, 1) if size <= bands)


def planes_tile_config(bands: int, columns: int, device: torch.device, tile_bands: int) -> CudaTileConfig:
    """The configuration of a matrix of planes in tiles of so many bands."""

    def needed(config: CudaTileConfig) -> int:
        return shared_bytes(columns, config)

    most = min(PLANES_SPLITS, -(-columns // COLUMNS_AT_ONCE))
    splits = max(1, min(most, multiprocessors(device) // -(-bands // tile_bands)))
    stages = PLANES_STAGES[tile_bands]
    return fitted(CudaTileConfig(tile_bands, 8, stages, splits, PLANES_BYTES), needed, device)


def offloaded_tile_bands(bands: int) -> int:
    """The bands of a tile of a matrix in the host's memory: as many as leave some tiles to be divided, all of them
    full. What lies together of a column is read the faster over the bus the longer it is."""
    sizes = (size for size in sorted(STAGES, reverse=True) if bands % size == 0 and bands >= OFFLOADED_TILES * size)
    return next(sizes, 1)


def offloaded_tile_config(bands: int, columns: int, device: torch.device, tile_bands: int) -> OffloadedTileConfig:
    """The configuration of so many bands, in tiles of `tile_bands`, of a matrix in the host's memory."""

    def needed(config: CudaTileConfig) -> int:
        return shared_bytes(columns, config)

    splits = filling_splits(bands, columns, device, tile_bands)
    config = OffloadedTileConfig(tile_bands, warps=8, stages=STAGES[tile_bands], splits=splits)
    return fitted(config, needed, device)


def expert_tile_config(
    bands: int,
    columns: int,
    device: torch.device,
    used: int,
    gate: bool,
    added: bool,
    block_bytes: int = BLOCK_BYTES,
) -> CudaTileConfig:
    """The configuration of an expert's matrix, where `used` of them are multiplied together and fill the GPU: tiles of
    2 bands, or of more where there would be more blocks than run at once, and these wait for each other."""
    at_once = multiprocessors(device)
    usual = 2 if gate or bands > 1 else 1
    sizes = [size for size in sorted(STAGES) if size >= usual]
    tile_bands = next((size for size in sizes if -(-bands // size) * used <= at_once), sizes[-1])
    splits = max(1, min(_most_splits(columns, tile_bands), at_once // (-(-bands // tile_bands) * used)))

    def needed(config: CudaTileConfig) -> int:
        return shared_bytes(columns, config)

    return fitted(CudaTileConfig(tile_bands, 8, STAGES[tile_bands], splits, block_bytes), needed, device)


def filling_splits(bands: int, columns: int, device: torch.device, tile_bands: int) -> int:
    """The number of blocks that share a tile's columns where each multiprocessor has about one block."""
    return max(1, min(_most_splits(columns, tile_bands), multiprocessors(device) // -(-bands // tile_bands)))


def _most_splits(columns: int, tile_bands: int) -> int:
    """The largest number of blocks that may share a tile's columns, of which each block needs some."""
    return min(MOST_SPLITS[tile_bands], -(-columns // COLUMNS_AT_ONCE))


def measured_tile_config(
    shape: Shape, device: torch.device, gate: bool = False, block: str = "Q4_K"
) -> CudaTileConfig | None:
    """The configuration that was measured for a matrix on this kind of GPU; None where none was, or none for a gate."""
    found = tuned(torch.cuda.get_device_name(device), block).get(shape)
    return None if found is None or (gate and found.tile_bands % 2) else found


def tuning_path(gpu: str, block: str = "Q4_K") -> Path:
    """The file that keeps what was measured on a kind of GPU, by the GPU's name, for a type of superblocks."""
    return tuning.tuning_path("cuda", gpu, block=block)


def read_tuning(path: Path) -> dict[Shape, dict[str, Any]]:
    """The measured configurations, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, tile_config_of)


@cache
def tuned(gpu: str, block: str = "Q4_K") -> Mapping[Shape, CudaTileConfig]:
    """The configurations measured on a kind of GPU; empty where `sparsepack tune` never ran there."""
    return {shape: tile_config_of(row) for shape, row in read_tuning(tuning_path(gpu, block)).items()}


def tile_config_of(row: Mapping[str, Any]) -> CudaTileConfig:
    """A configuration from a row of such a file.

    Raises `ValueError`, `KeyError` or `TypeError` where it is impossible.
    """
    values = {name: int(row[name]) for name in ("tile_bands", "warps", "stages", "splits")}
    if not all((name == "stages" or value) and 0 <= value <= 64 for name, value in values.items()):
        raise ValueError(f"{values}: expected 1 to 64, stages from 0 on")
    return CudaTileConfig(**values)
