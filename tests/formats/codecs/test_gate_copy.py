"""Copies of gates in one or two bits, the limits that say who is listed, and gates laid out by neuron."""

import pytest
import torch
from codec_cases import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.gates import GateCopy, by_neuron, copied, limits


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 2])
def test_the_first_weight_has_the_lowest_bits(bits: int) -> None:
    levels = 2**bits - 1
    codes = torch.randint(levels + 1, (5, 24), generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])
    packed = torch.zeros(5, 24 * bits // 8, dtype=torch.uint8)
    for column in range(24):
        place, within = divmod(column * bits, 8)
        packed[:, place] |= (codes[:, column] << within).to(torch.uint8)
    found = GateCopy(packed, scales.half(), bits).decoded()
    assert torch.equal(found, (2 * codes - levels) * scales[:, None])


@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from([1e-6, 1.0, 1e3]), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=30)
def test_weights_become_the_nearest_level(rows: int, eights: int, size: float, bits: int) -> None:
    gate = size * normal(rows, 8 * eights, seed=rows)
    copy = copied(gate, bits)
    assert (copy.codes.dtype, copy.codes.shape) == (torch.uint8, (rows, bits * eights))
    levels = torch.arange(-(2**bits - 1), 2**bits, 2).float() * copy.scales.float()[:, None]
    nearest = (gate[..., None] - levels[:, None]).abs().amin(2)
    assert torch.allclose((gate - copy.decoded()).abs(), nearest, rtol=1e-5, atol=1e-9 * size)


@pytest.mark.parametrize(("bits", "most"), [(1, 0.61), (2, 0.35)])
def test_normal_weights_lose_what_the_best_uniform_levels_lose(bits: int, most: float) -> None:
    # Max (1960): of two levels the error is 0.603 of the deviation, of four equidistant ones 0.345.
    gate = normal(64, 2048)
    assert relative_error(copied(gate, bits).decoded(), gate) < most


def test_one_bit_is_the_sign_and_the_mean_magnitude() -> None:
    gate = normal(5, 32)
    expected = gate.sign() * gate.abs().mean(1, keepdim=True)
    assert torch.allclose(copied(gate, 1).decoded(), expected, rtol=1e-3)


@pytest.mark.parametrize("bits", [1, 2])
def test_a_copy_takes_its_bits_and_a_scale_for_each_row(bits: int) -> None:
    assert copied(normal(48, 32), bits).nbytes == 48 * 32 * bits // 8 + 2 * 48


def test_a_copy_of_a_copy_is_the_same() -> None:
    once = copied(normal(7, 64))
    again = copied(once.decoded())
    assert torch.equal(again.codes, once.codes)
    assert torch.allclose(again.scales.float(), once.scales.float(), rtol=2e-3)


def test_a_row_of_zeros_stays_zero() -> None:
    gate = normal(3, 16)
    gate[1] = 0
    copy = copied(gate)
    assert not copy.decoded()[1].any()
    assert limits(copy, gate, torch.tensor([0.1, 0.0, 0.2]), 1.5).isfinite().all()


@pytest.mark.parametrize(("gate", "bits"), [(torch.zeros(3, 12), 2), (torch.zeros(16), 2), (torch.zeros(3, 16), 3)])
def test_what_cannot_be_copied_is_refused(gate: Tensor, bits: int) -> None:
    with pytest.raises(PackingError, match="expected"):
        copied(gate, bits)


@pytest.mark.parametrize("times", [1.25, 1.5, 2.0, 3.0])
def test_about_so_many_times_the_active_ones_are_listed(times: float) -> None:
    direction = torch.nn.functional.normalize(normal(256, seed=4), dim=0)
    gate = normal(400, 256) - torch.linspace(2, 5, 400)[:, None] * direction
    inputs = normal(4000, 256, seed=5) + 6 * direction  # gates are below zero in the mean, by 0.75 to 2 deviations
    active = inputs @ gate.t() > 0
    copy = copied(gate)
    limit = limits(copy, gate, active.float().mean(0), times)
    listed = inputs @ copy.decoded().t() > -limit * inputs.norm(dim=1, keepdim=True)
    assert listed.sum() / active.sum() == pytest.approx(times, rel=0.2)
    assert (listed & active).sum() / active.sum() > (0.85 if times < 1.5 else 0.92)


def test_more_times_list_more() -> None:
    gate, frequency = normal(50, 64), torch.rand(50, generator=torch.Generator().manual_seed(2)) / 5
    found = torch.stack([limits(copied(gate), gate, frequency, times) for times in (1.0, 1.5, 2.0, 4.0)])
    assert (found.diff(dim=0) > 0).all()


def test_where_all_neurons_are_wanted_all_are_listed() -> None:
    gate = normal(10, 64)
    assert limits(copied(gate), gate, torch.full((10,), 0.6), 2.0).isposinf().all()
    exact = copied(copied(gate).decoded())
    assert limits(exact, exact.decoded(), torch.full((10,), 0.3), 1.5).isposinf().all(), "no error to allow for"


@pytest.mark.parametrize("frequency", [0.0, 1.0])
def test_neurons_that_were_never_or_always_active_have_limits(frequency: float) -> None:
    gate, often = normal(10, 64), torch.full((10,), 0.2)
    often[3] = frequency
    assert limits(copied(gate), gate, often, 1.5).isfinite().all()


def test_limits_that_cannot_be_are_refused() -> None:
    gate = normal(4, 16)
    copy = copied(gate)
    with pytest.raises(PackingError, match=r"0\.5 times"):
        limits(copy, gate, torch.full((4,), 0.1), 0.5)
    with pytest.raises(PackingError, match="expected those of the copy"):
        limits(copy, gate, torch.full((5,), 0.1), 1.5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (31, 8), (256, 32), (300, 256), (513, 64)])
def test_gates_by_neuron_are_the_same_bits(rows: int, columns: int) -> None:
    blocks = zigzag.pack(normal(rows, columns, seed=rows))
    laid_out = by_neuron(PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), rows, columns))
    assert laid_out.numbers.shape == (rows, columns // 2)
    assert laid_out.scales.shape == (-(-rows // 32), columns)
    assert laid_out.steps.shape == (2, -(-rows // 256), columns)
    assert torch.equal(laid_out.decoded(), zigzag.unpack(blocks, rows))


def test_only_zigzag_gates_are_laid_out_by_neuron() -> None:
    with pytest.raises(PackingError, match="expected zigzag-q4_k"):
        by_neuron(PackedMatrix(torch.zeros(2, 288, dtype=torch.uint8), MatrixFormat("Q4_K"), 2, 512))
