"""Lists of active columns of every backend whose decoders chain operations. Ties, zeros and thresholds that nothing
exceeds are those of products with what is listed (`test_operations.py`)."""

import pytest
import torch
from operations_for_tests import Backend, assert_close_to_product, every_backend_of_operations, normal, packed

pytestmark = every_backend_of_operations


@pytest.mark.parametrize("columns", [1, 2, 31, 256, 1280, 5000])
@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_collect_lists_the_active_columns_in_order(backend: Backend, columns: int, kind: str) -> None:
    x = normal(columns)
    threshold = torch.tensor(0.6745) if kind == "scalar" else normal(columns, seed=1).abs()
    indices, count = backend.operations.collect(x.to(backend.device), threshold.to(backend.device))
    assert (indices.dtype, count.dtype) == (torch.int32, torch.int32)
    assert (indices.shape, count.shape) == ((columns,), ())
    assert (indices.device.type, count.device.type) == (backend.device, backend.device)
    expected = (x.abs() > threshold).nonzero()[:, 0]
    assert indices[: int(count)].tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_collect_compares_in_float32(backend: Backend, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.1], dtype=dtype)
    limit = torch.stack([x[0].float(), torch.nextafter(x[1].float(), torch.tensor(0.0))])
    indices, count = backend.operations.collect(x.to(backend.device), limit.to(backend.device))
    assert indices[: int(count)].tolist() == [1]


def test_gemv_never_reads_indices_beyond_the_count(backend: Backend) -> None:
    matrix, x = packed(300, 64), normal(64)
    loaded = backend.operations.load_zigzag(matrix, backend.device)
    indices = torch.full((64,), 1 << 30, dtype=torch.int32)
    indices[:2] = torch.tensor([3, 60])
    on_device = [value.to(backend.device) for value in (x, indices, torch.tensor(2, dtype=torch.int32))]
    y = backend.operations.zigzag_gemv(loaded, *on_device).cpu()
    only = torch.zeros(64)
    only[[3, 60]] = x[[3, 60]]
    assert_close_to_product(backend.bounds, y, matrix, only)
