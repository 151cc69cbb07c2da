"""Products of many positions with matrices and experts as they are stored: on a GPU, and as the processor runs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from torch import Tensor
from zigzag_cases import random_matrix

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, decode_matrix
from sparsepack.runtime.cuda.products import experts, grouped
from sparsepack.runtime.cuda.products.experts import load_experts, multiply_grouped, order_by_expert
from sparsepack.runtime.cuda.products.gemm_fp16 import ScaledFp16, multiply
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import load_zigzag

LIMIT = 1e-3
"""Of the norm that rows of products usually have: weights, what they are made of, and inputs have 11 bits."""
CONFIGS = {bands: CudaTileConfig(bands, 8, 8, 1) for bands in (1, 2, 4)}
SHAPES = {
    "odd": (5, 300, 43),
    "gate beside up": (3, 1024, 64),
    "filled up": (4, 1536, 70),
    "wide": (40, 2880, 1440),
    "narrow": (3, 7, 8),
}


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        for module in (experts, grouped):
            monkeypatch.setattr(module, "kernel", emulation.kernel)
            monkeypatch.setattr(module, "launch", emulation.launch)
        monkeypatch.setattr(grouped, "blocks_at_once", lambda *of: 8)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def random_experts(count: int, rows: int, columns: int) -> PackedExperts:
    few = torch.stack([random_matrix(rows, columns, seed=seed).blocks.cpu() for seed in range(3)])
    return PackedExperts(few[torch.arange(count) % 3], MatrixFormat("Q4_K", "zigzag"), rows, columns)


def inputs(positions: int, columns: int, device: torch.device) -> tuple[Tensor, ScaledFp16]:
    random = torch.Generator().manual_seed(positions)
    x = torch.randn(positions, columns, generator=random) * 2.0 ** torch.randint(9, (positions, 1), generator=random)
    factor = 2.0 ** torch.frexp(x.abs().amax(1)).exponent.float() / 2**15
    return x, ScaledFp16((x / factor[:, None]).half().to(device), factor.to(device))


def assert_products(y: Tensor, x: Tensor, weights: Tensor, added: Tensor | float = 0.0) -> None:
    expected = x.double() @ weights.t() + added
    error = (y.cpu().double() - expected).norm(dim=1)
    usual = x.double().norm(dim=1) * weights.norm() / x.shape[1] ** 0.5
    assert bool((error <= LIMIT * usual).all()), float((error / usual).amax())


def check(
    stored: PackedExperts,
    config: CudaTileConfig,
    gate: bool,
    chosen: Tensor,
    biased: bool,
    device: torch.device,
    counted: int | None = None,
) -> None:
    """chosen: int64 [positions, each]; counted: so many of them count, None: all."""
    loaded = load_experts(stored, 1, False, device, config, gate=gate)
    x, scaled = inputs(len(chosen), stored.columns, device)
    random = torch.Generator().manual_seed(len(chosen))
    bias = torch.randn(stored.experts, stored.rows, generator=random) if biased else None
    number = None if counted is None else torch.tensor([counted], dtype=torch.int32, device=device)
    order, ends = order_by_expert(chosen.to(device), stored.experts, number)
    found = multiply_grouped(
        loaded,
        scaled,
        order,
        ends,
        chosen.shape[1],
        None if bias is None else bias.to(device),
        zeros=counted is not None,
    )
    assert found.inverse == 1
    assert bool((found.factor == 1).all())
    y = found.sums.cpu().view(*chosen.shape, stored.rows)
    for expert in range(stored.experts):
        positions, places = (chosen[:counted] == expert).nonzero(as_tuple=True)
        added = 0.0 if bias is None else bias[expert].double()
        assert_products(y[positions, places], x[positions], decode_matrix(stored.expert(expert)).double(), added)
    if counted is not None:
        assert not y[counted:].any()


@needs_compiler
@pytest.mark.parametrize("positions", [1, 9, 40, 300])
@pytest.mark.parametrize("tile_bands", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_places_get_the_products_of_their_experts(
    shape: str, tile_bands: int, positions: int, device: torch.device
) -> None:
    count, rows, columns = SHAPES[shape]
    on_processor = {("odd", 1, 9), ("gate beside up", 2, 40), ("filled up", 4, 9), ("narrow", 2, 300)}
    if device.type == "cpu" and (shape, tile_bands, positions) not in on_processor:
        pytest.skip("takes long on a processor")
    gate = rows % 512 == 0 and tile_bands > 1
    stored = random_experts(count, rows, columns)
    each = min(3, count)
    chosen = torch.rand(positions, count, generator=torch.Generator().manual_seed(5)).topk(each, 1).indices
    check(stored, CONFIGS[tile_bands], gate, chosen, positions % 2 == 1, device)


@needs_compiler
@pytest.mark.parametrize(("positions", "counted"), [(70, 0), (70, 21), (33, 33), (200, 1)])
def test_positions_that_do_not_count_get_zeros(positions: int, counted: int, device: torch.device) -> None:
    if device.type == "cpu" and positions > 100:
        pytest.skip("takes long on a processor")
    chosen = torch.randint(4, (positions, 2), generator=torch.Generator().manual_seed(1))
    check(random_experts(4, 300, 40), CONFIGS[2], False, chosen, True, device, counted)


@needs_compiler
def test_one_expert_may_have_all_positions(device: torch.device) -> None:
    check(random_experts(4, 300, 40), CONFIGS[2], False, torch.full((70, 1), 2), True, device)


@needs_compiler
@pytest.mark.parametrize(("positions", "each", "stored"), [(1, 1, 1), (37, 3, 5), (300, 8, 257), (2048, 9, 512)])
@pytest.mark.parametrize("part", [None, 0.0, 0.4, 1.0])
def test_places_are_sorted_by_expert(
    positions: int, each: int, stored: int, part: float | None, device: torch.device
) -> None:
    if device.type == "cpu" and (positions > 100 or part == 0):
        pytest.skip("takes long on a processor")
    chosen = torch.randint(stored, (positions, each), generator=torch.Generator().manual_seed(2)) // 2
    count = positions if part is None else int(part * positions)
    number = None if part is None else torch.tensor([count], dtype=torch.int32, device=device)
    order, ends = order_by_expert(chosen.to(device), stored, number)
    in_order, expected = chosen[:count].flatten().sort(stable=True)
    assert order[: len(expected)].tolist() == expected.tolist()
    assert ends.tolist() == torch.searchsorted(in_order, torch.arange(stored + 1)).tolist()


@needs_compiler
@pytest.mark.parametrize("positions", [1, 17, 64])
@pytest.mark.parametrize("tile_bands", CONFIGS)
@pytest.mark.parametrize("shape", ["odd", "gate beside up", "wide", "many columns"])
def test_few_positions_are_multiplied_with_a_matrix_as_it_is_stored(
    shape: str, tile_bands: int, positions: int, device: torch.device
) -> None:
    """Its columns divided between blocks or not, with scales of rows or none."""
    if device.type == "cpu" and (shape, tile_bands, positions) not in {("odd", 4, 17), ("many columns", 2, 1)}:
        pytest.skip("takes long on a processor")
    _, rows, columns = (1, 300, 700) if shape == "many columns" else SHAPES[shape]
    stored = random_matrix(rows, columns, seed=3)
    stored = replace(stored, blocks=stored.blocks.cpu())
    if shape == "odd":
        stored = replace(stored, row_scale=0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(6)))
    gate = rows % 512 == 0 and tile_bands > 1
    matrix = load_zigzag(stored, device, CONFIGS[tile_bands], gate=gate)
    assert grouped.takes(matrix, positions)
    assert not grouped.takes(replace(matrix, on_card=False), positions)
    assert not grouped.takes(matrix, 65)
    x, scaled = inputs(positions, columns, device)
    product = multiply(matrix, scaled, torch.empty(0, device=device))
    y = product.sums.cpu() * (product.factor.cpu() * product.inverse)[:, None]
    assert_products(y, x, decode_matrix(stored).double())


@needs_compiler
def test_a_shared_expert_divides_its_positions_between_blocks(device: torch.device) -> None:
    stored = random_experts(9, 264, 32)
    chosen = torch.stack([torch.arange(700) % 8, torch.full((700,), 8)], 1)
    if device.type == "cpu":
        chosen = chosen[:150]
    check(stored, CONFIGS[2], False, chosen, False, device)


def test_no_positions_give_no_products(device: torch.device) -> None:
    check(random_experts(2, 300, 40), CONFIGS[2], False, torch.empty(0, 2, dtype=torch.int64), False, device)


def test_other_superblocks_are_an_error() -> None:
    loaded = load_experts(random_experts(2, 300, 40), 1, False, "cpu", CONFIGS[2])
    loaded = replace(loaded, all=replace(loaded.all, block="Q6_P"))
    nothing = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="experts of Q6_P: grouped products take Q4_K"):
        multiply_grouped(loaded, ScaledFp16(torch.empty(0, 40).half(), torch.empty(0)), nothing, nothing, 1)
