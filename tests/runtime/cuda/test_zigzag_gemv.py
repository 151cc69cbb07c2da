"""Products with zigzag matrices on the GPU in every configuration, against float64."""

import pytest
import torch
from zigzag_cases import ALL_BLOCKS, CONFIGS, LIMIT, PLANES_LIMIT, assert_close, loaded, normal, random_matrix, weights

from sparsepack.runtime.cuda.driver.memory import SENTINEL, flag_in_data_buffers
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, with_ring
from sparsepack.runtime.cuda.products.zigzag import load_zigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, batch, blocks, gemv
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("workspace_is_reset")]
SHAPES = [(256, 40), (700, 513), (3328, 1030), (300, 9001)]


def test_a_column_a_thousand_times_the_others_hides_no_row() -> None:
    """Tensor cores cut off what is small beside their largest product: on an H100 4e-6 of a row's size in the mean,
    6e-4 at worst. Inputs as one float16 instead of two would cost 2e-4 in the mean."""
    stored = random_matrix(2048, 40)
    matrix, w = load_zigzag(stored, "cuda", CudaTileConfig(8, 8, 8, 1)), weights(stored)
    x = normal(40)
    x[3] *= 1000
    y = torch.empty(2048, device="cuda")
    gemv(matrix, Input(x), Output(y))
    stored.blocks[..., 3] ^= 0x80  # minima are added instead of taken off: nothing cancels
    size = weights(stored) @ x.double().abs()
    error = (y.double() - w @ x.double()).abs() / size
    assert float(error.mean()) < 1e-5
    assert float(error.max()) < 2e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("config", "block"), ALL_BLOCKS, ids=str)
def test_a_product_in_every_configuration(config: CudaTileConfig, block: str, shape: tuple[int, int]) -> None:
    stored = random_matrix(*shape, block=block)
    matrix, w = loaded(stored, config), weights(stored)
    x, norm, offset = (normal(shape[1], seed=n) for n in range(3))
    bias, residual, threshold = normal(shape[0], seed=5), normal(shape[0], seed=6), torch.tensor([0.6], device="cuda")
    x[3] *= 1000
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    squares = torch.full((blocks(matrix),), float("nan"), device="cuda")
    y = torch.full((shape[0],), float("nan"), device="cuda")
    warps = min(config.warps, with_ring(config).warps)
    each = shape[1] * config.tile_bands / (config.splits * warps)  # columns that a warp adds up, where all are active
    limit = max(LIMIT, 1e-8 * each)
    if matrix.planes:  # inputs times scales become integers
        limit = PLANES_LIMIT

    gemv(matrix, Input(x), Output(y, active=active))
    assert_close(y, w @ x.double(), limit)
    assert int(active) == stored.units

    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm
    gemv(matrix, Input(x, norm=norm, eps=1e-5), Output(y, squares=squares))
    assert_close(y, w @ normed.double(), limit)
    assert float(squares.sum()) == pytest.approx(float(y.square().sum()), rel=1e-5)

    d = x - offset
    masked = torch.where(d.abs() > threshold, d, 0).double()
    y.copy_(residual)
    active.zero_()
    gemv(matrix, Input(x, threshold=threshold, offset=offset), Output(y, bias=bias, residual=y, active=active))
    assert_close(y, w @ masked + bias.double() + residual.double(), limit)
    assert int(active) == int(masked.count_nonzero()) * stored.units // shape[1]

    least = norm.abs()
    gemv(matrix, Input(x, threshold=least), Output(y))
    first = y.clone()
    assert_close(y, w @ torch.where(x.abs() > least, x, 0).double(), limit)
    for _ in range(3):
        gemv(matrix, Input(x, threshold=least), Output(y))
        assert torch.equal(y, first)

    gemv(matrix, Input(x, threshold=torch.tensor([float("inf")], device="cuda")), Output(y, residual=residual))
    assert torch.equal(y, residual), "nothing is active"


@pytest.mark.usefixtures("no_copy_engine")
@pytest.mark.parametrize(("config", "block"), ALL_BLOCKS, ids=str)
def test_a_product_without_the_copy_engine(config: CudaTileConfig, block: str) -> None:
    test_a_product_in_every_configuration(config, block, (700, 513))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_chain_of_products_hands_its_results_on(config: CudaTileConfig) -> None:
    """The second need not wait for the end of the first. Inputs within rounding of the threshold may flip."""
    stored = random_matrix(1100, 1100)
    matrix, w = loaded(stored, config), weights(stored) / 1000
    x, norm, limit = normal(1100), normal(1100, seed=1), torch.tensor([0.3], device="cuda")
    words, (between, squares) = flag_in_data_buffers([1100, blocks(matrix)], x.device)
    y = torch.empty(1100, device="cuda")
    for _ in range(20):
        gemv(matrix, Input(x), Output(between, squares=squares))
        second = Input(between, norm=norm, eps=1e-5, squares=squares, threshold=limit, flag_in_data=True)
        gemv(matrix, second, Output(y))
        gemv(matrix, Input(x), Output(y.clone(), reset=words))
        z = w @ x.double()
        normed = z * torch.rsqrt(z.square().mean() + 1e-5 / 1e6) * norm
        assert (y.double() / 1000 - w @ torch.where(normed.abs() > limit, normed, 0)).norm() <= 1e-3 * y.norm() / 1000
        assert bool((words == SENTINEL).all())


def test_a_sum_that_is_no_number_is_handed_on() -> None:
    stored = random_matrix(512, 512)
    matrix = load_zigzag(stored, "cuda", CudaTileConfig(2, 8, 16, 4))
    x = normal(512)
    x[7] = torch.tensor(SENTINEL, dtype=torch.int32, device="cuda").view(torch.float32)  # a NaN with these bits
    y = torch.zeros(512, device="cuda")
    gemv(matrix, Input(x), Output(y))
    assert y.isnan().all()
    assert not (y.view(torch.int32) == SENTINEL).any()


@pytest.mark.parametrize(
    ("config", "width", "activation"),
    [
        *((g, width, 0) for g in CONFIGS if g.tile_bands > 1 for width in (256, 1280, 768)),
        *((CudaTileConfig(2, 8, 16, 5), 768, activation) for activation in (1, 2, 3)),
    ],
    ids=str,
)
def test_gate_and_up_become_one(config: CudaTileConfig, width: int, activation: int) -> None:
    stored = random_matrix(2 * width, 300)
    matrix, w = loaded(stored, config, gate=True), weights(stored)
    x, bias, limit = normal(300), normal(2 * width, seed=1), torch.tensor([0.5], device="cuda")
    mid = torch.full((width,), float("nan"), device="cuda")
    gemv(matrix, Input(x, threshold=limit), Output(mid, bias=bias, activation=activation))
    gate, up = (w @ torch.where(x.abs() > limit, x, 0).double() + bias).chunk(2)
    assert_close(mid, list(ACTIVATION_FUNCTIONS.values())[activation](gate) * up)


@pytest.mark.parametrize("activation", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("config", "width"), [(CONFIGS[0], 40), (CONFIGS[3], 700), (CONFIGS[6], 9001), (CONFIGS[9], 9001)]
)
def test_an_input_of_gate_and_up_is_put_together(config: CudaTileConfig, width: int, activation: int) -> None:
    """Also as soon as the product before has left it."""
    first, stored = random_matrix(2 * width, 64, seed=1), random_matrix(300, width)
    into, matrix, w = loaded(first, CudaTileConfig(2, 8, 16, 1)), loaded(stored, config), weights(stored)
    x, limit = normal(64) / 100, torch.tensor([0.02], device="cuda")
    words, (both,) = flag_in_data_buffers([2 * width], x.device)
    y = torch.full((300,), float("nan"), device="cuda")
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(5):
        gemv(into, Input(x), Output(both))
        gemv(
            matrix, Input(both, threshold=limit, flag_in_data=True, gated=activation), Output(y, active=active.zero_())
        )
        gate, up = both.double().chunk(2)
        inner = list(ACTIVATION_FUNCTIONS.values())[activation](gate) * up
        assert_close(
            y, w @ torch.where(inner.abs() > limit, inner, 0), 1e-3
        )  # some lie within rounding of the threshold
        assert int(active) == pytest.approx(int((inner.abs() > limit).sum()), abs=2)
        words.fill_(SENTINEL)


def test_what_a_product_cannot_do_is_refused() -> None:
    few, x, y = load_zigzag(random_matrix(512, 64), "cuda", CudaTileConfig(2, 8, 16, 3)), normal(64), normal(512)
    with pytest.raises(ValueError, match="more splits than 64 columns have chunks of 32"):
        gemv(few, Input(x), Output(y))
    with pytest.raises(ValueError, match="more splits than 64 columns have chunks of 32"):
        batch(few, Input(x[None]), Output(y[None]))
    one = load_zigzag(random_matrix(512, 64), "cuda", CudaTileConfig(2, 8, 16, 1))
    with pytest.raises(ValueError, match="with a residual"):
        gemv(one, Input(x), Output(y, residual=y, activation=0))
    with pytest.raises(ValueError, match="an input of gate and up, with a norm"):
        gemv(one, Input(torch.cat([x, x]), norm=x, gated=0), Output(y))
    with pytest.raises(ValueError, match="without squares"):
        gemv(one, Input(x, norm=x, flag_in_data=True), Output(y))
    with pytest.raises(ValueError, match="several inputs with their flag"):
        batch(one, Input(x[None], flag_in_data=True), Output(y[None]))
    with pytest.raises(ValueError, match="with a residual"):
        batch(one, Input(x[None]), Output(y[None], residual=y[None], activation=0))
    gated = load_zigzag(random_matrix(512, 64), "cuda", CudaTileConfig(2, 8, 16, 1), gate=True)
    for matrix, activation in ((one, 0), (gated, None)):
        with pytest.raises(ValueError, match="bands of gate: one needs the other"):
            gemv(matrix, Input(x), Output(y, activation=activation))
        with pytest.raises(ValueError, match="bands of gate: one needs the other"):
            batch(matrix, Input(x[None]), Output(y[None], activation=activation))


def test_more_blocks_than_run_at_once_are_refused() -> None:
    matrix = load_zigzag(random_matrix(256 * 100, 512), "cuda", CudaTileConfig(1, 8, 8, 16))
    with pytest.raises(ValueError, match="1600 blocks that wait for each other"):
        gemv(matrix, Input(normal(512)), Output(torch.empty(256 * 100, device="cuda")))
    with pytest.raises(ValueError, match="1600 blocks that wait for each other"):
        batch(matrix, Input(normal(2, 512)), Output(torch.empty(2, 256 * 100, device="cuda")))
