"""Products of many positions with the experts that each of them has: on a GPU, and as the processor runs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from torch import Tensor
from zigzag_cases import random_matrix

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, decode_matrix
from sparsepack.runtime.cuda.products import experts
from sparsepack.runtime.cuda.products.experts import load_experts, multiply_grouped
from sparsepack.runtime.cuda.products.gemm_fp16 import ScaledFp16
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig

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
        monkeypatch.setattr(experts, "kernel", emulation.kernel)
        monkeypatch.setattr(experts, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def random_experts(count: int, rows: int, columns: int) -> PackedExperts:
    few = torch.stack([random_matrix(rows, columns, seed=seed).blocks.cpu() for seed in range(3)])
    return PackedExperts(few[torch.arange(count) % 3], MatrixFormat("Q4_K", "zigzag"), rows, columns)


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Order and ends of places by the experts chosen; those of number `count` are of none."""
    in_order, order = chosen.flatten().sort(stable=True)
    return order, torch.searchsorted(in_order, torch.arange(count + 1))


def check(
    stored: PackedExperts, config: CudaTileConfig, gate: bool, chosen: Tensor, biased: bool, device: torch.device
) -> None:
    """chosen: int64 [positions, each]."""
    loaded = load_experts(stored, 1, False, device, config, gate=gate)
    random = torch.Generator().manual_seed(len(chosen))
    x = torch.randn(len(chosen), stored.columns, generator=random) * 2.0 ** torch.randint(9, (len(chosen), 1))
    factor = 2.0 ** torch.frexp(x.abs().amax(1)).exponent.float() / 2**15
    scaled = ScaledFp16((x / factor[:, None]).half().to(device), factor.to(device))
    bias = torch.randn(stored.experts, stored.rows, generator=random) if biased else None
    order, ends = by_expert(chosen, stored.experts)
    of_none = bool((chosen == stored.experts).any())
    found = multiply_grouped(
        loaded,
        scaled,
        order.to(device),
        ends.to(device),
        chosen.shape[1],
        None if bias is None else bias.to(device),
        zeros=of_none,
    )
    assert found.inverse == 1
    assert bool((found.factor == 1).all())
    y = found.sums.cpu().view(*chosen.shape, stored.rows)
    for number in range(stored.experts):
        positions, places = (chosen == number).nonzero(as_tuple=True)
        added = 0 if bias is None else bias[number].double()
        weights = decode_matrix(stored.expert(number)).double()
        expected = x[positions].double() @ weights.t() + added
        error = (y[positions, places].double() - expected).norm(dim=1)
        usual = x[positions].double().norm(dim=1) * weights.norm() / stored.columns**0.5
        assert bool((error <= LIMIT * usual).all()), float((error / usual).amax())
    assert not y[chosen == stored.experts].any()


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
        pytest.skip("threads of a GPU are threads of the system here")
    gate = rows % 512 == 0 and tile_bands > 1
    stored = random_experts(count, rows, columns)
    each = min(3, count)
    chosen = torch.rand(positions, count, generator=torch.Generator().manual_seed(5)).topk(each, 1).indices
    check(stored, CONFIGS[tile_bands], gate, chosen, positions % 2 == 1, device)


@needs_compiler
@pytest.mark.parametrize("case", ["one has all", "the last has one", "nobody has any", "some count"])
def test_experts_without_positions_and_positions_that_do_not_count(case: str, device: torch.device) -> None:
    stored = random_experts(4, 300, 40)
    chosen = torch.full((70, 2), 4)
    if case == "one has all":
        chosen = torch.full((70, 1), 2)
    elif case == "the last has one":
        chosen[31, 1] = 3
    elif case == "some count":
        chosen[:21] = torch.randint(4, (21, 2), generator=torch.Generator().manual_seed(1))
    check(stored, CONFIGS[2], False, chosen, True, device)


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
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="experts of Q6_P: grouped products take Q4_K"):
        multiply_grouped(loaded, ScaledFp16(torch.empty(0, 40).half(), torch.empty(0)), nothing, nothing, 1)
