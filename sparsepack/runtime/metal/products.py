"""The kernels that multiply, and what they leave for each other: loading, and one function for each launch.

A matrix lies on the GPU as it is stored. A product reads a list of active columns, which a `collect` kernel has made of
what the kernel before left; each of its splits leaves sums over a part of the columns, which the next kernel adds up.

How a product with a zigzag matrix is laid over the GPU: the two numbers that the paper leaves open.

`sparsepack tune --device mps` measures them once per kind of GPU (`tune.py`); what it found is kept below ~/.cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.models.blocks import ACTIVATIONS
from sparsepack.runtime import tuning
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.metal.library import Launch, launch
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


def tuning_path(gpu: str) -> Path:
    """The file that keeps what was measured on a kind of GPU, by the GPU's name."""
    return tuning.tuning_path("metal", gpu)


def read_tuning(path: Path) -> dict[Shape, dict[str, Any]]:
    """The measured configurations, by shape. A file that is missing, damaged or of another schema holds nothing."""
    return tuning.read_rows(path, SCHEMA, tile_config_of)


@cache
def tuned(gpu: str) -> Mapping[Shape, MetalTileConfig]:
    """The configurations measured on a kind of GPU; empty where `sparsepack tune` never ran there."""
    return {shape: tile_config_of(row) for shape, row in read_tuning(tuning_path(gpu)).items()}


def tile_config_of(row: Mapping[str, Any]) -> MetalTileConfig:
    """A configuration from a row of such a file. Raises `ValueError`, `KeyError` or `TypeError` where it is
    impossible."""
    return MetalTileConfig(int(row["splits"]), int(row["simdgroups"]))


LEVELS = 5
SEGMENT = 1024
"""A list of active columns is made, and counted, in segments of so many columns."""
TYPES = {"F32": 0, "F16": 1, "BF16": 2, "Q4_K": 3, "Q6_K": 4, "Q8_0": 5}
"""The types of matrices stored by rows have the numbers that `kernels/rows.metal` gives them."""
ROWS_OF_A_GROUP = 16
"""A threadgroup of `rows_product` multiplies so many rows."""
SCRATCH_WEIGHTS = 1 << 26
"""This many weights are decoded to float32 at a time for products with many vectors: 256 MiB."""

FEW_VECTORS = 8
"""For up to this many vectors `matmul` reads the matrix once for each, as it is stored."""

_NORM, _BIAS, _OFFSET, _THRESHOLD, _PER_CHANNEL, _KEEP = 1, 2, 4, 8, 16, 32
_CANDIDATES, _LEVELS = 256, 512


@dataclass(frozen=True, eq=False)
class MetalZigzag:
    """A zigzag matrix as stored: blocks uint8 [bands, columns, bytes]; the last band's rows beyond `rows` are padding.

    row_scale -- what the sums of rows are multiplied by: float32 [bands * 256]; None: nothing
    levels    -- how many planes the blocks have; 0: none
    """

    blocks: Tensor
    rows: int
    columns: int
    config: MetalTileConfig
    row_scale: Tensor | None = None
    levels: int = 0

    @property
    def bands(self) -> int:
        """Bands of 256 rows."""
        return len(self.blocks)

    @property
    def units(self) -> int:
        """What is counted of a product that reads every column: as `PackedMatrix.units`."""
        return self.columns * (self.blocks.shape[-1] if self.levels else 1)


@dataclass(frozen=True, eq=False)
class MetalRows:
    """A matrix as stored by rows: uint8 [rows, bytes per row], of one of `TYPES`."""

    blocks: Tensor
    type: str
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class ActiveColumns:
    """A list of active columns: of each segment of 1024 columns the active ones in ascending order, from the place on
    where the segment begins.

    values  -- float32 [segments * 1024]: their inputs
    indices -- int32 [segments * 1024]: their numbers, and above 24 bits the levels that they are read at; 0: whole
    counts  -- int32 [2 * segments]: how many of each segment there are, and behind these the sums of their levels
    """

    values: Tensor
    indices: Tensor
    counts: Tensor

    def together(self, columns: int) -> tuple[Tensor, Tensor]:
        """The numbers of all active ones of a list for so many columns, and their inputs. The host waits for them."""
        counts = self.counts[: segments(columns)].tolist()
        places = torch.cat([torch.arange(n) + SEGMENT * g for g, n in enumerate(counts)]).to(self.values.device)
        return self.indices[places], self.values[places]


@dataclass(frozen=True, eq=False)
class Sums:
    """A product before its parts are added: float32 [splits, bands * 256], and the bias that it lacks or None."""

    parts: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Candidates:
    """The best row of each threadgroup of `rows_product`: float32 [groups], int32 [groups]."""

    best: Tensor
    rows: Tensor


def load_zigzag(
    matrix: PackedMatrix, device: torch.device | str = "mps", config: MetalTileConfig | None = None
) -> MetalZigzag:
    """Copy a stored zigzag matrix to the GPU's memory. Takes its stored size, a tail that of a whole band.

    config -- None: as `sparsepack tune` has measured, or else as the paper has it

    Raises `ValueError` for a matrix of another type.
    """
    if matrix.format.order != "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one in zigzag order")
    shape, blocks = (matrix.rows, matrix.columns), matrix.padded().blocks.to(device).contiguous()
    row_scale = None
    if matrix.row_scale is not None:
        row_scale = functional.pad(matrix.row_scale, (0, len(blocks) * BAND_ROWS - matrix.rows)).to(device)
    return MetalZigzag(blocks, *shape, config or tile_config(shape), row_scale, len(matrix.levels))


def load_rows(matrix: PackedMatrix, device: torch.device | str = "mps") -> MetalRows:
    """Copy a matrix stored by rows to the GPU's memory. Takes its stored size.

    Raises `ValueError` for another type, such as that of a zigzag matrix.
    """
    if matrix.format.order != "rows" or matrix.format.block not in TYPES:
        raise ValueError(f"matrix of type {matrix.format}, expected one stored by rows: {', '.join(TYPES)}")
    return MetalRows(matrix.blocks.to(device).contiguous(), matrix.format.block, matrix.rows, matrix.columns)


def segments(columns: int) -> int:
    """The segments of a list of so many columns."""
    return -(-columns // SEGMENT)


def new_active_columns(columns: int, device: torch.device) -> ActiveColumns:
    """Room for a list of so many columns."""
    size = segments(columns) * SEGMENT
    values, indices = torch.empty(size, device=device), torch.empty(size, dtype=torch.int32, device=device)
    return ActiveColumns(values, indices, torch.empty(2 * segments(columns), dtype=torch.int32, device=device))


def new_candidates(matrix: MetalRows) -> Candidates:
    """Room for what `rows_product` finds best of a matrix."""
    groups, device = -(-matrix.rows // ROWS_OF_A_GROUP), matrix.blocks.device
    return Candidates(torch.empty(groups, device=device), torch.empty(groups, dtype=torch.int32, device=device))


def embed(matrix: MetalRows, ids: Tensor, out: Tensor) -> Launch:
    """Decode rows of a matrix: ids int32 [n] -> out float32 [n, columns]. An id that is no row gives NaN."""
    columns = matrix.columns
    return launch(
        "embed",
        *(ids, matrix.blocks, out, TYPES[matrix.type], matrix.rows, columns, matrix.blocks.shape[1]),
        groups=(segments(columns), len(ids)),
        threads=256,
    )


def collect(
    x: Tensor,
    found: ActiveColumns,
    *,
    added: Sums | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: Tensor | None = None,
    threshold: Tensor | None = None,
    total: Tensor | None = None,
) -> Launch:
    """List the active columns of an input: x and what a product adds to it, normed, less an offset.

    x         -- float32 [columns]
    added     -- what is added to x; None: nothing
    norm, eps -- of RMSNorm, float32 [columns]; None: there is none
    offset    -- float32 [columns] or None
    threshold -- float32 [1] or [columns], or of levels [5, columns]; None: every column is active
    total     -- float32 [columns]: x and what is added are kept here; None: they are not
    """
    columns = len(x)
    parts, bias = (x, None) if added is None else (added.parts, added.bias)
    splits, stride = (0, 0) if added is None else added.parts.shape
    with_ = (
        (_NORM if norm is not None else 0) | (_BIAS if bias is not None else 0) | (_KEEP if total is not None else 0)
    )
    return launch(
        "collect",
        *(x, parts, _or(bias, x), _or(norm, x), _or(offset, x), _or(threshold, x), _or(total, x)),
        *(found.values, found.indices, found.counts, columns, splits, stride),
        with_ | limits(threshold, offset),
        float(eps),
        groups=segments(columns),
        threads=SEGMENT,
    )


def collect_gated(
    sums: Sums,
    columns: int,
    activation: str,
    found: ActiveColumns,
    *,
    offset: Tensor | None = None,
    threshold: Tensor | None = None,
) -> Launch:
    """List the active columns of activation(gate) * up, less an offset, as `collect` does. The first `columns` rows of
    the product are those of gate, the next as many those of up."""
    parts = sums.parts
    return launch(
        "collect_gated",
        *(parts, _or(sums.bias, parts), _or(offset, parts), _or(threshold, parts)),
        *(found.values, found.indices, found.counts, columns, *parts.shape),
        (_BIAS if sums.bias is not None else 0) | limits(threshold, offset),
        ACTIVATIONS.index(activation),
        groups=segments(columns),
        threads=SEGMENT,
    )


def zigzag_gemv(matrix: MetalZigzag, found: ActiveColumns, parts: Tensor, active: Tensor) -> Launch:
    """Multiply the listed columns with their inputs (SpQt, sections 4.2.2 and 4.2.3): the list is cut evenly among
    `splits * simdgroups` simdgroups for each band.

    parts  -- float32 [splits, bands * 256], written: each split's sums, in a fixed order
    active -- int32 [1]: the number of active columns is added; of a matrix with planes the bytes that are read of a row
              of superblocks
    """
    config = matrix.config
    return launch(
        "planes_gemv" if matrix.levels else "zigzag_gemv",
        *(matrix.blocks, found.values, found.indices, found.counts, parts, active, matrix.columns),
        *(_or(matrix.row_scale, parts), int(matrix.row_scale is not None)),
        groups=(config.splits, matrix.bands),
        threads=32 * config.simdgroups,
    )


def rows_product(matrix: MetalRows, x: Tensor, y: Tensor, candidates: Candidates | None = None) -> Launch:
    """y = W x: float32 [columns] or longer -> float32 [rows]; with candidates also the best row of each threadgroup."""
    best, rows = (y, y.view(torch.int32)) if candidates is None else (candidates.best, candidates.rows)
    return launch(
        "rows_product",
        *(
            matrix.blocks,
            x,
            y,
            best,
            rows,
            TYPES[matrix.type],
            matrix.rows,
            matrix.columns,
            matrix.blocks.shape[1],
        ),
        _CANDIDATES if candidates is not None else 0,
        groups=-(-matrix.rows // ROWS_OF_A_GROUP),
        threads=128,
    )


def pick_likeliest(candidates: Candidates, id: Tensor, best: Tensor) -> Launch:
    """The row with the largest product, the lowest of equals: id int32 [1], its product float32 [1]. Where that is NaN
    or infinite no token is likeliest, and the host must say so."""
    return launch(
        "pick_likeliest", candidates.best, candidates.rows, id, best, len(candidates.best), groups=1, threads=1024
    )


def planes_matmul(matrix: MetalZigzag, x: Tensor, levels: Tensor) -> Tensor:
    """Y = X W^T, every column of every row of X at its level: levels uint8 [S, columns], 0: it is not read."""
    y = x.new_zeros(len(x), matrix.rows)
    for level in range(1, matrix.levels + 1):
        y += zigzag_matmul(matrix, torch.where(levels == level, x, 0), level)
    return y


def zigzag_matmul(matrix: MetalZigzag, x: Tensor, level: int = 0) -> Tensor:
    """Y = X W^T with every column, some bands at a time, decoded to float32: [S, columns] -> [S, rows]. On these GPUs
    float32 is about as fast as float16, and it is exact.

    level -- of a matrix with planes, how many are read; 0: all
    """
    at_once = min(max(1, SCRATCH_WEIGHTS // (matrix.columns * BAND_ROWS)), matrix.bands)
    scratch = torch.empty(matrix.columns * at_once * BAND_ROWS, device=x.device)
    y = torch.empty(len(x), matrix.bands * BAND_ROWS, device=x.device)
    for first in range(0, matrix.bands, at_once):
        bands = min(at_once, matrix.bands - first)
        decoded = scratch[: matrix.columns * bands * BAND_ROWS].view(matrix.columns, -1)
        zigzag_decode(matrix, first, decoded, level)()
        y[:, first * BAND_ROWS : (first + bands) * BAND_ROWS] = x @ decoded
    y = y if matrix.row_scale is None else y.mul_(matrix.row_scale)
    return y[:, : matrix.rows]


def zigzag_decode(matrix: MetalZigzag, first: int, out: Tensor, level: int = 0) -> Launch:
    """Decode the bands from one on, without scales of rows: out float32 [columns, bands * 256], transposed weights.

    level -- as in `zigzag_matmul`
    """
    bands = out.shape[1] // BAND_ROWS
    return launch(
        "planes_decode" if matrix.levels else "zigzag_decode",
        *(matrix.blocks, out, matrix.columns, first, *([level or matrix.levels] if matrix.levels else [])),
        groups=(-(-matrix.columns // 8), bands),
        threads=256,
    )


def matmul(matrix: MetalRows, x: Tensor) -> Tensor:
    """Y = X W^T of a matrix stored by rows: float32 [S, columns] -> [S, rows]. For many vectors some rows at a time are
    decoded to float32."""
    if len(x) <= FEW_VECTORS:
        y = torch.empty(len(x), matrix.rows, device=x.device)
        for vector, product in zip(x.contiguous(), y, strict=True):
            rows_product(matrix, vector, product)()
        return y
    at_once = max(1, SCRATCH_WEIGHTS // matrix.columns)
    pieces = []
    for first in range(0, matrix.rows, at_once):
        ids = torch.arange(first, min(first + at_once, matrix.rows), dtype=torch.int32, device=x.device)
        decoded = torch.empty(len(ids), matrix.columns, device=x.device)
        embed(matrix, ids, decoded)()
        pieces.append(x @ decoded.T)
    return torch.cat(pieces, dim=1)


def limits(threshold: Tensor | None, offset: Tensor | None) -> int:
    """The bits by which a kernel knows of a threshold and an offset."""
    found = 0 if threshold is None else _THRESHOLD | (_PER_CHANNEL if threshold.numel() > 1 else 0)
    if threshold is not None and threshold.dim() > 1:
        found |= _LEVELS
    return found | (0 if offset is None else _OFFSET)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is given for a buffer: where there is none it is not read."""
    return other if x is None else x
