"""The operator of weights in planes: the reference's products, level by level, with and without kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import planes, zigzag
from sparsepack.models.sites import levels_read
from sparsepack.runtime import planes_operator
from sparsepack.runtime.planes_operator import PlanesMatrix, Prepared, decoded_rows, planes_linear, prepare
from sparsepack.runtime.reference import products as reference

SHAPES = [(1, 1), (64, 8), (65, 33), (192, 100), (200, 64), (256, 7), (320, 129), (577, 300)]
ERROR = {True: 8e-3, False: 5e-4}
"""Relative error of kernels: at levels of columns, where multipliers have 8 bits, and with all planes."""


def random_planes(rows: int, columns: int) -> tuple[PlanesMatrix, reference.ReferenceZigzag]:
    """A matrix and the oracle's."""
    blocks, tail = zigzag.pack_with_tail(torch.randn(rows, columns), "Q6_P")
    scale = torch.rand(rows) + 0.5
    threshold = torch.rand(columns)
    threshold[::7] = torch.finfo(torch.float32).max
    matrix = PlanesMatrix(
        planes.from_zigzag(blocks, tail, rows), scale, threshold, torch.tensor([0.2, 0.4, 0.9, 1.6, 2.5])
    )
    packed = PackedMatrix(blocks, MatrixFormat("Q6_P", "zigzag"), rows, columns, tail, scale)
    return matrix, reference.load_zigzag(packed)


def close(found: Tensor, expected: Tensor, error: float) -> None:
    assert (found - expected).norm() <= error * expected.norm() + 1e-6


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU's kernels count as built."""
    if request.param and not planes_operator.has_kernels():
        pytest.skip("the kernels were not built")
    monkeypatch.setattr(planes_operator, "has_kernels", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("prepared", [True, False])
def test_products_are_the_references(shape: tuple[int, int], prepared: bool, kernels: bool) -> None:
    matrix, oracle = random_planes(*shape)
    ready = prepare(matrix) if prepared else Prepared()
    assert (ready.loaded is not None) == (prepared and kernels)
    x, bias = torch.randn(3, 4, shape[1]), torch.randn(shape[0])
    flat = x.flatten(0, 1)
    expected = reference.planes_matmul(oracle, flat, levels_read(flat, matrix.limits)) + bias
    found = planes_linear(x, matrix, bias, ready.tensors, True)
    assert found.shape == (3, 4, shape[0])
    error = ERROR if prepared and kernels else dict.fromkeys(ERROR, 1e-6)
    close(found.flatten(0, 1), expected, error[True])
    found = planes_linear(x, matrix, bias, ready.tensors, False)
    close(found.flatten(0, 1), reference.zigzag_matmul(oracle, flat) + bias, error[False])


def test_large_matrices_are_unpacked_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes_operator, "_AT_ONCE", 64 * 50)
    matrix, oracle = random_planes(333, 50)
    x = torch.randn(5, 50)
    for decode, expected in (
        (True, reference.planes_matmul(oracle, x, levels_read(x, matrix.limits))),
        (False, reference.zigzag_matmul(oracle, x)),
    ):
        close(planes_linear(x, matrix, None, [], decode), expected, 1e-6)


def test_one_that_is_decoded_does_not_depend_on_the_others(kernels: bool) -> None:
    matrix, _ = random_planes(320, 96)
    ready, x = prepare(matrix), torch.randn(5, 96)
    together = planes_linear(x, matrix, None, ready.tensors, True)
    alone = torch.cat([planes_linear(row[None], matrix, None, ready.tensors, True) for row in x])
    assert torch.allclose(together, alone, rtol=0, atol=0 if kernels else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_have_the_type_of_inputs(dtype: torch.dtype, kernels: bool) -> None:
    matrix, oracle = random_planes(128, 64)
    ready, x = prepare(matrix), torch.randn(2, 64).to(dtype)
    for decode in (True, False):
        found = planes_linear(x, matrix, torch.ones(128, dtype=dtype), ready.tensors, decode)
        assert found.dtype == dtype
        levels = levels_read(x.float(), matrix.limits) if decode else torch.full((2, 64), 5, dtype=torch.uint8)
        expected = reference.planes_matmul(oracle, x.float(), levels) + 1
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_it_asks_who_knows_which_vectors_are_decoded(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes_operator, "_ASK", [])
    matrix, _ = random_planes(192, 80)
    ready, x = prepare(matrix), torch.randn(4, 80)
    whole, levels = (planes_linear(x, matrix, None, ready.tensors, decode) for decode in (False, True))
    assert not torch.allclose(whole, levels, atol=1e-2)
    assert torch.equal(planes_linear(x, matrix, None, ready.tensors, None), whole)  # nobody knows
    which = torch.tensor([True, False, True, False])
    for answer in (which, None, torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        decoded_rows(lambda count, answer=answer: answer)  # type: ignore[misc]
        expected = torch.where(torch.ones(4, 1, dtype=torch.bool) if answer is None else answer[:, None], levels, whole)
        assert torch.allclose(planes_linear(x, matrix, None, ready.tensors, None), expected, atol=1e-3)


def test_it_is_one_operation_to_torch(kernels: bool) -> None:
    matrix, _ = random_planes(128, 64)
    ready = prepare(matrix)

    def product(x: Tensor) -> Tensor:
        return planes_linear(x, matrix, None, ready.tensors, True) + 1

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), product(x))


def test_gradients_are_refused() -> None:
    matrix, _ = random_planes(64, 8)
    ready = prepare(matrix)
    y = planes_linear(torch.randn(2, 8, requires_grad=True), matrix, None, ready.tensors, False)
    with pytest.raises(UserError, match="packed weights have no gradients"):
        y.sum().backward()


def test_what_was_prepared_is_gone_with_its_owner() -> None:
    matrix, _ = random_planes(64, 8)
    ready = prepare(matrix)
    if ready.loaded is None:
        pytest.skip("the kernels were not built")
    tensors = ready.tensors
    del ready
    with pytest.raises(ValueError, match="for a Linear that is gone"):
        planes_linear(torch.randn(1, 8), matrix, None, tensors, True)


@pytest.mark.parametrize("change", [{"x": (3, 9)}, {"threshold": (9,)}, {"steps": (4,)}, {"scale": (65,)}], ids=str)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    matrix, _ = random_planes(64, 8)
    given = {name: torch.zeros(shape) for name, shape in change.items()}
    x = given.pop("x", torch.zeros(3, 8))
    parts = {name: given.get(name, getattr(matrix, name)) for name in ("pieces", "scale", "threshold", "steps")}
    with pytest.raises(ValueError, match="do not fit planes"):
        planes_linear(x, PlanesMatrix(**parts), None, [], True)


def test_no_vectors_have_no_outputs(kernels: bool) -> None:
    matrix, _ = random_planes(64, 8)
    assert planes_linear(torch.zeros(0, 8), matrix, None, prepare(matrix).tensors, True).shape == (0, 64)
