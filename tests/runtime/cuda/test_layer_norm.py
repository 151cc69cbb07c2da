"""LayerNorm on the GPU, against the reference in float64: of a step, and of a prompt with what is added to it first."""

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, layer_norm, to_scaled_fp16
from sparsepack.runtime.reference import products as reference

EPS = 1e-5
WIDTHS = [1, 31, 64, 1024, 1025, 3072, 6145]


def off_centre(rows: int, width: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rows whose mean is ten times as large as they differ from it, and a norm."""
    return 10 + normal(rows, width), (normal(width, seed=2), normal(width, seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_centred_and_normed(width: int, rows: int, flag_in_data: bool) -> None:
    x, norm = off_centre(rows, width)
    expected = reference.norm(x.double(), norm[0].double(), norm[1].double(), EPS)
    _, (there, y) = flag_in_data_buffers([rows * width, rows * width], torch.device("cuda", 0))
    there, y = there.view(rows, width), y.view(rows, width)
    there.copy_(x)
    on_gpu = (norm[0].cuda(), norm[1].cuda())
    layer_norm(there, on_gpu, EPS, y, flag_in_data=flag_in_data)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    first = y.clone()
    layer_norm(there, on_gpu, EPS, y, flag_in_data=flag_in_data)
    assert torch.equal(y, first)


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_prompt_are_centred_and_normed(width: int, added: bool) -> None:
    x, norm = off_centre(5, width)
    sums, factor, bias = normal(5, width, seed=4), 2.0 ** torch.arange(5), normal(width, seed=5)
    update = Product(sums.cuda(), factor.cuda(), 0.25, bias.cuda()) if added else None
    whole = x.double() + (sums * factor[:, None] * 0.25 + bias).double() * added
    on_gpu = x.cuda()
    scaled = to_scaled_fp16(on_gpu, update, norm[0].cuda(), EPS, None, norm[1].cuda())
    expected = reference.norm(whole, norm[0].double(), norm[1].double(), EPS)
    found = (scaled.values.float() * scaled.factor[:, None]).cpu().double()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(on_gpu.cpu().double(), whole, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, norm = torch.zeros(2, 8), (torch.zeros(8), torch.zeros(8))
    with pytest.raises(ValueError, match=r"y \[2, 7\]"):
        layer_norm(x, norm, EPS, torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"\[\[8\], \[7\]\]: expected \[2, 8\] and \[8\]"):
        layer_norm(x, (norm[0], torch.zeros(7)), EPS, x)
