"""GPTQ: with error feedback the outputs are nearer than with every weight rounded by itself."""

import pytest
import torch
from devices import needs_cuda
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats import gptq
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.slide import dequantised, quantise_rows
from sparsepack.reconstruction import Inputs, Sums

SHAPES = [(256, 64), (300, 97), (31, 40), (192, 50), (230, 9), (513, 3), (40, 1)]


def known(columns: int, seed: int = 0, dead: tuple[int, ...] = ()) -> Inputs:
    """Of inputs that depend on each other, some of them large, some never there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns + 64, columns, generator=generator)
    x = x @ torch.randn(columns, columns, generator=generator) / columns**0.5
    x *= torch.linspace(0.1, 3, columns)[torch.randperm(columns, generator=generator)]
    x[:, dead] = 0
    sums = Sums(columns, True, torch.device("cpu"))
    sums.add(x)
    return sums.inputs(0.01)


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_outputs_are_nearer_than_with_weights_rounded_each_by_itself(rows: int, columns: int) -> None:
    weight, inputs = weights(rows, columns), known(columns)
    rounded = zigzag.unpack(zigzag.pack(weight), rows)
    blocks, tail = gptq.zigzag_blocks(weight.clone(), inputs)
    assert blocks.shape == (zigzag.bands(rows - zigzag.tail_rows(rows)), columns, 144)
    assert (tail is None) == (not zigzag.tail_pieces(rows))
    found = zigzag.unpack(blocks, rows, tail=tail)
    if columns == 1:
        assert inputs.relative_error(weight, found) < 1.1 * inputs.relative_error(weight, rounded)
    else:
        assert inputs.relative_error(weight, found) < 0.9 * inputs.relative_error(weight, rounded)


def test_inputs_that_are_independent_leave_nothing_to_make_up_for() -> None:
    weight = weights(300, 50)
    inputs = Inputs(torch.ones(50), torch.eye(50))
    blocks, tail = gptq.zigzag_blocks(weight.clone(), inputs)
    rounded, rounded_tail = zigzag.pack_with_tail(weight)
    assert torch.equal(blocks, rounded)
    assert tail is not None
    assert rounded_tail is not None
    found, other = (zigzag.unpack_tail(each, 300, 50) for each in (tail, rounded_tail))
    assert (found - weight[256:]).norm() < 1.01 * (other - weight[256:]).norm()


def test_the_weights_of_an_input_that_never_comes_are_rounded_as_they_are() -> None:
    weight, inputs = weights(256, 20), known(20, dead=(3, 7))
    (blocks, _), rounded = gptq.zigzag_blocks(weight.clone(), inputs), zigzag.pack(weight)
    assert torch.equal(blocks[:, [3, 7]], rounded[:, [3, 7]])


def test_it_is_the_plain_algorithm() -> None:
    """Column by column in float64, the inverse of what is left made anew each time; scales fitted when it is their
    turn."""
    weight, inputs = weights(256, 30), known(30)
    assert inputs.products is not None
    hessian = inputs.products.double() + 0.01 * inputs.products.diagonal().double().mean() * torch.eye(30)
    left, expected = weight.double(), torch.empty(256, 30)
    waiting = inputs.moments.argsort(descending=True).tolist()
    while waiting:
        first = waiting[0]
        expected[:, first] = zigzag.unpack(zigzag.pack(left[:, [first]].float()), 256)[:, 0]
        inverse = hessian[waiting][:, waiting].inverse()
        error = (left[:, first] - expected[:, first].double()) / inverse[0, 0]
        left[:, waiting] -= torch.outer(error, inverse[0])
        waiting = waiting[1:]
    found = zigzag.unpack(gptq.zigzag_blocks(weight.clone(), inputs)[0], 256)
    assert (found - expected).abs().gt(1e-3).float().mean() < 0.02  # a value between two others may fall otherwise
    assert inputs.relative_error(weight, found) == pytest.approx(inputs.relative_error(weight, expected), rel=0.02)


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = weights(4, 4)
    weight[1, 2] = torch.inf
    with pytest.raises(PackingError, match="1 of 16 are infinite or NaN"):
        gptq.zigzag_blocks(weight, known(4))


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_does_as_well() -> None:
    weight, inputs = weights(300, 97), known(97)
    assert inputs.products is not None
    there = Inputs(inputs.moments.cuda(), inputs.products.cuda(), inputs.damping)
    (blocks, tail), (other, other_tail) = gptq.zigzag_blocks(weight.cuda(), there), gptq.zigzag_blocks(weight, inputs)
    found, here = zigzag.unpack(blocks, 300, tail=tail).cpu(), zigzag.unpack(other, 300, tail=other_tail)
    assert inputs.relative_error(weight, found) == pytest.approx(inputs.relative_error(weight, here), rel=0.02)


@pytest.mark.parametrize("shape", [(20, 256), (9, 768), (1, 512)])
def test_superblocks_along_rows_too(shape: tuple[int, int]) -> None:
    weight, inputs = weights(*shape), known(shape[1])
    rounded, blocks = q4_k.encode(weight), gptq.q4_k_rows(weight, inputs)
    assert blocks.shape == rounded.shape
    assert inputs.relative_error(weight, q4_k.decode(blocks)) < 0.9 * inputs.relative_error(
        weight, q4_k.decode(rounded)
    )
    alone = gptq.q4_k_rows(weight, Inputs(torch.ones(shape[1]), torch.eye(shape[1])))
    assert (alone != rounded).float().mean() < 0.01  # a value halfway between two others may fall otherwise
    assert torch.allclose(q4_k.decode(alone), q4_k.decode(rounded), atol=0.3)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)])
def test_rows_with_one_scale_keep_their_zeros(dtype: torch.dtype, steps: float) -> None:
    weight, inputs = weights(20, 64), known(64)
    weight[:, 1::2] = 0
    weight[3] = 0
    q, scale = gptq.symmetric_rows(weight, inputs, dtype, steps)
    plain, same_scale = quantise_rows(weight, dtype, steps)
    assert torch.equal(scale, same_scale)
    assert torch.equal(q, q.to(dtype).float())
    assert not q[weight == 0].any()
    errors = [inputs.relative_error(weight, dequantised(values, scale)) for values in (q, plain)]
    assert errors[0] < 0.95 * errors[1]
    alone, _ = gptq.symmetric_rows(weight, Inputs(torch.ones(64), torch.eye(64)), dtype, steps)
    assert torch.equal(alone, plain.float())


@pytest.mark.parametrize("rows", [64, 100, 192, 320, 576])
def test_a_tail_by_the_kernel_is_what_it_is_column_by_column(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = weights(rows, 70), known(70)
    blocks, tail = gptq.zigzag_blocks(weight.clone(), inputs)
    assert tail is not None
    monkeypatch.setattr(gptq.q4_k_device, "kernels", lambda: None)
    plain_blocks, plain_tail = gptq.zigzag_blocks(weight.clone(), inputs)
    found, expected = zigzag.unpack(blocks, rows, tail=tail), zigzag.unpack(plain_blocks, rows, tail=plain_tail)
    assert (found - expected).abs().gt(1e-3).float().mean() < 0.02  # sums in another order: few values fall otherwise
    assert inputs.relative_error(weight, found) == pytest.approx(inputs.relative_error(weight, expected), rel=0.02)
    rounded = zigzag.unpack(*zigzag.pack_with_tail(weight)[:1], rows, tail=zigzag.pack_with_tail(weight)[1])
    assert inputs.relative_error(weight, found) < 0.95 * inputs.relative_error(weight, rounded)
