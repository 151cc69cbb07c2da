"""Zigzag: Q4_K superblocks that lie within one input column, band by band."""

import codec_cases
import pytest
import torch
from codec_cases import relative_error
from devices import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.errors import PackingError
from sparsepack.formats.codecs import q4_k, superblock, zigzag


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 700), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_packing_is_encoding_the_permuted_matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> None:
    weight = matrix(columns, rows).t() if transposed else matrix(rows, columns)
    weight = weight.to(dtype)
    blocks = zigzag.pack(weight)
    assert blocks.shape == (zigzag.bands(rows), columns, 144)
    assert torch.equal(blocks.view(-1, 144), q4_k.encode(codec_cases.zigzag_order(weight)))


@given(st.integers(1, 700), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_unpacking_restores_shape_and_weights(rows: int, columns: int) -> None:
    weight = matrix(rows, columns)
    assert relative_error(zigzag.unpack(zigzag.pack(weight), rows), weight) < 0.09


def test_a_superblock_is_256_rows_of_one_column() -> None:
    weight = matrix(512, 3)
    blocks = zigzag.pack(weight)
    assert torch.equal(blocks[1, 2], q4_k.encode(weight[256:, 2]))


def test_a_dead_input_column_is_zero_bytes() -> None:
    weight = matrix(300, 5)
    weight[:, 3] = 0
    blocks = zigzag.pack(weight)
    assert not blocks[:, 3].any()
    assert blocks[:, 2].any()


def test_chunks_that_cross_bands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(1000, 17)
    expected = zigzag.pack(weight)
    for superblocks in (1, 5, 17, 20, 40):
        monkeypatch.setattr(superblock, "CPU_WEIGHTS_AT_ONCE", superblocks * 256)
        assert torch.equal(zigzag.pack(weight), expected)


@pytest.mark.parametrize(("rows", "bands"), [(0, 0), (1, 1), (256, 1), (257, 2), (4096, 16)])
def test_bands_cover_all_rows(rows: int, bands: int) -> None:
    assert zigzag.bands(rows) == bands


def test_a_matrix_without_rows_or_columns_packs_to_nothing() -> None:
    assert zigzag.pack(torch.zeros(0, 5)).shape == (0, 5, 144)
    assert zigzag.pack(torch.zeros(5, 0)).shape == (1, 0, 144)
    assert zigzag.unpack(zigzag.pack(torch.zeros(5, 0)), 5).shape == (5, 0)


def test_unpacking_to_bfloat16_rounds_the_float32_result() -> None:
    blocks = zigzag.pack(matrix(300, 4))
    assert torch.equal(zigzag.unpack(blocks, 300, torch.bfloat16), zigzag.unpack(blocks, 300).bfloat16())


def test_wrong_matrices_are_refused() -> None:
    with pytest.raises(PackingError, match="matrix"):
        zigzag.pack(torch.zeros(256))
    with pytest.raises(PackingError, match="infinite or NaN"):
        zigzag.pack(torch.full((256, 2), float("nan")))
    with pytest.raises(PackingError, match=r"expected \[2, columns, 144\] for 300 rows"):
        zigzag.unpack(torch.zeros(1, 3, 144, dtype=torch.uint8), 300)


@pytest.mark.gpu
@needs_cuda
def test_cuda_packs_as_well() -> None:
    weight = matrix(1000, 333)
    on_cuda = zigzag.pack(weight.cuda())
    assert torch.equal(zigzag.unpack(on_cuda, 1000).cpu(), zigzag.unpack(on_cuda.cpu(), 1000))
    ours = relative_error(zigzag.unpack(on_cuda.cpu(), 1000), weight)
    assert ours <= relative_error(zigzag.unpack(zigzag.pack(weight), 1000), weight) * 1.001
