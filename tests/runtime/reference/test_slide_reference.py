"""Products with slid weights are those of the weights, integers exactly."""

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.orders.slide import Slide, dequantised, pack_positions, quantise_rows, slide
from sparsepack.models.pattern import Pattern, kept
from sparsepack.runtime.reference.products import Sparse24Matrix, quantise_slide, slide_matmul

PATTERNS = [Pattern(2, 4), Pattern(4, 6), Pattern(6, 8), Pattern(8, 10), Pattern(14, 16)]
TYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16]


def pruned(rows: int, columns: int, pattern: Pattern) -> Tensor:
    weight = normal(rows, columns, seed=1)
    return weight * kept(weight.abs(), pattern)


def matrix(weight: Tensor, how: Slide, dtype: torch.dtype) -> Sparse24Matrix:
    values, positions = slide(weight, how)
    packed = pack_positions(positions)
    if dtype == torch.bfloat16:
        return Sparse24Matrix(values.to(dtype), packed, None, how, weight.shape[1])
    q, scale = quantise_rows(values, dtype)
    return Sparse24Matrix(q, packed, scale, how, weight.shape[1])


@pytest.mark.parametrize("columns", [64, 100, 1500])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_product_is_that_of_what_was_quantised(dtype: torch.dtype, pattern: Pattern, columns: int) -> None:
    weight, x, how = pruned(20, columns, pattern), normal(7, columns), Slide(pattern)
    x[2] = 0
    q, scale = quantise_slide(x, how, dtype)
    assert q.shape == (7, how.expanded(columns))
    assert q.dtype == dtype
    found = slide_matmul(matrix(weight, how, dtype), q, scale)
    if dtype == torch.bfloat16:
        assert scale is None
        expected = x.to(dtype).double() @ weight.to(dtype).double().t()
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-3)
        return
    (xq, x_scale), (wq, w_scale) = quantise_rows(x, dtype), quantise_rows(weight, dtype)
    expected = (xq.double() @ wq.double().t()) * x_scale.double()[:, None] * w_scale.double()
    if dtype == torch.int8:
        assert torch.equal(found, expected.float())
    else:
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert not found[2].any()


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_quantised_rows_are_as_near_as_their_type_allows(dtype: torch.dtype) -> None:
    x = normal(50, 300) * torch.logspace(-20, 20, 50)[:, None]
    q, scale = quantise_rows(x, dtype)
    error = (dequantised(q, scale) - x).double().norm(dim=1) / x.double().norm(dim=1)
    assert (error < (0.012 if dtype == torch.int8 else 0.04)).all()
    assert (q.float().abs().amax(1) == (127 if dtype == torch.int8 else 448)).all()


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(PackingError, match="not finite"):
        quantise_rows(torch.tensor([[1.0, float("inf")]]), torch.int8)


def test_tiny_rows_count_as_zeros() -> None:
    q, scale = quantise_rows(torch.full((1, 4), 1e-38), torch.int8)
    assert not q.any()
    assert not scale.any()
