"""Inputs of slid weights on the GPU have the bits of the reference."""

import pytest
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import Slide
from sparsepack.models.pattern import Pattern
from sparsepack.runtime.cuda.slide.product import ALIGNMENT, quantise_slide, row_bytes
from sparsepack.runtime.reference import products as reference

pytestmark = pytest.mark.gpu

PATTERNS = [Pattern(2, 4), Pattern(4, 6), Pattern(6, 8), Pattern(8, 10), Pattern(10, 12), Pattern(14, 16)]
INPUTS = [torch.bfloat16, torch.float16, torch.float32]
FP8 = torch.float8_e4m3fn


def normal(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(columns))
    return (x * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)


def assert_reference(x: Tensor, how: Slide, dtype: torch.dtype) -> None:
    expected, expected_scale = reference.quantise_slide(x, how, dtype)
    assert expected_scale is not None
    q, scale = quantise_slide(x.cuda(), how, dtype)
    expanded = how.expanded(x.shape[1])
    assert q.shape == (len(x), row_bytes(how, x.shape[1]))
    assert q.shape[1] % ALIGNMENT == 0
    bits = q.view(torch.uint8).cpu()
    assert not bits[:, expanded:].any()
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(bits[:, :expanded], expected.view(torch.uint8))


@pytest.mark.parametrize("columns", [1, 33, 512, 1999, 3584, 18944])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("input", INPUTS, ids=str)
def test_bits_are_those_of_the_reference(input: torch.dtype, pattern: Pattern, columns: int) -> None:
    x = normal(5, columns, input)
    x[3] = 0
    assert_reference(x, Slide(pattern), torch.int8)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert_reference(x, Slide(pattern), FP8)


@pytest.mark.parametrize("tokens", [0, 1, 64, 4097])
def test_any_number_of_tokens(tokens: int) -> None:
    assert_reference(normal(tokens, 896, torch.bfloat16), Slide(Pattern(6, 8)), torch.int8)


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_inputs_may_begin_anywhere(offset: int) -> None:
    how, x = Slide(Pattern(6, 8)), normal(7, 512, torch.bfloat16)
    moved = torch.zeros(offset + x.numel(), dtype=x.dtype, device="cuda")[offset:].view(x.shape)
    moved.copy_(x)
    q, scale = quantise_slide(moved, how, torch.int8)
    wanted, wanted_scale = quantise_slide(x.cuda(), how, torch.int8)
    assert torch.equal(q, wanted)
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_shows_in_its_scale_alone(value: float) -> None:
    x = normal(3, 512, torch.float32)
    x[1, 200] = value
    scale = quantise_slide(x.cuda(), Slide(Pattern(6, 8)), torch.int8)[1]
    assert scale.isfinite().tolist() == [True, False, True]


def test_what_does_not_fit_is_an_error() -> None:
    x, how = torch.zeros(4, 64, device="cuda"), Slide(Pattern(6, 8))
    with pytest.raises(ValueError, match="expected a contiguous float matrix"):
        quantise_slide(x[:, ::2], how, torch.int8)
    with pytest.raises(ValueError, match="expected 2 of 4, int8 or float8_e4m3fn"):
        quantise_slide(x, how, torch.bfloat16)


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.slide.product.architecture", lambda device: 80)
    with pytest.raises(UserError, match=r"FP8 needs a GPU of compute capability 8\.9"):
        quantise_slide(torch.zeros(1, 64, device="cuda"), Slide(Pattern(6, 8)), FP8)
