"""Measure which layout of a zigzag matrix suits this machine, and remember it (SpQt, section 3.2: hardware profiling):
thoroughly as `sparsepack tune`, or in two seconds for the shapes of a model that an engine loads for the first time."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsepack.errors import OutputError
from sparsepack.files.lock import locked
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.packed import PackedModel
from sparsepack.progress import format_count, say
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cpu.machine import cpu_info, instruction_set, native
from sparsepack.runtime.cpu.operations import load_zigzag
from sparsepack.runtime.cpu.tile_config import (
    QUAD_ROWS,
    SCHEMA,
    CpuTileConfig,
    default_tile_config,
    read_tuning,
    tuned,
    tuning_path,
)
from sparsepack.runtime.tuning import Shape, measure_shapes, random_blocks, row_of, thresholds, zigzag_matrices

SPANS = (1, 2, 4, 8, 16)
TILES = (24, 48, 64, 96)
CALLS = 15
ROUNDS = 3

AUTOTUNE = "SPARSEPACK_AUTOTUNE"
"""This environment variable with the value 0: an engine measures nothing when it loads a model."""
SECONDS = 2.0
"""An engine measures the new shapes of a model for so long."""
LEAST_BYTES = 16 << 20
"""A model whose matrices have fewer bytes is not measured: caches serve it."""
QUICK_CALLS, QUICK_ROUNDS = 5, 30
LIKELY = 1.1
"""Of an engine's candidates those are measured on that take at most so many times as long as the best one."""
GAIN = 0.97
"""An engine leaves the default for what takes at most this share of its time: less is noise."""


def measure(shapes: Iterable[Shape], threads: int, block: str = "Q4_K") -> dict[str, Any]:
    """Time every configuration on every shape, keep the best, and return what was found as JSON-able values.

    block -- the type of the superblocks, of which files are kept apart

    Half of the columns are active, of planes 3.4 bits of a weight are read; the weights come from memory, and
    collecting the columns is part of the time. What was measured before for other shapes stays. Raises `UserError`
    without kernels, `OutputError` where that cannot be kept.
    """

    def best(shape: Shape) -> dict[str, Any]:
        trial = _Trial(PackedMatrix(random_blocks(shape, block), MatrixFormat(block, "zigzag"), *shape), threads)
        configs = [CpuTileConfig(span, tile) for span in trial.spans for tile in TILES]
        for _ in range(ROUNDS):
            trial.time(configs, CALLS)
        return trial.row(min(configs, key=trial.nanoseconds))

    return _measured(shapes, threads, block, best)


def tune_new_shapes(packed: PackedModel, threads: int) -> None:
    """Measure the shapes of a model's matrices of which nothing is known for so many threads, in two seconds together,
    and keep the results as `measure` does. One process at a time: others wait, and take what it found.

    Nothing is measured where $SPARSEPACK_AUTOTUNE is 0, for a model that caches serve, and, with a note, where the
    results cannot be kept.
    """
    matrices = {(matrix.rows, matrix.columns): matrix for _, matrix in zigzag_matrices(packed)}
    large = sum(matrix.nbytes for _, matrix in zigzag_matrices(packed)) >= LEAST_BYTES
    if os.environ.get(AUTOTUNE) == "0" or not large or packed.block not in find_backend("cpu").tunes:
        return
    path = tuning_path(instruction_set(), threads, packed.block)
    if matrices.keys() <= tuned(instruction_set(), threads, packed.block).keys():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".tune"), wait=True):
            tuned.cache_clear()
            new = [shape for shape in matrices if shape not in tuned(instruction_set(), threads, packed.block)]
            start = time.monotonic()
            until = {shape: start + SECONDS * number / len(new) for number, shape in enumerate(new, 1)}

            def best(shape: Shape) -> dict[str, Any]:
                matrix = matrices[shape]
                one = matrix if isinstance(matrix, PackedMatrix) else matrix.expert(0)
                return _quick(_Trial(one, threads), until[shape])

            if new:
                _measured(new, threads, packed.block, best)
                say(
                    f"tuned {format_count(len(new), 'shape')} of matrices for this machine in "
                    f"{time.monotonic() - start:.1f} s; kept in {path} ({AUTOTUNE}=0: never)"
                )
    except (OutputError, OSError) as error:
        say(f"not tuned for this machine: {error} ({AUTOTUNE}=0: no attempt)")


def _measured(shapes: Iterable[Shape], threads: int, block: str, best: Any) -> dict[str, Any]:
    name = instruction_set()
    path = tuning_path(name, threads, block)
    head = {"schema": SCHEMA, "cpu_info": cpu_info(), "instruction_set": name, "threads": threads, "block": block}
    found = measure_shapes(shapes, path, head, read_tuning(path), best)
    tuned.cache_clear()
    return found


def _quick(trial: "_Trial", until: float) -> dict[str, Any]:
    """The best configuration that is found until then: first of the spans, then of the tiles in that one."""
    default = best = default_tile_config(trial.shape)
    trial.time([best], QUICK_CALLS)
    spans = sorted(trial.spans, key=lambda span: abs(span - default.span))
    stages = [[replace(default, span=span) for span in spans], []]
    for number, candidates in enumerate(stages, 1):
        candidates = candidates or [replace(best, tile=tile) for tile in TILES]
        stop = time.monotonic() + (until - time.monotonic()) * number / len(stages)
        for _ in range(QUICK_ROUNDS):
            for candidate in candidates:
                if time.monotonic() < stop:
                    trial.time([candidate], QUICK_CALLS)
            candidates = [each for each in candidates if trial.nanoseconds(each) <= LIKELY * trial.nanoseconds(best)]
            best = min(trial.samples, key=trial.nanoseconds)
            if time.monotonic() >= stop or len(candidates) < 2:
                break
    return trial.row(best if trial.nanoseconds(best) <= GAIN * trial.nanoseconds(default) else default)


class _Trial:
    """Products of one matrix in several layouts, which take turns: what disturbs the machine disturbs them all."""

    def __init__(self, matrix: PackedMatrix, threads: int) -> None:
        self._matrix, self._threads, self._block = matrix, threads, matrix.format.block
        self.shape = matrix.rows, matrix.columns
        self.spans = [span for span in SPANS if span == 1 or span <= -(-matrix.rows // QUAD_ROWS)]
        self.samples: dict[CpuTileConfig, list[int]] = {}
        self._x = torch.randn(8, matrix.columns, generator=torch.Generator().manual_seed(0))
        self._threshold = thresholds(self._x, self._block)
        if self._threshold.dim() == 2:  # of all columns one, and the steps of levels
            self._threshold = torch.cat([torch.ones(matrix.columns), self._threshold[:, 0]])
        self._loaded: dict[int, Any] = {}

    def time(self, configs: Sequence[CpuTileConfig], calls: int) -> None:
        """Take so many samples of each configuration, after one more that does not count."""
        for config in configs:
            if config.span not in self._loaded:
                self._loaded[config.span] = load_zigzag(self._matrix, config=config)
            matrix = self._loaded[config.span]
            matrix.tile = config.tile
            given = [matrix], self._x, self._threshold, self._threads, calls + 1, instruction_set()
            self.samples.setdefault(config, []).extend(native().time_gemv(*given)[1:])

    def nanoseconds(self, config: CpuTileConfig) -> float:
        """The lower quartile of the samples: what disturbs a product only slows it. Very many where there is none."""
        samples = sorted(self.samples.get(config, ()))
        return samples[len(samples) // 4] if samples else float("inf")

    def row(self, best: CpuTileConfig) -> dict[str, Any]:
        """What is kept."""
        times = map(self.nanoseconds, self.samples)
        return row_of(self.shape, {"span": best.span, "tile": best.tile}, times, self.nanoseconds(best), self._block)
