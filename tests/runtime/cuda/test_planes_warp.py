"""What a warp makes of k_tiles of planes, one input or several, run by the processor, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from torch import Tensor
from zigzag_cases import PLANES_BATCH_LIMIT, PLANES_LIMIT, random_matrix

from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.runtime.cuda.products.tile_config import K_TILE, PADDED_ROWS, CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, divided, load_zigzag

pytestmark = needs_compiler
COLUMNS = 5 * K_TILE
LEVELS = {
    "all": lambda: torch.arange(COLUMNS) * 7 % 6,
    "none": lambda: torch.zeros(COLUMNS, dtype=torch.int64),
    "by class": lambda: torch.tensor([5, 4] * 9 + [3, 2] * 14 + [1] * (COLUMNS - 46)),
    **{f"{level} alone": lambda level=level: torch.full((COLUMNS,), level) for level in range(1, 6)},
}
ROWS_OF_SUMS = torch.arange(256) + torch.arange(256) // 64 * 4  # `padded_index` of a band


def in_ring(matrix: CudaZigzag, levels: Tensor, bands: int) -> Tensor:
    """Columns as they lie in a ring: of planes that are not read, whatever was there."""
    pieces = matrix.blocks.reshape(COLUMNS, -1)
    pitch = (pieces.shape[1] + 31) // 64 * 64 + 32
    stages = torch.randint(256, (COLUMNS, pitch), dtype=torch.uint8)
    read = torch.where(levels > 0, max(8 * bands, 16) + bands * (32 + 32 * levels), 0)
    is_read = torch.arange(pieces.shape[1]) < read[:, None]
    stages[:, : pieces.shape[1]] = torch.where(is_read, pieces, stages[:, : pieces.shape[1]])
    return stages.contiguous()


def in_divided_ring(matrix: CudaZigzag, levels: Tensor, bands: int, planes: int, rest_columns: int) -> Tensor:
    """The same where planes after the first ones lie elsewhere, which the ring has of the first columns alone."""
    first, rest = divided(matrix.blocks, planes)
    here = in_ring(replace(matrix, blocks=first), levels.clamp_max(planes), bands)
    here = here.view(COLUMNS // K_TILE, -1)
    others, level = rest.reshape(COLUMNS, -1), torch.arange(1, 6 - planes).repeat_interleave(32 * bands) + planes
    is_read = (level <= levels[:, None]) & (torch.arange(COLUMNS) < rest_columns)[:, None]
    there = torch.where(is_read, others, torch.randint(256, others.shape, dtype=torch.uint8))
    return torch.cat([here, there.view(len(here), -1)], dim=1).contiguous()


def power_below(bound: float) -> float:
    """The power of two that leaves a bound below 2^15."""
    return 2.0 ** (15 - math.frexp(bound)[1])


def expected_of(stored: PackedMatrix, x: Tensor, levels: Tensor) -> Tensor:
    y = torch.zeros(len(x), stored.rows, dtype=torch.float64)
    for level in range(1, 6):
        y += torch.where(levels == level, x.double(), 0) @ decode_matrix(stored, level).double().t()
    return y / stored.row_scale.double()


def assert_right(
    emulation: Emulation,
    x: Tensor,
    levels: Tensor,
    bands: int,
    batch: bool,
    limit: float,
    parts: tuple[int, int] | None = None,
) -> None:
    """parts: planes that lie together, and of how many first columns the others are in the ring"""
    stored = random_matrix(256 * bands, COLUMNS, block="Q6_P")
    matrix = load_zigzag(stored, "cpu", CudaTileConfig(bands, 8, 8, 1))
    x = torch.where(levels > 0, x, 0)
    roots = x.abs().sqrt().sum() / max(int((levels > 0).sum()), 1)
    one = power_below(float(roots**2) * matrix.typical_scale / 2 or 1.0)
    several = power_below(float(x.abs().max()) * matrix.largest_d or 1.0) / 4
    index = (torch.arange(COLUMNS) | levels << 28).to(torch.int64)
    index = torch.where(index >= 2**31, index - 2**32, index).int()
    sums = torch.full((bands, len(x), PADDED_ROWS), math.nan)
    planes, rest_columns = parts or (5, 0)
    dense = int(bool((levels == 5).all()))
    defines = (f"TILE_BANDS={bands}", f"DENSE={dense}", f"INPUTS={len(x)}", f"BATCH={int(batch)}", "BLOCK=q6_p")
    stages = in_ring(matrix, levels, bands)
    if parts is not None:
        defines += (f"CARD_LEVELS={planes}",)
        stages = in_divided_ring(matrix, levels, bands, planes, rest_columns)
    arguments = (stages, index, x.contiguous(), COLUMNS // K_TILE)
    kernel = emulation.kernel("planes_warp", "planes_warp", defines)
    emulation.launch(kernel, (bands,), 32, *arguments, several if batch else one, sums, rest_columns)
    found = sums[..., ROWS_OF_SUMS].transpose(0, 1).flatten(1)
    expected = expected_of(stored, x, levels)
    if parts is not None:
        blocks = stored.blocks.clone()
        blocks[:, rest_columns:, stored.levels[planes - 1] :] = 0
        expected = expected_of(replace(stored, blocks=blocks), x, levels)
    for y, of_input in zip(found.double(), expected, strict=True):
        assert torch.isfinite(y).all()
        assert (y - of_input).norm() <= limit * of_input.norm()


def normal(inputs: int, seed: int) -> Tensor:
    return torch.randn(inputs, COLUMNS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("bands", "levels"), [*((bands, "all") for bands in (1, 4, 8)), *((2, levels) for levels in LEVELS)]
)
def test_one_input(emulation: Emulation, bands: int, levels: str) -> None:
    assert_right(emulation, normal(1, bands), LEVELS[levels](), bands, False, PLANES_LIMIT)


@pytest.mark.parametrize(
    ("inputs", "levels"),
    [
        *((inputs, "all") for inputs in (3, 8)),
        (2, "5 alone"),
        (8, "by class"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1, "all"), (4, "all"), (5, "all"), (6, "5 alone"), (4, "1 alone"))
        ),
    ],
)
def test_several_inputs(emulation: Emulation, inputs: int, levels: str) -> None:
    assert_right(emulation, normal(inputs, inputs), LEVELS[levels](), 2, True, PLANES_BATCH_LIMIT)


@pytest.mark.parametrize(
    ("planes", "rest_columns", "inputs", "levels", "bands"),
    [
        *((planes, 41, 1, "all", 2) for planes in (1, 4)),
        *((planes, 41, inputs, "all", 2) for planes, inputs in ((2, 3), (3, 5))),
        *((1, rest_columns, inputs, "5 alone", 4) for rest_columns, inputs in ((0, 1), (COLUMNS, 4))),
        (2, 60, 1, "by class", 1),
        *(
            pytest.param(planes, 41, inputs, "all", 2, marks=pytest.mark.long)
            for planes, inputs in ((2, 1), (3, 1), (1, 8), (4, 2))
        ),
        *(
            pytest.param(1, rest_columns, inputs, "5 alone", 4, marks=pytest.mark.long)
            for rest_columns, inputs in ((0, 4), (COLUMNS, 1))
        ),
    ],
)
def test_planes_that_somebody_else_multiplies(
    emulation: Emulation, planes: int, rest_columns: int, inputs: int, levels: str, bands: int
) -> None:
    limit = PLANES_BATCH_LIMIT if inputs > 1 else PLANES_LIMIT
    x = normal(inputs, planes)
    x[0, 9] *= 1000 if inputs == 1 else 1
    assert_right(emulation, x, LEVELS[levels](), bands, inputs > 1, limit, (planes, rest_columns))


def test_columns_of_more_than_sixteen_bits_are_multiplied_by_themselves(emulation: Emulation) -> None:
    x = normal(1, 3)
    x[0, 5::23] *= 1000
    assert_right(emulation, x, LEVELS["all"](), 2, False, 1e-5)
