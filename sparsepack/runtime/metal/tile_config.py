"""How a product with a zigzag matrix is laid over the GPU: the two numbers that the paper leaves open.

`sparsepack tune --device mps` measures them once per kind of GPU (`tune.py`); what it found is kept below ~/.cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.runtime import tuning
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.tuning import Shape

SCHEMA = 1
MOST_SPLITS, MOST_SIMDGROUPS = 64, 8


@dataclass(frozen=True)
class MetalTileConfig:
    """The sizes of a product's grid; the defaults are those of SpQt, section 6.3.

    splits     -- threadgroups that share the active columns of a band
    simdgroups -- of a threadgroup, 32 threads each
    """

    splits: int = 32
    simdgroups: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= MOST_SPLITS or not 1 <= self.simdgroups <= MOST_SIMDGROUPS:
            raise ValueError(f"{self}: expected 1 to {MOST_SPLITS} splits and 1 to {MOST_SIMDGROUPS} simdgroups")


def tile_config(shape: Shape) -> MetalTileConfig:
    """What suits a matrix: as measured on this kind of GPU, or else as in the paper."""
    return tuned(gpu_name()).get(shape, MetalTileConfig())


def gpu_name() -> str:
    """The name of the GPU, that of the chip that it is a part of: "Apple M2 Pro"."""
    return cpu_info()


def tuned_path(gpu: str) -> Path:
    """The file that keeps what was measured on a kind of GPU, by the GPU's name."""
    return tuning.tuned_path("metal", gpu)


def read_tuned(path: Path) -> dict[Shape, dict[str, Any]]:
    """The measured configurations, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, tile_config_of)


@cache
def tuned(gpu: str) -> Mapping[Shape, MetalTileConfig]:
    """The configurations measured on a kind of GPU; empty where `sparsepack tune` never ran there."""
    return {shape: tile_config_of(row) for shape, row in read_tuned(tuned_path(gpu)).items()}


def tile_config_of(row: Mapping[str, Any]) -> MetalTileConfig:
    """A configuration from a row of such a file. Raises `ValueError`, `KeyError` or `TypeError` where it is
    impossible."""
    return MetalTileConfig(int(row["splits"]), int(row["simdgroups"]))
