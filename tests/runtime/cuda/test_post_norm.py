"""What attention and MLP add, normed first, on the GPU, against the reference in float64."""

import pytest
import torch
from operations_for_tests import normal

from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import post_norm
from sparsepack.runtime.reference import products as reference

EPS = 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 31, 64, 1024, 1025, 2304, 5376])
def test_the_norm_of_an_update_is_added(width: int, rows: int, flag_in_data: bool) -> None:
    update, residual, norm = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    expected = residual.double() + reference.rms_norm(update.double(), norm.double(), EPS)
    device = torch.device("cuda", torch.cuda.current_device())
    _, (there, y, squares) = flag_in_data_buffers([rows * width, rows * width, rows], device)
    there, y = there.view(rows, width), y.view(rows, width)
    there.copy_(update)
    post_norm(there, residual.cuda(), norm.cuda(), EPS, y, squares=squares, flag_in_data=flag_in_data)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares.cpu().double(), expected.square().sum(1), rtol=1e-5, atol=1e-6)
    first = y.clone()
    post_norm(there, residual.cuda(), norm.cuda(), EPS, y, flag_in_data=flag_in_data)
    assert torch.equal(y, first)
    stream = residual.cuda()
    post_norm(there, stream, norm.cuda(), EPS, stream)
    assert torch.equal(stream, first)


@pytest.mark.gpu
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 31, 1025, 2816])
def test_two_updates_are_normed_apart_and_the_sum_is_scaled(width: int, rows: int, flag_in_data: bool) -> None:
    updates, residual = [normal(rows, width), normal(rows, width, seed=4)], normal(rows, width, seed=1)
    norm, *of_both = (normal(width, seed=seed) for seed in (2, 5, 6))
    normed = [reference.rms_norm(u.double(), n.double(), EPS) for u, n in zip(updates, of_both, strict=True)]
    expected = 0.3 * (residual.double() + reference.rms_norm(sum(normed), norm.double(), EPS))
    device = torch.device("cuda", torch.cuda.current_device())
    _, (first, other, y, squares) = flag_in_data_buffers([*[rows * width] * 3, rows], device)
    first, other, y = (each.view(rows, width) for each in (first, other, y))
    first.copy_(updates[0])
    other.copy_(updates[1])
    sums = (other, *(each.cuda() for each in of_both))
    more = {"squares": squares, "flag_in_data": flag_in_data, "scale": 0.3, "sums": sums}
    post_norm(first, residual.cuda(), norm.cuda(), EPS, y, **more)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares.cpu().double(), expected.square().sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": torch.zeros(2, 7)}, r"y \[2, 7\]"),
        ({"norm": torch.zeros(7)}, r"norm \[7\]: expected twice \[2, 8\] and \[8\]"),
        ({"squares": torch.zeros(3)}, r"squares \[3\], expected \[2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed: dict[str, torch.Tensor], message: str) -> None:
    of = {"y": torch.zeros(2, 8), "norm": torch.zeros(8), "squares": torch.zeros(2), **changed}
    with pytest.raises(ValueError, match=message):
        post_norm(torch.zeros(2, 8), torch.zeros(2, 8), of["norm"], EPS, of["y"], squares=of["squares"])
