"""The backend of Apple GPUs; see `runtime.decoder.BackendModule`."""

import statistics
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.metal import library, products
from sparsepack.runtime.metal.decoder import MetalDecoder
from sparsepack.runtime.metal.library import Launch
from sparsepack.runtime.metal.operations import operations
from sparsepack.runtime.metal.products import (
    SCHEMA,
    MetalTileConfig,
    MetalZigzag,
    Sums,
    gpu_name,
    load_zigzag,
    read_tuning,
    tuned,
    tuning_path,
)
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import (
    ACTIVE,
    COPIES,
    ROTATION,
    Shape,
    copies_of,
    measure_shapes,
    random_blocks,
    row_of,
)

__all__ = ["decoder", "describe", "operations", "synchronise", "tune", "usable"]


def usable(device: torch.device) -> None:
    library.usable(device)


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> MetalDecoder:
    return MetalDecoder(packed, library.usable(device), context)


def synchronise(device: torch.device) -> None:
    torch.mps.synchronize()


def describe(device: torch.device) -> str:
    return gpu_name()


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape], block: str
) -> dict[str, Any]:
    """See `metal.tune.measure`."""
    return measure(shapes, library.usable(device), gates)


SPLITS = (4, 8, 16, 32, 64)
SIMDGROUPS = (1, 2, 4, 8)
ROUNDS = 5


def measure(shapes: Iterable[Shape], device: torch.device, gates: Collection[Shape]) -> dict[str, Any]:
    """Time every grid on every shape, keep the best, and return what was found as JSON-able values.

    Half of the columns are active, the weights come from memory, and the kernel that adds up the splits and lists the
    columns of the next product is part of the time: more splits are more to add. What was measured before for other
    shapes stays.

    gates -- of the shapes, those of gate and up, behind which that kernel is another

    Raises `OutputError` where it cannot be kept.
    """
    gpu = gpu_name()
    path = tuning_path(gpu)
    head = {"schema": SCHEMA, "gpu_info": gpu}
    found = measure_shapes(shapes, path, head, read_tuning(path), lambda shape: _best(shape, device, shape in gates))
    tuned.cache_clear()
    return found


def _best(shape: Shape, device: torch.device, gate: bool) -> dict[str, Any]:
    """The grid with the least median time. They take turns: what disturbs the machine disturbs them all."""
    trial = _Trial(shape, device, gate)
    samples: dict[MetalTileConfig, list[float]] = {}
    for _ in range(ROUNDS):
        for splits in SPLITS:
            for simdgroups in SIMDGROUPS:
                config = MetalTileConfig(splits, simdgroups)
                samples.setdefault(config, []).append(trial.nanoseconds(config))
    times = {config: statistics.median(taken) for config, taken in samples.items()}
    best = min(times, key=lambda config: times[config])
    return row_of(shape, asdict(best), times.values(), times[best])


class _Trial:
    """Products of one shape, each with what follows it. Copies of the matrix take turns."""

    def __init__(self, shape: Shape, device: torch.device, gate: bool) -> None:
        rows, columns = shape
        self._gate, self._device = gate, device
        blocks = random_blocks(shape)
        first = load_zigzag(
            PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), rows, columns), device, MetalTileConfig()
        )
        others = (
            replace(first, blocks=first.blocks.clone()) for _ in range(copies_of(blocks.numel(), ROTATION, COPIES) - 1)
        )
        self._matrices = [first, *others]
        x = torch.randn(columns, generator=torch.Generator().manual_seed(0))
        self._found = products.new_active_columns(columns, device)
        threshold = x.abs().quantile(1 - ACTIVE).reshape(1).to(device)
        products.collect(x.to(device), self._found, threshold=threshold)()
        self._next = products.new_active_columns(rows, device)
        self._active = torch.zeros(1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, device=device)

    def nanoseconds(self, config: MetalTileConfig) -> float:
        """The time of a product and what follows it, the mean over the copies."""
        parts = torch.empty(config.splits, self._matrices[0].bands * BAND_ROWS, device=self._device)
        kernels = [
            kernel for matrix in self._matrices for kernel in self._kernels(replace(matrix, config=config), Sums(parts))
        ]
        torch.mps.synchronize()
        start = time.perf_counter_ns()
        for kernel in kernels:
            kernel()
        torch.mps.synchronize()
        return (time.perf_counter_ns() - start) / len(self._matrices)

    def _kernels(self, matrix: MetalZigzag, sums: Sums) -> list[Launch]:
        product = products.zigzag_gemv(matrix, self._found, sums.parts, self._active)
        if self._gate:
            return [product, products.collect_gated(sums, matrix.rows // 2, "silu", self._next)]
        return [product, products.collect(self._zeros, self._next, added=sums)]
