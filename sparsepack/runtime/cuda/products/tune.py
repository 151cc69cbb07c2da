"""Measure which tile configuration suits this GPU, once, and remember it (SpQt, section 3.2: hardware profiling)."""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.device import capture_graph, own_stream, usable
from sparsepack.runtime.cuda.driver.kernel import compile_together
from sparsepack.runtime.cuda.products.tile_config import (
    SCHEMA,
    CudaTileConfig,
    default_tile_config,
    filling_splits,
    read_tuning,
    tuned,
    tuning_path,
)
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, block_bytes, load_zigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, gemv
from sparsepack.runtime.tuning import ROTATION, Shape, copies_of, measure_shapes, random_blocks, row_of, thresholds

CHOICES: Mapping[str, Sequence[int]] = MappingProxyType(
    {"tile_bands": (1, 2, 4, 8), "splits": (1, 2, 4, 8, 16, 32), "warps": (8, 16), "stages": (0, 8, 16, 24)}
)
"""The fields of the configuration may have these values."""
STAGES_OF_PLANES = (4, 8, 12, 16, 24)
"""`stages` of matrices of planes, which travel to a ring."""
TOGETHER = (("tile_bands", "stages"), ("splits",), ("warps", "stages"))
"""The fields of a group are chosen at one time, since together they fill shared memory; the groups come in this order.
With other tiles come as many splits as fill the GPU."""
TURNS = 2
"""Every group of fields is chosen this many times, the other fields as they were chosen last."""
COPIES = 64
"""The largest number of copies of a matrix that are made, so that small matrices do not take most of the time."""
REPLAYS = 15


def measure(
    shapes: Iterable[Shape],
    device: torch.device | str = "cuda",
    gates: Collection[Shape] = (),
    block: str = "Q4_K",
) -> dict[str, Any]:
    """Search for the fastest configuration of every shape, and return what was found as JSON-able values.

    Half of the columns are active, of planes 3.4 bits of a weight are read; the weights come from memory, and
    collecting the columns is part of the time. What was measured before for other shapes stays.

    gates -- of the shapes, those of gate and up, which are measured as the decoder runs them
    block -- the type of the superblocks, of which files are kept apart

    Raises `UserError` where the cuda backend cannot run, `OutputError` where the result cannot be kept.
    """
    device = usable(device)
    gpu = torch.cuda.get_device_name(device)
    path = tuning_path(gpu, block)
    with torch.cuda.device(device):
        head = {"schema": SCHEMA, "gpu_info": gpu, "block": block}
        found = measure_shapes(
            shapes, path, head, read_tuning(path), lambda shape: _best(shape, device, shape in gates, block)
        )
    tuned.cache_clear()
    return found


def _best(shape: Shape, device: torch.device, gate: bool, block: str = "Q4_K") -> dict[str, Any]:
    """The configuration with the least median time, searched for field by field, from the one that runs where nothing
    was measured."""
    gate = gate and shape[0] % (2 * BAND_ROWS) == 0
    trial = _Trial(shape, device, gate, block)
    best = default_tile_config(trial.bands, shape[1], device, gate, block_bytes(block))
    times = {best: trial.nanoseconds(best)}
    for _ in range(TURNS):
        for names in TOGETHER:
            candidates = [each for each in _candidates(best, names, trial, device) if each not in times]
            trial.compile(candidates)
            for candidate in candidates:
                with suppress(*_IMPOSSIBLE):
                    times[candidate] = trial.nanoseconds(candidate)
            best = min(times, key=lambda config: times[config])
    trial.check()
    return row_of(shape, asdict(best), times.values(), times[best], block)


_IMPOSSIBLE = RuntimeError, ValueError
"""More than a multiprocessor has, or than columns and multiprocessors allow, raises one of these."""


def _candidates(
    best: CudaTileConfig, names: Sequence[str], trial: "_Trial", device: torch.device
) -> Iterator[CudaTileConfig]:
    """Each configuration with other values of some fields, once."""
    found = set[CudaTileConfig]()
    choices = {**CHOICES, "stages": STAGES_OF_PLANES} if best.planes else CHOICES
    for values in product(*(choices[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        if "tile_bands" in chosen:
            chosen["splits"] = filling_splits(trial.bands, trial.columns, device, chosen["tile_bands"])
        with suppress(*_IMPOSSIBLE):
            candidate = replace(best, **chosen)
            if candidate not in found:
                found.add(candidate)
                yield candidate


class _Trial:
    """Products of one shape. Copies of the matrix take turns, in one layout at a time."""

    def __init__(self, shape: Shape, device: torch.device, gate: bool, block: str = "Q4_K") -> None:
        self._shape, self._gate, self._block = shape, gate, block
        self._blocks = random_blocks(shape, block).to(device)
        self.bands, self.columns = self._blocks.shape[:2]
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(shape[1], generator=generator).to(device)
        self._threshold = thresholds(self._x, block)
        self._y = torch.empty(shape[0], device=device)
        self._stream = own_stream()
        self._layout: tuple[int, list[Tensor]] | None = None

    def check(self) -> None:
        """Raises RuntimeError where the GPU has stopped, and not where the GPU merely refuses a configuration."""
        torch.cuda.synchronize(self._blocks.device)

    def compile(self, configs: Sequence[CudaTileConfig]) -> None:
        """Compile the products of some configurations many at a time; not those that are impossible."""

        def run() -> None:
            for config in configs:
                with suppress(*_IMPOSSIBLE):
                    self._multiply(self._laid_out(config))

        compile_together(run)

    def nanoseconds(self, config: CudaTileConfig) -> float:
        """The time of a product: the median over replays of a CUDA graph of one for each copy.

        Raises one of `_IMPOSSIBLE` where the GPU cannot run it.
        """
        matrices = self._matrices(config)

        def run() -> None:
            for matrix in matrices:
                self._multiply(matrix)

        graph = capture_graph(run, self._stream)
        return statistics.median(_replayed(graph) for _ in range(REPLAYS)) / len(matrices)

    def _multiply(self, matrix: CudaZigzag) -> None:
        gemv(matrix, Input(self._x, threshold=self._threshold), Output(self._y, activation=0 if self._gate else None))

    def _laid_out(self, config: CudaTileConfig) -> CudaZigzag:
        packed = PackedMatrix(self._blocks, MatrixFormat(self._block, "zigzag"), *self._shape)
        return load_zigzag(packed, self._blocks.device, config, gate=self._gate)

    def _matrices(self, config: CudaTileConfig) -> list[CudaZigzag]:
        first = self._laid_out(config)
        if self._layout is None or self._layout[0] != config.tile_bands:
            self._layout = None  # before the next one is made
            copies = copies_of(self._blocks.numel(), ROTATION, COPIES)
            self._layout = config.tile_bands, [first.blocks.clone() for _ in range(copies)]
        return [replace(first, blocks=blocks) for blocks in self._layout[1]]


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """The nanoseconds that a replay takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6
