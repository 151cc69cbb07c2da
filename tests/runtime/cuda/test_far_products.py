"""The kernels by which a GPU shares a product with the processor: what they ask, and what they make of an answer."""

import numpy as np
import pytest
import torch
from operations_for_tests import normal, packed
from torch import Tensor

from sparsepack.formats.codecs.matrices import decode_matrix
from sparsepack.runtime.cuda.driver.host_memory import in_host_memory, shared_memory
from sparsepack.runtime.cuda.products import far, zigzag, zigzag_products
from sparsepack.runtime.cuda.products.far import FarProduct
from sparsepack.runtime.cuda.products.tile_config import far_tile_config
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.hybrid.handover import LAST_NUMBER, Abort, AskedProduct, HandOver
from sparsepack.runtime.reference import products as reference

pytestmark = pytest.mark.gpu

EPS = 1e-5
CUDA = torch.device("cuda")


class Shared:
    """A product of which the GPU has `near` bands, and the memory as the processor sees it."""

    def __init__(
        self, rows: int, columns: int, near: int, texts: int, step: int = 7, before_list: bool = False
    ) -> None:
        matrix = packed(rows, columns)
        self.weight = decode_matrix(matrix).double()
        asked = AskedProduct(0, columns, rows - 256 * near)
        self.layout = HandOver(1, 32, 256, texts, (asked,))
        self.memory, there = shared_memory(self.layout.size, CUDA, "a test")
        (at,) = self.layout.places

        def part(begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return there[begin : begin + 4 * torch.Size(shape).numel()].view(dtype).view(shape)

        config = far_tile_config(len(matrix.blocks), columns, CUDA)
        loaded = far.first_bands(zigzag.load_zigzag(matrix, CUDA, config, place=in_host_memory), near)
        self.step, self.at = step, at
        number = [step - 1 if step > 1 else LAST_NUMBER, 0] if before_list else [step, 0]
        self.of = FarProduct(
            near=loaded,
            rows=rows,
            sums=torch.zeros(texts, loaded.rows, device=CUDA),
            number=torch.tensor(number, dtype=torch.int32, device=CUDA),
            before_list=before_list,
            abort=part(self.layout.abort, torch.int32, 1),
            request_number=part(at.request, torch.int32, 1),
            request_x=part(at.x, torch.float32, texts, columns),
            answer_number=part(at.answer, torch.int32, 1),
            answer=part(at.y, torch.float32, texts, asked.rows),
            waited=torch.zeros(1, dtype=torch.int64, device=CUDA),
            limit=50,
        )

    def words(self, begin: int, kind: type, *shape: int) -> np.ndarray:
        return self.memory[begin : begin + 4 * int(np.prod(shape))].view(kind).reshape(shape)

    def answer(self, x: Tensor) -> None:
        """What the processor would have answered already."""
        rest = (x.double() @ self.weight[self.of.near.rows :].t()).float()
        self.words(self.at.y, np.float32, *rest.shape)[:] = rest.numpy()
        self.words(self.at.answer, np.int32, 1)[:] = self.step


@pytest.mark.parametrize("before_list", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("texts", "columns"), [(1, 256), (1, 5120), (3, 1301)])
def test_the_processor_is_asked_with_the_normed_input(
    texts: int, columns: int, normed: bool, before_list: bool
) -> None:
    shared = Shared(600, columns, 1, texts, step=1 if before_list else 9, before_list=before_list)
    x, weight = normal(texts, columns, seed=1) * 3, 1 + 0.1 * normal(columns, seed=2)
    far.ask(shared.of, Input(x.to(CUDA), weight.to(CUDA) if normed else None, EPS))
    torch.cuda.synchronize()
    found = torch.from_numpy(shared.words(shared.at.x, np.float32, texts, columns).copy())
    torch.testing.assert_close(found, reference.rms_norm(x, weight, EPS) if normed else x)
    assert shared.words(shared.at.request, np.int32, 1)[0] == shared.step


@pytest.mark.parametrize("squares", [0, 1, 37, 132])
@pytest.mark.parametrize(("rows", "columns", "near"), [(300, 256, 1), (1301, 768, 3), (13_824, 512, 19)])
@pytest.mark.parametrize("texts", [1, 3])
def test_rows_of_both_sides_make_the_product(rows: int, columns: int, near: int, texts: int, squares: int) -> None:
    shared = Shared(rows, columns, near, texts)
    x, bias, before = normal(texts, columns, seed=3), normal(rows, seed=4), normal(texts, rows, seed=5)
    shared.answer(x)
    y = before.to(CUDA)
    parts = torch.full((texts, squares), -1.0, device=CUDA) if squares else None
    active = torch.zeros((), dtype=torch.int64, device=CUDA)
    multiply, given = (zigzag_products.gemv, x[0]) if texts == 1 else (zigzag_products.batch, x)
    input = Input(given.to(CUDA))
    far.multiply(shared.of, multiply, input, Output(y, bias=bias.to(CUDA), residual=y, squares=parts, active=active))
    expected = x.double() @ shared.weight.t() + bias + before
    typical = (x.double().square() @ shared.weight.square().t()).sqrt().mean()
    assert float((y.cpu() - expected).abs().max()) < 1e-3 * typical
    assert int(active) == columns
    if parts is not None:
        torch.testing.assert_close(parts.sum(1).cpu(), y.cpu().square().sum(1))
    assert int(shared.of.abort) == Abort.GOES_ON


def test_an_answer_that_never_comes_is_given_up() -> None:
    shared = Shared(600, 256, 1, 1)
    far.take(shared.of, Output(torch.zeros(1, 600, device=CUDA)))
    torch.cuda.synchronize()
    assert int(shared.of.abort) == Abort.DEVICE_WAITED
    assert int(shared.of.waited) >= 50e6
