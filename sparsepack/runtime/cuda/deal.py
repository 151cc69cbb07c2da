"""What the blocks of a product with a zigzag matrix take and need: columns (`kernels/deal.cuh`) and shared memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from sparsepack.runtime.cuda.geometry import PRODUCERS, Geometry
from sparsepack.runtime.cuda.kernel import multiprocessors, shared_memory

BAND_ROWS = 256
BLOCK_BYTES = 144
COLUMNS = 16  # that are multiplied together
CHUNK = 32  # columns that are dealt to a block together
MOST_SPLITS = 16


def default_geometry(bands: int, columns: int, device: torch.device, gate: bool = False) -> Geometry:
    """Where nothing was measured: longer pieces for larger matrices, up to a block for each multiprocessor, and as many
    stages as fit."""
    group = 1 if bands <= 8 and not gate else 4 if bands >= 64 and not gate else 2
    splits = filling_splits(bands, columns, device, group)
    geometry = Geometry(group, warps=8, stages={1: 24, 2: 16, 4: 8}[group], splits=splits)
    return fitted(geometry, lambda fewer: shared_bytes(columns, fewer), device)


def fitted(geometry: Geometry, needed: Callable[[Geometry], int], device: torch.device) -> Geometry:
    """With fewer stages where a block would need more shared memory than there is."""
    least = math.lcm(PRODUCERS, geometry.warps // geometry.group)
    while geometry.stages > least and needed(geometry) > shared_memory(device):
        geometry = replace(geometry, stages=geometry.stages - least)
    return geometry


def filling_splits(bands: int, columns: int, device: torch.device, group: int) -> int:
    """How many blocks share a group's columns where there is about a block for each multiprocessor."""
    most = min(MOST_SPLITS, -(-columns // CHUNK))
    return max(1, min(most, multiprocessors(device) // -(-bands // group)))


def shared_bytes(columns: int, geometry: Geometry) -> int:
    """Dynamic shared memory of a block: the ring, the warps' sums, and the list of its columns."""
    lists = 8 * CHUNK * chunks(columns, geometry)
    return ring_bytes(geometry) + 4 * geometry.warps * BAND_ROWS + lists


def chunks(columns: int, geometry: Geometry) -> int:
    """Of columns, that a block takes at most."""
    return -(-columns // (CHUNK * geometry.splits))


def ring_bytes(geometry: Geometry) -> int:
    """Of shared memory, for the columns on their way (`kernels/zigzag.cuh`)."""
    column = geometry.group * BLOCK_BYTES // 16 // 2 * 32 + 16  # an odd number of 16 bytes
    return geometry.stages * COLUMNS * column
