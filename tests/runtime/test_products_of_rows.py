"""Products of every backend with matrices stored by rows, of every type, against float64 products."""

import pytest
from operations_for_tests import Backend, assert_close_to_product, every_backend, normal, packed

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix

pytestmark = every_backend

ROW_TYPES = ["F32", "F16", "BF16", "Q4_K", "Q6_K"]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("type", ROW_TYPES)
def test_matmul_takes_every_stored_type(backend: Backend, type: str, batch: int) -> None:
    matrix = PackedMatrix(BLOCKS[type].encode(normal(77, 512)), MatrixFormat(type), 77, 512)
    loaded = backend.products.load_rows(matrix)
    x = normal(batch, 512, seed=2)
    assert_close_to_product(backend.bounds, backend.products.matmul(loaded, x.to(backend.device)).cpu(), matrix, x)


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (77, 512), (33, 96), (130, 896), (65, 1056)])
def test_matmul_takes_q8_0_of_any_width_of_whole_blocks(backend: Backend, rows: int, columns: int, batch: int) -> None:
    matrix = PackedMatrix(BLOCKS["Q8_0"].encode(normal(rows, columns)), MatrixFormat("Q8_0"), rows, columns)
    loaded = backend.products.load_rows(matrix)
    x = normal(batch, columns, seed=2)
    assert_close_to_product(backend.bounds, backend.products.matmul(loaded, x.to(backend.device)).cpu(), matrix, x)


def test_a_matrix_is_loaded_as_what_it_is(backend: Backend) -> None:
    rows = PackedMatrix(BLOCKS["F16"].encode(normal(7, 5)), MatrixFormat("F16"), 7, 5)
    with pytest.raises(ValueError, match="expected one in zigzag order"):
        backend.products.load_zigzag(rows)
    with pytest.raises(ValueError, match="expected one stored by rows"):
        backend.products.load_rows(packed(3, 4))
