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
"""By the bands of a group, largest first."""


def default_geometry(bands: int, columns: int, device: torch.device, gate: bool = False) -> Geometry:
    """Where nothing was measured: the largest group, whose pieces are the longest, that fits and with which there is a
    block for almost every multiprocessor; as many stages as fit."""
    enough = 0.95 * multiprocessors(device)

    def needed(geometry: Geometry) -> int:
        return shared_bytes(columns, geometry)

    def of(group: int) -> Geometry:
        splits = filling_splits(bands, columns, device, group)
        return fitted(Geometry(group, warps=8, stages=STAGES[group], splits=splits), needed, device)

    *larger, smallest = (of(group) for group in STAGES if group > 1 or not gate)
    return next(
        (
            geometry
            for geometry in larger
            if -(-bands // geometry.group) * _most_splits(columns, geometry.group) >= enough
            and needed(geometry) <= shared_memory(device)
        ),
        smallest,
    )


def fitted(geometry: Geometry, needed: Callable[[Geometry], int], device: torch.device) -> Geometry:
    """With fewer stages where a block would need more shared memory than there is."""
    least = math.lcm(PRODUCERS, geometry.warps // geometry.group)
    while geometry.stages > least and needed(geometry) > shared_memory(device):
        geometry = replace(geometry, stages=geometry.stages - least)
    return geometry


def filling_splits(bands: int, columns: int, device: torch.device, group: int) -> int:
    """How many blocks share a group's columns where there is about a block for each multiprocessor."""
    return max(1, min(_most_splits(columns, group), multiprocessors(device) // -(-bands // group)))


def _most_splits(columns: int, group: int) -> int:
    """Blocks that may share a group's columns: their sums have to be added up, and each needs columns."""
    return min(16 if group > 1 else 32, -(-columns // CHUNK))


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
