"""Products with matrices of planes on the GPU, every column at a level of its own, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from zigzag_cases import (
    CONFIGS,
    PLANES_BATCH_LIMIT,
    PLANES_LIMIT,
    assert_close,
    loaded,
    normal,
    random_matrix,
)

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.models.sites import levels_read
from sparsepack.runtime.cuda.driver.kernel import multiprocessors
from sparsepack.runtime.cuda.driver.memory import (
    SENTINEL,
    DividedPlace,
    flag_in_data_buffers,
    in_host_memory,
    on_card,
)
from sparsepack.runtime.cuda.products.offloaded import counting_rest, rest_of_first_bands
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, dequantise, load_zigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, batch, blocks, gemv, most_inputs
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("workspace_is_reset")]
BLOCK = "Q6_P"
BYTES = torch.tensor([0, *BLOCKS[BLOCK].level_bytes])
SHAPES = [(256, 40), (700, 513), (3328, 1030), (300, 9001)]
_CONFIGS = [
    *(config for config in CONFIGS if config.tile_bands < 8),
    CudaTileConfig(8, 8, 4, 2),
    CudaTileConfig(4, 8, 12, 7),
]
every_config = pytest.mark.parametrize("config", _CONFIGS, ids=str)


def limits_for(columns: int, seed: int = 7) -> Tensor:
    """Thresholds under which normal inputs have all levels, some columns only the first or the last: [5, columns]."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(columns, generator=generator)
    steps = torch.rand(4, columns, generator=generator) * 0.6
    limits = torch.cat([first[None], first + steps.cumsum(0)])
    limits[1:, ::11] = torch.inf
    limits[:, 1::11] = limits[:1, 1::11]
    return limits.cuda()


def expected_of(stored: PackedMatrix, x: Tensor, levels: Tensor) -> Tensor:
    """The product of x [.., columns], columns at levels: float64 [.., rows]."""
    y: Tensor = torch.zeros((), dtype=torch.float64, device=x.device)
    for level in range(1, len(BYTES)):
        y = y + torch.where(levels == level, x.double(), 0) @ decode_matrix(stored, level).double().to(x.device).t()
    return y


def read_by(levels: Tensor) -> int:
    return int(BYTES[levels.cpu().long()].sum())


def matrix_of(stored: PackedMatrix, config: CudaTileConfig, gate: bool = False) -> CudaZigzag:
    matrix = loaded(stored, config, gate)
    assert matrix.planes
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_config
def test_a_product_reads_columns_at_their_levels(config: CudaTileConfig, shape: tuple[int, int]) -> None:
    stored = random_matrix(*shape, block=BLOCK)
    matrix, limits = matrix_of(stored, config), limits_for(shape[1])
    x, norm, offset = (normal(shape[1], seed=n) for n in range(3))
    bias, residual = normal(shape[0], seed=5), normal(shape[0], seed=6)
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    squares = torch.full((blocks(matrix),), float("nan"), device="cuda")
    y = torch.full((shape[0],), float("nan"), device="cuda")

    levels = levels_read(x, limits)
    assert shape[1] < 100 or {*levels.tolist()} == {*range(6)}
    gemv(matrix, Input(x, threshold=limits), Output(y, active=active, squares=squares))
    assert_close(y, expected_of(stored, x, levels), PLANES_LIMIT)
    assert int(active) == read_by(levels)
    assert float(squares.sum()) == pytest.approx(float(y.square().sum()), rel=1e-5)
    first = y.clone()
    for _ in range(3):
        gemv(matrix, Input(x, threshold=limits), Output(y))
        assert torch.equal(y, first)

    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm - offset
    levels = levels_read(normed, limits)
    y.copy_(residual)
    input = Input(x, norm=norm, eps=1e-5, threshold=limits, offset=offset)
    gemv(matrix, input, Output(y, bias=bias, residual=y, active=active.zero_()))
    assert_close(
        y, expected_of(stored, normed, levels) + bias + residual, 2 * PLANES_LIMIT
    )  # one may lie at its threshold
    assert int(active) == pytest.approx(read_by(levels), abs=2 * int(BYTES[-1]))

    scales, skipped = torch.tensor([1.3], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    levels = levels_read(x, scales * limits)
    gemv(matrix, Input(x, threshold=limits, scales=scales, skipped=skipped), Output(y))
    assert_close(y, expected_of(stored, x, levels), PLANES_LIMIT)
    assert int(skipped) == shape[0] * (shape[1] * int(BYTES[-1]) - read_by(levels))

    for level in range(6):  # every column at the same
        same = torch.tensor([-1.0] * level + [torch.inf] * (5 - level), device="cuda")[:, None].expand_as(limits)
        gemv(matrix, Input(x, threshold=same.contiguous()), Output(y, residual=residual, active=active.zero_()))
        assert_close(y, expected_of(stored, x, torch.full_like(x, level)) + residual, PLANES_LIMIT)
        assert int(active) == shape[1] * int(BYTES[level])


@every_config
def test_columns_are_read_whole_or_not_by_other_thresholds(config: CudaTileConfig) -> None:
    stored = random_matrix(1100, 513, block=BLOCK)
    matrix, x = matrix_of(stored, config), normal(513)
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.empty(1100, device="cuda")
    for threshold in (torch.tensor([0.6], device="cuda"), normal(513, seed=1).abs(), None):
        levels = torch.ones_like(x) * 5 if threshold is None else (x.abs() > threshold) * 5
        gemv(matrix, Input(x, threshold=threshold), Output(y, active=active.zero_()))
        assert_close(y, expected_of(stored, x, levels), PLANES_LIMIT)
        assert int(active) == read_by(levels)


def test_a_column_a_thousand_times_the_others_hides_no_row() -> None:
    stored = random_matrix(1024, 40, block=BLOCK)
    matrix, x = load_zigzag(stored, "cuda", CudaTileConfig(4, 8, 8, 1)), normal(40)
    x[3] *= 1000
    y = torch.empty(1024, device="cuda")
    gemv(matrix, Input(x), Output(y))
    w = decode_matrix(stored).double().cuda()
    error = (y.double() - w @ x.double()).abs() / (w.abs() @ x.double().abs())
    assert float(error.mean()) < 1e-5
    assert float(error.max()) < 5e-4


def test_a_sum_that_is_no_number_is_handed_on() -> None:
    stored = random_matrix(512, 512, block=BLOCK)
    matrix = load_zigzag(stored, "cuda", CudaTileConfig(2, 8, 16, 4))
    y = torch.zeros(512, device="cuda")
    for wrong in (torch.nan, torch.inf):
        x = normal(512)
        x[7] = wrong
        gemv(matrix, Input(x), Output(y))
        assert not torch.isfinite(y).any()


@pytest.mark.usefixtures("no_copy_engine")
@every_config
def test_levels_without_the_copy_engine(config: CudaTileConfig) -> None:
    test_a_product_reads_columns_at_their_levels(config, (700, 513))


def test_a_chain_of_products_hands_its_results_on() -> None:
    stored = random_matrix(1100, 1100, block=BLOCK)
    matrix = matrix_of(stored, CudaTileConfig(4, 8, 12, 7))
    x, norm, limits = normal(1100), normal(1100, seed=1), limits_for(1100)
    words, (between, squares) = flag_in_data_buffers([1100, blocks(matrix)], x.device)
    y = torch.empty(1100, device="cuda")
    w = decode_matrix(stored).double().cuda()
    for _ in range(20):
        gemv(matrix, Input(x), Output(between, squares=squares))
        gemv(matrix, Input(between, norm, 1e-5, squares, limits, flag_in_data=True), Output(y))
        gemv(matrix, Input(x), Output(y.clone(), reset=words))
        z = w @ x.double()
        normed = z * torch.rsqrt(z.square().mean() + 1e-5) * norm
        assert_close(y, expected_of(stored, normed, levels_read(normed, limits)), 1e-3)
        assert bool((words == SENTINEL).all())


@pytest.mark.parametrize(
    ("config", "width"), [(g, width) for g in _CONFIGS if g.tile_bands in (2, 4, 8) for width in (256, 1280)], ids=str
)
def test_gate_and_up_become_one(config: CudaTileConfig, width: int) -> None:
    stored = random_matrix(2 * width, 300, block=BLOCK)
    matrix, limits = matrix_of(stored, config, gate=True), limits_for(300)
    x, bias = normal(3, 300), normal(2 * width, seed=1)
    mid = torch.full((width,), float("nan"), device="cuda")
    gemv(matrix, Input(x[0], threshold=limits), Output(mid, bias=bias, activation=0))
    gate, up = (expected_of(stored, x[0], levels_read(x[0], limits)) + bias).chunk(2)
    assert_close(mid, ACTIVATION_FUNCTIONS["silu"](gate) * up, 2 * PLANES_LIMIT)
    if most_inputs(matrix) < 3:
        return
    mids = torch.full((3, width), float("nan"), device="cuda")
    batch(matrix, Input(x, threshold=limits), Output(mids, bias=bias, activation=0))
    levels = levels_read(x, limits).amax(0)
    for found, one in zip(mids, x, strict=True):
        gate, up = (expected_of(stored, one, levels) + bias).chunk(2)
        assert_close(found, ACTIVATION_FUNCTIONS["silu"](gate) * up, 2 * PLANES_BATCH_LIMIT)


@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 8])
@every_config
def test_several_inputs_read_a_column_at_the_largest_of_their_levels(config: CudaTileConfig, inputs: int) -> None:
    stored = random_matrix(1100, 700, block=BLOCK)
    matrix, limits = matrix_of(stored, config), limits_for(700)
    if inputs > most_inputs(matrix):
        pytest.skip("more inputs than this GPU's shared memory takes")
    x = normal(inputs, 700) * 3.0 ** torch.arange(0, -inputs, -1, device="cuda")[:, None]
    residual = normal(inputs, 1100, seed=3)
    scales = torch.linspace(0.8, 1.4, inputs, device="cuda")
    skipped = torch.zeros(inputs, dtype=torch.int64, device="cuda")
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = residual.clone()
    of_each = levels_read(x, scales[:, None, None] * limits)
    input = Input(x, threshold=limits, scales=scales, skipped=skipped)
    batch(matrix, input, Output(y, residual=y, active=active))
    levels = of_each.amax(0)
    for found, one, before in zip(y, x, residual, strict=True):
        assert_close(found - before, expected_of(stored, one, levels), PLANES_BATCH_LIMIT)
    assert int(active) == read_by(levels)
    unread = [1100 * (700 * int(BYTES[-1]) - read_by(each)) for each in of_each]
    assert skipped.tolist() == unread
    batch(matrix, Input(x), Output(y, active=active.zero_()))
    for found, one in zip(y, x, strict=True):
        assert_close(found, expected_of(stored, one, torch.full_like(one, 5)), PLANES_BATCH_LIMIT)
    assert int(active) == 700 * int(BYTES[-1])


def clipped(stored: PackedMatrix, planes: int, level: int) -> Tensor:
    """The weights of a level of which planes after the first ones are zero."""
    blocks = stored.blocks.clone()
    blocks[..., stored.levels[planes - 1] :] = 0
    return decode_matrix(replace(stored, blocks=blocks), level).double().cuda()


@pytest.mark.parametrize("copy_engine", [True, False])
@pytest.mark.parametrize("planes", [1, 2, 3, 4])
@every_config
def test_planes_that_lie_elsewhere_are_read_of_the_first_tiles(
    config: CudaTileConfig, planes: int, copy_engine: bool, request: pytest.FixtureRequest
) -> None:
    rows, columns = 2100, 700
    blocks_together = config.splits * -(-rows // (256 * config.tile_bands))
    if config.splits > columns // 32 or blocks_together > multiprocessors(torch.device("cuda")):
        pytest.skip("more splits than chunks of columns, or more blocks than run at once")
    if not copy_engine:
        if config.tile_bands == 2:
            pytest.skip("others are enough")
        request.getfixturevalue("no_copy_engine")
    stored = random_matrix(rows, columns, block=BLOCK)
    matrix = load_zigzag(stored, "cuda", config, place=DividedPlace(planes, on_card, in_host_memory))
    x, limits, bias = normal(3, columns), limits_for(columns), normal(rows, seed=5)
    tiles = -(-9 // config.tile_bands)
    beyond_columns = 320
    for with_rest in sorted({0, 1, tiles // 2, tiles}):
        read = torch.zeros(1, dtype=torch.int64, device="cuda")
        rest = with_rest * config.tile_bands * 256
        tile = slice(rest, rest + config.tile_bands * 256)
        part = rest_of_first_bands(counting_rest(matrix, read), with_rest * config.tile_bands, beyond_columns)

        def expected(one: Tensor, levels: Tensor, rest: int = rest, tile: slice = tile) -> Tensor:
            y = bias.double()
            for level in range(1, len(BYTES)):
                whole, weights = decode_matrix(stored, level).double().cuda(), clipped(stored, planes, level)
                weights[:rest] = whole[:rest]
                weights[tile, :beyond_columns] = whole[tile, :beyond_columns]
                y = y + weights @ torch.where(levels == level, one.double(), 0)
            return y

        for threshold in (limits, torch.tensor([0.6], device="cuda"), None):
            of_each = (
                torch.full_like(x, 5).long()
                if threshold is None
                else levels_read(x, limits).long()
                if threshold is limits
                else (x.abs() > threshold) * 5
            )
            y, active = torch.empty(rows, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
            read.zero_()
            gemv(part, Input(x[0], threshold=threshold), Output(y, bias=bias, active=active))
            assert_close(y, expected(x[0], of_each[0]), PLANES_LIMIT)
            assert int(active) == read_by(of_each[0])
            beyond = (BYTES[of_each[0].cpu()] - BYTES[planes]).clamp_min(0).sum()
            assert int(read) == int(beyond)
            if most_inputs(part) < 3:
                continue
            ys, levels = torch.empty(3, rows, device="cuda"), of_each.amax(0)
            read.zero_()
            batch(part, Input(x, threshold=threshold), Output(ys, bias=bias))
            for found, one in zip(ys, x, strict=True):
                assert_close(found, expected(one, levels), PLANES_BATCH_LIMIT)
            assert int(read) == int((BYTES[levels.cpu()] - BYTES[planes]).clamp_min(0).sum())
    out = torch.zeros(columns, 256 * 9, dtype=torch.float16, device="cuda")
    dequantise(matrix, out, 0, 9)
    weights = decode_matrix(stored).cuda().t() * matrix.fp16_scale
    assert (out[:, :rows].float() - weights).norm() < 4e-4 * weights.norm()


def test_levels_are_for_planes_alone() -> None:
    x, limits, y = normal(64), limits_for(64), torch.empty(512, device="cuda")
    matrix = load_zigzag(random_matrix(512, 64), "cuda", CudaTileConfig(2, 8, 16, 1))
    with pytest.raises(ValueError, match="thresholds of levels for a matrix of Q4_K"):
        gemv(matrix, Input(x, threshold=limits), Output(y))
