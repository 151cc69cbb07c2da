"""Queries and keys normed over all of their heads, on the GPU, against the reference in float64."""

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, norm_prefill_rows, norm_rows
from sparsepack.runtime.reference import products as reference

EPS = 1e-6
WIDTHS = [(2048, 2048), (1024, 128), (1025, 31), (64, 16), (8192, 1024)]
every_shape = pytest.mark.parametrize(("queries", "keys"), WIDTHS)


def expected_of(x: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = x.double().split([len(norms[0]), len(norms[1]), len(norms[1])], dim=1)
    first, second = (reference.rms_norm(part, norm.double(), EPS) for part, norm in zip((q, k), norms, strict=True))
    return torch.cat([first, second, v], dim=1)


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_queries_and_keys_are_normed_and_values_are_not(queries: int, keys: int, rows: int, flag_in_data: bool) -> None:
    x, norms = 3 * normal(rows, queries + 2 * keys), (normal(queries, seed=1), normal(keys, seed=2))
    device = torch.device("cuda", torch.cuda.current_device())
    _, (there, y) = flag_in_data_buffers([x.numel()] * 2, device)
    there, y = there.view_as(x), y.view_as(x)
    there.copy_(x)
    on_device = norms[0].cuda(), norms[1].cuda()
    norm_rows(there, on_device, EPS, y, flag_in_data=flag_in_data)
    torch.testing.assert_close(y.cpu().double(), expected_of(x, norms), rtol=1e-5, atol=1e-5)
    first = y.clone()
    norm_rows(there, on_device, EPS, y, flag_in_data=flag_in_data)
    assert torch.equal(y, first)


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_put_together_before(queries: int, keys: int, bias: bool) -> None:
    rows = queries + 2 * keys
    sums, factor = normal(5, rows), torch.tensor([1.0, 0.5, 8.0, 2.0, 1024.0])
    of_rows = normal(rows, seed=3) if bias else None
    norms = normal(queries, seed=1), normal(keys, seed=2)
    whole = sums * factor[:, None] * 0.25 + (0 if of_rows is None else of_rows)
    product = Product(sums.cuda(), factor.cuda(), 0.25, None if of_rows is None else of_rows.cuda())
    found = norm_prefill_rows(product, (norms[0].cuda(), norms[1].cuda()), EPS)
    assert (found.inverse, found.bias, set(found.factor.tolist())) == (1.0, None, {1.0})
    torch.testing.assert_close(found.sums.cpu().double(), expected_of(whole, norms), rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    norms = torch.zeros(8), torch.zeros(2)
    with pytest.raises(ValueError, match=r"qkv \[3, 11\], y \[3, 11\]: expected \[3, 12\] twice"):
        norm_rows(torch.zeros(3, 11), norms, EPS, torch.zeros(3, 11))
    with pytest.raises(ValueError, match=r"y \[2, 12\]"):
        norm_rows(torch.zeros(3, 12), norms, EPS, torch.zeros(2, 12))
