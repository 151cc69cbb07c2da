"""Error feedback for planes: outputs of columns that are read at levels of their own are nearer than rounded ones."""

from dataclasses import replace

import pytest
import torch
from devices import needs_cuda
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats import gptq_planes
from sparsepack.formats.blocks import q6_p
from sparsepack.formats.orders import zigzag
from sparsepack.formats.zigzag.plan import encoded_site
from sparsepack.models.sites import levels_read
from sparsepack.reconstruction import Inputs
from sparsepack.runtime.cpu.machine import FORCED, instruction_sets

SHAPES = [(256, 64), (300, 97), (31, 40), (192, 150), (230, 9), (513, 3), (40, 1)]
LEVELS = len(q6_p.LEVELS)


def inputs_of(columns: int, never: int | None = None) -> tuple[Tensor, Tensor, Inputs]:
    """Inputs [tokens, columns] that depend on each other, at which level each is read, and what is known of them."""
    generator = torch.Generator().manual_seed(0)
    tokens, rank = 8 * columns + 400, max(columns // 8, 1)
    x = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, columns, generator=generator) / rank**0.5
    x += 0.3 * torch.randn(tokens, columns, generator=generator)
    limits = torch.rand(LEVELS, columns, generator=generator).div(2).sort(0).values
    if never is not None:
        limits[:, never] = torch.inf
    levels = levels_read(x, limits)
    squares = torch.stack([torch.where(levels == n, x.square(), 0).sum(0) for n in range(1 + LEVELS)])
    read = torch.where(levels > 0, x, 0)
    shares = squares / squares[1:].sum(0).clamp_min(1e-30)
    return x, levels, Inputs(read.square().mean(0), read.t() @ read / len(x), 0.1, True, shares)


def error(weight: Tensor, x: Tensor, levels: Tensor, blocks: Tensor, tail: Tensor | None) -> float:
    y = torch.zeros(len(x), len(weight))
    for level in range(1, 1 + LEVELS):
        matrix = zigzag.unpack(blocks, len(weight), tail=tail, block="Q6_P", level=level)
        y += torch.where(levels == level, x, 0) @ matrix.t()
    return float((y - x @ weight.t()).norm() / (x @ weight.t()).norm())


def weights(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_outputs_by_levels_are_nearer_than_with_weights_rounded(rows: int, columns: int) -> None:
    weight, (x, levels, inputs) = weights(rows, columns), inputs_of(columns)
    blocks, tail = gptq_planes.zigzag_blocks(weight.clone(), inputs)
    rounded = zigzag.pack_with_tail(weight, "Q6_P")
    assert blocks.shape == rounded[0].shape
    assert (None if tail is None else tail.shape) == (None if rounded[1] is None else rounded[1].shape)
    most = 0.9 if columns > 16 else 0.98 if columns > 4 else 1.01
    assert error(weight, x, levels, blocks, tail) < most * error(weight, x, levels, *rounded)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_kernel_does_what_plain_torch_does(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, (x, levels, inputs) = weights(rows, columns), inputs_of(columns)
    if gptq_planes.kernels() is None:
        pytest.skip("the CPU kernels were not built")
    made = []
    for each in instruction_sets():
        monkeypatch.setenv(FORCED, each)
        made.append(gptq_planes.zigzag_blocks(weight.clone(), inputs))
    monkeypatch.setattr(gptq_planes, "kernels", lambda: None)
    oracle = gptq_planes.zigzag_blocks(weight.clone(), inputs)
    expected = zigzag.unpack(oracle[0], rows, tail=oracle[1], block="Q6_P")
    for blocks, tail in made:
        found = zigzag.unpack(blocks, rows, tail=tail, block="Q6_P")
        assert (found != expected).float().mean() < 0.01  # a value halfway between two others may fall otherwise
        assert error(weight, x, levels, blocks, tail) == pytest.approx(error(weight, x, levels, *oracle), rel=0.01)


@pytest.mark.parametrize("rows", [256, 300, 230])
def test_inputs_that_are_independent_leave_nothing_to_make_up_for(rows: int) -> None:
    weight = weights(rows, 50)
    shares = torch.tensor([0.0, *q6_p.SHARES])[:, None].expand(-1, 50)
    inputs = Inputs(torch.ones(50), torch.eye(50), levels=shares)
    found, rounded = (
        zigzag.unpack(blocks, rows, tail=tail, block="Q6_P")
        for blocks, tail in (gptq_planes.zigzag_blocks(weight.clone(), inputs), zigzag.pack_with_tail(weight, "Q6_P"))
    )
    assert (found != rounded).float().mean() < 0.001  # a value halfway between two others may fall otherwise


def test_without_levels_it_is_gptq_with_all_planes() -> None:
    """Column by column in float64, the inverse of what is left made anew each time."""
    weight, (_, _, inputs) = weights(256, 30), inputs_of(30)
    inputs = Inputs(inputs.moments, inputs.products, 0.1, True)
    assert inputs.products is not None
    products = inputs.products.double()
    mean = products.diagonal().mean()
    left, hessian = weight.double(), products + torch.diag(0.1 * products.diagonal() + 0.001 * mean)
    whole = torch.zeros(1, LEVELS)
    whole[:, -1] = 1
    each, _ = q6_p.fit(weight.t().reshape(30, 4, 64), whole.expand(30, -1))
    scale, m = q6_p.steps_and_centres(each)
    expected, waiting = torch.empty(256, 30), inputs.moments.argsort(descending=True, stable=True).tolist()
    while waiting:
        first = waiting[0]
        q = q6_p.numbers(left[:, first].float().view(4, 64), scale[first], m[first])
        expected[:, first] = ((q6_p.at_level(q, LEVELS) + m[first, :, None]) * scale[first, :, None]).view(-1)
        inverse = hessian[waiting][:, waiting].inverse()
        left[:, waiting] -= torch.outer((left[:, first] - expected[:, first].double()) / inverse[0, 0], inverse[0])
        waiting = waiting[1:]
    found = zigzag.unpack(gptq_planes.zigzag_blocks(weight, inputs)[0], 256, block="Q6_P")
    assert (found - expected).abs().gt(1e-3).float().mean() < 0.02  # a value between two others may fall otherwise


def test_the_weights_of_an_input_that_is_never_read_are_rounded_with_all_planes() -> None:
    weight, (_, _, inputs) = weights(256, 20), inputs_of(20, never=3)
    found = zigzag.unpack(gptq_planes.zigzag_blocks(weight.clone(), inputs)[0], 256, block="Q6_P")
    alone = Inputs(torch.ones(1), torch.ones(1, 1))
    expected = zigzag.unpack(gptq_planes.zigzag_blocks(weight[:, [3]], alone)[0], 256, block="Q6_P")
    assert torch.equal(found[:, [3]], expected)


def test_what_is_fed_back_is_the_mean_error_of_levels() -> None:
    """Two inputs that are the same but for noise: the second column takes what the first one loses in the mean."""
    x = torch.randn(4000, 1, generator=torch.Generator().manual_seed(2))
    both = torch.cat([2 * x, x], 1)
    shares = torch.zeros(1 + LEVELS, 2)
    shares[[0, 1, 5], [0, 0, 1]] = torch.tensor([0.5, 1.0, 1.0])
    inputs = Inputs(both.square().mean(0), both.t() @ both / len(x), 1e-4, True, shares)
    weight = weights(64, 2) * torch.tensor([0.1, 1.0])
    found = [zigzag.unpack_tail(_tail(weight, inputs), 64, 2, block="Q6_P", level=level) for level in (1, 5)]
    missed = 1.5 * weight[:, 0] - found[0][:, 0]
    assert torch.allclose(found[1][:, 1], weight[:, 1] + 2 * missed, atol=0.1)


def _tail(weight: Tensor, inputs: Inputs) -> Tensor:
    blocks, tail = gptq_planes.zigzag_blocks(weight.clone(), inputs)
    assert blocks.shape[0] == 0
    assert tail is not None
    return tail


def test_rows_whose_errors_cost_more_are_quantised_finer() -> None:
    weight, (_, _, inputs) = weights(300, 50), inputs_of(50)
    costs = torch.full((300,), 0.01)
    costs[::16] = 1.0
    errors = []
    for row_costs in (None, costs):
        made = encoded_site("Q6_P", 0, "mlp_in", weight, replace(inputs, row_costs=row_costs)).weight
        errors.append(float(costs @ (made - weight).square().sum(1)))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("costs", [torch.zeros(40), torch.full((40,), 1e-38), torch.logspace(-20, 20, 40)])
def test_scales_of_rows_are_within_bounds_whatever_errors_cost(costs: Tensor) -> None:
    weight = weights(40, 9)
    weight[3] = 0
    scales = zigzag.row_scales(weight, costs)
    assert scales[3] == 1
    assert ((scales >= 2**-8) & (scales <= 2**8)).all()
    same = zigzag.row_scales(weight, torch.full((40,), 7.0)).log2()
    expected = zigzag.row_scales(weight).log2() * 0.8
    others = torch.arange(40) != 3
    assert torch.allclose((same - expected)[others] - (same - expected)[others].mean(), torch.zeros(39), atol=0.02)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_does_as_well() -> None:
    weight, (x, levels, inputs) = weights(300, 97), inputs_of(97)
    assert inputs.products is not None
    assert inputs.levels is not None
    there = replace(inputs, moments=inputs.moments.cuda(), products=inputs.products.cuda(), levels=inputs.levels.cuda())
    blocks, tail = gptq_planes.zigzag_blocks(weight.cuda(), there)
    assert tail is not None
    here = error(weight, x, levels, *gptq_planes.zigzag_blocks(weight, inputs))
    assert error(weight, x, levels, blocks.cpu(), tail.cpu()) == pytest.approx(here, rel=0.02)


def test_weights_beyond_the_format_become_its_largest() -> None:
    weight, (_, _, inputs) = weights(64, 8), inputs_of(8)
    weight[3, 2] = 1e30
    found = zigzag.unpack_tail(_tail(weight, inputs), 64, 8, block="Q6_P")
    assert found.isfinite().all()
    assert found[3, 2] == pytest.approx(q6_p.HIGHEST, rel=0.02)


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = weights(4, 4)
    weight[1, 2] = torch.inf
    with pytest.raises(PackingError, match="1 of 16 are infinite or NaN"):
        gptq_planes.zigzag_blocks(weight, inputs_of(4)[2])
