"""Products of several inputs with a zigzag matrix on the GPU, against float64."""

import pytest
import torch
from torch import Tensor
from zigzag_cases import (
    CONFIGS,
    CUDA_BLOCKS,
    LIMIT,
    PLANES_BATCH_LIMIT,
    assert_close,
    loaded,
    normal,
    random_matrix,
    weights,
)

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, batch, blocks, gemv, most_inputs
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("workspace_is_reset")]
several_inputs = pytest.mark.parametrize("inputs", [1, 2, 3, 5, 8])
several_geometries = pytest.mark.parametrize(
    ("config", "columns"),
    [
        (CudaTileConfig(1, 8, 24, 1), 40),
        (CudaTileConfig(1, 8, 8, 8), 700),
        (CudaTileConfig(1, 8, 24, 32), 3001),
        (CudaTileConfig(2, 8, 16, 5), 3001),
        (CudaTileConfig(2, 4, 4, 16), 513),
        (CudaTileConfig(4, 8, 8, 3), 700),
        (CudaTileConfig(4, 16, 4, 2), 700),
    ],
    ids=str,
)


def loaded_for(stored: PackedMatrix, config: CudaTileConfig, inputs: int, gate: bool = False) -> CudaZigzag:
    matrix = loaded(stored, config, gate)
    if inputs > most_inputs(matrix):
        pytest.skip("more inputs than this GPU's shared memory takes")
    return matrix


def powers_of_ten(inputs: int) -> Tensor:
    """float32 [inputs, 1]: each input has a scale of its own."""
    return 10.0 ** torch.arange(inputs, device="cuda")[:, None]


def between(x: Tensor) -> Tensor:
    """A threshold that about half the magnitudes exceed, and none is within rounding of: float32 [1]."""
    magnitudes = x.abs().flatten().sort().values
    middle = magnitudes[len(magnitudes) * 2 // 5 : len(magnitudes) * 3 // 5]
    widest = int(middle.diff().argmax())
    return middle[widest : widest + 2].mean()[None].float()


@several_inputs
@several_geometries
@pytest.mark.parametrize("block", CUDA_BLOCKS)
def test_several_inputs_share_their_active_columns(
    config: CudaTileConfig, columns: int, inputs: int, block: str
) -> None:
    stored = random_matrix(1100, columns, block=block)
    matrix, w = loaded_for(stored, config, inputs), weights(stored)
    limit = PLANES_BATCH_LIMIT if matrix.planes else LIMIT  # inputs times scales are float16
    x = normal(inputs, columns) * powers_of_ten(inputs)
    bias, offset, residual = normal(1100, seed=1), normal(columns, seed=2), normal(inputs, 1100, seed=3)
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.full((inputs, 1100), float("nan"), device="cuda")

    batch(matrix, Input(x), Output(y, bias=bias, active=active))
    for found, one in zip(y, x, strict=True):
        assert_close(found, w @ one.double() + bias, limit)
    assert int(active) == stored.units

    shifted = x - offset
    one_limit, limits = torch.tensor([1.5], device="cuda"), 4 * normal(columns, seed=4).abs()
    everything, nothing = one_limit - 9, one_limit + torch.inf
    for threshold in (one_limit, everything, nothing, limits):
        input = Input(x, threshold=threshold, offset=offset)
        union = (shifted.abs() > threshold).any(0)
        y.copy_(residual)
        active.zero_()
        batch(matrix, input, Output(y, bias=bias, residual=y, active=active))
        for found, one, before in zip(y, shifted, residual, strict=True):
            expected = w @ torch.where(union, one, 0).double() + bias.double() + before.double()
            assert_close(found, expected, limit)
        assert int(active) == int(union.sum()) * stored.units // columns

    first = y.clone()
    for _ in range(3):
        batch(matrix, input, Output(y, bias=bias, residual=residual))
        assert torch.equal(y, first)


@several_inputs
@several_geometries
@pytest.mark.parametrize("parts", [0, 1, 100, 700])
def test_a_norm_of_several_inputs_comes_first(config: CudaTileConfig, columns: int, inputs: int, parts: int) -> None:
    """parts -- of the sums of squares, which others have added up; 0: the product does"""
    stored = random_matrix(700, columns)
    matrix, w = loaded_for(stored, config, inputs), weights(stored)
    x = normal(inputs, columns) * powers_of_ten(inputs)
    norm, offset = normal(columns, seed=1), normal(columns, seed=2) / 4
    squares = None
    if parts:
        shares = torch.rand(inputs, parts, generator=torch.Generator().manual_seed(3)).cuda()
        squares = x.square().sum(1, keepdim=True) * shares / shares.sum(1, keepdim=True)
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * norm
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.full((inputs, 700), float("nan"), device="cuda")

    batch(matrix, Input(x, norm=norm, eps=1e-5, squares=squares), Output(y))
    for found, one in zip(y, normed, strict=True):
        assert_close(found, w @ one)

    d = normed - offset
    limit = between(d)
    limits = limit * (1 + norm.abs())
    limits = torch.where(((d.abs() - limits).abs() < 1e-4).any(0), limit + 1e3, limits)
    for threshold in (limit, limits):
        union = (d.abs() > threshold).any(0)
        active.zero_()
        batch(matrix, Input(x, norm, 1e-5, squares, threshold=threshold, offset=offset), Output(y, active=active))
        for found, one in zip(y, d, strict=True):
            assert_close(found, w @ torch.where(union, one, 0))
        assert int(active) == int(union.sum())


@several_inputs
@several_geometries
@pytest.mark.parametrize("rows", [700, 3328])
def test_the_squares_of_several_outputs_are_added_up(
    config: CudaTileConfig, columns: int, inputs: int, rows: int
) -> None:
    matrix = loaded_for(random_matrix(rows, columns), config, inputs)
    x, residual = normal(inputs, columns) * powers_of_ten(inputs), normal(inputs, rows, seed=1)
    y = residual.clone()
    squares = torch.full((inputs, blocks(matrix)), float("nan"), device="cuda")
    batch(matrix, Input(x), Output(y, residual=y, squares=squares))
    torch.testing.assert_close(squares.double().sum(1), y.double().square().sum(1), rtol=1e-5, atol=0)
    # Those of a tile are in its blocks' parts.
    padded = torch.nn.functional.pad(y, (0, -rows % (256 * config.tile_bands)))
    of_tiles = padded.view(inputs, matrix.blocks.shape[0], -1)
    found = squares.view(*of_tiles.shape[:2], -1).double().sum(2)
    torch.testing.assert_close(found, of_tiles.double().square().sum(2), rtol=1e-5, atol=0)

    first = squares.clone()
    for _ in range(3):
        batch(matrix, Input(x), Output(y, residual=residual, squares=squares.fill_(float("nan"))))
        assert torch.equal(squares, first)


@several_inputs
@pytest.mark.parametrize(
    ("config", "width", "activation"),
    [
        *((g, width, 0) for g in CONFIGS if g.tile_bands > 1 for width in (256, 768)),
        *((CudaTileConfig(2, 8, 16, 5), 1280, activation) for activation in (1, 2, 3)),
    ],
    ids=str,
)
def test_gate_and_up_of_several_inputs_become_one(
    config: CudaTileConfig, width: int, activation: int, inputs: int
) -> None:
    stored = random_matrix(2 * width, 300)
    matrix, w = loaded_for(stored, config, inputs, gate=True), weights(stored)
    x, bias, limit = normal(inputs, 300), normal(2 * width, seed=1), torch.tensor([1.5], device="cuda")
    mid = torch.full((inputs, width), float("nan"), device="cuda")
    squares = torch.full((inputs, blocks(matrix)), float("nan"), device="cuda")
    for given in (bias, None):
        batch(matrix, Input(x, threshold=limit), Output(mid, bias=given, activation=activation, squares=squares))
        union = (x.abs() > limit).any(0)
        for found, one in zip(mid, x, strict=True):
            product = w @ torch.where(union, one, 0).double()
            gate, up = (product if given is None else product + given).chunk(2)
            assert_close(found, list(ACTIVATION_FUNCTIONS.values())[activation](gate) * up)
        torch.testing.assert_close(squares.double().sum(1), mid.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_chain_of_products_of_several_inputs_passes_squares_on(config: CudaTileConfig) -> None:
    """Each begins while the one before still runs, and writes its buffers again."""
    stored = random_matrix(1100, 1100)
    matrix, w = loaded_for(stored, config, 5), weights(stored)
    start, norm = normal(5, 1100) * powers_of_ten(5), normal(1100, seed=1)
    hidden, normed = torch.empty_like(start), torch.empty_like(start)
    squares = torch.empty(5, blocks(matrix), device="cuda")
    for _ in range(20):
        hidden.copy_(start)
        batch(matrix, Input(start), Output(hidden, residual=hidden, squares=squares))
        batch(matrix, Input(hidden, norm=norm, eps=1e-5, squares=squares), Output(normed))
        batch(matrix, Input(normed), Output(hidden, residual=hidden, squares=squares))
        batch(matrix, Input(hidden, norm=norm, eps=1e-5, squares=squares), Output(normed))
    expected = start.double() + start.double() @ w.t()
    for _ in range(2):
        one = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * norm
        last = one @ w.t()
        expected = expected + last @ w.t()
    for found, one in zip(normed, last, strict=True):
        assert_close(found, one, 1e-3)


@pytest.mark.usefixtures("no_copy_engine")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_several_inputs_without_the_copy_engine(config: CudaTileConfig) -> None:
    test_several_inputs_share_their_active_columns(config, 700, 3, "Q4_K")


def test_products_of_one_and_of_several_inputs_share_their_slots() -> None:
    stored = random_matrix(1100, 1100)
    one, several = loaded(stored, CudaTileConfig(1, 8, 8, 8)), loaded(stored, CudaTileConfig(2, 8, 16, 5))
    x, w = normal(8, 1100), weights(stored)
    y, alone = torch.empty(8, 1100, device="cuda"), torch.empty(1100, device="cuda")
    for _ in range(20):
        batch(several, Input(x), Output(y))
        gemv(one, Input(x[0]), Output(alone))
        batch(one, Input(x[:3]), Output(y[:3]))
    assert_close(alone, w @ x[0].double())
    for found, input in zip(y, x, strict=True):
        assert_close(found, w @ input.double())


@several_inputs
@several_geometries
def test_inputs_of_gate_and_up_are_put_together(config: CudaTileConfig, columns: int, inputs: int) -> None:
    stored = random_matrix(1100, columns)
    matrix, w = loaded_for(stored, config, inputs), weights(stored)
    both, y = normal(inputs, 2 * columns), torch.full((inputs, 1100), float("nan"), device="cuda")
    gate, up = both.double().chunk(2, dim=1)
    x = ACTIVATION_FUNCTIONS["silu"](gate) * up
    threshold = between(x)
    batch(matrix, Input(both, threshold=threshold, gated=0), Output(y))
    union = (x.abs() > threshold).any(0)
    for found, one in zip(y, x, strict=True):
        assert_close(found, w @ torch.where(union, one, 0))
