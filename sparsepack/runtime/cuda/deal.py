"""What the blocks of a product with a zigzag matrix take and need: columns (`kernels/deal.cuh`) and shared memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from sparsepack.runtime.cuda.geometry import PRODUCERS, Geometry
from sparsepack.runtime.cuda.kernel import multiprocessors, shared_memory

BAND_ROWS = 256
BAND_PLACES = BAND_ROWS + 20  # of its sums in shared memory (`kernels/meet.cuh`)
BLOCK_BYTES = 144
COLUMNS = 16  # that are multiplied together
CHUNK = 32  # columns that are dealt to a block together
STAGES = {8: 8, 4: 8, 2: 16, 1: 24}
"""By the bands of a group."""
MOST_SPLITS = {8: 16, 4: 16, 2: 32, 1: 32}
"""Likewise: their sums have to be added up."""
MANY_COLUMNS = 1024
"""Of a block: with so many, groups of 4 are faster at 50 % than of 2 (an H100)."""
FEW_COLUMNS = 224
"""Of a block of one band: with no more, it is faster without a ring (likewise)."""


def default_geometry(bands: int, columns: int, device: torch.device, gate: bool = False) -> Geometry:
    """Where nothing was measured: groups of 2, or of 4, whose pieces are longer, where that leaves a block for almost
    every multiprocessor and each of them many columns; as many stages as fit. A gate's groups are of 2: in a decoder
    those of 4 lose more dense than they gain sparse. Small matrices are in groups of 1, without a ring
    (benchmarks/notes/cuda.md)."""

    def needed(geometry: Geometry) -> int:
        return shared_bytes(columns, geometry)

    def of(group: int) -> Geometry:
        splits = filling_splits(bands, columns, device, group)
        return fitted(Geometry(group, warps=8, stages=STAGES[group], splits=splits), needed, device)

    one = Geometry(1, warps=8, stages=0, splits=filling_splits(bands, columns, device, 1))
    if not gate and CHUNK * chunks(columns, one) <= FEW_COLUMNS:
        return one
    four = of(4)
    enough = -(-bands // 4) * _most_splits(columns, 4) >= 0.95 * multiprocessors(device)
    if not gate and enough and columns // four.splits >= MANY_COLUMNS and needed(four) <= shared_memory(device):
        return four
    return of(2 if gate or bands >= 4 else 1)


def fitted(geometry: Geometry, needed: Callable[[Geometry], int], device: torch.device) -> Geometry:
    """With fewer stages where a block would need more shared memory than there is."""
    least = math.lcm(PRODUCERS, geometry.warps // geometry.group)
    while geometry.stages > least and needed(geometry) > shared_memory(device):
        geometry = replace(geometry, stages=geometry.stages - least)
    return geometry


def with_ring(geometry: Geometry) -> Geometry:
    """The same layout of a matrix, for kernels that need a ring."""
    return geometry if geometry.stages else replace(geometry, warps=8, stages=STAGES[geometry.group])


def filling_splits(bands: int, columns: int, device: torch.device, group: int) -> int:
    """How many blocks share a group's columns where there is about a block for each multiprocessor."""
    return max(1, min(_most_splits(columns, group), multiprocessors(device) // -(-bands // group)))


def _most_splits(columns: int, group: int) -> int:
    """Blocks that may share a group's columns: each needs some."""
    return min(MOST_SPLITS[group], -(-columns // CHUNK))


def shared_bytes(columns: int, geometry: Geometry) -> int:
    """Dynamic shared memory of a block: the ring, the warps' sums, and the list of its columns."""
    lists = 8 * CHUNK * chunks(columns, geometry)
    return ring_bytes(geometry) + 4 * geometry.warps * BAND_PLACES + lists


def chunks(columns: int, geometry: Geometry) -> int:
    """Of columns, that a block takes at most."""
    return -(-columns // (CHUNK * geometry.splits))


def ring_bytes(geometry: Geometry) -> int:
    """Of shared memory, for the columns on their way (`kernels/zigzag.cuh`)."""
    column = geometry.group * BLOCK_BYTES // 16 // 2 * 32 + 16  # an odd number of 16 bytes
    return geometry.stages * COLUMNS * column
